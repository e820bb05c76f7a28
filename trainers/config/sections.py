"""The sections of `train.yaml`, without torch, and the kinds of values that they share.

Among these are the names of metrics: which direction is better, and whether an
evaluation has one. See train.py on the descriptions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from trainers.config.model import Settings
from trainers.errors import MISSING, POLICIES, ConfigError, did_you_mean, nearest

LARGEST = 2**31 - 1
"""Of any count: what torch, numpy and Arrow take everywhere."""
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Restarts = Annotated[int, Field(ge=-1, le=LARGEST)]
Seconds = Annotated[
    float, Field(gt=0, le=1e9)
]  # the longest that every clock and lock takes
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
NAME_RULE = "must be at most 128 letters, digits, `.`, `_` and `-`"
PATH = r"^[^\x00-\x1f\x7f]+$"
PATH_RULE = "must be a path or URI, without control characters"
RunName = Annotated[
    str,
    Field(pattern=NAME, examples=["digits"], json_schema_extra={"rule": NAME_RULE}),
]
Place = Annotated[
    str | None, Field(pattern=PATH, json_schema_extra={"rule": PATH_RULE})
]
AutoOrBool = Annotated[
    Literal["auto"] | bool,
    Field(json_schema_extra={"rule": "must be auto, true or false"}),
]
PHASE_FACTOR = 4
"""How many times `hang_timeout_s` a phase without batches may take."""
LEAST_PHASE_S = 60.0
"""What such a phase may always take."""
TRACKERS = ("mlflow", "wandb", "tensorboard")
"""All but a user's own. Ours alone, `tensorboard`, needs no package."""
_OWN_SINK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
Mode = Literal["min", "max"]
"""Whether less or more of a metric is better."""

_LESS_IS_BETTER = """
    loss error err mae mse rmse mape smape wape mase msle rmsle mdae nrmse nll nllloss bce ce kl kld cross_entropy
    divergence deviance perplexity ppl bpb bpc bpd bits_per_byte bits_per_char bits_per_dim wer cer per ter mer
    word_error_rate fid kid lpips crps ece brier hinge eer fpr fnr fdr false_positive false_negative false_discovery
    mpjpe epe ade fde davies_bouldin aic bic regret neg_log_likelihood negative_log_likelihood neg_elbo
    negative_elbo hamming hausdorff wasserstein levenshtein edit_distance time_to_target usd_to_target energy_j
    memory_bytes peak_memory_bytes time_s time_ms latency latency_s latency_ms
"""
_MORE_IS_BETTER = """
    accuracy acc f1 f2 fbeta fscore fmeasure auc auroc auprc aupr precision recall sensitivity specificity tpr tnr ppv
    npv true_positive true_negative positive_predictive negative_predictive ap map mar iou miou dice jaccard pq kappa
    mcc matthews matthews_corrcoef r2 explained_variance likelihood loglik elbo bleu sacrebleu rouge rougel rougelsum
    meteor chrf cider spice bertscore ndcg mrr hit_rate hits exact_match em psnr ssim msssim snr sdr sisdr stoi pesq
    similarity correlation pearson spearman kendall pearsonr spearmanr concordance silhouette calinski_harabasz ari nmi
    inception_score clip_score reward return win_rate success samples_per_s samples_per_second tokens_per_s
    tokens_per_second throughput
"""
_KNOWN: dict[str, Mode] = {
    **dict.fromkeys(_LESS_IS_BETTER.split(), "min"),
    **dict.fromkeys(_MORE_IS_BETTER.split(), "max"),
}
_ENDS = [
    "loss",
    "error",
    "mse",
    "mae",
    "mape",
    "accuracy",
    "auc",
    "auroc",
    "iou",
    "perplexity",
]
"""Known also where something is written in front of them without a break: celoss,
prauc.
"""
_SPLITS = ("val", "valid", "validation", "test", "eval", "dev", "train")
_QUALIFIERS = """
    mean avg average median macro micro weighted binary multiclass multilabel total overall all epoch step ema
    score rate index value coefficient coef percent pct at k s top
"""
_SAY_NOTHING = {*_SPLITS, *_QUALIFIERS.split()}
"""Words after which the one in front of them decides."""
_TURNS = {"neg", "negative", "minus", "inverse", "inv"}
_DENIALS = {*_TURNS, "in", "un", "non"}
"""In front of a name without a break: negmse, inaccuracy."""
_OF_WHAT = ("at", "per")
"""The words after them say where or of what alone: tpr_at_fpr, reward_per_step."""
_BREAK = re.compile(r"(?<=[a-z])(?=[A-Z][a-z])")
_MINUS = re.compile(r"(?<![a-z0-9])(1 ?)?- ?(?=[a-z])")
_LONGEST = 3  # words of a name in the table


