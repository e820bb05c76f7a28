"""Whole steps as CUDA graphs: captured once, then replayed for every step of the same shapes.

A replay launches forward, backward, checks and optimizer in one call, so a small model does not wait for the host.

    the first steps of a shape    run as they are, in the stream that captures: warm-up and training at once, so that
                                  neither weights nor optimizer nor random state have to be put back
    the next one                  is captured, which computes nothing, and replayed
    steps of the same shapes      are copied into the graph's own batches and replayed
    all others                    (an epoch's last, shorter step) run as they are, with the same code

Random numbers go on from where the generator is, in a replay too. The task's Python code runs only in steps that are
captured or run as they are.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from trainers.causes import classify
from trainers.data.batch import Batch, map_tensors, parts_of, tensors_of
from trainers.devices.group import Group
from trainers.errors import ConfigError, first_line
from trainers.model.schedule import Schedule
from trainers.step.ceiling import OUT_OF_MEMORY
from trainers.step.forward import ForwardPass
from trainers.step.train_step import TrainStep

logger = logging.getLogger(__name__)

CAPTURE_AFTER_STEPS = 3
"""Steps of a shape before it is captured (torch's own number for models without DDP)."""
_MOST_SHAPES = 64  # that are counted: more of them never come back
_capture_stream = functools.cache(torch.cuda.Stream)  # one of a device: cuBLAS keeps a workspace for each that it sees


class CudaCapture:
    """CUDA graphs of one device, on a stream beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _capture_stream(device)

    def run(self, work: Callable[[], None]) -> None:
        """Do the work on the capturing stream; the current one waits for it, the host does not."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the work without doing it; what is returned does it, each time. Waits for the device."""
        graph = torch.cuda.CUDAGraph()
        # Other threads (pinning, checkpoints, readings) go on meanwhile: only this one's calls are refused.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


@dataclass(frozen=True)
class _Graph:
    shape: Hashable
    inputs: list[Tensor]
    """The tensors of the step's batches, which a replay reads."""
    replay: Callable[[], None]


class GraphedStep(TrainStep):
    """A TrainStep whose repeated shape is captured and replayed.

    Raises ConfigError where that cannot be: no CUDA, an optimizer whose step reads the device.
    """

    def __init__(
        self,
        forward: ForwardPass,
        optimizer: Optimizer,
        group: Group,
        clip_grad_norm: float | None = None,
        capture: CudaCapture | None = None,
    ) -> None:
        super().__init__(forward, optimizer, group, clip_grad_norm)
        if not self._fused:
            rule = "needs an optimizer whose step never waits for the device, and a group of this"
            raise _impossible(f"{rule} {type(optimizer).__name__} is not fused", "build it with `fused=True`")
        if capture is None and group.device.type != "cuda":
            raise _impossible(f"needs CUDA, and this worker trains on {group.device.type}", "train on a GPU")
        if self.by_hand or (self._beside and group.world_size > 1):
            self.average_by_hand("the optimizer trains what DDP does not have")
        self._capture = capture or CudaCapture(group.device)
        # A graph keeps the numbers that it was captured with, so the learning rate has to be a tensor. It is float32:
        # that is how the fused steps read it.
        self._lrs = [torch.full((), base, dtype=torch.float32, device=group.device) for base in self._base_lrs]
        self._graph: _Graph | None = None
        self._seen: Counter[Hashable] = Counter()
        self._last: tuple[list[int], Hashable] = ([], None)  # sizes and shape of the last step that ran as it is
        self._warned = False

    def __call__(self, batches: Iterator[Batch], sizes: Sequence[int], step_samples: int, idle: bool) -> None:
        """Take the step as TrainStep does; holds all its microbatches at once."""
        held = [next(batches) for _ in sizes]
        shape = (tuple(sizes), step_samples, idle, tuple(layout(batch) for batch in held))
        if self._graph is None and self._seen[shape] >= CAPTURE_AFTER_STEPS:
            self._graph = self._record(shape, held, sizes, step_samples, idle)
        if self._graph is not None and self._graph.shape == shape:
            for mine, tensor in zip(self._graph.inputs, tensors_of(held), strict=True):
                mine.copy_(tensor, non_blocking=True)
            self._graph.replay()
            return
        self._count(shape, list(sizes))
        self._capture.run(lambda: TrainStep.__call__(self, iter(held), sizes, step_samples, idle))

    def set_lrs(self, lrs: list[float]) -> None:
        """Set every group's learning rate, in place on the device."""
        self._wanted_lrs = lrs
        for param_group, wanted, lr in zip(self.optimizer.param_groups, lrs, self._lrs, strict=True):
            lr.fill_(wanted)
            param_group["lr"] = lr  # a checkpoint that was loaded since has brought a tensor of its own

    def resized(self) -> None:
        """Let go of the graph: a step of the new size is captured in its place."""
        self._graph = None
        self._seen.clear()

    def average_by_hand(self, why: str) -> None:
        """ConfigError: which gradients there are is agreed by the host."""
        rule = "needs gradients that DDP averages in the backward pass, and here they are averaged after it"
        raise _impossible(f"{rule} ({why})", "use all of the model through the one that forward() is given")

    def _refrozen(self) -> None:
        super()._refrozen()
        self.resized()

    def follow(self, schedule: Schedule, step: int, scale: float = 1.0) -> None:
        """Set the learning rates that a scheduler says of `step`; ConfigError where it changes what is captured."""
        self.set_lrs([lr * scale for lr in schedule.lrs(step)])
        if schedule.cycled(self.optimizer):
            rule = "keeps the momentum that it has captured, and the scheduler cycles it"
            raise _impossible(rule, "make it with `cycle_momentum=False`")

    def _record(
        self, shape: Hashable, held: list[Batch], sizes: Sequence[int], step_samples: int, idle: bool
    ) -> _Graph:
        inputs = [map_tensors(torch.clone, batch) for batch in held]
        for parameter in self._parameters:
            parameter.grad = None  # the graph makes its own
        flags = [(group, group["capturable"]) for group in self.optimizer.param_groups if "capturable" in group]
        try:
            # While captured only: it would be kept in checkpoints, and warned of in other steps.
            for param_group, _ in flags:
                param_group["capturable"] = True
            replay = self._capture.record(lambda: TrainStep.__call__(self, iter(inputs), sizes, step_samples, idle))
        except RuntimeError as error:
            if classify(error) in OUT_OF_MEMORY:
                raise
            cause = error.__context__ or error  # ending a capture that failed raises once more
            rule = f"needs a step that the host never waits in, and this one cannot be captured ({first_line(cause)})"
            fix = "keep forward() and loss() free of `.item()`, copies to the CPU and shapes that depend on values"
            raise _impossible(rule, fix) from error
        finally:
            for param_group, flag in flags:
                param_group["capturable"] = flag
        logger.info("captured the step of %d samples as a CUDA graph", step_samples)
        return _Graph(shape, tensors_of(inputs), replay)

    def _count(self, shape: Hashable, sizes: list[int]) -> None:
        """Remember a step that runs as it is; say so once where not its size but its shape is the reason."""
        if sizes == self._last[0] and shape != self._last[1] and not self._warned:
            self._warned = True
            logger.warning("`cuda_graphs` replays equal steps only, and here shapes change: the others run as they are")
        self._last = (sizes, shape)
        if len(self._seen) >= _MOST_SHAPES:
            self._seen.clear()
        self._seen[shape] += 1


def layout(batch: Batch) -> Hashable:
    """Describe what batches of one graph have in common: nesting, shapes, formats, places, all that is no tensor."""
    if isinstance(batch, Tensor):
        return (batch.shape, batch.dtype, batch.stride(), batch.device)
    if isinstance(batch, PackedSequence):  # a graph has its sizes from the host
        return (*batch.batch_sizes.tolist(), layout(batch.data), layout(batch.sorted_indices))
    parts = parts_of(batch)
    if parts is not None:
        return (type(batch), *((key, layout(value)) for key, value in parts))
    # Anything else might be read in forward(): equal only where that is certain.
    return (type(batch), batch) if isinstance(batch, (str, bytes, bool, int, float, type(None))) else object()


def _impossible(rule: str, fix: str) -> ConfigError:
    return ConfigError("cuda_graphs", True, rule, f"{fix}, or set `cuda_graphs: false`")
