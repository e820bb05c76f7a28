"""TrainConfig: everything that `train.yaml` may say; imports no torch.

The descriptions below the fields are also the text of `--help` and of
docs/config.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

import trainers.config.sections as sections
from trainers.config.model import Settings, Tree
from trainers.config.sections import (
    AutoOrBool,
    Count,
    Place,
    Positive,
    RunName,
    Seconds,
    TrackerConfig,
    Tracking,
    chosen,
)
from trainers.errors import ConfigError

_NAMES = {
    "optimizer.lr": "learning_rate base_lr max_lr init_lr learning_rate_init",
    "optimizer.name": "optim optimizer_name optimizer_type opt",
    "optimizer.weight_decay": "wd l2",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon epsilon",
    "lr_schedule.name": "scheduler lr_scheduler lr_scheduler_type schedule lr_policy",
    "lr_schedule.warmup": "warmup_steps warmup_ratio warmup_epochs num_warmup_steps lr_warmup_steps",
    "global_batch_size batch_size_per_worker": "batch_size train_batch_size train_batch bs",
    "batch_schedule": "batch_size_schedule batch_size_warmup batch_size_rampup rampup_batch_size batch_ramp",
    "batch_size_per_worker": "per_device_train_batch_size per_gpu_train_batch_size local_batch_size",
    "evaluate.microbatch_size": "eval_batch_size per_device_eval_batch_size val_batch_size test_batch_size",
    "microbatch_size": "accumulate_grad_batches gradient_accumulation_steps gradient_accumulation grad_accum "
    "accumulation_steps micro_batch_size train_micro_batch_size_per_gpu device_train_microbatch_size",
    "epochs": "max_epochs num_epochs num_train_epochs n_epochs nb_epochs total_epochs max_duration",
    "max_steps": "num_steps total_steps max_iters num_iterations train_steps training_steps max_train_steps",
    "max_time_s": "max_time time_limit walltime",
    "clip_grad_norm": "gradient_clip_val max_grad_norm grad_clip gradient_clipping clip_norm max_norm",
    "precision": "amp fp16 bf16 tf32 dtype torch_dtype mixed_precision use_amp half amp_level",
    "compile": "torch_compile jit compile_mode torchdynamo",
    "strategy": "ddp_backend distributed_backend parallelism deepspeed zero_stage zero_optimization backend",
    "scaling.num_workers": "world_size nproc_per_node num_gpus gpus n_gpus devices num_devices num_processes num_nodes "
    "nnodes workers",
    "data.num_workers scaling.num_workers": "num_workers",
    "data.num_workers": "dataloader_num_workers num_data_workers loader_workers",
    "data.prefetch_factor": "dataloader_prefetch_factor prefetch",
    "data.pin_memory": "dataloader_pin_memory",
    "device": "accelerator use_cuda no_cuda use_cpu",
    "checkpoint.every_steps": "save_steps save_interval checkpoint_every every_n_train_steps save_freq",
    "checkpoint.keep": "save_total_limit save_top_k num_to_keep",
    "checkpoint.best": "load_best_model_at_end metric_for_best_model monitor",
    "checkpoint.best_mode": "greater_is_better monitor_mode mode",
    "evaluate.every_steps evaluate.every_epochs": "eval_steps eval_interval val_check_interval eval_every "
    "check_val_every_n_epoch eval_strategy evaluation_strategy",
    "log_every_steps": "logging_steps log_interval log_every_n_steps log_every print_freq",
    "seed": "random_seed random_state manual_seed",
    "drop_last": "dataloader_drop_last",
    "storage_path": "output_dir save_dir default_root_dir log_dir work_dir checkpoint_dir out_dir root_dir",
    "name": "run_name experiment_name exp_name experiment",
    "task_args": "model_args model_kwargs model_config hparams hyperparameters",
    "task": "model module model_name dataset datamodule train_func trainer trainer_class",
    "profile_steps": "profiler profile",
    "early_stopping.patience": "patience early_stop early_stopping_patience early_stopping_rounds",
    "ema.decay": "ema_decay model_ema model_ema_decay use_ema moving_average swa",
    "ddp.sync_batchnorm": "sync_bn sync_batchnorm syncbn use_sync_bn",
    "failure.error": "max_failures max_retries max_restarts retries",
    "tracking": "report_to log_with trackers tracker loggers use_wandb wandb mlflow tensorboard",
}
"""Maps our keys to other tools' names for them; an error's fix gives our name."""
_SMALLEST_HALF = 2.0**-24
CAPTURING = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that replay CUDA graphs: each pass overwrites outputs
and gradients of the pass before.
"""
Precision = Literal[
    "fp32", "tf32", "bf16", "fp16", "fp8", "bf16-pure", "fp16-pure"
]

