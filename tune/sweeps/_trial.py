"""A trial as Ray Tune sees it: a trainable that waits for its lane's reports (Ray)."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.tune import Trainable
from ray.tune.result import AUTO_RESULT_KEYS, DONE, SHOULD_CHECKPOINT

from trainers.config.model import Tree
from trainers.errors import StorageError
from trainers.on_ray.vital_signs import show_life
from trainers.storage import Storage
from tune.config import Objective
from tune.forks.assignment import Assignment
from tune.lanes.queue import Event, new_ticket
from tune.search.ray_search import reward, so_far
from tune.search.space import trial_tree, unwrap
from tune.trials.journal import Journal
from tune.trials.record import (
    Purpose,
    Row,
    TrialRecord,
    make_record,
    trial_id,
)

_TAKEN = {*AUTO_RESULT_KEYS, DONE, SHOULD_CHECKPOINT, "status"}
"""Names that a result must not have by chance: `done`, for example, would end
its trial.
"""


def assignment_of(
    trial: Tree,
    train: Tree,
    objective: Objective,
    purpose: Purpose = "trial",
    seed: int | None = None,
) -> Assignment:
    """Return the assignment of a trial for a lane; `seed` is the seed of a repeat."""
    name = trial_id(trial, purpose, seed)
    values = trial if seed is None else {**trial, "seed": seed}
    target = objective.goal if objective.ends_at_target else None
    return Assignment(
        new_ticket(name),
        name,
        trial_tree(train, values),
        target=target,
        watches=objective.watched,
    )


def _untaken(row: Mapping[str, float]) -> Tree:
    """Return the figures whose names have no special meaning for Tune."""
    return {key: value for key, value in row.items() if key not in _TAKEN}


class LaneTrial(Trainable):
    """Submits a trial to the mailbox; each `step` returns one evaluation.

    A trial's record is written to the journal before Tune learns that the
    trial ended. A trial that has a record already (in a resumed sweep) ends
    immediately with the recorded result. If the actor dies, Tune starts
    another one for the trial.
    """

    def setup(
        self,
        config: Tree,
        *,
        mailbox: Any = None,
        sweep: Storage | None = None,
        train: Tree | None = None,
        objective: Tree | None = None,
        usd_per_hour: float | None = None,
    ) -> None:
        """Set up the actor; called once by Tune, with the sweep's keyword arguments."""
        show_life()
        self._mailbox = mailbox
        self._train = train or {}
        self._usd_per_hour = usd_per_hour
        assert sweep is not None  # Tune's signature wants a default
        self._journal = Journal(sweep)
        self._objective = Objective.model_validate(objective)
        self._name = sweep.name
        self._begin(config)

    def __repr__(self) -> str:
        return f"{self._name}, trials"

    def reset_config(self, new_config: Tree) -> bool:
        """Take the next trial on this actor; called by Tune."""
        self.cleanup()
        self._begin(new_config)
        return True

    def _begin(self, config: Tree) -> None:
        self._space_config = unwrap(config)
        self._trial = trial_id(self._space_config)
        self._ticket = ""
        self._events = 0
        self._curve: list[Row] = []
        self._started = time.time()
        self._record = self._journal.find(self._trial)
        if self._record is None:
            assignment = assignment_of(
                self._space_config, self._train, self._objective
            )
            # A dead actor's submission continues: this actor receives all of
            # its events again.
            self._ticket = ray.get(self._mailbox.submit.remote(assignment))

    def step(self) -> Tree:
        """Wait for the trial's next evaluation or its end, and return it."""
        if self._record is not None:
            return self._final(self._record)
        event: Event = ray.get(
            self._mailbox.next_event.remote(self._ticket, self._events)
        )
        self._events += 1
        if event.outcome is None:
            self._curve.append(event.row)
            return {
                **_untaken(event.row),
                "objective": so_far(
                    self._objective, self._curve, self._usd_per_hour
                ),
                "trial": self._trial,
            }
        self._record = make_record(
            self._space_config,
            self._objective,
            self._started,
            self._curve,
            event.outcome,
            self._usd_per_hour,
        )
        # The driver finds the record missing, writes it, and reports failures.
        with contextlib.suppress(StorageError):
            self._journal.append(self._record)
        return self._final(self._record)

    def _final(self, record: TrialRecord) -> Tree:
        said = {
            "objective": reward(self._objective, record),
            "trial": record.id,
            "status": record.status,
            "done": True,
        }
        return {**_untaken(record.metrics), **said}

    def cleanup(self) -> None:
        """Cancel a trial that the search has stopped; the driver records it."""
        if self._record is None and self._ticket:
            ray.get(self._mailbox.cancel.remote(self._ticket))

    def save_checkpoint(self, checkpoint_dir: str) -> Tree:
        """Save nothing; without this method Tune would not reuse the actor."""
        return {}

    def load_checkpoint(self, checkpoint: Tree | None) -> None:
        """Load nothing."""
