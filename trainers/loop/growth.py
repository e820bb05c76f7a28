"""A batch that grows by measurement: `global_batch_size: auto`.

It begins with a size of which larger ones are not much faster: how large a step pays changes as a run goes on, and what
is lost by steps that are too small in the beginning is less than by slow ones.

Now and then PARTS steps of twice the size are taken from the state in memory and thrown away: the run itself is one of
the `batch_schedule` that was found, to the bit. It trains on the same samples next, with steps of its own size. Both
confirm the larger size or refute it (as Merrill et al. 2025, arXiv 2505.23971, branch). Where neither time nor batch
changes the learning rate, a larger batch lowers the noise, as a falling rate does otherwise (Smith et al. 2018,
arXiv 1711.00489). As long as noise is not what keeps the loss up, its loss is the higher one: it has taken fewer steps.

The gradient noise scale is not asked: it tells what a batch wastes whose rate is tuned to it (McCandlish et al. 2018,
arXiv 1812.06162), and was wrong by a factor of one to ten with Adam. Branches show it at the rates that the run has.
"""

import contextlib
import copy
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, median, stdev

import torch

from trainers.loop.attempt import Attempt
from trainers.measure.clock import StepClock
from trainers.model.optimizer import warmup_steps
from trainers.step.throwaway import throwaway

logger = logging.getLogger(__name__)

PARTS = 8
"""Parts of a comparison, each a step of the larger batch."""
APART = 2
"""The first of them, in which branches come apart, are not compared."""
SPEED = 0.95
"""The larger batch must train at least so many times as fast: what differs by less is the same, as clocks go."""
WAIT = 128
"""Steps of a size until a larger one is tried, ..."""
LATER = 0.25
"""... which must be this share of the run's samples so far: what is thrown away is a tenth of a run at most."""
LEFT = 64
"""Steps that must be left of a run for a comparison."""

FIRST = 8
"""The smallest size that a run begins with, where none is given."""
TIMED = 4
"""Steps by which a size is timed."""
ENOUGH = 1.3
"""A run begins with the size from which on twice as many samples in a step train less than so much faster: where steps
take a fixed time and one that grows with their samples, the former is less than six sevenths of the latter."""
STEPS = 256
"""A run of epochs does not begin with a size that leaves it fewer steps."""

Steps = Callable[[int], Iterator[tuple[int, list[int]]]]
"""Trains the rest of the epoch, at most to a step of the run; yields the samples of each step, and this rank's."""


@dataclass(frozen=True)
class Branch:
    """What each part of a branch took, and the mean loss of its samples before they were trained on."""

    times_s: list[float]
    losses: list[float]


@dataclass(frozen=True)
class Verdict:
    """Whether to take the larger batch, and why."""

    grows: bool
    words: str


def judge(size: int, smaller: Branch, larger: Branch) -> Verdict:
    """Compare what trained the same samples with steps of `size` and of twice that."""
    gain = median(smaller.times_s[APART:]) / median(larger.times_s[APART:])
    lower = [ours - theirs for ours, theirs in zip(smaller.losses[APART:], larger.losses[APART:], strict=True)]
    error = stdev(lower) / math.sqrt(len(lower)) if all(map(math.isfinite, lower)) else math.inf
    told = f"steps of {2 * size} samples train {gain:.3g} times as fast as those of {size}, and after as many samples"
    told += f" their loss is {fmean(lower):.3g} +-{error:.2g} lower"
    return Verdict(gain >= SPEED and fmean(lower) > error, told)


