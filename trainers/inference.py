"""Use what was trained: open a run on storage, evaluate, predict, export.

One worker in this process does the work, or N with `--scaling.num_workers N`.
Everything else is as in training, so on the same hardware an evaluation
reproduces the run's figures to the last bit.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch
from torch import Tensor, nn

from trainers.causes import classify
from trainers.checkpoint.manifest import Best, Manifest
from trainers.checkpoint.store import Archive
from trainers.checkpoint.validation import State, check_dtypes, check_state
from trainers.config import TrainConfig
from trainers.config.model import Tree, build, override
from trainers.context import RunContext
from trainers.data.feed import Feed
from trainers.devices.device import (
    drawn_alike,
    resolve_device,
    seed_all,
    set_flags,
    synchronize,
)
from trainers.devices.group import Group
from trainers.errors import (
    MISSING,
    CheckpointError,
    ConfigError,
    counted,
    in_digits,
    redact,
)
from trainers.launch.process import end_at_once
from trainers.launch.spec import (
    MARK,
    Job,
    RunSpec,
    make_spec,
    open_run,
    read_mapping,
)
from trainers.loop.data import load_same, tell_samples
from trainers.measure.result import Answer, RunResult
from trainers.measure.run_log import read_log
from trainers.model.precision import (
    PrecisionSpec,
    apply_matmul,
    resolve_precision,
)
from trainers.model.state import (
    add_buffers,
    check_frozen,
    find_beside,
    frozen_digests,
    load_beside,
    load_model,
    modules_beside,
    place,
)
from trainers.model.strategy import compile_model
from trainers.step.ceiling import OUT_OF_MEMORY, next_smaller
from trainers.step.evaluation import evaluate, too_large
from trainers.step.forward import ForwardPass
from trainers.step.snapshot import CollectiveWatch, throwaway
from trainers.storage import Storage, storage_uri
from trainers.task import Task, load_split, task_feed

logger = logging.getLogger(__name__)

_INDEX = "index"
_WINDOW = 16  # batches that a rank runs between two meetings of all ranks
_TRIED = 2  # samples of the throw-away pass


@dataclass(frozen=True)
class SavedCheckpoint:
    """One checkpoint, verified against its manifest."""

    name: str
    manifest: Manifest
    state: State
    """The state that trainers/checkpoint/run_state.py wrote, on the CPU; from
    a sharded checkpoint, only the tensors of model and task are read.
    """


def read_checkpoint(
    run: Storage, config: TrainConfig, which: str
) -> SavedCheckpoint:
    """Read a run's checkpoint `newest`, `best` or `step-123`.

    Raises ConfigError if there is no such checkpoint, and CheckpointError if
    the checkpoint contains more than tensors and plain data.
    """
    trained_as = read_mapping(run, MARK)  # `config` may have another precision
    keep = config.checkpoint
    archive = Archive(run, Best.of(keep.best, keep.best_mode), trained_as)
    try:
        name = archive.choose(which)
    except CheckpointError as error:
        rule = f"cannot be read: {error}"
        fix = "give newest, best or step-N"
        if archive.newest() is None:
            fix = "resume the run until it has written a checkpoint"
        raise ConfigError("--checkpoint", which, rule, fix) from error
    state = read_trained(archive, name)
    return SavedCheckpoint(name, archive.manifest(name), state)


def read_trained(archive: Archive, name: str) -> State:
    """Return a checkpoint's state, with the whole tensors of model and task.

    Other tensors may be on the meta device: only continued training needs
    them.

    Raises CheckpointError if `name` is not a valid checkpoint.
    """
    state, rows = archive.read_state(name)
    try:
        check_state(state, name)
    except CheckpointError as error:
        where = archive.storage.locate(name)
        raise CheckpointError(
            f"checkpoint {where} cannot be used: {error}"
        ) from None
    if rows is not None:
        for section in ("model", "task"):
            state[section] = rows.fill(state[section])
    return state


def export(location: str, out: str, which: str = "newest") -> str:
    """Write a checkpoint's model to `out`, a file or URI; return a line about it.

    Tensors are named as in the task's bare model. Tensors that share memory
    are written under each of their names, so that `load_state_dict` accepts
    the file as it is. Raises ConfigError, CheckpointError, StorageError.
    """
    checkpoint = read_checkpoint(*open_run(location), which)
    model = checkpoint.state["model"]
    weights = {name: _own(name, value) for name, value in model.items()}
    manifest = checkpoint.manifest
    described = {
        "format": "pt",  # other readers expect it
        "task": manifest.config["task"],
        "step": str(manifest.step),
        "metrics": json.dumps(manifest.metrics),
        "versions": json.dumps(manifest.versions),
    }
    try:
        data = safetensors.torch.save(weights, described)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        words = (
            f"the model of {checkpoint.name} cannot be written as safetensors"
        )
        raise CheckpointError(f"{words}: {error}") from error
    target = Storage(storage_uri(out))
    target.parent.write(target.name, data)
    size = f"{len(weights)} tensors, {len(data) / 2**20:,.1f} MiB"
    said = [f"{target.uri}: {size}", f"of step {manifest.step}"]
    for name, value in sorted(manifest.metrics.items()):
        said.append(f"{name} {in_digits(value)}")
    return ", ".join(said)


def _own(name: str, value: object) -> Tensor:
    """Return a contiguous copy of a tensor, as safetensors requires."""
    if not isinstance(value, Tensor):
        words = f"the model cannot be written as safetensors: {name} is not a tensor"
        raise CheckpointError(words)
    return value.detach().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class InferenceResult(Answer):
    """The result of one pass over a split."""

    checkpoint: str
    """The checkpoint's location."""
    step: int
    split: str
    samples: int
    metrics: dict[str, float]
    """Named after the split (`val_loss`); empty for predictions."""
    time_s: float
    """Time of the pass, without building and loading the model."""
    world_size: int
    device: str
    precision: str
    out: str | None = None

    def __str__(self) -> str:
        samples = counted(self.samples, "sample", ",")
        lines = [
            f"step {self.step} on the {samples} of {self.split}: {self.checkpoint}"
        ]
        for name, value in sorted(self.metrics.items()):
            lines.append(f"{name} {value!r}")
        speed = (
            f"{self.samples / self.time_s:,.0f} samples/s ({self.time_s:.2f} s"
        )
        workers = counted(self.world_size, "worker")
        lines.append(f"{speed}; {workers}, {self.device}, {self.precision})")
        if self.out:
            lines.append(f"predictions {self.out}")
        return "\n  ".join(lines)