def direction_of(metric: str) -> Mode | None:
    """Return whether less or more of a metric is better, by its name.

    The last word that says it decides; None where none does.

    scikit-learn's `neg_` is in front of losses whose sign it has turned.
    """
    plain = _MINUS.sub("minus_", _BREAK.sub("_", metric).lower()).replace("@", "_at_")
    words = _measured(re.findall(r"[a-z]+\d*|\d+", plain))
    if set(words) <= _SAY_NOTHING:  # scikit-learn: of a score more is better
        return "max" if "score" in words else None
    for end in range(len(words), 0, -1):
        for start in range(max(0, end - _LONGEST), end):
            if (found := _known("_".join(words[start:end]))) is not None:
                return _turned(found, words[:start])
        last = words[end - 1].rstrip("0123456789")
        if last and last not in _SAY_NOTHING:
            return None
    return None


def _measured(words: list[str]) -> list[str]:
    """The words in front of `at` or `per`, where they are more than qualifiers."""
    for place in range(1, len(words) - 1):
        before = words[:place]
        is_name = "_".join(words[place - 1 : place + 2]) in _KNOWN
        says_nothing = set(before) <= _SAY_NOTHING
        if words[place] in _OF_WHAT and not is_name and not says_nothing:
            return before
    return words


def _known(name: str) -> Mode | None:
    """Look up a word or a few, also where they are numbered: acc1, rouge2, map50."""
    bare = name.rstrip("0123456789")
    found = _KNOWN.get(name) or _KNOWN.get(bare)
    if found is None and "_" not in name:
        for end in _ENDS:
            if bare.endswith(end) and bare.removesuffix(end) not in _DENIALS:
                return _KNOWN[end]
    return found


def _turned(found: Mode, before: list[str]) -> Mode | None:
    """Return what is better where these words stand in front of a name.

    Only of a loss's `neg_` is the sign known.
    """
    words = [word for word in before if word not in _SPLITS]
    if not _TURNS.intersection(words):
        return found
    return "max" if words[0] == "neg" and found == "min" else None


def check_direction(key: str, metric: str, mode: Mode | None) -> None:
    """Raise ConfigError where neither `mode` nor the metric's name says what is better."""
    if mode is None and direction_of(metric) is None:
        rule = f"is required: the name {metric} does not say whether less or more is better"
        leaf = key.rpartition(".")[2]
        fix = f"add `{leaf}: min` or `{leaf}: max`"
        near = _meant(metric)
        if near is not None:
            fix = f"did you mean `{near}`? Else {fix}"
        raise ConfigError(key, MISSING, rule, fix)


def _meant(metric: str) -> str | None:
    """Return the known name that a misspelt one is nearest to, or None.

    It may be near as a whole, or in its last word.
    """
    last = metric.rpartition("_")[2]
    for name in (metric, last):
        if (near := nearest(name, _KNOWN, cutoff=0.85)) is not None:
            return metric.removesuffix(name) + near
    return None


