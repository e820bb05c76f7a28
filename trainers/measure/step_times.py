"""Step times as running sums: the mean and its confidence interval, at the same cost after any step."""

import itertools
import math
import statistics
from array import array
from collections.abc import Sequence

STRETCHES = 30
"""Most stretches of steps that an interval is made from, and the fewest steps that say how long a step takes."""


class StepTimes:
    """The time and the samples of each step, in order."""

    def __init__(self) -> None:
        self._time_s = array("d", [0.0])
        self._samples, self._spans = array("q", [0]), array("q", [0])

    def __len__(self) -> int:
        return len(self._time_s) - 1

    def add(self, elapsed_s: float, samples: Sequence[int]) -> None:
        """Add a step for each of `samples`; they shared `elapsed_s` evenly."""
        each = elapsed_s / len(samples)
        for index, count in enumerate(samples):
            self._time_s.append(self._time_s[-1] + each)
            self._samples.append(self._samples[-1] + count)
            self._spans.append(self._spans[-1] + (index == 0))

    def cut(self, length: int) -> None:
        """Forget the steps after the first `length`."""
        for sums in (self._time_s, self._samples, self._spans):
            del sums[length + 1 :]

    def total_s(self, skip: int) -> float:
        """Time of the steps after the first `skip`."""
        return self._time_s[-1] - self._time_s[skip]

    def samples(self, skip: int) -> int:
        """Samples of the steps after the first `skip`."""
        return self._samples[-1] - self._samples[skip]

    def half_width_s(self, skip: int) -> float:
        """Half width of the 95 % confidence interval of the mean time of the steps after the first `skip`.

        From the means of up to 30 consecutive stretches: neighbouring steps are slow or fast together, and single
        ones would promise too much. Steps that shared a time are no more than one.
        """
        steps = len(self) - skip
        count = min(STRETCHES, steps, self._spans[-1] - self._spans[skip])
        if count < 2:
            return 0.0
        edges = [skip + steps * at // count for at in range(count + 1)]
        pairs = itertools.pairwise(edges)
        means = [(self._time_s[last] - self._time_s[first]) / (last - first) for first, last in pairs]
        return student_t95(count - 1) * statistics.stdev(means) / math.sqrt(count)


def student_t95(freedom: float) -> float:
    """The 97.5 % quantile of Student's t."""
    return student_t(freedom, 0.975)


def student_t(freedom: float, level: float) -> float:
    """A quantile of Student's t (Abramowitz and Stegun 26.7.5); the 97.5 % one is within 1 % from 2 degrees of freedom
    on, the 99.9 % one from 4 on.
    """
    z = statistics.NormalDist().inv_cdf(level)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
