"""Capture whole steps as CUDA graphs, and replay them for steps of the same shapes.

A replay launches forward, backward, checks and optimizer in one call, so a
small model does not wait for the host.

- The first steps of a shape run normally, on the capture stream. They are
  training as well as warm-up, so neither weights nor optimizer nor random
  state are restored.
- The next step is captured, which computes nothing, and replayed.
- Batches of later steps with the same shapes are copied into the graph's own
  batches, and the graph is replayed.
- All other steps (such as an epoch's last, shorter one) run normally, with the
  same code.

Replays continue the sequence of random numbers. The task's Python code only
runs in steps that are captured or run normally: in a replay, a schedule or
counter in forward() does not advance, and an `if` decides nothing. So a graph
is verified by throw-away steps, when it is captured and before its 2nd, 11th,
101st and 1,001st replay: a few replays and the same steps run normally start
from the same state, and must end in the same state. Any difference ends
capturing for good. The graph is also verified again if an attribute of the
task, the model or their modules has changed, as by a schedule in after_step().
"""

import contextlib
import functools
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from trainers.causes import classify
from trainers.data.batch import (
    Batch,
    as_bytes,
    map_tensors,
    parts_of,
    tensors_of,
)
from trainers.data.stream import digest
from trainers.devices.device import get_rng_state, synchronize, take_spare
from trainers.devices.group import Group
from trainers.errors import ConfigError, chain, first_line
from trainers.model.schedule import Schedule
from trainers.step._changes import Changes
from trainers.step.ceiling import OUT_OF_MEMORY
from trainers.step.forward import ForwardPass
from trainers.step.snapshot import throwaway
from trainers.step.train_step import TrainStep
from trainers.task import overrides

logger = logging.getLogger(__name__)

STEPS = 3
"""Number of steps in a pass; the effect of a step counter, or of a random
number from outside torch, shows in the second step.
"""
_SPREADS = 3.0  # times the difference between plain steps
CAPTURE_AFTER_STEPS = 3
"""Steps of a shape before it is captured (torch's own number for models
without DDP).
"""
PROVED_BEFORE = (1, 10, 100, 1000)
"""Numbers of replays after which a graph is verified again."""
LOOK_EVERY = 20
"""Replays between two looks at what Python holds, if the task has no after_step()."""
_SELDOM = 100
"""If what Python holds changes at most once in this many replays, the graph is
verified again after each change.
"""
LEAST_GAIN = 1.03
"""Factor by which captured steps must be faster."""
_HOST_SHARE = 0.5
"""If the host issues a step in less than this share of the step's time, the
device is the bottleneck.
"""
_REPEATS = 3  # passes, to see how much steps that are not reproducible differ
_MOST_SHAPES = 64  # shapes counted; if there are more, they do not recur
# One per device: cuBLAS keeps a workspace for each stream that it sees.
_capture_stream = functools.cache(torch.cuda.Stream)


@dataclass(frozen=True)
class Pass:
    """The state that a few throw-away steps led to, recorded before they were undone."""

    state: dict[str, Tensor]
    """Tensors by name, copied to host memory."""
    changed: str | None
    """An attribute of the task, the model or the optimizer that the steps changed."""
    step_s: float
    changes: Changes
    """What Python code has changed since the pass; the steps' own changes were undone."""


def take_pass(
    step: Callable[[], None],
    forward: ForwardPass,
    optimizer: Optimizer,
    own: Mapping[str, Tensor],
) -> Pass:
    """Take a step a few times, record the resulting state, and put everything back.

    `own` names tensors that the step writes to besides those of model and
    optimizer.
    """
    device = forward.device
    with throwaway(forward, optimizer) as snapshot:
        for tensor in own.values():
            snapshot.keep(tensor)
        synchronize(device)
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        synchronize(device)
        step_s = (time.perf_counter() - began) / STEPS
        named = {
            **dict(forward.model.named_parameters()),
            **dict(forward.model.named_buffers()),
            **own,
        }
        names = {id(tensor): name for name, tensor in named.items()}
        for number, (parameter, moments) in enumerate(optimizer.state.items()):
            of_parameter = names.get(id(parameter), f"parameter {number}")
            named |= {
                f"{of_parameter}, {key}": value
                for key, value in moments.items()
                if isinstance(value, Tensor)
            }
        state = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in named.items()
        }
        random_state = digest(get_rng_state(device)).encode()
        state["random state"] = torch.frombuffer(
            bytearray(random_state), dtype=torch.uint8
        )
        changes = snapshot.changes
        return Pass(state, changes.first(), step_s, changes)


