"""The course of a sweep with all of Ray replaced: what its driver does at the end, and what it watches meanwhile."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.report_records import config, done
from trainers.errors import PacelineError
from trainers.storage import Storage
from tune.sweeps import run

RESTARTS = [(12.0, "still running: thread spin")]


class Driver:
    """Notes, in their order, the acts of a sweep."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, fails: Exception | None = None) -> None:
        self.acts: list[str] = []
        self.failure: Exception | None = None
        self.records: dict[str, Any] = {}
        self.seen: dict[str, Any] = {}
        self.signal_name = self.tick = None
        self.terminal = self
        self.say, self.close = self.acts.append, lambda: None
        scaling = SimpleNamespace(num_workers=1)
        plan = SimpleNamespace(is_independent=True, num_lanes=1, num_at_once=1, num_trials=1, use_gpu=False)
        plan.train = SimpleNamespace(scaling=scaling)
        ask = SimpleNamespace(remote=lambda: RESTARTS)
        lanes = {name: lambda *args: None for name in ("grow", "await_first", "settle", "close", "end")}
        replaced: dict[str, Any] = {
            "_plan": lambda spec, checked: plan,
            "start_mailbox": lambda *given: SimpleNamespace(restarts=ask),
            "Lanes": lambda *args, **options: SimpleNamespace(**lanes, count=1, mailbox=args[0]),
            "Pace": lambda *args: SimpleNamespace(over=lambda: None),
            "Progress": lambda *args: self,
            "_tuner": lambda *args: SimpleNamespace(fit=lambda: self.fit(fails)),
            "run_repeats": lambda *args: {},
            "save": lambda spec: self.acts.append("save"),
            "ending_with_cluster": self.watching,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(run, name, value)
        monkeypatch.setattr(run.ray_search, "searcher", lambda *args: None)
        for name in ("get", "kill"):
            monkeypatch.setattr(run.ray, name, lambda value: value)
        self.spec: Any = SimpleNamespace(
            config=config(), storage=Storage(str(directory)), uri=str(directory), train={}, path=(), source="s"
        )
        self.spec.is_of_function = False

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @contextlib.contextmanager
    def watching(self, words: str, close: object) -> Any:
        """In place of the look at the cluster."""
        self.acts.append("watch")
        yield
        self.acts.append("watched")

    def heeding_signals(self) -> Any:
        return contextlib.nullcontext()

    def fit(self, fails: Exception | None) -> None:
        self.acts.append("fit")
        if fails is not None:
            raise fails
        [record] = done()[:1]
        self.records[record.id] = self.seen[record.id] = record

    def record_rest(self, is_over_budget: bool) -> None:
        self.acts.append("rest")

    def restore_records(self) -> None:
        self.acts.append("restore")


def test_a_sweep_s_end_misses_nothing_and_its_report_says_what_restarts_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, facts = Driver(tmp_path, monkeypatch), dict[str, str]()
    assert run.run_sweep(driver.spec, facts=facts) == done()[:1]
    words = "once, 12 s: still running: thread spin (1)"
    said = f"lanes started again: {words}"
    acts = [act for act in driver.acts if act != said]
    assert acts == ["watch", "fit", "rest", "restore", "save", "watched"]
    assert said in driver.acts
    assert facts == {"lane_restarts": words}


def test_a_sweep_that_is_cut_off_keeps_what_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tmp_path, monkeypatch, EOFError("Ran out of input"))
    with pytest.raises(PacelineError, match=r"^EOFError: Ran out of input; what has ended .*tune resume .* goes on$"):
        run.run_sweep(driver.spec)
    assert driver.acts == ["watch", "fit", "restore", "save"]
