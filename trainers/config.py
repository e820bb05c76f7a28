"""TrainConfig: everything that `train.yaml` may say, strict, without torch.

The descriptions below the fields are also the text of `--help` and of docs/config.md.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from trainers.errors import MISSING, POLICIES, ConfigError
from trainers.settings import Settings, plain

Positive = Annotated[int, Field(ge=1)]
_SMALLEST_HALF = 2.0**-24
Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16-pure", "fp16-pure"]


class OptimizerConfig(Settings):
    """The optimizer; ignored when the task overrides `optimizer()`."""

    name: Literal["sgd", "adam", "adamw"] = Field(default="adamw")
    """The algorithm, as torch.optim has it."""
    lr: float = Field(gt=0, examples=[0.001])
    """Learning rate at `lr_scaling.base_batch_size` (at any batch size when the rule is none)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay: L2 for sgd and adam, decoupled for adamw."""
    momentum: float | None = Field(default=None, ge=0, lt=1, examples=[0.9])
    """Momentum, sgd only."""
    nesterov: bool | None = Field(default=None)
    """Nesterov momentum, sgd only."""
    betas: list[Annotated[float, Field(ge=0, lt=1)]] | None = Field(
        default=None, min_length=2, max_length=2, examples=[[0.9, 0.999]]
    )
    """Decay rates of the two moments, adam and adamw only."""
    eps: float | None = Field(default=None, gt=0, examples=[1e-8])
    """Term added to the denominator, adam and adamw only."""

    @model_validator(mode="after")
    def _only_what_is_used(self) -> Self:
        unused = ("betas", "eps") if self.name == "sgd" else ("momentum", "nesterov")
        for name in unused:
            if (value := getattr(self, name)) is not None:
                raise ConfigError(name, value, f"means nothing to optimizer {self.name}", "remove it")
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov", True, "needs momentum", "set `momentum: 0.9`")
        return self


class ScheduleConfig(Settings):
    """The learning rate's course; a pure function of the step."""

    name: Literal["constant", "linear", "cosine"] = Field(default="constant")
    """Course after the warm-up: constant, or falling to zero at the last step."""
    warmup: int | float = Field(
        default=0, ge=0, examples=[100], json_schema_extra={"rule": "must be a number of steps, or a share below 1"}
    )
    """Linear warm-up: a whole number of steps, or a share of all steps (0.05)."""

    @model_validator(mode="after")
    def _steps_or_share(self) -> Self:
        if isinstance(self.warmup, float) and self.warmup >= 1:
            raise ConfigError("warmup", self.warmup, "as a share must be below 1", "write steps as a whole number")
        return self


class ScalingRule(Settings):
    """How the learning rate follows the batch size."""

    rule: Literal["none", "linear", "sqrt"] = Field(default="none")
    """linear for SGD (Goyal et al. 2017), sqrt for Adam (Malladi et al. 2022)."""
    base_batch_size: Positive | None = Field(default=None, examples=[64])
    """The global batch size that `optimizer.lr` was chosen for."""

    @model_validator(mode="after")
    def _base_is_known(self) -> Self:
        if self.rule != "none" and self.base_batch_size is None:
            raise ConfigError("base_batch_size", MISSING, "is what the rule scales from", "add `base_batch_size: 64`")
        return self


class EvaluateConfig(Settings):
    """When, and in which batches, the validation split is evaluated."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("every_epochs", "every_steps"),)

    every_epochs: Positive | None = Field(default=None)
    """Evaluate after every so many epochs (1 when neither key is set)."""
    every_steps: Positive | None = Field(default=None, examples=[500])
    """Evaluate after every so many steps."""
    microbatch_size: Positive = Field(default=256)
    """Samples of one evaluation batch; fixed, so that figures do not depend on the number of workers."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.every_epochs and self.every_steps:
            raise ConfigError("every_steps", self.every_steps, "cannot stand beside every_epochs", "keep one of them")
        return self


class DataConfig(Settings):
    """How samples reach the device."""

    num_workers: int = Field(default=0, ge=0)
    """DataLoader processes of each worker; 0 loads in the worker itself."""
    prefetch_factor: Positive | None = Field(default=None, examples=[2])
    """Microbatches that each loader process prepares ahead (torch's default when not set)."""
    pin_memory: Literal["auto"] | bool = Field(
        default="auto", json_schema_extra={"rule": "must be auto, true or false"}
    )
    """Page-locked host memory for faster copies; auto: on CUDA."""
    resident: Literal["auto"] | bool = Field(default="auto", json_schema_extra={"rule": "must be auto, true or false"})
    """Whole split as tensors on the device; auto: a TensorDataset that takes at most a tenth of its memory."""

    @model_validator(mode="after")
    def _prefetch_has_workers(self) -> Self:
        if self.prefetch_factor is not None and self.num_workers == 0:
            raise ConfigError("prefetch_factor", self.prefetch_factor, "needs loader processes", "set `num_workers: 2`")
        if self.resident is True and self.num_workers > 0:
            raise ConfigError("num_workers", self.num_workers, "is of no use with resident data", "remove it")
        return self