@dataclass(frozen=True)
class Inference(Job[InferenceResult]):
    """One pass over a split: writes predictions to `out`; if `out` is None, evaluates."""

    answer = InferenceResult
    split: str
    which: str
    """The checkpoint: newest, best or step-N."""
    out: str | None

    def execute(self, context: RunContext) -> InferenceResult:
        """Do one pass as one worker."""
        end_at_once()
        return infer(self.load_task(), context, self)


def infer(task: Task, context: RunContext, job: Inference) -> InferenceResult:
    """Build the model, load the checkpoint and run the pass on this worker.

    Every rank must call it; the results are equal on all ranks, except for the
    time.
    """
    config = job.config
    device = resolve_device(config.device, context.device_index)
    group = Group(context.rank, context.world_size, device)
    set_flags(device, config.scaling.cpus_per_worker, config.deterministic)
    spec = resolve_precision(config.precision, device)
    apply_matmul(spec)
    if context.local_rank == 0:
        with drawn_alike(device):
            task.setup()
    group.barrier()
    dataset = load_same(task, job.split, config.task, group)
    checkpoint, position, model, spec = load_trained(task, group, spec, job)
    step = position["step"]
    with_loss = job.out is None
    together = _communicates(
        ForwardPass(model, task, spec, device), dataset, with_loss, group
    )
    if config.compile != "off":
        compile_model(model, config.compile, config.fullgraph)
    seed_all(config.seed + context.rank)
    sharers = context.local_world_size if device.type == "cpu" else 1
    feed = task_feed(
        dataset, task, config.data, device, sharers=sharers, seed=config.seed
    )
    forward = ForwardPass(model, task, spec, device)
    with contextlib.closing(feed):
        group.barrier()
        began = time.perf_counter()
        # Not inference_mode: a forward may compute gradients, e.g. forces.
        with torch.no_grad():
            metrics = _pass(job, forward, feed, group, step, together)
        synchronize(device)
        group.barrier()
        time_s = time.perf_counter() - began
        if group.rank == 0 and job.split == "val":
            _warn_of_other_samples(position.get("held_back"), dataset)
    return InferenceResult(
        checkpoint,
        step,
        job.split,
        len(dataset),
        metrics,
        time_s,
        group.world_size,
        str(device),
        spec.name,
        job.out,
    )


def _communicates(
    forward: ForwardPass, dataset: Any, with_loss: bool, group: Group
) -> bool:
    """Run a throw-away pass; return whether the forward or the loss is a collective."""
    if group.world_size == 1:
        return False
    watch = CollectiveWatch()
    rows = torch.arange(min(_TRIED, len(dataset)))
    says_it_better = contextlib.suppress(Exception)  # the real pass does
    with (
        throwaway(forward, dataset=dataset),
        says_it_better,
        torch.no_grad(),
        watch,
    ):
        forward(forward.read(dataset, rows, training=False), with_loss)
    return any(group.gather(watch.seen))


