"""The sections of `train.yaml`, without torch, and the kinds of values that they share.

It also derives from a metric's name which direction is better.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from trainers.config.model import Settings
from trainers.errors import MISSING, POLICIES, ConfigError, did_you_mean

LARGEST = 2**31 - 1
"""The largest count: torch, numpy and Arrow accept it everywhere."""
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Ends = Annotated[
    list[Positive], Field(min_length=2, max_length=2), AfterValidator(sorted)
]
"""The least and the most of a count, in either order."""
Restarts = Annotated[int, Field(ge=-1, le=LARGEST)]
# The longest that every clock and lock accepts.
Seconds = Annotated[float, Field(gt=0, le=1e9)]
RunName = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
        examples=["digits"],
        json_schema_extra={
            "rule": "must be at most 128 letters, digits, `.`, `_` and `-`"
        },
    ),
]
Place = Annotated[
    str | None,
    Field(
        pattern=r"^[^\x00-\x1f\x7f]+$",
        json_schema_extra={
            "rule": "must be a path or URI, without control characters"
        },
    ),
]
AutoOrBool = Annotated[
    Literal["auto"] | bool,
    Field(json_schema_extra={"rule": "must be auto, true or false"}),
]
PHASE_FACTOR = 4
"""A phase without batches may take this factor times `hang_timeout_s`."""
LEAST_PHASE_S = 60.0
"""Seconds that a phase without batches may take in any case."""
TRACKERS = ("mlflow", "wandb", "tensorboard")
"""All trackers except a user's own. Only `tensorboard` needs no package."""
_OWN_SINK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
Mode = Literal["min", "max"]
"""Whether less or more of a metric is better."""

_LESS_IS_BETTER = """
    loss total_loss mse_loss l1_loss ce_loss bce_loss kl_loss error error_rate top1_error top5_error err mae mse rmse mape smape wape mase msle rmsle mdae nrmse mean_absolute_error
    mean_squared_error root_mean_squared_error mean_squared_log_error root_mean_squared_log_error median_absolute_error
    mean_absolute_percentage_error mean_poisson_deviance mean_gamma_deviance max_error log_loss nll nllloss bce ce kl
    kld cross_entropy kl_divergence divergence deviance perplexity ppl bpb bpc bpd bits_per_byte bits_per_char
    bits_per_dim wer cer per ter mer word_error_rate char_error_rate fid fid_score kid lpips crps ece calibration_error
    brier brier_score brier_score_loss hinge hinge_loss eer fpr fnr fdr false_positive false_positive_rate
    false_negative false_negative_rate false_discovery false_discovery_rate mpjpe epe ade fde davies_bouldin
    davies_bouldin_score aic bic regret neg_log_likelihood negative_log_likelihood neg_elbo negative_elbo
    negative_likelihood_ratio hamming hamming_loss hausdorff wasserstein levenshtein edit_distance time_to_target
    usd_to_target memory_bytes peak_memory_bytes time_s time_ms step_time_s latency latency_s latency_ms
"""
_MORE_IS_BETTER = """
    score accuracy accuracy_top top1_accuracy top5_accuracy balanced_accuracy acc acc_top top1_acc top5_acc f1 f1_score f1_macro macro_f1
    f1_micro micro_f1 f1_weighted weighted_f1 f2 fbeta fscore fmeasure auc roc_auc pr_auc auroc auprc aupr precision
    average_precision recall sensitivity specificity tpr tnr ppv npv true_positive true_positive_rate true_negative
    true_negative_rate positive_predictive negative_predictive ap map mean_ap mar iou miou mean_iou dice dice_score
    dice_coefficient jaccard pq kappa cohen_kappa mcc matthews matthews_corrcoef r2 r2_score explained_variance
    likelihood log_likelihood loglik elbo bleu bleu_score sacrebleu rouge rougel rougelsum meteor chrf cider spice
    bertscore ndcg mrr hit_rate hits exact_match em psnr ssim msssim ms_ssim snr sdr sisdr si_sdr stoi pesq similarity
    correlation pearson spearman kendall pearsonr spearmanr concordance silhouette calinski_harabasz ari nmi
    inception_score clip_score reward episode_reward_mean return win_rate success success_rate samples_per_s samples_per_second
    tokens_per_s tokens_per_second throughput
"""
_KNOWN: dict[str, Mode] = {
    **dict.fromkeys(_LESS_IS_BETTER.replace("_", "").split(), "min"),
    **dict.fromkeys(_MORE_IS_BETTER.replace("_", "").split(), "max"),
}
_SPLIT = re.compile(
    r"^((train|val|valid|validation|test|eval|dev)[_/])?(binary|multiclass|multilabel)?"
)
"""Prefixes of a name; torchmetrics' class names begin with their kind of task."""
_NUMBER = re.compile(r"(_at_|[@_])?\d+$")
"""The number at a name's end: acc1, rouge2, ndcg@10."""


