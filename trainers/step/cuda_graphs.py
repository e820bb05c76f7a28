"""Capture whole steps as CUDA graphs, and replay them for steps of the same shapes.

A replay launches forward, backward, checks and optimizer in one call, so a small model
does not wait for the host.

- The first steps of a shape run normally, on the capture stream. They are warm-up and
  training at once, so neither weights nor optimizer nor random state are restored.
- The next one is captured, which computes nothing, and replayed.
- Batches of later steps with the same shapes are copied into the graph's own batches,
  and the graph is replayed.
- All other steps (such as an epoch's last, shorter one) run normally, with the same
  code.

Replays continue the sequence of random numbers. The task's Python code only runs in
steps that are captured or run normally: a schedule in forward(), a counter or an `if`
does not advance in replays. So a graph is verified by throw-away steps, when it is
captured and before its 2nd, 11th, 101st and 1,001st replay: a few replays and the same
steps run normally start from the same state, and must end in the same state. Any
difference ends capturing for good. It is verified again where an attribute of the task,
the model or their modules has changed since, as by a schedule in after_step().
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
from trainers.data.batch import Batch, map_tensors, parts_of, tensors_of
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
from trainers.task import Task

logger = logging.getLogger(__name__)

STEPS = 3
"""Number of steps in a pass; a step counter, or a draw outside torch, shows in the
second.
"""
_SPREADS = 3.0  # times what plain steps differ by from each other
CAPTURE_AFTER_STEPS = 3
"""Steps of a shape before it is captured (torch's own number for models without DDP).
"""
PROVED_BEFORE = (1, 10, 100, 1000)
"""Numbers of replays after which a graph is verified again, besides at its start."""
LOOK_EVERY = 20
"""Number of replays between looks at what Python holds, where no after_step() runs."""
_SELDOM = 100
"""Replays between changes of what Python holds, for which the graph is verified again.
"""
LEAST_GAIN = 1.03
"""Factor by which captured steps must be faster."""
_HOST_SHARE = 0.5
"""Share of a step: if the host issues it in less, the device is what takes the time."""
_REPEATS = 3  # of steps that do not repeat to the bit, to see how far apart they are
_MOST_SHAPES = 64  # that are counted: more of them never come back
# One of a device: cuBLAS keeps a workspace for each that it sees.
_capture_stream = functools.cache(torch.cuda.Stream)


@dataclass(frozen=True)
class Pass:
    """The state after a few trial steps, which were then undone."""

    state: dict[str, Tensor]
    """Tensors by name, copied to host memory."""
    changed: str | None
    """An attribute of the task, the model or the optimizer that the steps changed."""
    step_s: float
    changes: Changes
    """What Python has changed since: the steps' own changes are undone."""


def take_pass(
    step: Callable[[], None],
    forward: ForwardPass,
    optimizer: Optimizer,
    own: Mapping[str, Tensor],
) -> Pass:
    """Take a step a few times, record the resulting state, and put everything back.

    `own` names tensors that the step writes to besides those of model and optimizer.
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
            name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()
        }
        random_state = digest(get_rng_state(device)).encode()
        state["random state"] = torch.frombuffer(
            bytearray(random_state), dtype=torch.uint8
        )
        changes = snapshot.changes
        return Pass(state, changes.first(), step_s, changes)


def difference(captured: Pass, eager: Pass, repeats: Sequence[Pass] = ()) -> str | None:
    """Name the first tensor that two passes left different, by any bit, or return None.

    Both passes must have started from the same state. With `repeats` of the eager pass,
    a difference counts only if it clearly exceeds the spread among those repeats.
    """
    for name, theirs in eager.state.items():
        ours = captured.state[name]
        if torch.equal(_bytes(ours), _bytes(theirs)):
            continue
        spread = max(
            (_distance(repeat.state[name], theirs) for repeat in repeats), default=0.0
        )
        if not _distance(ours, theirs) <= _SPREADS * spread:
            return name
    return None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


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
            # Other threads (pinning, checkpoints, readings) go on meanwhile: only this
            # one's calls are refused. The outer block gives the stream back where
            # torch, as 2.11, does not after a failure.
            with (
                torch.cuda.stream(current),
                torch.cuda.graph(graph, pool, self._stream, "thread_local"),
            ):
                work()
        except BaseException:
            generator.graphsafe_set_state(
                random_state
            )  # the old one may believe that it is still captured
            # So may the allocator of torch 2.11, which then keeps all unused memory.
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
    """Number of replays that have trained."""
    changes: Changes | None = None
    """What Python held when the graph was last verified."""
    changed_at: int = -_SELDOM
    """The replay before which that had last changed."""


class GraphedStep(TrainStep):
    """A TrainStep that captures recurring steps as a CUDA graph and replays them.

    If capture is explicitly `asked` for, ConfigError says why it is impossible: without
    CUDA, say, or if the optimizer's step reads from the device. Otherwise steps are
    captured only if that is faster, memory allows it, and no attribute of the task
    changes in a step.
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
            rule = "needs an optimizer whose step never waits for the device, and a group of this"
            raise _impossible(
                f"{rule} {type(optimizer).__name__} is not fused",
                "build it with `fused=True`",
            )
        if capture is None and group.device.type != "cuda":
            raise _impossible(
                f"needs CUDA, and this worker trains on {group.device.type}",
                "train on a GPU",
            )
        if self.by_hand or (self._beside and group.world_size > 1):
            self.average_by_hand("the optimizer trains what DDP does not have")
        self._capture = capture or CudaCapture(group.device)
        # A graph keeps the numbers that it was captured with, so the learning rate has
        # to be a tensor. It is float32: that is how the fused steps read it.
        self._lrs = [
            torch.full((), base, dtype=torch.float32, device=group.device)
            for base in self._base_lrs
        ]
        self.asked = asked
        self._given_up = False
        self._graph: _Graph | None = None
        self._has_gradients = False
        """Whether the parameters' gradients are the graph's; after a step that was not
        replayed they are not.
        """
        self._seen: Counter[Hashable] = Counter()

    def __call__(
        self,
        batches: Iterator[Batch],
        sizes: Sequence[int],
        step_samples: int,
        idle: bool,
    ) -> None:
        """Take the step as TrainStep does; holds all its microbatches at once."""
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
                lambda: TrainStep.__call__(self, iter(held), sizes, step_samples, idle)
            )

        seen = self._seen[shape]
        if self._graph is None and seen >= CAPTURE_AFTER_STEPS and not self._given_up:
            self._begin(
                lambda: self._record(shape, held, sizes, step_samples, idle), issue
            )
        if self._graph is not None and self._graph.shape == shape:
            for mine, tensor in zip(self._graph.inputs, tensors_of(held), strict=True):
                mine.copy_(tensor, non_blocking=True)
            if self._graph.replays in PROVED_BEFORE or self._holds_other(self._graph):
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
        """Whether Python holds something else since the graph was verified.

        Gives the graph up if that changes again and again.
        """
        task = self.forward.task
        acts = type(task).after_step is not Task.after_step
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
        """Take a step; return whether issuing it takes about as long as the step."""
        synchronize(self.group.device)
        began = time.perf_counter()
        issue()
        issued_s = time.perf_counter() - began
        synchronize(self.group.device)
        return issued_s > _HOST_SHARE * (time.perf_counter() - began)

    def _begin(self, record: Callable[[], _Graph], issue: Callable[[], None]) -> None:
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

        After its first replay, also give it up unless it is faster.
        """
        self.strayed = True
        eager = self._pass(issue)
        graph.changes = eager.changes
        captured = self._pass(graph.replay)
        found = difference(captured, eager)
        if found is not None and not torch.are_deterministic_algorithms_enabled():
            found = difference(
                captured, eager, [self._pass(issue) for _ in range(_REPEATS)]
            )
        if eager.changed is not None and not self.asked:
            self._give_up(f"a step changes `{eager.changed}`, and a replay would not")
        elif found is not None:
            self._give_up(
                f"after {graph.replays} replays `{found}` differs from what the step itself makes of it"
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
            self.capture = f"captured: {gain}; proved after {graph.replays} replays"

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
            param_group["lr"] = (
                lr  # a checkpoint that was loaded since has brought a tensor of its own
            )
        self._lr_versions = [lr._version for lr in self._lrs]

    def check_lr(self) -> None:
        """Check as TrainStep does, but only if something has written to a rate."""
        same = all(
            group["lr"] is lr
            for group, lr in zip(self.optimizer.param_groups, self._lrs, strict=False)
        )
        if not same or self._lr_versions != [lr._version for lr in self._lrs]:
            super().check_lr()

    def resized(self) -> None:
        """Drop the graph, so that a step of the new size is captured."""
        self._graph = None
        self._seen.clear()

    def average_by_hand(self, why: str) -> None:
        """Raise ConfigError: which gradients exist would be decided by the host."""
        rule = "needs gradients that DDP averages in the backward pass, and here they are averaged after it"
        raise _impossible(
            f"{rule} ({why})",
            "use all of the model through the one that forward() is given",
        )

    def _refrozen(self) -> None:
        super()._refrozen()
        self.resized()

    def follow(self, schedule: Schedule, step: int, scale: float = 1.0) -> None:
        """Set learning rates and momenta as TrainStep does.

        Raises ConfigError if capture was asked for and the scheduler cycles the
        momentum, which a graph holds as a constant.
        """
        if schedule.cycled(self.optimizer) and not self._given_up:
            rule = (
                "keeps the momentum that it has captured, and the scheduler cycles it"
            )
            if self.asked:
                raise _impossible(rule, "make it with `cycle_momentum=False`")
            self._give_up("the scheduler cycles the momentum")
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
            # While captured only: it would be kept in checkpoints, and warned of in
            # other steps.
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
            cause = (
                error.__context__ or error
            )  # ending a capture that failed raises once more
            raise _impossible(
                f"needs a step that the host never waits in, and this one cannot be captured ({first_line(cause)})",
                "keep forward() and loss() free of `.item()`, copies to the CPU and shapes that depend on values",
            ) from error
        finally:
            for param_group, flag in flags:
                param_group["capturable"] = flag
        logger.info("captured the step of %d samples as a CUDA graph", step_samples)
        return _Graph(shape, tensors_of(inputs), gradients, replay)


def layout(batch: Batch) -> Hashable:
    """Return what batches of one graph must share: nesting, shapes, formats, values."""
    if isinstance(batch, Tensor):
        return (batch.shape, batch.dtype, batch.stride(), batch.device)
    if isinstance(batch, PackedSequence):  # a graph has its sizes from the host
        return (
            *batch.batch_sizes.tolist(),
            layout(batch.data),
            layout(batch.sorted_indices),
        )
    parts = parts_of(batch)
    if parts is not None:
        return (type(batch), *((key, layout(value)) for key, value in parts))
    # Anything else might be read in forward(): equal only where that is certain.
    return (
        (type(batch), batch)
        if isinstance(batch, (str, bytes, bool, int, float, type(None)))
        else object()
    )


def _impossible(rule: str, fix: str) -> ConfigError:
    return ConfigError("cuda_graphs", True, rule, f"{fix}, or set `cuda_graphs: false`")