def _pass(
    job: Inference,
    forward: ForwardPass,
    feed: Feed,
    group: Group,
    step: int,
    together: bool,
) -> dict[str, float]:
    """Evaluate, or write predictions; return the metrics, named after the split.

    `together` says that all ranks must run equally many forwards.
    """
    config = job.config
    size = config.evaluate.microbatch_size
    if job.out is not None:
        about = {
            "task": config.task,
            "split": job.split,
            "checkpoint": f"step-{step}",
        }
        predict(forward, feed, size, group, Storage(job.out), about, together)
        return {}
    seeds = (config.seed, step)
    figures = evaluate(
        forward, feed, size, group, seeds=seeds, collective=together
    )
    return {
        f"{job.split}_{name.removeprefix('val_')}": value
        for name, value in figures.items()
    }


def _warn_of_other_samples(held_back: Any, dataset: Any) -> None:
    """Warn if the validation split had different samples in training."""
    if held_back and held_back != tell_samples(dataset):
        words = "dataset('val') gives other samples than it gave in training, so the model may have been trained on them"
        fix = "seed the random choices in dataset(), and sort sets and directory listings"
        logger.warning("%s; %s", words, fix)


def load_trained(
    task: Task, group: Group, spec: PrecisionSpec, job: Inference
) -> tuple[str, State, nn.Module, PrecisionSpec]:
    """Load a checkpoint; return its location, its position, the model and precision."""
    config = job.config
    archive = Archive(job.storage)
    if group.rank == 0:
        found = read_checkpoint(job.storage, config, job.which)
        group.first(found.name)
        name = found.name
        state = found.state
    else:
        name = group.first("")
        state = read_trained(archive, name)
    where = archive.storage.locate(name)
    seed_all(config.seed)
    model = task.model()
    frozen = frozen_digests(model) if "frozen" in state else None
    spec = spec.with_layout(config.channels_last, model, group.device)
    model = spec.convert_model(model).to(group.device)
    try:
        position = {
            **state["position"],
            "step": int(state["position"]["step"]),
        }
        check_frozen(state.get("frozen"), frozen)
        check_dtypes(state["model"], model.state_dict())
        add_buffers(model, state.get("switched", {}), state["model"])
        load_model(model, state["model"], frozen)
        beside = find_beside(task, state.get("beside", {}).keys())
        place(beside.values(), group.device, spec.parameters)
        load_beside(beside, state.get("beside", {}))
        task.load_state_dict(state["task"])
    except Exception as error:
        if classify(error) in OUT_OF_MEMORY:
            raise
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(
            f"checkpoint {where} could not be loaded into this task and model ({words})"
        ) from error
    for module in modules_beside(task, model):
        module.eval()
    return where, position, model.eval(), spec


def run_spec(
    location: str, overrides: Tree, world_size: int | None
) -> RunSpec:
    """Return the run at `location` with settings that this machine can execute.

    The run has one local worker, unless `overrides` say otherwise or torchrun
    has started `world_size` workers. Raises ConfigError.
    """
    run, config = open_run(location)
    source = run.locate(MARK)
    if overrides.get("launcher") == "ray":
        fix = "set `launcher: spawn`, or use torchrun"
        raise ConfigError(
            "launcher", "ray", "is for training only", fix, "command line"
        )
    # The model is whole on every worker, however it was trained.
    changes = {
        "storage_path": run.parent.uri,
        "launcher": "spawn",
        "strategy": "ddp",
        "scaling.num_workers": 1,
        **overrides,
    }
    tree = override(TrainConfig, config.tree(), changes)
    if world_size is not None:
        tree = override(TrainConfig, tree, {"scaling.num_workers": world_size})
    elif "launcher" not in overrides:
        workers = build(TrainConfig, tree, source).scaling.max_workers
        if workers == 1:
            tree = override(TrainConfig, tree, {"launcher": "local"})
    directory = Path(run.path) if run.is_local else None
    spec = make_spec(tree, source, directory, own_workers=world_size is None)
    assert isinstance(spec, RunSpec)
    return replace(spec, uri=run.uri)