def direction_of(metric: str) -> Mode | None:
    """Return whether less or more of a metric is better; None for an unknown name.

    The split in front of a name and a number at its end are ignored.
    scikit-learn's prefix `neg_` marks losses with their sign inverted.
    """
    name = _SPLIT.sub("", metric.lower())
    known = _known(name) or _known(_NUMBER.sub("", name))
    if known is None and _known(name.removeprefix("neg_")) == "min":
        return "max"
    return known


def _known(name: str) -> Mode | None:
    return _KNOWN.get(name.replace("_", ""))


def check_direction(key: str, metric: str, mode: Mode | None) -> None:
    """Raise ConfigError if neither `mode` nor the metric's name says what is better."""
    if mode is None and direction_of(metric) is None:
        rule = f"is required: the name {metric} does not say whether less or more is better"
        leaf = key.rpartition(".")[2]
        fix = f"add `{leaf}: min` or `{leaf}: max`"
        raise ConfigError(key, MISSING, rule, fix)


def check_metric(key: str, metric: str, figures: Iterable[str]) -> None:
    """Raise ConfigError if an evaluation has no metric of this name."""
    names = sorted(figures)
    if metric not in names:
        fix = did_you_mean(metric, names, f"use one of {', '.join(names)}")
        raise ConfigError(
            key, metric, "is not a metric of this task's evaluation", fix
        )


class ScheduledSize(Settings):
    """One size of a batch schedule."""

    until_samples: Annotated[int, Field(ge=1, le=10**12)] | None = Field(
        default=None, examples=[64000]
    )
    """The size holds until the run has trained this many samples, over all
    epochs and workers; required in every entry but the last, whose size holds
    to the end.
    """
    size: Positive = Field(examples=[64])
    """Samples of one optimizer step over all workers."""


def check_schedule(schedule: list[ScheduledSize]) -> list[ScheduledSize]:
    """Raise ConfigError for a batch schedule that could be misread."""
    *untils, last = [scheduled.until_samples or 0 for scheduled in schedule]
    if last or untils != sorted({*untils} - {0}):
        rule = "must have an `until_samples` in every entry except the last, each larger than the one before (it counts from the start of the run)"
        fix = "write `{until_samples: 64000, size: 64}, {size: 256}`"
        raise ConfigError("", MISSING, rule, fix)
    return schedule


BatchSizes = Annotated[
    list[ScheduledSize],
    Field(min_length=1, max_length=1000),
    AfterValidator(check_schedule),
]


class OptimizerConfig(Settings):
    """The optimizer; ignored when the task overrides `optimizer()`."""

    needs: ClassVar[Mapping[str, str]] = {"nesterov": "momentum"}

    name: Literal[
        "sgd", "adam", "adamw", "adamw8bit", "adamw4bit", "adamwfp8"
    ] = "adamw"
    """The algorithm, from torch.optim; adamw8bit, adamw4bit and adamwfp8 are
    torchao's, with moments of low precision.
    """
    lr: float = Field(gt=0, examples=[0.001])
    """Learning rate at `lr_scaling.base_batch_size` (at any batch size if
    `lr_scaling.rule` is none).
    """
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay: L2 for sgd and adam, decoupled for adamw."""
    momentum: float | None = Field(default=None, ge=0, lt=1, examples=[0.9])
    """Momentum, sgd only."""
    nesterov: bool | None = None
    """Nesterov momentum, sgd only."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] | None = Field(
        default=None, min_length=2, max_length=2, examples=[[0.9, 0.999]]
    )
    """Decay rates of the two moments, not for sgd."""
    eps: float | None = Field(default=None, gt=0, examples=[1e-8])
    """Term added to the denominator, not for sgd."""

    @model_validator(mode="after")
    def _only_what_is_used(self) -> Self:
        of_others = ("betas", "eps")
        if self.name != "sgd":
            of_others = ("momentum", "nesterov")
        rule = f"has no effect with optimizer {self.name}"
        for key in of_others:
            given = getattr(self, key) is not None
            self.refuse_if(given, key, rule, "remove it")
        return self


class ScheduleConfig(Settings):
    """The learning rate schedule."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up: constant, or falling (linear, cosine) to zero
    at the last step.

    The task's `schedule()` may return a torch scheduler instead.
    """
    warmup: Count | Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0,
        examples=[100],
        json_schema_extra={
            "rule": "must be a whole number of steps, or a share below 1"
        },
    )
    """Linear warm-up: a whole number of steps, or a share of all steps (0.05)."""