def check_metric(key: str, metric: str, figures: Iterable[str]) -> None:
    """Raise ConfigError where an evaluation has no figure of the metric's name."""
    names = sorted(figures)
    if metric not in names:
        fix = did_you_mean(metric, names, f"use one of {', '.join(names)}")
        raise ConfigError(key, metric, "is no metric of this task's evaluation", fix)


class ScheduledSize(Settings):
    """One size of a batch schedule."""

    until_samples: Annotated[int, Field(ge=1, le=10**12)] | None = Field(
        default=None, examples=[64000]
    )
    """Samples until which it holds, counted from the start of the run over all epochs
    and workers; every entry has it but the last one, whose size holds to the end.
    """
    size: Positive = Field(examples=[64])
    """Samples of one optimizer step over all workers."""


def check_schedule(schedule: list[ScheduledSize]) -> list[ScheduledSize]:
    """Raise ConfigError for a batch schedule that could be misread."""
    last = len(schedule) - 1
    before = 0
    for number, scheduled in enumerate(schedule):
        until = scheduled.until_samples
        is_open = until is None
        rule = ""
        if is_open != (number == last):
            rule = "must be in every entry but the last one, whose size holds to the end of the run"
            fix = "write `{until_samples: 64000, size: 64}, {size: 256}`"
        elif until is not None and until <= before:
            rule = f"must be above the {before} of the entry before: it counts from the start of the run"
            fix = "add the samples of the entries before to it"
        if rule:
            shown = MISSING if is_open else until
            raise ConfigError(f"[{number}].until_samples", shown, rule, fix)
        before = until or 0
    return schedule


BatchSizes = Annotated[
    list[ScheduledSize],
    Field(min_length=1, max_length=1000),
    AfterValidator(check_schedule),
]