def predict(
    forward: ForwardPass,
    feed: Feed,
    microbatch_size: int,
    group: Group,
    target: Storage,
    about: dict[str, str],
    together: bool = False,
) -> None:
    """Write the task's `predictions` of every sample to the file `target`.

    `about` becomes the file's metadata. With `together` every rank runs
    equally many forwards: a rank that has fewer batches also runs some whose
    outputs are dropped.

    Each rank gets windows of whole batches, which rank 0 writes in order: the
    file is the same, byte for byte, for any number of ranks. Every rank must
    call this function. Raises ConfigError for a value that cannot be a column,
    and StorageError.
    """
    length = len(feed.dataset)  # type: ignore[arg-type]
    batches = torch.arange(length).split(microbatch_size)
    starts = range(
        group.rank * _WINDOW, len(batches), _WINDOW * group.world_size
    )
    mine = [batches[start : start + _WINDOW] for start in starts]
    # All ranks meet as often as rank 0 has windows: no rank has more.
    meetings = -(-len(batches) // (_WINDOW * group.world_size))
    mine += [()] * (meetings - len(mine))
    idle = [0] * meetings
    if together:
        for meeting, part in enumerate(mine):
            begun = meeting * _WINDOW * group.world_size
            idle[meeting] = min(_WINDOW, len(batches) - begun) - len(part)
    every = [
        [*part, *batches[:1] * more]
        for part, more in zip(mine, idle, strict=True)
    ]
    source = feed.batches(list(itertools.chain(*every)), training=False)
    task = forward.task

    def record(rows: Tensor) -> pa.RecordBatch:
        batch = next(source)
        size = len(rows)
        try:
            outputs, _ = forward(batch, with_loss=False)
        except (RuntimeError, MemoryError) as error:
            if classify(error) in OUT_OF_MEMORY:
                raise too_large(
                    error, size, group, next_smaller(size)
                ) from error
            raise
        columns = task.predictions(outputs, batch)
        with _as_table():
            return _record(rows, columns)

    def windows() -> Iterator[list[pa.RecordBatch]]:
        for part, own in zip(every, mine, strict=True):
            made = [record(rows) for rows in part]
            yield from filter(None, group.collect(made[: len(own)]))

    if group.rank == 0:
        _write(windows(), target, about)
    else:
        collections.deque(windows(), maxlen=0)


def _record(rows: Tensor, columns: dict[str, Tensor]) -> pa.RecordBatch:
    arrays = {}
    made = {_INDEX: rows, **columns}
    if _INDEX in columns:
        raise ValueError(f"`{_INDEX}` is taken by the sample's number")
    for name, value in made.items():
        if value.layout is not torch.strided or value.is_nested:
            raise TypeError(f"`{name}` is a sparse or nested tensor")
        values = value.detach()
        # Arrow does not know bfloat16, and many readers do not know float16.
        if values.dtype in (torch.bfloat16, torch.float16):
            values = values.float()
        array = pa.array(values.cpu().contiguous().view(-1).numpy())
        for size in reversed(values.shape[1:]):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        arrays[name] = array
    return pa.RecordBatch.from_pydict(arrays)


def _write(
    windows: Iterator[list[pa.RecordBatch]],
    target: Storage,
    about: dict[str, str],
) -> None:
    """Write each window as a row group."""
    first = next(windows)
    schema = first[0].schema.with_metadata(about)
    with (
        target.parent.writer(target.name) as stream,
        pq.ParquetWriter(stream, schema) as file,
    ):
        for window in itertools.chain([first], windows):
            with _as_table():
                file.write_table(pa.Table.from_batches(window))


@contextlib.contextmanager
def _as_table() -> Iterator[None]:
    """Raise ConfigError if pyarrow cannot make a table from the columns."""
    try:
        yield
    except (
        AttributeError,
        NotImplementedError,
        TypeError,
        ValueError,
    ) as error:
        rule = f"does not form a table: {error}"
        fix = "return real tensors with one row per sample, of one shape in every batch"
        raise ConfigError("predictions()", MISSING, rule, fix) from error


@dataclass(frozen=True, repr=False)
class TrainedRun(RunResult):
    """The content of a run's `result.json`, and the run's directory."""

    uri: str = ""
    """The run's directory."""

    def __repr__(self) -> str:
        return redact(f"{self}\n  in {self.uri}")

    def log(self) -> list[dict[str, Any]]:
        """Return the run's log in order: losses, evaluations and other records."""
        return read_log(Storage(self.uri))

    def model(self, checkpoint: str = "newest") -> nn.Module:
        """Return the trained model in evaluation mode, on this process's device.

        Reads split "val" only if the task's model() fails without it.
        `checkpoint` is newest, best or step-N. Raises ConfigError if there is
        none.
        """
        spec = asdict(run_spec(self.uri, {}, None))
        job = Inference(**spec, split="val", which=checkpoint, out=None)
        device = resolve_device(job.config.device)
        precision = resolve_precision(job.config.precision, device)
        group = Group(0, 1, device)
        task = job.load_task()
        with drawn_alike(device):
            task.setup()
        try:
            return load_trained(task, group, precision, job)[2]
        except (AttributeError, TypeError):
            # The model needs what dataset() finds; a stream is not counted.
            load_split(task, "val", True, device)
            return load_trained(task, group, precision, job)[2]
