"""How far off are the step times that are predicted for machines which are not at hand, and do their intervals hold?

Run as: python -m benchmarks.what_if [--worlds 200] [--seed 0] [--keep]      made-up machines: depends on no machine
The made-up machines (`World`) differ from the model in what they are made of: layers whose gradients go out in buckets
while the backward pass runs, workers that are not equally fast, compute that bends where launches turn into arithmetic.
Their rates, links, sizes and noise are drawn from the seed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.measure import save
from tune.what_if.shapes import MEASURED
from tune.what_if.step_time import Array, Link, Measured, Roofline, StepTimes, Where, learn

_BUCKET_BYTES = 25 * 2**20
_DOUBT = 0.3
"""Of a link that the user has named: what it carries is not what it is called."""


@dataclass(frozen=True)
class World:
    """A model, two kinds of device and a link, made up."""

    each_s: dict[str, float]
    """Of a sample, by device."""
    launches_s: dict[str, float]
    bend: float
    """How softly the one takes over from the other: they add up at 1, the larger counts alone at infinity."""
    gradient_bytes: float
    bytes_per_s: float
    latency_s: float
    slowed: float
    """How much all-reduce slows the compute that it hides behind."""
    joined_s: float
    """Of a step of several workers, besides."""
    uneven: float
    """Standard deviation of how fast workers are."""
    jitter: float
    """The same of one step."""
    noise: float
    """The same of a run."""
    rooflines: dict[str, Roofline]

    @classmethod
    def draw(cls, rng: np.random.Generator) -> World:
        """Draw one; the efficiency of two kinds of device is alike within some 15 %."""
        rooflines, each, launches = {}, {}, {}
        work_s, kernels = 10 ** rng.uniform(-5, -2.5), float(rng.integers(40, 800))
        efficiency, launch_s = math.exp(rng.normal(math.log(0.45), 0.35)), 10 ** rng.uniform(-5.3, -4.7)
        host_s = 10 ** rng.uniform(-4, -3)
        for device, speed in (("here", 1.0), ("there", rng.uniform(1.5, 6))):
            rooflines[device] = Roofline(work_s / speed, 5 * work_s / speed, kernels)
            each[device] = work_s / speed / (efficiency * math.exp(0.15 * rng.standard_normal()))
            launches[device] = (host_s + kernels * launch_s) * math.exp(0.15 * rng.standard_normal()) + 5 * each[device]
        return cls(
            each,
            launches,
            rng.uniform(1, 1.6),
            gradient_bytes=10 ** rng.uniform(6, 9),
            bytes_per_s=10 ** rng.uniform(7.3, 10.5),
            latency_s=10 ** rng.uniform(-5, -3.7),
            slowed=rng.uniform(0, 0.6),
            joined_s=10 ** rng.uniform(-4, -3),
            uneven=rng.uniform(0, 0.03),
            jitter=rng.uniform(0.005, 0.05),
            noise=rng.uniform(0.005, 0.06),
            rooflines=rooflines,
        )

    def step_s(self, where: Where, rng: np.random.Generator, steps: int = 30) -> float:
        """Return the mean step time that a run would show."""
        share = where.share / where.passes
        parts = self.launches_s[where.device], self.each_s[where.device] * share
        alone = sum(part**self.bend for part in parts) ** (1 / self.bend)
        speeds = np.exp(self.uneven * rng.standard_normal(where.workers))
        slowest = (speeds * np.exp(self.jitter * rng.standard_normal((steps, where.workers)))).max(axis=1).mean()
        compute = alone * where.passes * slowest
        if where.workers > 1:
            compute = self._with_reduce(compute, alone * slowest, where.workers)
        return float(compute * math.exp(self.noise * rng.standard_normal()))

    def _with_reduce(self, compute: float, last: float, workers: int) -> float:
        """Let the last microbatch's gradients go out in buckets, one after the other, each when it is ready."""
        buckets = max(1, round(self.gradient_bytes / _BUCKET_BYTES))
        each = 2 * (workers - 1) * (self.gradient_bytes / buckets / workers / self.bytes_per_s + self.latency_s)
        backward, end = last * 2 / 3, 0.0
        for number in range(1, buckets + 1):
            end = max(end, backward * number / buckets) + each
        hidden = buckets * each - (end - backward)
        return compute + self.joined_s - backward + end + self.slowed * hidden


def cases(world: World, rng: np.random.Generator) -> Iterator[tuple[str, StepTimes, Where, float]]:
    """Yield the kind of a prediction, what was learned, the place, and the step time there."""
    sizes = [int(size) for size in 2 ** rng.choice(np.arange(4, 10), rng.integers(2, 5), replace=False)]
    most = int(rng.integers(1, 3))
    named = Link(world.bytes_per_s * math.exp(_DOUBT * rng.standard_normal()), world.latency_s, _DOUBT)
    # Where it was measured nobody has to name it.
    link = {"link": MEASURED if most > 1 and rng.random() < 0.5 else named}

    def place(device: str, workers: int, size: int) -> Where:
        return Where(device, workers, -(-size // workers), link="link")

    measured = [
        Measured(at, world.step_s(at, rng), world.jitter / math.sqrt(30))
        for size in sizes
        for at in (place("here", workers, size) for workers in range(1, most + 1))
    ]
    known = learn(measured, world.gradient_bytes, link, world.rooflines, seed=int(rng.integers(2**31)))
    for workers in (3, 4, 6, 8):
        at = place("here", workers, int(rng.choice(sizes)))
        yield f"{workers} workers, {most} measured", known, at, world.step_s(at, rng)
    for workers in (1, 4):
        at = place("there", workers, int(rng.choice(sizes)))
        yield f"another device, {workers} workers", known, at, world.step_s(at, rng)


def replay(worlds: int, seed: int) -> dict[str, dict[str, float]]:
    """Predict in made-up worlds; return errors and coverage of all, and of each kind."""
    rows: list[tuple[str, Array, float]] = []
    for number in range(worlds):
        rng = np.random.default_rng([seed, number])
        for kind, known, at, step_s in cases(World.draw(rng), rng):
            rows.append((kind, np.quantile(known.predict(at), [0.025, 0.5, 0.975]), step_s))
    kinds = sorted({kind for kind, *_ in rows})
    return {kind: summarize([row for row in rows if row[0] == kind]) for kind in kinds} | {"all": summarize(rows)}


def summarize(rows: list[tuple[str, Array, float]]) -> dict[str, float]:
    """Return how far off predictions (low, median, high) of figures are."""
    low, middle, high = np.array([figures for _, figures, _ in rows]).T
    there = np.array([figure for *_, figure in rows])
    return {
        "predictions": len(rows),
        "median_error": float(np.median(np.abs(middle / there - 1))),
        "coverage": float(np.mean((low <= there) & (there <= high))),
        "median_width": float(np.median(high / low)),
    }


def main(argv: list[str] | None = None) -> None:
    """Made-up machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    given = parser.parse_args(argv)
    found: dict[str, Any] = replay(given.worlds, given.seed)
    for kind, row in found.items():
        print(
            f"  {kind:32} {row['predictions']:5.0f} predictions: median error {row['median_error']:6.1%}, "
            f"95 % intervals cover {row['coverage']:6.1%}, their high is {row['median_width']:.2f} x their low"
        )
    print(f"kept in {save('what-if', found | {'seed': given.seed}, given.keep)}")


if __name__ == "__main__":
    main()