class OptimizerConfig(Settings):
    """The optimizer; ignored when the task overrides `optimizer()`."""

    needs: ClassVar[Mapping[str, str]] = {"nesterov": "momentum"}

    name: Literal["sgd", "adam", "adamw", "adamw8bit", "adamw4bit", "adamwfp8"] = (
        "adamw"
    )
    """The algorithm, as torch.optim has it; adamw8bit, adamw4bit and adamwfp8 are
    torchao's, with narrow moments.
    """
    lr: float = Field(gt=0, examples=[0.001])
    """Learning rate at `lr_scaling.base_batch_size` (at any batch size when the rule is
    none).
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
    """The learning rate's course."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Course after the warm-up: constant, or falling to zero at the last step.

    A scheduler of torch's comes from the task's `schedule()`.
    """
    warmup: int | float = Field(
        default=0,
        ge=0,
        examples=[100],
        json_schema_extra={"rule": "must be a number of steps, or a share below 1"},
    )
    """Linear warm-up: a whole number of steps, or a share of all steps (0.05)."""

    @model_validator(mode="after")
    def _steps_or_share(self) -> Self:
        beyond = isinstance(self.warmup, float) and self.warmup >= 1
        fix = "write steps as a whole number"
        self.refuse_if(beyond, "warmup", "as a share must be below 1", fix)
        return self


class ScalingRule(Settings):
    """How the learning rate follows the batch size."""

    rule: Literal["none", "linear", "sqrt", "sde"] = "none"
    """linear for SGD (Goyal et al. 2017), sqrt for Adam; sde: the whole rule for Adam
    (Malladi et al. 2022), where betas, `eps`, decoupled weight decay and `ema.decay`
    follow too.
    """
    base_batch_size: Positive | None = Field(default=None, examples=[64])
    """The global batch size that `optimizer.lr` was chosen for."""

    @model_validator(mode="after")
    def _base_is_known(self) -> Self:
        unknown = self.rule != "none" and self.base_batch_size is None
        rule = "is what the rule scales from"
        self.refuse_if(unknown, "base_batch_size", rule, "add `base_batch_size: 64`")
        return self

    def ratio(self, size: int) -> float:
        """Return a global batch size as a multiple of the base; 1 without a rule."""
        if self.rule == "none" or self.base_batch_size is None:
            return 1.0
        return size / self.base_batch_size


class EmaConfig(Settings):
    """An exponential moving average of the weights; off without a `decay`."""

    decay: float | None = Field(default=None, gt=0, lt=1, examples=[0.999])
    """Share of the average that an update keeps.

    The average of parameters and floating buffers is what is evaluated, kept, exported
    and predicted with.
    """


class EvaluateConfig(Settings):
    """When, and in which batches, the validation split is evaluated."""

    exclusive = (("every_epochs", "every_steps"),)

    every_epochs: Positive | None = None
    """Epochs between two evaluations (1 when neither key is set)."""
    every_steps: Positive | None = Field(default=None, examples=[500])
    """Steps between two evaluations."""
    microbatch_size: Positive = 256
    """Samples of one evaluation batch; fixed, so that figures do not depend on the
    number of workers.

    Where they depend on this size, that is said before the first step.
    """


class EarlyStoppingConfig(Settings):
    """When a run ends before its last step; off without a `metric`."""

    needs: ClassVar[Mapping[str, str]] = {
        "mode": "metric",
        "patience": "metric",
        "metric": "patience",
    }

    metric: str | None = Field(default=None, min_length=1, examples=["val_loss"])
    """The figure of an evaluation that has to improve: else the run ends, as done."""
    mode: Mode | None = None
    """Whether a small or a large one is good; known by itself of most names (loss, mae,
    wer, accuracy, f1, bleu, ...; scikit-learn's neg_mean_squared_error), and required
    of others.
    """
    patience: Positive | None = Field(default=None, examples=[5])
    """Evaluations without an improvement after which it ends; required with a metric.
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
    """Microbatches that each loader process prepares ahead (torch's default when not
    set).
    """
    pin_memory: AutoOrBool = "auto"
    """Page-locked host memory for faster copies; auto: on CUDA."""
    resident: AutoOrBool = "auto"
    """Whole split as tensors on the device; auto: a TensorDataset that takes at most a
    tenth of its memory.
    """

    @model_validator(mode="after")
    def _resident_has_no_workers(self) -> Self:
        unused = self.resident is True and self.num_workers > 0
        rule = "has no effect with resident data"
        self.refuse_if(unused, "num_workers", rule, "remove it")
        return self


class ScalingConfig(Settings):
    """Workers and what each of them gets."""

    num_workers: Positive | list[Positive] = Field(
        default=1,
        examples=[2],
        json_schema_extra={
            "rule": "must be a whole number of at least 1, or [MIN, MAX]"
        },
    )
    """Worker processes, one for each GPU; [MIN, MAX] is elastic and needs `launcher:
    ray`.
    """
    use_gpu: AutoOrBool = "auto"
    """GPUs for the workers; auto: when the cluster (or this machine) has any."""
    cpus_per_worker: Positive = 1
    """CPU cores of one worker, and its number of compute threads under every launcher.
    """
    gpus_per_worker: float = Field(default=1, gt=0, le=1024)
    """GPUs of one worker."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = (
        "PACK"
    )
    """Ray's placement of the workers on nodes."""
    label_selector: dict[str, str] = Field(
        default_factory=dict,
        json_schema_extra={
            "rule": "must map Ray's node labels to values or conditions"
        },
    )
    """Labels of nodes that workers may run on."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        workers = self.num_workers
        if isinstance(workers, list):
            is_range = len(workers) == 2 and workers[0] <= workers[1]
            rule = "must be [MIN, MAX] with MIN at most MAX"
            self.refuse_if(not is_range, "num_workers", rule, "write [1, 4]")
        return self

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
    """When training state goes to storage; the last step is always written."""

    needs: ClassVar[Mapping[str, str]] = {"best_mode": "best"}
    exclusive = (("every_steps", "every_epochs", "every_s"),)

    every_steps: Positive | None = Field(default=None, examples=[1000])
    """Steps between two checkpoints."""
    every_epochs: Positive | None = None
    """Epochs between two checkpoints (1 when no key is set; of a stream without epochs,
    `every_s: 600`).

    Trials of a sweep write none when no key is set.
    """
    every_s: Seconds | None = Field(default=None, examples=[600])
    """Seconds between two checkpoints."""
    keep: Positive = 2
    """Newest checkpoints that are kept."""
    best: str | None = Field(default=None, min_length=1, examples=["val_accuracy"])
    """A metric of evaluation whose best checkpoint is kept too."""
    best_mode: Mode | None = None
    """Whether a small or a large `best` is good; known by itself as
    `early_stopping.mode` is.
    """
    parameters: Literal["all", "trained"] = "all"
    """What of the model is written. trained: without the parameters that the task's
    `model()` has frozen.

    Whoever loads the checkpoint gets them from `model()`; if they have changed, it is
    refused.
    """
    async_: bool = Field(default=False, alias="async")
    """Copy the state to host memory in the loop, and write it to storage while training
    goes on.
    """

    @property
    def says_when(self) -> bool:
        """Whether a key says when."""
        return (self.every_steps, self.every_epochs, self.every_s) != (None, None, None)

    @model_validator(mode="after")
    def _has_a_direction(self) -> Self:
        if self.best is not None:
            check_direction("best_mode", self.best, self.best_mode)
        return self


class DdpConfig(Settings):
    """What only `strategy: ddp` has."""

    sync_batchnorm: bool = False
    """BatchNorm by the statistics of all workers' microbatches together (torch's
    SyncBatchNorm).

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
    """No step was made for `hang_timeout_s`, or a phase took longer than that allows.
    """
    hang_timeout_s: Seconds = 1800
    """Seconds without a batch until the stacks of all ranks are saved and the workers
    end.

    A phase without batches (import, setup, dataset, model, probe, compilation,
    checkpoint, end) may take four times as long, and always 60.
    """

    @property
    def of_phases_s(self) -> float:
        """Seconds that a phase without steps may take."""
        return max(LEAST_PHASE_S, PHASE_FACTOR * self.hang_timeout_s)


