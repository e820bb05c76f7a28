"""A run that keeps nothing but its state, as a trial in a lane does: when its
node is taken away, or to be longer.
"""

import pytest

from tests.specs import make
from trainers.context import RunContext
from trainers.errors import PreemptedError
from trainers.storage import Storage


class Lane(RunContext):
    """Without storage; `taken`: its node is about to be taken away."""

    def __init__(self, refuge, taken=False):
        super().__init__(None, "test")
        self.refuge = refuge
        self._taken = taken
        self.rows = []

    def report(self, metrics, checkpoint, elapsed_s):
        if checkpoint is None:
            self.rows.append(
                {
                    name: value
                    for name, value in metrics.items()
                    if name != "train_time_s"
                }
            )

    def preempted(self, elapsed_s):
        return self._taken


def test_it_goes_on_elsewhere_as_if_nothing_had_been(tmp_path):
    spec = make(tmp_path, checkpoint={})
    refuge = Storage(tmp_path / "refuge")
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
    assert rest.train_time_s > rest.earlier_time_s > 0, (
        "no step is trained twice"
    )
    assert [row["step"] for row in first.rows] == [10]
    assert second.rows == unbroken.rows, (
        "to the bit, and what was told before is told again"
    )
    assert (rest.status, rest.steps, rest.metrics) == (
        whole.status,
        whole.steps,
        whole.metrics,
    )
    assert refuge.names("checkpoints") == kept == ["step-000000000010"], (
        "nothing else is kept"
    )


def test_without_a_refuge_the_notice_is_told_all_the_same(tmp_path):
    with pytest.raises(PreemptedError, match="step 10 is kept in None"):
        make(tmp_path).execute(Lane(None, taken=True))


def longer(tmp_path, **changes):
    """A run of 25 steps, which is then one of 50; and one that was that from
    its beginning.
    """
    refuge = Storage(tmp_path / "refuge")
    changes = {"log_every_steps": 10, **changes}
    make(tmp_path, max_steps=25, **changes).execute(Lane(refuge))
    spec = make(tmp_path, max_steps=50, **changes)
    longer = Lane(refuge)
    unbroken = Lane(None)
    result = spec.execute(longer)
    spec.execute(unbroken)
    return longer, result, unbroken


def test_a_longer_run_goes_on_from_the_end_as_if_it_had_been_that_long(
    tmp_path,
):
    """Neither the window of the log nor the evaluation that the shorter one
    ended with is one of its own.
    """
    lane, result, unbroken = longer(tmp_path)
    assert result.train_time_s > result.earlier_time_s > 0
    assert [row["step"] for row in lane.rows] == [10, 20, 30, 40, 50]
    assert lane.rows == unbroken.rows
    assert result.warnings == []


def test_another_run_may_begin_with_the_state_that_one_ended_in(tmp_path):
    """Which stays as it is."""
    first, second = (Storage(tmp_path / name) for name in ("first", "second"))
    make(tmp_path, max_steps=20).execute(Lane(first))
    clone = Lane(second)
    unbroken = Lane(None)
    clone.source = first
    make(tmp_path).execute(clone)
    make(tmp_path).execute(unbroken)
    assert clone.rows == unbroken.rows
    assert first.names("checkpoints")[-1] == "step-000000000020"
    assert second.names("checkpoints")[-1] == "step-000000000030"


def test_a_run_that_ends_before_the_state_of_another_begins_anew(tmp_path):
    first = Storage(tmp_path / "first")
    make(tmp_path, max_steps=20).execute(Lane(first))
    shorter = make(tmp_path, max_steps=10)
    clone = Lane(Storage(tmp_path / "second"))
    clone.source = first
    unbroken = Lane(None)
    result = shorter.execute(clone)
    expected = shorter.execute(unbroken)
    assert clone.rows == unbroken.rows
    assert (result.steps, result.metrics) == (10, expected.metrics)
    [warning] = result.warnings
    assert "the checkpoint is of step 20" in warning


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"lr_schedule": {"name": "cosine"}},
            "the learning rate depends on the number of steps, which was 25 and is 50 now",
        ),
        (
            {"lr_schedule": {"warmup": 0.1}},
            "the learning rate depends on the number of steps, which was 25 and is 50 now",
        ),
        (
            {"early_stopping": {"metric": "val_loss", "patience": 9}},
            "used the evaluation at the end of 25 steps",
        ),
    ],
)
def test_where_a_longer_run_would_have_been_another_it_begins_anew_and_says_so(
    tmp_path, changes, words
):
    lane, result, unbroken = longer(tmp_path, **changes)
    assert result.earlier_time_s == 0
    assert lane.rows == unbroken.rows
    [warning] = result.warnings
    assert warning.startswith("trained from the start: ")
    assert words in warning
