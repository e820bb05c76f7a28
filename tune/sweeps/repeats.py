"""Repeats of the finalists: one at a time, in turn, while no other lane works (Ray)."""

import time
from collections.abc import Callable
from typing import Any

from trainers.config import TrainConfig
from trainers.config.overrides import override
from tune.lanes.alone import await_quiet, run_alone
from tune.lanes.messages import Assignment, new_ticket
from tune.report.words import in_short, labels
from tune.search.finalists import repeats_to_run
from tune.sweeps.plan import SweepPlan
from tune.sweeps.spec import SweepSpec
from tune.trials.journal import Journal, trial_id
from tune.trials.record import TrialRecord, make_record


def run_repeats(
    spec: SweepSpec,
    plan: SweepPlan,
    mailbox: Any,
    settle: Callable[[], bool],
    check: Callable[[], None],
    say: Callable[[str], None],
) -> dict[str, TrialRecord]:
    """Run the repeats that have no record yet, until the order of the first is decided, cannot be, or their time is
    used up; returns the records of all, by id.

    `settle` and `check` are those of `await_quiet`.
    """
    journal = Journal(spec.storage)
    records = journal.records()
    ended = {record.id: record for record in records if record.purpose == "repeat"}
    wanted = repeats_to_run(spec.config, spec.train, records)
    if not wanted:
        return ended
    names = labels(spec.config, records)
    num_finalists = len({finalist.id for finalist, _ in wanted})
    say(f"the {num_finalists} finalists again, alone and in turn, until it is clear which is first")
    await_quiet(mailbox, settle, check)
    while wanted:
        finalist, seed = wanted[0]
        record = _repeat(spec, plan, mailbox, finalist, seed, check)
        journal.append(record)
        records.append(record)
        ended[record.id] = record
        reached = "not reached" if record.time_to_target_s is None else f"reached in {record.time_to_target_s:.3g} s"
        say(f"repeat {len(ended)}  {in_short(names, finalist)}  seed {seed}  {record.status}  {reached}")
        wanted = repeats_to_run(spec.config, spec.train, records)
    return ended


def _repeat(
    spec: SweepSpec, plan: SweepPlan, mailbox: Any, finalist: TrialRecord, seed: int, check: Callable[[], None]
) -> TrialRecord:
    """Run one repeat to its end."""
    trial = trial_id(finalist.config, "repeat", seed)
    tree = override(TrainConfig, spec.train, {**finalist.config, "seed": seed})
    objective, started = spec.config.objective, time.time()
    repeat = Assignment(new_ticket(trial), trial, tree, target=objective.target or {}, watches=objective.watched)
    curve, outcome = run_alone(mailbox, repeat, check)
    price = plan.lane_usd_per_hour
    return make_record(trial, finalist.config, objective, started, curve, outcome, price, "repeat", seed)
