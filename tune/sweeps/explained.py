"""Where the steps of a sweep's best trial spend their time, by a profile in a lane (Ray)."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from trainers.config.model import build
from trainers.config.train import TrainConfig
from trainers.explain.job import ExplainJob
from tune.lanes.alone import await_quiet, run_alone
from tune.lanes.messages import Assignment, new_ticket
from tune.report.answer import answer
from tune.report.explained import FILE, Explained, read_explained
from tune.search.space import trial_tree
from tune.sweeps.spec import SweepSpec
from tune.trials.record import TrialRecord

logger = logging.getLogger(__name__)

_SHARE = 0.05
"""Of the time that the sweep's trials have trained, what the steps of the profile take."""
_LEAST_S, _MOST_S = 1.0, 3.0
"""Less says nothing, more nothing more."""


def explain_best(
    spec: SweepSpec,
    records: list[TrialRecord],
    mailbox: Any,
    settle: Callable[[], bool],
    check: Callable[[], None],
) -> None:
    """Keep for the report where the steps of the best trial spend their time; nothing where that is not wanted, or
    all trials together have trained for less than 20 s, or the steps are no loop's of ours, or not of one size.
    `settle` and `check` are those of `await_quiet`.
    """
    seconds = min(_MOST_S, _SHARE * sum(record.spent.training_s for record in records if record.spent))
    if not spec.config.explain or spec.is_of_function or seconds < _LEAST_S:
        return
    best = answer(spec.config, records).best
    known = read_explained(spec.storage)
    if best is None or (known is not None and known.trial == best.id):
        return
    tree, source = trial_tree(spec.train, best.config), f"trial {best.id}"
    if build(TrainConfig, tree, source).changes_batch:
        return
    await_quiet(mailbox, settle, check)
    job = ExplainJob(tree, spec.path, source, spec.uri, quiet=True, seconds=seconds)
    ticket = new_ticket(f"explain-{best.id}")
    _, outcome = run_alone(mailbox, Assignment(ticket, best.id, tree, job=job), check)
    if outcome["status"] != "done":
        logger.warning("the steps of the best trial were not profiled: %s", outcome.get("message"))
        return
    found = Explained(best.id, job.read_result(outcome["answer"].encode()))
    spec.storage.write(FILE, json.dumps(asdict(found)).encode())