class ScalingRule(Settings):
    """How the learning rate follows the batch size."""

    needs: ClassVar[Mapping[str, str]] = {"rule": "base_batch_size"}

    rule: Literal["none", "linear", "sqrt", "sde"] = "none"
    """Scaling of the learning rate. linear: for SGD (Goyal et al. 2017); sqrt:
    for Adam; sde: the whole rule for Adam (Malladi et al. 2022), which also
    scales betas, `eps`, decoupled weight decay and `ema.decay`.
    """
    base_batch_size: Positive | None = Field(default=None, examples=[64])
    """The global batch size that `optimizer.lr` was chosen for."""

    def ratio(self, size: int) -> float:
        """Return a global batch size as a multiple of the base; 1 without a rule."""
        if self.rule == "none" or self.base_batch_size is None:
            return 1.0
        return size / self.base_batch_size


class EmaConfig(Settings):
    """An exponential moving average of the weights; off without a `decay`."""

    decay: float | None = Field(default=None, gt=0, lt=1, examples=[0.999])
    """Weight of the old average in each update.

    Evaluations, checkpoints, export and predict use the average of parameters
    and floating-point buffers.
    """


class EvaluateConfig(Settings):
    """When, and in which batches, the validation split is evaluated."""

    exclusive = (("every_epochs", "every_steps"),)

    every_epochs: Positive | None = None
    """Epochs between two evaluations (1 when neither key is set)."""
    every_steps: Positive | None = Field(default=None, examples=[500])
    """Steps between two evaluations."""
    microbatch_size: Positive = 256
    """Samples of one evaluation batch; fixed, so that figures do not depend on
    the number of workers.

    If figures depend on this size, a warning says so before the first step.
    """


class EarlyStoppingConfig(Settings):
    """When a run ends before its last step; off without a `metric`."""

    needs: ClassVar[Mapping[str, str]] = {
        "mode": "metric",
        "patience": "metric",
        "metric": "patience",
    }

    metric: str | None = Field(
        default=None, min_length=1, examples=["val_loss"]
    )
    """The evaluation metric that must improve; otherwise the run ends as `done`."""
    mode: Mode | None = None
    """min if less is better, max if more is; derived from most metrics' names
    (loss, mae, wer, accuracy, f1, bleu, ...), and required for others.
    """
    patience: Positive | None = Field(default=None, examples=[5])
    """Evaluations without an improvement after which the run ends; required
    with a metric.
    """

    @model_validator(mode="after")
    def _has_a_direction(self) -> Self:
        if self.metric is not None:
            check_direction("mode", self.metric, self.mode)
        return self


class DataConfig(Settings):
    """How samples reach the device."""

    needs: ClassVar[Mapping[str, str]] = {"prefetch_factor": "num_workers"}

    num_workers: int = Field(default=0, ge=0, le=1024, examples=[2])
    """DataLoader processes of each worker; 0 loads in the worker itself."""
    prefetch_factor: Positive | None = Field(default=None, examples=[2])
    """Microbatches that each loader process prepares ahead (torch's default
    when not set).
    """
    pin_memory: AutoOrBool = "auto"
    """Page-locked host memory for faster copies; auto: on CUDA."""
    resident: AutoOrBool = "auto"
    """Keep a whole TensorDataset on the device; auto: if it takes at most a
    tenth of the device's memory, and `num_workers` is 0.
    """


class ScalingConfig(Settings):
    """Workers and what each of them gets."""

    num_workers: Positive | Ends = Field(
        default=1,
        examples=[2],
        json_schema_extra={
            "rule": "must be a whole number of at least 1, or [MIN, MAX]"
        },
    )
    """Worker processes, one for each GPU; [MIN, MAX] is elastic and needs
    `launcher: ray`.
    """
    use_gpu: AutoOrBool = "auto"
    """Use GPUs; auto: if the cluster (or this machine) has any."""
    cpus_per_worker: Positive = 1
    """CPU cores of one worker, and its number of compute threads under every
    launcher.
    """
    gpus_per_worker: float = Field(default=1, gt=0, le=1024)
    """GPUs of one worker."""
    placement_strategy: Literal[
        "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"
    ] = "PACK"
    """Ray's placement of the workers on nodes."""
    label_selector: dict[str, str] = Field(
        default_factory=dict,
        json_schema_extra={
            "rule": "must map Ray's node labels to values or conditions"
        },
    )
    """Labels of nodes that workers may run on."""

    @property
    def min_workers(self) -> int:
        """The fewest workers that the run may have."""
        return self._range_of_workers[0]

    @property
    def max_workers(self) -> int:
        """The most workers that the run may have."""
        return self._range_of_workers[-1]

    @property
    def _range_of_workers(self) -> list[int]:
        workers = self.num_workers
        return [workers] if isinstance(workers, int) else workers


