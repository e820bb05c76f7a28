"""The finalists of a sweep: which trials one run each cannot tell apart, and the repeats that they need. Pure.

A repeat runs alone, with another seed, in turn with the other finalists': its time owes nothing to trials beside it,
nor to the luck for which the first run was chosen, so only repeats count (report/finals.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tune.config import TO_TARGET, SweepConfig
from tune.trials.journal import trial_id
from tune.trials.record import TrialRecord

_NEAR = 1.3  # the ratio of two runs of one configuration stays below it (2.5 standard deviations)


def contenders(config: SweepConfig, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials to repeat, fastest first; none where the answer is clear, or of another kind than a time."""
    if config.objective.metric not in TO_TARGET or "seed" in config.space:
        return []
    times = [(one.time_to_target_s, one) for one in records if one.purpose != "repeat" and one.finished]
    known = [(time_s, record) for time_s, record in times if time_s and math.isfinite(time_s)]
    reached = sorted(known, key=lambda pair: pair[0])
    unique = list({trial_id(record.config): (time_s, record) for time_s, record in reversed(reached)}.values())[::-1]
    near = [record for time_s, record in unique if time_s <= _NEAR * unique[0][0]]
    return near[: config.num_finalists] if len(near) > 1 else []


def repeats_to_run(
    config: SweepConfig, train: dict[str, Any], records: Sequence[TrialRecord]
) -> list[tuple[TrialRecord, int]]:
    """Return the finalists and the seeds of their repeats that have no record yet, in turn."""
    known = {record.id for record in records}
    first, found = int(train.get("seed", 0)) + 1, contenders(config, records)
    pairs = [(record, first + number) for number in range(config.finalists.repeats) for record in found]
    return [(record, seed) for record, seed in pairs if trial_id(record.config, "repeat", seed) not in known]
