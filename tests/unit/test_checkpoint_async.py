"""Checkpoints written while training goes on: equal to those written at once,
whole or absent, and never in silence.
"""

import threading

import pytest

from tests.unit.test_checkpoint import loaded_step, make
from tests.unit.test_loop import Context, Tiny, check_resume, config, train
from tests.waits import HANG_S
from trainers.checkpoint.store import Archive
from trainers.errors import StorageError
from trainers.loop.fit import fit


class Gate:
    """Holds the background's writes of `state.pt` until it is opened."""

    def __init__(self, monkeypatch):
        self.reached = threading.Event()
        self.open = threading.Event()
        write = Archive.write

        def gated(archive, name, file, state):
            if (
                file == "state.pt"
                and threading.current_thread() is not threading.main_thread()
            ):
                self.reached.set()
                assert self.open.wait(HANG_S)
            return write(archive, name, file, state)

        monkeypatch.setattr(Archive, "write", gated)


def test_a_run_resumed_from_one_is_bit_equal_to_the_unbroken(tmp_path):
    """The end of a run writes at once: a power cut leaves what was written in
    the background.
    """
    check_resume(
        tmp_path, Tiny, 7, checkpoint={"every_steps": 1, "async": True}
    )


def test_training_goes_on_while_one_is_written(tmp_path, monkeypatch):
    """The step in which a checkpoint is told lies after the step that it
    holds, and every one is told once.
    """
    gate = Gate(monkeypatch)
    steps = []

    class Watched(Tiny):
        def transform(self, batch, training):
            steps.append(len(steps))
            if len(steps) == 25:
                gate.open.set()
            return super().transform(batch, training)

    context = Context(tmp_path)
    changes = {
        "checkpoint": {"every_steps": 5, "async": True},
        "evaluate": {"every_steps": 99},
        "max_steps": 40,
    }
    changes |= {"microbatch_size": 5}
    # One checkpoint, at step 5: a second would wait for it.
    once = "trainers.loop._attempt.Attempt.is_due"
    monkeypatch.setattr(
        once, lambda _, step, every: step == every.every_steps == 5
    )
    fit(Watched(), config(**changes), context)
    told = [
        (metrics["step"], checkpoint)
        for metrics, checkpoint in context.reports
        if checkpoint
    ]
    assert [checkpoint.rpartition("-")[2] for _, checkpoint in told] == [
        "000000000005",
        "000000000040",
    ]
    assert told[0][0] >= 20


def test_a_failed_write_ends_the_run_at_the_next_agreed_step(
    tmp_path, monkeypatch
):
    write = Archive.write

    def failing(archive, name, file, state):
        if name.endswith("5"):
            raise StorageError("injected: no room")
        return write(archive, name, file, state)

    monkeypatch.setattr(Archive, "write", failing)
    with pytest.raises(
        StorageError,
        match="step-000000000005 could not be written: injected: no room",
    ):
        train(
            tmp_path,
            checkpoint={"every_steps": 1, "async": True},
            evaluate={"every_steps": 99},
        )
    assert loaded_step(make(tmp_path)) == 4
