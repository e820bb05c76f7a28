"""A batch that grows by measurement: `global_batch_size: auto`.

It begins with the size from which on larger steps gain little speed: how much the gradients' noise allows, nobody knows
before the first step, and what is lost by steps that are somewhat too small or too large is less than by slow ones.

Now and then some steps are taken from the state in memory and thrown away: the run itself is one of the
`batch_schedule` that was found, to the bit. They measure the gradient noise scale N, and what a step of each larger
size takes. Where one may gain more speed than it wastes (of sizes A and B, in a gradient of critical batch size C, the
latter needs (B + C) / (A + C) times as many samples: McCandlish et al. 2018, arXiv 1812.06162, equation 2.11, with N
for C; but see CRITICAL), the samples that come next are trained on twice, with steps of either size. The larger one is
taken if its losses confirm it (as Merrill et al. 2025, arXiv 2505.23971, branch): what it lags behind with as many
samples is no more than it makes up for by its speed.
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

from trainers.devices.device import synchronize
from trainers.loop.attempt import Attempt
from trainers.measure.clock import StepClock
from trainers.measure.step_times import student_t95
from trainers.model.optimizer import warmup_steps
from trainers.step.noise_scale import estimate
from trainers.step.throwaway import throwaway

logger = logging.getLogger(__name__)

LOOK = 16
"""Steps by which the noise scale is measured."""
PARTS = 8
"""Parts of a branch, each a step of the larger batch. The first half warms up; the second is timed and compared."""
WAIT = 64
"""Steps of a size until larger ones are looked at; after one that was refused four times as many as before."""
LEFT = 512
"""Steps that must be left of a run for a look, which takes LOOK steps, and TIMED ones of each size not timed before."""
REACH = 4
"""How many times as large as the size at hand one may be that is looked at."""
CRITICAL = 4
"""How many times the noise scale a batch is taken to be that needs twice the samples of a small one. In single runs
with Adam it was about 6 times (digits), once (a small GPT) and more than 10 times (a small BERT): branches decide."""
MARGIN = 1.05
"""A smaller advantage is of no interest."""

FIRST = 8
"""The smallest size that a run begins with, where none is given."""
TIMED = 8
"""Steps by which a size is timed."""
ENOUGH = 1.25
"""A run begins with the size from which on twice as many samples in a step train less than so much faster: where steps
take a fixed time and one that grows with their samples, the former is less than two thirds of the latter."""
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


def samples_needed(size: int, noise_scale: float) -> float:
    """Return how many samples steps of a size should need, as a multiple of what all sizes have in common."""
    return 1.0 if math.isinf(noise_scale) else size + CRITICAL * max(0.0, noise_scale)


def judge(size: int, to: int, smaller: Branch, larger: Branch, noise_scale: float | None) -> Verdict:
    """Compare two branches over the same samples, with steps of `size` and of `to` samples.

    Without a `noise_scale` (in samples) the branches alone decide.
    """
    half = len(smaller.times_s) // 2
    gain = median(smaller.times_s[half:]) / median(larger.times_s[half:])
    told = f"steps of {to} samples train {gain:.3g} times as fast as those of {size}"
    waste = 1.0
    if noise_scale is not None:
        waste = samples_needed(to, noise_scale) / samples_needed(size, noise_scale)
        told += f", at a gradient noise scale of {noise_scale:.3g} samples they should need {waste:.3g} times as many"
    if gain <= MARGIN * waste:
        return Verdict(False, told)
    lags = [theirs - ours for ours, theirs in zip(smaller.losses[half:], larger.losses[half:], strict=True)]
    if not all(map(math.isfinite, lags)):
        return Verdict(False, f"{told}, and lead to a loss that is not finite")
    lag, error = fmean(lags), student_t95(len(lags) - 1) * stdev(lags) / math.sqrt(len(lags))
    # From the middle of the first half to that of the second is half of a branch; to there from its start, 3/4.
    fall = max(0.0, fmean(smaller.losses[:half]) - fmean(smaller.losses[half:])) * 1.5
    makes_up = fall * (gain - 1)
    told += f"; their loss is {lag:+.3g} +-{error:.2g} apart, and they make up for {makes_up:.3g}"
    return Verdict(lag - error <= makes_up, told)


class Growth:
    """Compares batch sizes amid a run. Every rank must call `compare` in the same step."""

    def __init__(self, attempt: Attempt, steps: Steps) -> None:
        self.attempt, self._steps = attempt, steps
        self._times_s: dict[int, float] = {}
        """What a step of each size takes that was timed."""
        self._wait()

    def _wait(self) -> None:
        """Set when larger sizes are looked at first."""
        attempt, config, parts = self.attempt, self.attempt.config, self.attempt.parts
        batches, wait = parts.sampler.batches, WAIT * self.size
        # Growth amid a warm-up that is a share of all samples would change the steps of which it consists.
        course = batches if config.counts_samples else None
        warm = batches.samples(warmup_steps(config.lr_schedule, parts.total_steps, course))
        attempt.growth = (max(wait, warm), wait)

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
        """The step before which larger sizes are looked at next, or the last one."""
        attempt = self.attempt
        at, _ = attempt.growth
        return min(attempt.end, attempt.parts.sampler.batches.step_at(at)) if at > attempt.samples else attempt.end

    @property
    def due(self) -> bool:
        """Whether to look at larger sizes now; not so late that nothing can be gained by them any more."""
        size, attempt = self.size, self.attempt
        return 2 * size <= self._most and attempt.samples >= attempt.growth[0] and self._left >= LEFT * size

    def begin(self) -> None:
        """Choose the first size of a run that names none. Sizes are not timed where each would be compiled."""
        attempt, parts, auto = self.attempt, self.attempt.parts, self.attempt.config.auto_batch
        if attempt.step or attempt.compiles or auto.start is not None:
            return
        began, batches, most = time.perf_counter(), parts.sampler.batches, self._most
        if attempt.config.epochs is not None:
            most = min(most, self._left // STEPS)
        with attempt.watchdog.phase("timing batch sizes", steps=True), self._thrown_away():
            size = min(FIRST, auto.most)
            while (
                2 * size <= most
                and attempt.step + 2 * TIMED <= parts.total_steps
                and 2 * self._step_s(size) >= ENOUGH * self._step_s(2 * size)
            ):
                size *= 2
        attempt.take_sizes(batches.grown(size, 0))
        self._wait()
        took_s = time.perf_counter() - began
        attempt.clock.train_time_s += took_s
        if attempt.context.rank == 0:
            logger.info("the batch begins at %d (%.1f s)", size, took_s)

    def compare(self) -> bool:
        """Look for a larger size that trains faster; return whether the run goes on with one."""
        attempt, parts = self.attempt, self.attempt.parts
        began, size, samples, left = time.perf_counter(), self.size, attempt.samples, self._left
        with attempt.watchdog.phase("comparing batch sizes", steps=not attempt.compiles):
            with self._thrown_away():
                noise_scale = self._noise_scale(size)
                to = self._promising(size, left, noise_scale)
            if to == size:
                told = "" if noise_scale is None else f"at a gradient noise scale of {noise_scale:.3g} samples "
                verdict = Verdict(False, f"{told}no larger one promises to be faster")
            else:
                verdict = judge(size, to, self._branch(size, to), self._branch(to, to), noise_scale)
        verdict = parts.group.first(verdict)
        if verdict.grows:
            attempt.take_sizes(parts.sampler.batches.grown(to, samples))
        wait = WAIT * to if verdict.grows else 4 * attempt.growth[1]
        attempt.growth = (samples + wait, wait)
        took_s = time.perf_counter() - began
        attempt.clock.train_time_s += took_s
        if attempt.context.rank == 0:
            words = "the batch grows to" if verdict.grows else "the batch stays at"
            logger.info("%s %d from sample %d on (%.1f s): %s", words, self.size, samples, took_s, verdict.words)
        return verdict.grows

    def _noise_scale(self, size: int) -> float | None:
        """Measure the gradient noise scale, in samples; None where that cannot be."""
        noise, step = self.attempt.parts.noise, self.attempt.parts.step
        if noise is None:
            return None
        noise.windows.clear()
        step.noise = noise
        self._train(size, size, LOOK)
        step.noise = None
        step.resized()
        noise.take()
        found = estimate(noise.windows)
        return None if found is None else max(0.0, found.noise_scale)

    def _promising(self, size: int, left: int, noise_scale: float | None) -> int:
        """Return the size that should train the samples that are left fastest; `size`, the one at hand, where another
        one would gain too little.
        """
        step_s, sizes = self._step_s, [size]
        if noise_scale is None or self.attempt.compiles:
            return 2 * size  # only branches can tell
        while 2 * sizes[-1] <= min(self._most, REACH * size) and 2 * step_s(sizes[-1]) > MARGIN * step_s(2 * sizes[-1]):
            sizes.append(2 * sizes[-1])
        needs = {one: step_s(one) / one * samples_needed(one, noise_scale) for one in sizes}
        best = min(needs, key=needs.__getitem__)
        gain, branches_s = needs[size] / needs[best], PARTS * (step_s(best) + best // size * step_s(size))
        saves_s = (1 - 1 / gain) * left / size * step_s(size)
        return best if gain > MARGIN and saves_s > 2 * branches_s else size

    def _step_s(self, size: int) -> float:
        """Return what a step of a size takes, the same on every rank."""
        if size not in self._times_s:
            times_s = self._train(size, size, TIMED).times_s
            self._times_s[size] = self.attempt.parts.group.first(min(times_s[1:]))
        return self._times_s[size]

    def _branch(self, size: int, part: int) -> Branch:
        """Train the same samples as any other branch of these parts, with steps of a size, from where the run is."""
        with self._thrown_away():
            return self._train(size, part, PARTS)

    def _train(self, size: int, part: int, count: int) -> Branch:
        """Train `count` parts of at least `part` samples with steps of a size."""
        attempt, parts = self.attempt, self.attempt.parts
        start, step = attempt.samples, parts.step
        times_s: list[float] = []
        losses: list[torch.Tensor] = []
        parts.sampler.batches = parts.sampler.batches.grown(size, start)
        end = parts.sampler.batches.step_at(start + count * part)
        step.loss_sum.zero_()  # has what was not logged yet
        lost, trained, began = torch.zeros_like(step.loss_sum), 0, time.perf_counter()
        while attempt.step < end:
            for samples, _ in self._steps(end):
                lost += step.loss_sum * samples
                step.loss_sum.zero_()
                trained += samples
                if attempt.samples - start < (len(losses) + 1) * part:
                    continue
                losses.append(lost / trained)
                lost, trained = torch.zeros_like(lost), 0
                synchronize(parts.device)
                times_s.append(time.perf_counter() - began)
                began = time.perf_counter()
        return Branch(times_s, parts.group.sum(torch.stack(losses)).tolist())

    @contextlib.contextmanager
    def _thrown_away(self) -> Iterator[None]:
        """Put everything back at the end, to the bit: whatever steps of training change."""
        attempt, parts, step = self.attempt, self.attempt.parts, self.attempt.parts.step
        tensors = [*step.sums, *(() if parts.ema is None else parts.ema.tensors)]
        copies = [tensor.clone() for tensor in tensors]
        scaler = copy.deepcopy(step.scaler.state_dict())
        schedule = None if parts.schedule is None else copy.deepcopy(parts.schedule.state_dict())
        before = attempt.step, attempt.clock, parts.sampler.batches
        attempt.clock = StepClock(parts.device)
        try:
            with throwaway(step.forward, parts.optimizer, parts.train_feed.dataset):
                yield
        finally:
            attempt.step, attempt.clock, parts.sampler.batches = before
            step.noise = None
            for tensor, kept in zip(tensors, copies, strict=True):
                tensor.copy_(kept)
            step.scaler.load_state_dict(scaler)
            if parts.ema is not None:
                parts.ema.follow(step.scaler)
            if parts.schedule is not None and schedule is not None:
                parts.schedule.load_state_dict(schedule)
            step.resized()