class ScalingConfig(Settings):
    """Workers and what each of them gets."""

    num_workers: Positive | list[Positive] = Field(
        default=1, examples=[2], json_schema_extra={"rule": "must be a whole number of at least 1, or [MIN, MAX]"}
    )
    """Worker processes, one for each GPU; [MIN, MAX] is elastic and needs `launcher: ray`."""
    use_gpu: Literal["auto"] | bool = Field(default="auto", json_schema_extra={"rule": "must be auto, true or false"})
    """GPUs for the workers; auto: when the cluster (or this machine) has any."""
    cpus_per_worker: Positive = Field(default=1)
    """CPU cores of one worker, and its number of compute threads under every launcher."""
    gpus_per_worker: float = Field(default=1, gt=0)
    """GPUs of one worker."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(default="PACK")
    """Ray's placement of the workers on nodes."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        workers = self.num_workers
        if isinstance(workers, list) and (len(workers) != 2 or workers[0] > workers[1]):
            raise ConfigError("num_workers", workers, "must be [MIN, MAX] with MIN at most MAX", "write [1, 4]")
        return self

    @property
    def min_workers(self) -> int:
        """The fewest workers that the run may have."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        """The most workers that the run may have."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]


class CheckpointConfig(Settings):
    """When training state goes to storage; the last step is always written."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (("every_steps", "every_epochs", "every_s"),)

    every_steps: Positive | None = Field(default=None, examples=[1000])
    """Write after every so many steps."""
    every_epochs: Positive | None = Field(default=None)
    """Write after every so many epochs (1 when no key is set)."""
    every_s: float | None = Field(default=None, gt=0, examples=[600])
    """Write when so many seconds have passed since the last one."""
    keep: Positive = Field(default=2)
    """How many checkpoints are kept."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        chosen = [name for name in self.exclusive[0] if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ConfigError(chosen[1], getattr(self, chosen[1]), f"cannot stand beside {chosen[0]}", "keep one")
        return self


class FailureConfig(Settings):
    """How many restarts from the newest checkpoint each kind of failure gets; -1: no limit."""

    error: int = Field(default=POLICIES["error"].restarts, ge=-1)
    """An exception in the task."""
    node_lost: int = Field(default=POLICIES["node_lost"].restarts, ge=-1)
    """A worker process or its node died."""
    preempted: int = Field(default=POLICIES["preempted"].restarts, ge=-1)
    """The node was drained or taken back."""
    out_of_host_memory: int = Field(default=POLICIES["out_of_host_memory"].restarts, ge=-1)
    """The host ran out of memory."""


