"""The head's host loses power in the middle of a sweep, and `ray up` and
`resume` go on from the journal.

Minutes, so `make faults` runs it.
"""

import json

import pytest

from tests.lab.hosts import lab_of
from tests.lab.on_premises import HEAD, OnPremises
from tests.waits import until

pytestmark = [pytest.mark.campaign, pytest.mark.lab]

SPACE = "{optimizer.lr: [0.001, 0.002, 0.003, 0.004, 0.005, 0.006]}"
SWEEP = (
    "python",
    "-m",
    "tune",
    "examples/digits/sweep.yaml",
    "--name",
    "held",
    "--space",
    SPACE,
)
OPTIONS = (
    "--objective",
    "{metric: val_loss}",
    "--train.epochs",
    "32",
    "--lanes",
    "2",
)
RESUME = ("python", "-m", "tune", "resume", "/srv/nfs/paceline/held")


def test_no_trial_that_had_ended_runs_again():
    with lab_of(3) as lab:

        def records():
            return {
                file: file.read_bytes()
                for file in lab.shared.glob("paceline/held/trials/*.json")
            }

        cluster = OnPremises(lab)
        cluster.up()
        until(
            lambda: cluster.alive() == ["h0", "h1", "h2"],
            "all hosts",
            every_s=1,
        )
        cluster.submit(*SWEEP, *OPTIONS, wait=False)
        until(lambda: len(records()) >= 2, "two trials that have ended")
        lab.power_cut(HEAD)
        ended = records()
        lab.start(HEAD)
        cluster.up()
        until(
            lambda: cluster.alive() == ["h0", "h1", "h2"],
            "all hosts",
            every_s=1,
        )
        log = cluster.submit(*RESUME)
        assert {
            json.loads(record)["status"] for record in records().values()
        } == {"done"}, log[-6000:]
        assert len(records()) == 6
        assert records().items() >= ended.items(), (
            "with the times at which they had begun and ended"
        )
