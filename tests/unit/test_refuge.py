"""A run that keeps nothing but its state when its node is taken away, as a trial in a lane does."""

from pathlib import Path
from typing import Any

import pytest

from tests.specs import make
from trainers.context import RunContext
from trainers.errors import PreemptedError
from trainers.storage import Storage


class Lane(RunContext):
    """Without storage; `taken`: its node is about to be taken away."""

    def __init__(self, refuge: Storage | None, taken: bool = False) -> None:
        super().__init__(None, "test")
        self.refuge, self._taken = refuge, taken
        self.rows = []

    def report(self, metrics: dict[str, Any], checkpoint: str | None, elapsed_s: float) -> None:
        if checkpoint is None:
            self.rows.append({name: value for name, value in metrics.items() if name != "train_time_s"})

    def preempted(self, elapsed_s: float) -> bool:
        return self._taken


def test_it_goes_on_elsewhere_as_if_nothing_had_been(tmp_path: Path) -> None:
    spec, refuge = make(tmp_path), Storage(str(tmp_path / "refuge"))
    unbroken = Lane(refuge)
    whole = spec.execute(unbroken)
    assert not refuge.exists(), "without a notice nothing is written"

    first = Lane(refuge, taken=True)
    with pytest.raises(PreemptedError, match=r"step 10 is kept in .*refuge"):
        spec.execute(first)
    kept = refuge.names("checkpoints")
    second = Lane(refuge)
    second.source = refuge
    rest = spec.execute(second)
    assert [row["step"] for row in first.rows + second.rows] == [10, 20, 30], "no step is trained twice"
    assert first.rows + second.rows == unbroken.rows, "to the bit"
    assert (rest.status, rest.steps, rest.metrics) == (whole.status, whole.steps, whole.metrics)
    assert refuge.names("checkpoints") == kept == ["step-000000000010"], "nothing else is kept"


def test_without_a_refuge_the_notice_is_told_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(PreemptedError, match="step 10 is kept in None"):
        make(tmp_path).execute(Lane(None, taken=True))