IDENTITY = (
    "task",
    "task_args",
    "seed",
    "global_batch_size",
    "batch_schedule",
    "drop_last",
    "precision",
    "optimizer",
    "lr_schedule",
    "lr_scaling",
    "clip_grad_norm",
    "ema",
)
"""Keys that decide what is learned. A run that resumes must not have changed them."""


def by_name(names: Mapping[str, str]) -> dict[str, tuple[str, ...] | str]:
    """Invert {our keys: other names}; in each text, spaces separate the names."""
    found: dict[str, tuple[str, ...] | str] = {}
    for keys, others in names.items():
        found |= dict.fromkeys(others.split(), tuple(keys.split()))
    return found


FOREIGN = by_name(_NAMES)
"""Maps another tool's name to our dotted keys, or to a sentence if we have none."""
for _names, _sentence in (
    (
        "sampler batch_sampler train_sampler shuffle",
        "define the task's `sampler()`; without one, every epoch uses each sample once, in an order that follows from `seed`",
    ),
    (
        "callbacks callback hooks",
        "put such code into methods of the Task",
    ),
    (
        "resume resume_from resume_from_checkpoint ckpt_path",
        "remove it: the same command resumes a run, and --fresh starts it over",
    ),
):
    FOREIGN |= dict.fromkeys(_names.split(), _sentence)