class Stretch:
    """Steps that follow one another, in parts of at least `part` samples."""

    def __init__(self, attempt: Attempt, part: int, count: int) -> None:
        self._attempt, self._part, self._start = attempt, part, attempt.samples
        self.end = self._start + count * part
        """The samples at which it ends."""
        self._times_s: list[float] = []
        self._losses: list[torch.Tensor] = []
        self._sum = attempt.parts.step.loss_sum.clone()
        self._lost, self._trained, self._began_s = torch.zeros_like(self._sum), 0, attempt.clock.train_time_s

    def stepped(self, samples: int) -> None:
        """Note a step that the clock has, before its loss is logged."""
        attempt, clock = self._attempt, self._attempt.clock
        before, self._sum = self._sum, attempt.parts.step.loss_sum.clone()
        is_first = attempt.logged_step == attempt.step - 1  # since the last window was logged
        self._lost += (self._sum if is_first else self._sum - before) * samples
        self._trained += samples
        if attempt.samples - self._start < (len(self._losses) + 1) * self._part:
            return
        self._losses.append(self._lost / self._trained)
        self._lost, self._trained = torch.zeros_like(self._lost), 0
        clock.end_span()
        self._times_s.append(clock.train_time_s - self._began_s)
        self._began_s = clock.train_time_s

    def branch(self) -> Branch:
        """Return what it took. Every rank must call it."""
        losses: list[float] = self._attempt.parts.group.sum(torch.stack(self._losses)).tolist()
        return Branch(self._times_s, losses)