class TrainConfig(Settings):
    """One training run."""

    exclusive: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("global_batch_size", "batch_size_per_worker"),
        ("epochs", "max_steps"),
    )

    task: str = Field(
        pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$",
        examples=["task:MyTask"],
        json_schema_extra={"rule": "must be `module:Class`"},
    )
    """The Task to train, as `module:Class`; the YAML's own directory and those above it are searched."""
    task_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the Task."""
    task_dir: str | None = Field(default=None)
    """Directory to search for the task's module first; sweeps set it in best.yaml."""
    name: str = Field(
        default="run",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        examples=["digits"],
        json_schema_extra={"rule": "must be letters, digits, `.`, `_` and `-`"},
    )
    """Name of the run: its directory below `storage_path`."""
    storage_path: str | None = Field(default=None, min_length=1, examples=["s3://bucket/runs"])
    """Where runs are kept: a directory or any pyarrow.fs URI (default $PACELINE_STORAGE, else ./results)."""

    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of weights, sample order, dropout and transforms."""
    deterministic: bool = Field(default=False)
    """Only deterministic algorithms: bit-equal repeats on CUDA, slower."""
    device: Literal["auto", "cuda", "mps", "cpu"] = Field(default="auto")
    """Where to train; auto: cuda, then mps, then cpu."""

    epochs: Positive | None = Field(default=None, examples=[10])
    """Passes over the training split."""
    max_steps: Positive | None = Field(default=None, examples=[10000])
    """Optimizer steps, in place of epochs."""
    max_time_s: float | None = Field(default=None, gt=0, examples=[3600])
    """Checkpoint and leave after so many seconds; the same command goes on."""
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    """Evaluation of the validation split."""
    log_every_steps: Positive = Field(default=50)
    """Steps whose mean loss makes one line of the log."""

    global_batch_size: Positive | None = Field(default=None, examples=[64])
    """Samples of one optimizer step over all workers."""
    batch_size_per_worker: Positive | None = Field(default=None, examples=[32])
    """The same for each worker; turned into global_batch_size once, at the start."""
    drop_last: bool = Field(default=False)
    """Leave out the last, shorter step of an epoch (default: it is trained, weighted by its samples)."""
    microbatch_size: Literal["auto"] | Positive = Field(
        default="auto", examples=[16], json_schema_extra={"rule": "must be auto or a whole number of at least 1"}
    )
    """Samples of one forward pass on one worker; accumulation follows. auto: a whole share, halved until it fits."""

    precision: Precision = Field(default="fp32")
    """Number formats of parameters, autocast and matmul: the table is in trainers/precision.py."""
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = Field(default="off")
    """torch.compile of the model, by mode."""
    fullgraph: bool = Field(default=False)
    """Make a graph break an error."""
    strategy: Literal["ddp", "none"] = Field(default="ddp")
    """How workers share one model; none: a single worker, no wrapper."""

    optimizer: OptimizerConfig = Field(examples=[{"name": "adamw", "lr": 0.001}])
    """The optimizer."""
    lr_schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    """The learning rate's course."""
    lr_scaling: ScalingRule = Field(default_factory=ScalingRule)
    """How the learning rate follows the batch size."""
    clip_grad_norm: float | None = Field(default=None, gt=0, examples=[1.0])
    """Largest norm of the gradient; larger ones are scaled down to it."""

    data: DataConfig = Field(default_factory=DataConfig)
    """How samples reach the device."""
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)
    """Workers and what each of them gets."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When training state goes to storage."""
    failure: FailureConfig = Field(default_factory=FailureConfig)
    """Restarts for each kind of failure (`launcher: ray`)."""
    launcher: Literal["ray", "local", "spawn"] = Field(default="ray")
    """Who starts the workers; under torchrun: torchrun."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for group in self.exclusive:
            chosen = [name for name in group if getattr(self, name) is not None]
            if not chosen:
                first, second = group
                example = (type(self).model_fields[first].examples or [1])[0]
                raise ConfigError(first, MISSING, f"or {second} is required", f"add `{first}: {example}`")
            if len(chosen) > 1:
                raise ConfigError(
                    chosen[1],
                    getattr(self, chosen[1]),
                    f"cannot stand beside {chosen[0]}",
                    "keep exactly one of the two",
                )
        scaling = self.scaling
        if scaling.max_workers > 1 and self.strategy == "none":
            raise ConfigError("strategy", "none", "is for one worker", "set `strategy: ddp`")
        if scaling.max_workers > 1 and self.launcher == "local":
            raise ConfigError(
                "scaling.num_workers",
                scaling.num_workers,
                "must be 1 with `launcher: local`",
                "set `launcher: spawn` or `launcher: ray`",
            )
        if isinstance(scaling.num_workers, list):
            if self.launcher != "ray":
                raise ConfigError(
                    "scaling.num_workers", scaling.num_workers, "is elastic, which needs Ray", "set `launcher: ray`"
                )
            if self.batch_size_per_worker is not None:
                raise ConfigError(
                    "batch_size_per_worker",
                    self.batch_size_per_worker,
                    "has no fixed meaning with elastic workers",
                    "set `global_batch_size`",
                )
        eps = 1e-8 if self.optimizer.eps is None else self.optimizer.eps
        if self.precision == "fp16-pure" and self.optimizer.name != "sgd" and eps < _SMALLEST_HALF:
            raise ConfigError(
                "optimizer.eps",
                eps,
                f"vanishes in float16, whose smallest number is {_SMALLEST_HALF:.0e}: the first step divides by zero",
                "set `eps: 1e-4`, or use precision fp16",
            )
        if self.fullgraph and self.compile == "off":
            raise ConfigError("fullgraph", True, "needs a compiled model", "set `compile: default`")
        return self

    def with_global_batch(self) -> TrainConfig:
        """The same run with `batch_size_per_worker` turned into `global_batch_size`."""
        if self.batch_size_per_worker is None:
            return self
        size = self.batch_size_per_worker * self.scaling.max_workers
        return self.model_copy(update={"global_batch_size": size, "batch_size_per_worker": None})

    @property
    def batch_size(self) -> int:
        """Samples of one optimizer step over all workers, whichever key gave it."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        assert self.batch_size_per_worker is not None
        return self.batch_size_per_worker * self.scaling.max_workers

    def tree(self) -> dict[str, Any]:
        """Plain data that `TrainConfig` reads back; keys without a value are left out."""
        return plain(self)