def difference(
    captured: Pass, eager: Pass, repeats: Sequence[Pass] = ()
) -> str | None:
    """Name the first tensor that differs, in any bit, after two passes, or return None.

    Both passes must have started from the same state. With `repeats` of the
    eager pass, a difference counts only if it clearly exceeds the spread among
    those repeats.
    """
    for name, theirs in eager.state.items():
        ours = captured.state[name]
        if torch.equal(as_bytes(ours), as_bytes(theirs)):
            continue
        spread = max(
            (_distance(repeat.state[name], theirs) for repeat in repeats),
            default=0.0,
        )
        if not _distance(ours, theirs) <= _SPREADS * spread:
            return name
    return None


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max())


class CudaCapture:
    """Records and runs work of one device on its own capture stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _capture_stream(device)

    def run(self, work: Callable[[], None]) -> None:
        """Run the work on the capture stream; the current stream waits for it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the work without running it; return a function that replays it.

        Waits for the device.
        """
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        current = torch.cuda.current_stream(self._device)
        generator = torch.cuda.default_generators[self._device.index]
        random_state = generator.clone_state()
        try:
            # Other threads (pinning, checkpoints, readings) continue: only
            # this one's calls are refused. The outer block restores the stream
            # after a failure, which torch 2.11 does not.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool, self._stream, "thread_local"),
            ):
                work()
        except BaseException:
            # The generator's present state may still count as captured.
            generator.graphsafe_set_state(random_state)
            # The allocator of torch 2.11 may still count as capturing, and
            # would then keep all unused memory.
            with contextlib.suppress(AttributeError, RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, pool)
            raise
        return graph.replay


@dataclass
class _Graph:
    shape: Hashable
    inputs: list[Tensor]
    """The tensors of the step's batches, which a replay reads."""
    gradients: list[Tensor | None]
    replay: Callable[[], None]
    replays: int = 0
    """Number of training steps replayed; the replays of a verification do not count."""
    changes: Changes | None = None
    """What Python held when the graph was last verified."""
    changed_at: int = -_SELDOM
    """Number of replays before the last change of what Python holds."""


