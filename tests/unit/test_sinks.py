"""TensorBoard events: whole files by TensorBoard's own format, in parts like
the log, each step once after a resume.
"""

import struct

import pytest
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from tests.unit.test_loop import Context, Power, Tiny, config, curve, train
from trainers.loop.fit import fit
from trainers.measure.run_log import RunLog
from trainers.storage import Storage


def events(run):
    """All events in the order in which TensorBoard reads them; every checksum holds."""
    found = []
    for path in sorted((run / "tensorboard").iterdir()):
        assert "tfevents" in path.name
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            assert struct.unpack("<I", data[8:12]) == (
                masked_crc32c(data[:8]),
            )
            body = data[12 : 12 + length]
            assert struct.unpack("<I", data[12 + length : 16 + length]) == (
                masked_crc32c(body),
            )
            found.append(Event.FromString(body))
            data = data[16 + length :]
    return found


def series(run, name):
    return [
        (event.step, value.simple_value)
        for event in events(run)
        for value in event.summary.value
        if value.tag == name
    ]


def test_numbers_are_scalars_and_nothing_else_is(tmp_path, monkeypatch):
    monkeypatch.setattr("trainers.measure.run_log.time.time", lambda: 1234.5)
    log = RunLog(Storage(tmp_path), tensorboard=True)
    log.add(
        {
            "step": 3,
            "epoch": 0.5,
            "train_time_s": 1.0,
            "train_loss": 0.25,
            "lr": 1,
            "ranks": [{"rank": 0}],
        }
    )
    log.add({"step": 3, "epoch": 0.5, "train_time_s": 1.0, "val_loss": 0.5})
    log.flush(3)
    first, *rest = events(tmp_path)
    assert first.file_version == "brain.Event:2"
    assert [(event.wall_time, event.step) for event in rest] == [
        (1234.5, 3)
    ] * 2
    assert [
        {value.tag: value.simple_value for value in event.summary.value}
        for event in rest
    ] == [{"train_loss": 0.25, "lr": 1.0}, {"val_loss": 0.5}]


def test_a_run_and_its_curve(tmp_path):
    train(tmp_path, epochs=2, tracking=["tensorboard"])
    for index, name in ((1, "lr"), (2, "train_loss")):
        wanted = [
            (row[0], pytest.approx(row[index], rel=1e-6))
            for row in curve(tmp_path)
        ]
        assert series(tmp_path, name) == wanted
    assert [step for step, _ in series(tmp_path, "val_loss")] == [5, 10]
    assert all(value > 0 for _, value in series(tmp_path, "samples_per_s"))
    assert series(tmp_path, "allocated_bytes")


@pytest.mark.parametrize("cut_at_step", [4, 5, 8])
def test_after_a_power_cut_each_step_is_there_once(cut_at_step, tmp_path):
    changes = {
        "tracking": ["tensorboard"],
        "checkpoint": {"every_steps": 4},
        "epochs": 2,
    }
    if (
        cut_at_step == 5
    ):  # between two checkpoints, after events that were flushed with none
        with pytest.raises(Power):
            fit(Tiny(), config(**changes), Context(tmp_path, cut_at_step=4))
        log = RunLog(Storage(tmp_path), tensorboard=True)
        log.add({"step": 6, "train_loss": -1.0})
        log.flush(6)
    else:
        with pytest.raises(Power):
            fit(
                Tiny(),
                config(**changes),
                Context(tmp_path, cut_at_step=cut_at_step),
            )
    train(tmp_path, **changes)
    assert [step for step, _ in series(tmp_path, "train_loss")] == list(
        range(1, 11)
    )
    assert [step for step, _ in series(tmp_path, "val_loss")] == [5, 10]