class CheckpointConfig(Settings):
    """When training state is saved; after the last step it always is."""

    needs: ClassVar[Mapping[str, str]] = {"best_mode": "best"}
    exclusive = (("every_steps", "every_epochs", "every_s"),)

    every_steps: Positive | None = Field(default=None, examples=[1000])
    """Steps between two checkpoints."""
    every_epochs: Positive | None = None
    """Epochs between two checkpoints. If no interval is set: 1, or `every_s:
    600` for a stream without epochs; no checkpoints in trials of a sweep.
    """
    every_s: Seconds | None = Field(default=None, examples=[600])
    """Seconds between two checkpoints."""
    keep: Positive = 2
    """Number of newest checkpoints to keep."""
    best: str | None = Field(
        default=None, min_length=1, examples=["val_accuracy"]
    )
    """An evaluation metric whose best checkpoint is kept too."""
    best_mode: Mode | None = None
    """min or max, with the meaning and default of `early_stopping.mode`.
    """
    parameters: Literal["all", "trained"] = "all"
    """Which parameters are saved. trained: all except those that the task's
    `model()` has frozen.

    On loading, frozen ones come from `model()`; if they have changed, the
    checkpoint is refused.
    """
    async_: bool = Field(default=False, alias="async")
    """Copy the state to host memory in the loop, and write it to storage while
    training continues.
    """

    @property
    def says_when(self) -> bool:
        """Whether a key sets an interval."""
        return (self.every_steps, self.every_epochs, self.every_s) != (
            None,
            None,
            None,
        )

    @model_validator(mode="after")
    def _has_a_direction(self) -> Self:
        if self.best is not None:
            check_direction("best_mode", self.best, self.best_mode)
        return self


class DdpConfig(Settings):
    """Settings of `strategy: ddp` only."""

    sync_batchnorm: bool = False
    """Compute BatchNorm's statistics over the microbatches of all workers
    (torch's SyncBatchNorm).

    GPUs only.
    """


class FailureConfig(Settings):
    """Restarts from the newest checkpoint for each kind of failure; -1: no limit."""

    error: Restarts = POLICIES["error"].restarts
    """An exception in the task."""
    node_lost: Restarts = POLICIES["node_lost"].restarts
    """A worker process or its node died."""
    preempted: Restarts = POLICIES["preempted"].restarts
    """The node was drained or taken back."""
    out_of_host_memory: Restarts = POLICIES["out_of_host_memory"].restarts
    """The host ran out of memory."""
    hung: Restarts = POLICIES["hung"].restarts
    """No batch came for `hang_timeout_s`, or a phase without batches took too
    long.
    """
    hang_timeout_s: Seconds = 1800
    """Seconds without a batch until the stacks of all ranks are saved and the
    workers end.

    A phase without batches (import, setup, dataset, model, probe, compilation,
    checkpoint, end) may take four times as long (at least 60 s).
    """

    @property
    def of_phases_s(self) -> float:
        """Seconds that a phase without batches may take."""
        return max(LEAST_PHASE_S, PHASE_FACTOR * self.hang_timeout_s)


class TrackerConfig(Settings):
    """One experiment tracker."""

    tracker: str = Field(
        max_length=256,
        examples=["mlflow"],
        description=f"{', '.join(TRACKERS)}, or your own sink as `module:Class`.",
    )
    project: str | None = Field(
        default=None, min_length=1, max_length=128, examples=["digits"]
    )
    """The project (W&B) or experiment (MLflow) that runs go to."""


def chosen(tracking: Sequence[str | TrackerConfig]) -> list[TrackerConfig]:
    """Return every entry of `tracking` as a TrackerConfig."""
    return [
        TrackerConfig(tracker=entry) if isinstance(entry, str) else entry
        for entry in tracking
    ]


def _check_trackers(
    tracking: list[str | TrackerConfig],
) -> list[str | TrackerConfig]:
    for entry in chosen(tracking):
        name = entry.tracker
        if name not in TRACKERS and not _OWN_SINK.fullmatch(name):
            listed = f"use one of {', '.join(TRACKERS)}, or your own sink as `module:Class`"
            fix = did_you_mean(name, TRACKERS, listed)
            raise ConfigError("", name, "is not a tracker", fix)
    return tracking


Tracking = Annotated[
    list[str | TrackerConfig],
    AfterValidator(_check_trackers),
    Field(
        examples=[["mlflow"]],
        description=f"Trackers that follow a run, or a sweep and its trials: {', '.join(TRACKERS)}, or your own sink as "
        "`module:Class`. `{tracker: mlflow, project: digits}` sets the project. The trackers' own environment "
        "variables set their addresses (MLFLOW_TRACKING_URI).",
    ),
]