class TrainConfig(Settings):
    """One training run."""

    exclusive = (
        ("global_batch_size", "batch_size_per_worker", "batch_schedule"),
        ("epochs", "max_steps"),
    )
    one_is_required = True
    foreign = FOREIGN
    call = "python -m trainers"

    task: str = Field(
        pattern=r"^\w[\w.-]*:[A-Za-z_]\w*$",
        max_length=256,
        examples=["task:MyTask"],
        json_schema_extra={"rule": "must be `module:Class`"},
    )
    """The Task to train, as `module:Class`, looked for from the YAML file's
    directory upwards.
    """
    task_args: Tree = Field(default_factory=dict)
    """Keyword arguments of the Task."""
    task_dir: Place = None
    """Directory to search first for the module of `task` or `train_func`; if
    relative, it is below the working directory, like `storage_path`. Sweeps
    set it in best.yaml.
    """
    name: RunName = "run"
    """Name of the run: its directory below `storage_path`."""
    storage_path: Place = Field(default=None, examples=["s3://bucket/runs"])
    """Where runs are kept: a directory or any pyarrow.fs URI (default
    $PACELINE_STORAGE, else ./results).
    """

    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of weights, sample order, dropout and transforms; random choices in
    `dataset()`, such as a random split, are the same for every seed.
    """
    deterministic: bool = False
    """Only deterministic algorithms: bit-equal repeats on CUDA, slower."""
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"
    """Where to train; auto: cuda, then mps, then cpu."""

    epochs: Positive | None = Field(default=None, examples=[10])
    """Passes over the training split."""
    max_steps: Positive | None = Field(default=None, examples=[10000])
    """Optimizer steps, in place of epochs."""
    max_time_s: Seconds | None = Field(default=None, examples=[3600])
    """Seconds of the loop until it writes a checkpoint and stops; the same
    command resumes it.
    """
    evaluate: sections.EvaluateConfig = sections.EvaluateConfig()
    """Evaluation of the validation split."""
    early_stopping: sections.EarlyStoppingConfig = (
        sections.EarlyStoppingConfig()
    )
    """When the run ends before its last step."""
    log_every_steps: Positive = 50
    """Steps over which the loss is averaged, for a line of the log and for
    `train_loss`; the last line covers the steps left. Before the first line,
    `train_loss` is the mean so far.

    Evaluations, checkpoints and restarts do not change these means.
    """

    global_batch_size: Positive | None = Field(default=None, examples=[64])
    """Samples of one optimizer step over all workers."""
    batch_size_per_worker: Positive | None = Field(default=None, examples=[32])
    """Samples of one optimizer step on each worker; converted to
    `global_batch_size` at the start.
    """
    batch_schedule: sections.BatchSizes | None = Field(
        default=None,
        examples=[[{"until_samples": 64000, "size": 64}, {"size": 256}]],
    )
    """Global batch sizes one after another, as `[{until_samples: 64000, size:
    64}, {size: 256}]`: each holds until the run has trained that many samples,
    the last one to the end.

    `lr_scaling` adapts the learning rate to each size.
    """
    drop_last: bool = False
    """Leave out the last, shorter step of an epoch (default: it is trained,
    weighted by its samples).
    """
    microbatch_size: Literal["auto"] | Positive = Field(
        default="auto",
        examples=[16],
        json_schema_extra={
            "rule": "must be auto or a whole number of at least 1"
        },
    )
    """Samples of one forward pass on one worker; gradients accumulate over a
    step. auto: the worker's share of a step, halved until it fits.
    """

    precision: Precision = "fp32"
    """Number formats. tf32: fp32 with products in TF32; bf16, fp16: autocast
    (fp16 also scales the loss); fp8: bf16 with Linear layers in float8;
    bf16-pure, fp16-pure: all in that format, parameters too.
    """
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = (
        "off"
    )
    """Mode of torch.compile for the model; with fsdp, each sharded block is
    compiled separately.
    """
    fullgraph: bool = False
    """Make a graph break in the model an error."""
    cuda_graphs: AutoOrBool = "auto"
    """Capture whole steps as CUDA graphs, with one worker and a fused
    optimizer.

    Replays run no Python code of the task, and are given up if they differ
    from plain steps. auto: on a GPU, if steps are 3 % faster.
    """
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass, in blocks that a ModuleList
    or Sequential repeats. full: all of a block; selective: all but
    matrix products, convolutions and attention.

    Losses stay the same.
    """
    channels_last: AutoOrBool = "auto"
    """Memory format of 4-D parameters and batches; auto: channels last for
    convolutions on CUDA.
    """
    strategy: Literal["ddp", "fsdp", "dp", "none"] = "ddp"
    """How devices share one model. ddp: a replica each; fsdp: sharded (FSDP2);
    dp: torch's DataParallel, one process on all its GPUs; none: a single
    worker, no wrapper.
    """
    ddp: sections.DdpConfig = sections.DdpConfig()
    """Settings of `strategy: ddp` only."""

    optimizer: sections.OptimizerConfig = Field(
        examples=[{"name": "adamw", "lr": 0.001}]
    )
    """The optimizer."""
    lr_schedule: sections.ScheduleConfig = sections.ScheduleConfig()
    """The learning rate schedule."""
    lr_scaling: sections.ScalingRule = sections.ScalingRule()
    """How the learning rate follows the batch size."""
    clip_grad_norm: float | None = Field(default=None, gt=0, examples=[1.0])
    """Largest norm of the gradient; a larger one is scaled down to this norm."""
    ema: sections.EmaConfig = sections.EmaConfig()
    """Moving average of the weights."""

    data: sections.DataConfig = sections.DataConfig()
    """How samples reach the device."""
    scaling: sections.ScalingConfig = sections.ScalingConfig()
    """Workers and what each of them gets."""
    checkpoint: sections.CheckpointConfig = sections.CheckpointConfig()
    """When training state is saved."""
    failure: sections.FailureConfig = sections.FailureConfig()
    """Restarts for each kind of failure (`launcher: ray`)."""
    tracking: Tracking = Field(default_factory=list)
    profile_steps: Count = Field(default=0, examples=[5])
    """Steps that torch.profiler records after the warm-up, to `profile/` in
    the run's directory.
    """
    launcher: Literal["ray", "local", "spawn"] = "ray"
    """What starts the workers: Ray, nothing (local: one worker in this
    process), or this process (spawn: all on this machine). Ignored if torchrun
    has started this process.
    """

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        strategy = self.strategy
        compiled = self.compile
        device = self.device
        off_cuda = device in ("cpu", "mps")
        launcher = self.launcher
        workers = self.scaling.max_workers
        elastic = isinstance(self.scaling.num_workers, list)
        captures = compiled in CAPTURING
        again = self.activation_checkpointing != "none"
        ddp = "set `strategy: ddp`"
        default = "set `compile: default`"
        for condition, key, rule, fix in (
            (
                workers > 1 and strategy in ("none", "dp"),
                "strategy",
                "is for one worker",
                ddp,
            ),
            (
                self.ddp.sync_batchnorm and strategy != "ddp",
                "ddp.sync_batchnorm",
                f"has no effect with strategy {strategy}",
                ddp,
            ),
            (
                strategy == "fsdp"
                and self.optimizer.name
                in ("adamw8bit", "adamw4bit", "adamwfp8"),
                "optimizer.name",
                "stores moments in blocks, which sharding would cut",
                "set `name: adamw`",
            ),
            (
                self.precision in ("fp8", "tf32") and off_cuda,
                "precision",
                f"needs CUDA, not device {device}",
                "set `precision: bf16`",
            ),
            (
                self.precision == "fp8" and compiled == "off",
                "compile",
                "does not work with precision fp8, which needs a compiled model",
                default,
            ),
            (
                self.lr_scaling.rule == "sde" and self.optimizer.name == "sgd",
                "lr_scaling.rule",
                "scales the moments of Adam, which sgd does not have",
                "set `rule: linear`",
            ),
            (
                strategy == "dp" and (compiled != "off" or again),
                "strategy",
                "supports neither `compile` nor `activation_checkpointing`",
                ddp,
            ),
            (
                strategy == "fsdp" and captures,
                "strategy",
                f"does not support `compile: {compiled}`, which captures CUDA graphs",
                ddp,
            ),
            (
                self.fullgraph and compiled == "off",
                "fullgraph",
                "needs a compiled model",
                default,
            ),
            (
                self.cuda_graphs is True
                and (
                    captures
                    or again
                    or off_cuda
                    or workers > 1
                    or strategy in ("fsdp", "dp")
                ),
                "cuda_graphs",
                "needs one worker on CUDA, without strategy fsdp or dp, activation_checkpointing, or a `compile` mode that captures graphs",
                "set `cuda_graphs: false`",
            ),
            (
                workers > 1 and launcher == "local",
                "scaling.num_workers",
                "must be 1 with `launcher: local`",
                "set `launcher: spawn` or `launcher: ray`",
            ),
            (
                elastic and launcher != "ray",
                "scaling.num_workers",
                "is elastic, which needs Ray",
                "set `launcher: ray`",
            ),
            (
                elastic and self.batch_size_per_worker is not None,
                "batch_size_per_worker",
                "has no fixed meaning with elastic workers",
                "set `global_batch_size`",
            ),
        ):
            self.refuse_if(condition, key, rule, fix)
        return self

    @model_validator(mode="after")
    def _eps_survives(self) -> Self:
        if self.precision != "fp16-pure" or self.optimizer.name == "sgd":
            return self
        given = eps = self.optimizer.eps or 1e-8
        if self.lr_scaling.rule == "sde":
            eps /= math.sqrt(self.lr_scaling.ratio(self.batch_size))
        if eps < _SMALLEST_HALF:
            rule = f"vanishes in float16, whose smallest number is {_SMALLEST_HALF:.0e}: the first step would divide by zero"
            if eps != given:
                rule = f"becomes {eps:.1e} by `lr_scaling`, which {rule}"
            fix = "set `eps: 1e-4`, or use precision fp16"
            raise ConfigError("optimizer.eps", given, rule, fix)
        return self

    def with_global_batch(self) -> TrainConfig:
        """Return the run with `batch_size_per_worker` converted to `global_batch_size`."""
        if self.batch_size_per_worker is None:
            return self
        return self.model_copy(
            update={
                "global_batch_size": self.batch_size,
                "batch_size_per_worker": None,
            }
        )

    @property
    def batch_size(self) -> int:
        """Samples of one optimizer step over all workers; the most if the size changes."""
        return max(size for _, size in self.batch_sizes)

    @property
    def batch_sizes(self) -> list[tuple[int | None, int]]:
        """Global batch sizes in order, each with its `until_samples`."""
        if self.batch_schedule is not None:
            return [
                (entry.until_samples, entry.size)
                for entry in self.batch_schedule
            ]
        of_workers = (
            self.batch_size_per_worker or 0
        ) * self.scaling.max_workers
        return [(None, self.global_batch_size or of_workers)]

    @property
    def changes_batch(self) -> bool:
        """Whether the batch size changes within the run."""
        return len(self.batch_sizes) > 1

    @property
    def counts_samples(self) -> bool:
        """Whether the learning rate follows samples, since steps differ in size."""
        return self.batch_schedule is not None and self.epochs is not None

    @property
    def writes_events(self) -> bool:
        """Whether rank 0 writes TensorBoard events."""
        return len(self.trackers) < len(self.tracking)

    @property
    def trackers(self) -> list[TrackerConfig]:
        """The trackers that follow the run; the run writes TensorBoard itself."""
        trackers = chosen(self.tracking)
        return [each for each in trackers if each.tracker != "tensorboard"]