class GraphedStep(TrainStep):
    """A TrainStep that captures recurring steps as a CUDA graph and replays them.

    If capture is explicitly `asked` for but impossible (without CUDA, for
    example, or if the optimizer's step reads from the device), ConfigError
    says why. If capture is not asked for, steps are captured only if that is
    faster, memory allows it, and no attribute of the task changes in a step.
    """

    def __init__(
        self,
        forward: ForwardPass,
        optimizer: Optimizer,
        group: Group,
        clip_grad_norm: float | None = None,
        capture: CudaCapture | None = None,
        asked: bool = True,
    ) -> None:
        super().__init__(forward, optimizer, group, clip_grad_norm)
        if not self._fused:
            name = type(optimizer).__name__
            raise _impossible(
                f"needs a fused optimizer, and a parameter group of this {name} is not fused",
                "build it with `fused=True`",
            )
        if capture is None and group.device.type != "cuda":
            raise _impossible(
                f"needs CUDA, and this worker trains on {group.device.type}",
                "train on a GPU",
            )
        if self.by_hand or (self._beside and group.world_size > 1):
            self.average_by_hand(
                "the optimizer has parameters whose gradients DDP does not average"
            )
        self._capture = capture or CudaCapture(group.device)
        # A graph keeps the numbers that it was captured with, so the learning
        # rate has to be a tensor: float32, as fused steps read it.
        self._lrs = [
            torch.full((), base, dtype=torch.float32, device=group.device)
            for base in self._base_lrs
        ]
        self.asked = asked
        self._given_up = False
        self._graph: _Graph | None = None
        self._has_gradients = False
        """Whether the parameters' gradients are the graph's; after a step that
        was not replayed they are not.
        """
        self._seen: Counter[Hashable] = Counter()

    def __call__(
        self,
        batches: Iterator[Batch],
        sizes: Sequence[int],
        step_samples: int,
        idle: bool,
    ) -> None:
        """Take the step as TrainStep does, with all its microbatches in memory."""
        held = [next(batches) for _ in sizes]
        shape = (
            tuple(sizes),
            step_samples,
            idle,
            tuple(layout(batch) for batch in held),
        )
        self.strayed = False

        def issue() -> None:
            self._has_gradients = False
            self._capture.run(
                lambda: TrainStep.__call__(
                    self, iter(held), sizes, step_samples, idle
                )
            )

        seen = self._seen[shape]
        if (
            self._graph is None
            and seen >= CAPTURE_AFTER_STEPS
            and not self._given_up
        ):
            self._begin(
                lambda: self._record(shape, held, sizes, step_samples, idle),
                issue,
            )
        if self._graph is not None and self._graph.shape == shape:
            for mine, tensor in zip(
                self._graph.inputs, tensors_of(held), strict=True
            ):
                mine.copy_(tensor, non_blocking=True)
            if self._graph.replays in PROVED_BEFORE or self._holds_other(
                self._graph
            ):
                self._prove(self._graph, issue)
        if self._graph is not None and self._graph.shape == shape:
            self._replay(self._graph)
            return
        if len(self._seen) >= _MOST_SHAPES:
            self._seen.clear()
        self._seen[shape] += 1
        last_before = self._graph is None and seen == CAPTURE_AFTER_STEPS - 1
        if self.asked or self._given_up or not last_before:
            issue()
        elif not self._waits_for_host(issue):
            self._give_up("the device is busy for most of a step")

    def _holds_other(self, graph: _Graph) -> bool:
        """Whether what Python holds has changed since the graph was verified.

        If this changes often and capture was not asked for, gives the graph up.
        """
        task = self.forward.task
        acts = overrides(task, "after_step")
        if graph.changes is None or (graph.replays % LOOK_EVERY and not acts):
            return False
        name = graph.changes.first(for_step=True)
        if name is None:
            return False
        is_seldom = graph.replays - graph.changed_at >= _SELDOM
        if is_seldom:
            graph.changed_at = graph.replays
        elif not self.asked:
            self._give_up(
                f"`{name}` changes between steps, and a replay does not see it"
            )
        return is_seldom

    def _replay(self, graph: _Graph) -> None:
        graph.replay()
        graph.replays += 1
        if not self._has_gradients:
            self._has_gradients = True
            for parameter, gradient in zip(
                self._parameters, graph.gradients, strict=True
            ):
                parameter.grad = gradient

    def _waits_for_host(self, issue: Callable[[], None]) -> bool:
        """Take a step; return whether issuing it takes over half of the step's time."""
        synchronize(self.group.device)
        began = time.perf_counter()
        issue()
        issued_s = time.perf_counter() - began
        synchronize(self.group.device)
        return issued_s > _HOST_SHARE * (time.perf_counter() - began)

    def _begin(
        self, record: Callable[[], _Graph], issue: Callable[[], None]
    ) -> None:
        """Capture the step and verify it; raise only if capture was asked for."""
        try:
            spare = None if self.asked else take_spare(self.group.device)
            self._graph = record()
            self._prove(self._graph, issue)
            del spare
        except Exception as error:
            if self.asked:
                raise
            lacks_memory = classify(error) in OUT_OF_MEMORY
            why = (
                "there is no memory for it"
                if lacks_memory
                else first_line([error, *chain(error)][-1])
            )
        else:
            return
        self._give_up(why)  # once the error has let go of its tensors
        gc.collect()
        torch.cuda.empty_cache()

    def _prove(self, graph: _Graph, issue: Callable[[], None]) -> None:
        """Give the graph up unless replays leave the same state as plain steps.

        After its first replay, also give up a graph that was not asked for
        unless its replays are faster than plain steps.
        """
        self.strayed = True
        eager = self._pass(issue)
        graph.changes = eager.changes
        captured = self._pass(graph.replay)
        found = difference(captured, eager)
        if (
            found is not None
            and not torch.are_deterministic_algorithms_enabled()
        ):
            found = difference(
                captured, eager, [self._pass(issue) for _ in range(_REPEATS)]
            )
        if eager.changed is not None and not self.asked:
            self._give_up(
                f"a step changes `{eager.changed}`, and a replay would not"
            )
        elif found is not None:
            self._give_up(
                f"after {graph.replays} replays `{found}` differs from its value after plain steps"
            )
            logger.warning("steps are not replayed any more: %s", self.capture)
        elif (
            graph.replays == 1
            and eager.step_s < LEAST_GAIN * captured.step_s
            and not self.asked
        ):
            self._give_up(
                f"a step takes {eager.step_s * 1e3:.3g} ms, and a replay {captured.step_s * 1e3:.3g} ms"
            )
        elif graph.replays:
            gain = f"{captured.step_s * 1e3:.3g} ms a step, and {eager.step_s * 1e3:.3g} ms without"
            self.capture = (
                f"captured: {gain}; proved after {graph.replays} replays"
            )

    def _pass(self, step: Callable[[], None]) -> Pass:
        self._has_gradients = False
        own = {
            name: getattr(self, name)
            for name in ("loss_sum", "weightless", "_bad_loss", "_found_inf")
        }
        own |= {
            f"scaler.{name}": getattr(self.scaler, name, None)
            for name in ("_scale", "_growth_tracker")
        }
        return take_pass(
            step,
            self.forward,
            self.optimizer,
            {k: v for k, v in own.items() if v is not None},
        )

    def _give_up(self, why: str) -> None:
        self._graph = None
        self._given_up = True
        self.capture = f"not captured: {why}"
        logger.info("%s", self.capture)

    def set_lrs(self, lrs: list[float]) -> None:
        """Set every group's learning rate, in place on the device."""
        self.wanted_lrs = lrs
        for param_group, wanted, lr in zip(
            self.optimizer.param_groups, lrs, self._lrs, strict=True
        ):
            lr.fill_(wanted)
            param_group["lr"] = lr  # loading a checkpoint may have replaced it
        self._lr_versions = [lr._version for lr in self._lrs]

    def check_lr(self) -> None:
        """Check as TrainStep does, but only if something has written to a rate."""
        same = all(
            group["lr"] is lr
            for group, lr in zip(
                self.optimizer.param_groups, self._lrs, strict=False
            )
        )
        if not same or self._lr_versions != [lr._version for lr in self._lrs]:
            super().check_lr()

    def resized(self) -> None:
        """Drop the graph, so that a step of the new size is captured."""
        self._graph = None
        self._seen.clear()

    def average_by_hand(self, why: str) -> None:
        """Raise ConfigError: the host would decide which gradients exist."""
        rule = "needs gradients that DDP averages in the backward pass, and here they are averaged after it"
        raise _impossible(
            f"{rule} ({why})",
            "use all of the model, and only through forward()'s argument `model`",
        )

    def _refrozen(self) -> None:
        super()._refrozen()
        self.resized()

    def follow(
        self, schedule: Schedule, step: int, scale: float = 1.0
    ) -> None:
        """Set learning rates and momenta as TrainStep does.

        Raises ConfigError if capture was asked for and the scheduler cycles
        the momentum, which a graph holds as a constant.
        """
        if self._cycled(schedule) and not self._given_up:
            rule = "holds the momentum as a constant, and the scheduler changes it"
            if self.asked:
                raise _impossible(
                    rule, "create the scheduler with `cycle_momentum=False`"
                )
            self._give_up("the scheduler changes the momentum")
        super().follow(schedule, step, scale)

    def _record(
        self,
        shape: Hashable,
        held: list[Batch],
        sizes: Sequence[int],
        step_samples: int,
        idle: bool,
    ) -> _Graph:
        inputs = [map_tensors(torch.clone, batch) for batch in held]
        for parameter in self._parameters:
            parameter.grad = None  # the graph makes its own
        flags = [
            (group, group["capturable"])
            for group in self.optimizer.param_groups
            if "capturable" in group
        ]
        try:
            # Only during the capture: otherwise checkpoints would contain the
            # flag, and other steps would warn about it.
            for param_group, _ in flags:
                param_group["capturable"] = True
            with throwaway(self.forward):
                replay = self._capture.record(
                    lambda: TrainStep.__call__(
                        self, iter(inputs), sizes, step_samples, idle
                    )
                )
                gradients = [parameter.grad for parameter in self._parameters]
        except RuntimeError as error:
            if classify(error) in OUT_OF_MEMORY:
                raise
            # Ending a failed capture raises a second error.
            cause = error.__context__ or error
            raise _impossible(
                f"needs a step in which the host never waits for the device, and this one could not be captured ({first_line(cause)})",
                "keep forward() and loss() free of `.item()`, copies to the CPU and shapes that depend on values",
            ) from error
        finally:
            for param_group, flag in flags:
                param_group["capturable"] = flag
        logger.info(
            "captured the step of %d samples as a CUDA graph", step_samples
        )
        return _Graph(shape, tensors_of(inputs), gradients, replay)


def layout(batch: Batch) -> Hashable:
    """Return what batches of one graph must share: nesting, shapes, formats, values."""
    if isinstance(batch, Tensor):
        return (batch.shape, batch.dtype, batch.stride(), batch.device)
    # A graph keeps the sizes of a packed sequence, which are on the host.
    if isinstance(batch, PackedSequence):
        return (
            *batch.batch_sizes.tolist(),
            layout(batch.data),
            layout(batch.sorted_indices),
        )
    parts = parts_of(batch)
    if parts is not None:
        return (type(batch), *((key, layout(value)) for key, value in parts))
    # forward() may read other values; they count as equal only if that is certain.
    return (
        (type(batch), batch)
        if isinstance(batch, (str, bytes, bool, int, float, type(None)))
        else object()
    )


def _impossible(rule: str, fix: str) -> ConfigError:
    return ConfigError(
        "cuda_graphs", True, rule, f"{fix}, or set `cuda_graphs: false`"
    )