class TrackerConfig(Settings):
    """One experiment tracker."""

    tracker: str = Field(
        max_length=256,
        examples=["mlflow"],
        description=f"{', '.join(TRACKERS)}, or a sink of your own as `module:Class`.",
    )
    project: str | None = Field(
        default=None, min_length=1, max_length=128, examples=["digits"]
    )
    """The project (W&B) or experiment (MLflow) that runs go to."""


def chosen(tracking: Sequence[str | TrackerConfig]) -> list[TrackerConfig]:
    """Return every entry of the key as a mapping has it."""
    return [
        TrackerConfig(tracker=entry) if isinstance(entry, str) else entry
        for entry in tracking
    ]


def _check_trackers(tracking: list[str | TrackerConfig]) -> list[str | TrackerConfig]:
    known = set()
    for entry in chosen(tracking):
        name = entry.tracker
        value = name
        rule = ""
        if name not in TRACKERS and not _OWN_SINK.fullmatch(name):
            listed = f"there are {', '.join(TRACKERS)}, and your own as `module:Class`"
            rule = "is no tracker"
            fix = did_you_mean(name, TRACKERS, listed)
        elif name in known:
            rule = "is listed twice"
            fix = "keep one of the two"
        elif entry.project is not None and name == "tensorboard":
            value = entry.project
            rule = f"has no effect with {name}"
            fix = "remove `project`"
        if rule:
            raise ConfigError("", value, rule, fix)
        known.add(name)
    return tracking


Tracking = Annotated[
    list[str | TrackerConfig],
    AfterValidator(_check_trackers),
    Field(
        examples=[["mlflow"]],
        description=f"Trackers that get a run, or a sweep with its trials: {', '.join(TRACKERS)}, or your sink as "
        "`module:Class`. `{tracker: mlflow, project: digits}` names the project. Their own environment variables say "
        "where they are (MLFLOW_TRACKING_URI).",
    ),
]
