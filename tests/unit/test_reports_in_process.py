"""How reports pass from the thread of a trial's function to Tune
(tune/ray/_controller.py), as Ray's session has it.
"""

import contextlib
import queue
import threading
from types import SimpleNamespace

import pytest
from ray.util.queue import Empty

from tests.waits import HANG_S
from tune.forks.child import TrialStopped
from tune.ray import _controller as controller
from tune.ray._controller import report_in_process


@pytest.fixture
def session(monkeypatch):
    """What of Ray's session the reports touch."""
    session = SimpleNamespace(
        result_queue=queue.Queue(1),
        stop_event=threading.Event(),
        _inter_actor_queue=None,
    )
    monkeypatch.setattr(controller, "_session", lambda: session)
    report_in_process()
    return session


def test_rays_own_trainer_is_refused_and_no_sweep_hangs():
    """A report in Ray's controller would end that actor's event loop."""
    with pytest.raises(RuntimeError, match=r"from tune\.ray"):
        controller.reports_of_trial()


def test_no_report_is_lost_or_overtaken_by_the_trials_end(
    session, monkeypatch
):
    """Tune has just looked for a report when the last one comes, and with it the end."""
    reports = session._inter_actor_queue
    heard = []
    look = queue.Queue.get

    def function():
        reports.put("loss")
        session.result_queue.put("end")

    thread = threading.Thread(target=function)

    def late(self, block=True, timeout=None):
        try:
            return look(self, block, timeout)
        except queue.Empty:
            if thread.ident is None:
                thread.start()
                thread.join(0.2)
            raise

    monkeypatch.setattr(queue.Queue, "get", late)
    while "end" not in heard:
        with contextlib.suppress(Empty):
            heard.append(reports.get(block=True, timeout=0.2))
            continue
        with contextlib.suppress(queue.Empty):
            heard.append(session.result_queue.get(timeout=0.2))
    thread.join()
    assert heard == ["loss", "end"]


def test_a_report_that_nobody_takes_ends_with_the_trial(session):
    raised = []

    def function():
        try:
            session._inter_actor_queue.put(1)
        except TrialStopped as error:
            raised.append(error)

    thread = threading.Thread(target=function)
    thread.start()
    thread.join(0.02)
    assert thread.is_alive(), "it waits until Tune has the report"
    session.stop_event.set()
    thread.join(HANG_S)
    assert len(raised) == 1