class Growth:
    """Compares batch sizes amid a run. Every rank must call `compare` and `stepped` in the same step."""

    def __init__(self, attempt: Attempt, steps: Steps) -> None:
        self.attempt, self._steps = attempt, steps
        self._larger: Branch | None = None
        """What steps of twice the size took that were thrown away."""
        self._own: Stretch | None = None
        """The run's own steps over the same samples."""
        self._wait()

    def _wait(self) -> None:
        """Set when a larger size is tried first."""
        attempt, config, parts = self.attempt, self.attempt.config, self.attempt.parts
        batches = parts.sampler.batches
        # Growth amid a warm-up that is a share of all samples would change the steps of which it consists.
        course = batches if config.counts_samples else None
        warm = batches.samples(warmup_steps(config.lr_schedule, parts.total_steps, course))
        attempt.next_look = max(WAIT * self.size, warm)

    @property
    def size(self) -> int:
        """The batch size that the run has now."""
        return self.attempt.parts.sampler.batches.sizes[-1][1]

    @property
    def _most(self) -> int:
        """The largest size that there may be."""
        return min(self.attempt.config.auto_batch.most, self.attempt.parts.sampler.length)

    @property
    def _left(self) -> int:
        """Samples that are left of the run."""
        attempt = self.attempt
        return attempt.parts.sampler.batches.samples(attempt.parts.total_steps) - attempt.samples

    @property
    def end(self) -> int:
        """The step before which `compare` is due next, or the last one."""
        attempt = self.attempt
        at = attempt.next_look if self._own is None else self._own.end
        return min(attempt.end, attempt.parts.sampler.batches.step_at(at)) if at > attempt.samples else attempt.end

    @property
    def due(self) -> bool:
        """Whether to `compare` now; not so late that nothing can be gained by it any more."""
        size, attempt = self.size, self.attempt
        if self._own is not None:
            return attempt.samples >= self._own.end
        return 2 * size <= self._most and attempt.samples >= attempt.next_look and self._left >= LEFT * size

    def begin(self) -> None:
        """Choose the first size of a run that names none. Sizes are not timed where each would be compiled."""
        attempt, parts, auto = self.attempt, self.attempt.parts, self.attempt.config.auto_batch
        if attempt.step or attempt.compiles or auto.start is not None:
            return
        batches, most = parts.sampler.batches, self._most
        if attempt.config.epochs is not None:
            most = min(most, self._left // STEPS)
        with self._timed("timing batch sizes") as began, self._thrown_away():
            size = min(FIRST, auto.most)
            step_s = self._step_s(size)
            while 2 * size <= most and attempt.step + 4 * TIMED <= parts.total_steps:
                twice_s = self._step_s(2 * size)
                if 2 * step_s < ENOUGH * twice_s:  # unless one of the two was a hiccup
                    step_s, twice_s = min(step_s, self._step_s(size)), min(twice_s, self._step_s(2 * size))
                if 2 * step_s < ENOUGH * twice_s:
                    break
                size, step_s = 2 * size, twice_s
        attempt.take_sizes(batches.grown(size, 0))
        self._wait()
        if attempt.context.rank == 0:
            logger.info("the batch begins at %d (%.1f s)", size, time.perf_counter() - began)

    def compare(self) -> bool:
        """Begin a comparison with twice the size, or end it; return whether the run goes on with that."""
        attempt, size, samples = self.attempt, self.size, self.attempt.samples
        if self._own is None or self._larger is None:
            with self._timed("trying a larger batch"), self._thrown_away():
                self._larger = self._train(2 * size, 2 * size, PARTS)
            self._own = Stretch(attempt, 2 * size, PARTS)
            return False
        verdict = attempt.parts.group.first(judge(size, self._own.branch(), self._larger))
        self._own = self._larger = None
        if verdict.grows:
            attempt.take_sizes(attempt.parts.sampler.batches.grown(2 * size, samples))
        attempt.next_look = samples + max(WAIT * self.size, int(LATER * samples))
        if attempt.context.rank == 0:
            words = "the batch grows to" if verdict.grows else "the batch stays at"
            logger.info("%s %d from sample %d on: %s", words, self.size, samples, verdict.words)
        return verdict.grows

    def stepped(self, samples: int) -> None:
        """Note a step of the run."""
        if self._own is not None:
            self._own.stepped(samples)

    def _step_s(self, size: int) -> float:
        """Return what a step of a size takes, the same on every rank."""
        return self.attempt.parts.group.first(min(self._train(size, size, TIMED).times_s[1:]))

    def _train(self, size: int, part: int, count: int) -> Branch:
        """Train `count` parts of at least `part` samples with steps of a size."""
        attempt, sampler = self.attempt, self.attempt.parts.sampler
        sampler.batches = sampler.batches.grown(size, attempt.samples)
        stretch = Stretch(attempt, part, count)
        end = sampler.batches.step_at(stretch.end)
        while attempt.step < end:
            for samples, _ in self._steps(end):
                attempt.clock.step(samples)
                stretch.stepped(samples)
                if not attempt.clock.running:
                    attempt.clock.start_span()
        return stretch.branch()

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[float]:
        """Count what is done within as training time; yields when it began."""
        attempt, began = self.attempt, time.perf_counter()
        with attempt.watchdog.phase(phase, steps=not attempt.compiles):
            yield began
        attempt.clock.train_time_s += time.perf_counter() - began

    @contextlib.contextmanager
    def _thrown_away(self) -> Iterator[None]:
        """Put everything back at the end, to the bit: whatever steps of training change."""
        attempt, parts, step = self.attempt, self.attempt.parts, self.attempt.parts.step
        tensors = [*step.sums, *(() if parts.ema is None else parts.ema.tensors)]
        copies = [tensor.clone() for tensor in tensors]
        scaler = copy.deepcopy(step.scaler.state_dict())
        schedule = None if parts.schedule is None else copy.deepcopy(parts.schedule.state_dict())
        before = attempt.step, attempt.clock, parts.sampler.batches, step.noise
        attempt.clock, step.noise = StepClock(parts.device), None
        try:
            with throwaway(step.forward, parts.optimizer, parts.train_feed.dataset):
                yield
        finally:
            attempt.step, attempt.clock, parts.sampler.batches, step.noise = before
            for tensor, kept in zip(tensors, copies, strict=True):
                tensor.copy_(kept)
            step.scaler.load_state_dict(scaler)
            if parts.ema is not None:
                parts.ema.follow(step.scaler)
            if parts.schedule is not None and schedule is not None:
                parts.schedule.load_state_dict(schedule)
            step.resized()
