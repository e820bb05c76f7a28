"""A case is data: a scenario, one or two faults, and their moment; drawn by
seed and number, with what must follow.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.faults.scenarios import SCENARIOS, TRIALS, Scenario

_DEADLY = {"SIGKILL": -9, "SIGTERM": -15, "SIGINT": -2, "SIGHUP": -1}
# What people type at a terminal, or a scheduler sends, is drawn as often as
# what a crash does.
SIGNALS = (
    "SIGKILL",
    "SIGKILL",
    "SIGTERM",
    "SIGINT",
    "SIGINT twice",
    "SIGHUP",
    "SIGSTOP",
    "SIGSTOP 3",
)
PHASES = (
    "import",
    "constructor",
    "setup",
    "dataset",
    "model",
    "optimizer",
    "probe",
    "forward",
    "backward",
)
PHASES += ("transform", "collate", "loss", "metrics", "evaluate", "state_dict")
_STEPWISE = ("forward", "backward", "loss")
_LATER = {
    "transform": 40,
    "collate": 40,
    "metrics": 8,
    "evaluate": 8,
    "state_dict": 12,
}
"""Phases that come again and again: the latest occurrence that is drawn."""
_SOONER = {"transform": 12, "collate": 12, "metrics": 6, "evaluate": 6}
"""The first that is: before, samples are also read in passes that are thrown
away, in some of which nobody minds an error that does not come again.
"""
# How often each scenario is drawn: the slow ones less.
_SHARES = {
    "local": 5,
    "loader": 2,
    "s3": 2,
    "spawn": 6,
    "torchrun": 4,
    "ray": 4,
    "sweep": 4,
}
_KINDS = {
    "signal": 10,
    "storage": 5,
    "raise": 5,
    "memory": 2,
    "nan": 1,
    "hang": 1,
    "clock": 1,
    "start": 1,
    "two": 3,
}
_ON_DISK = ("fill", "delete")


@dataclass(frozen=True)
class Fault:
    """What happens, to whom, and when."""

    name: str
    act: str
    """signal, raise, oom, nan, hang, clock, errno, slow, stall, fill, delete,
    start, fresh or server.
    """
    target: str = "worker"
    """The role that a signal is sent to."""
    detail: str = ""
    """The signal, the errno, the seconds of a jump."""
    event: str = "step"
    number: int = 1
    """It happens at this occurrence of `event`, as the process of `role` (and
    `rank`) counts it.
    """
    role: str = "worker"
    rank: int | None = None
    victim: int | None = None
    """The rank that a signal to a worker is sent to."""
    trial: int | None = None
    """The trial of a sweep in which it happens; None: whichever is there first."""


@dataclass(frozen=True)
class Expected:
    """What must follow, as the documents say it."""

    codes: frozenset[int] = frozenset({0})
    """Exit codes of the first command."""
    words: str = ""
    """A pattern: the true cause, which a command that failed has to name."""
    close: bool = False
    """Weights are those of another microbatch: equal up to rounding."""
    redo: bool = True
    """At most a checkpoint's interval is done again; else there may be nothing
    to go on from.
    """
    statuses: frozenset[str] = frozenset()
    """What a trial of a sweep may have ended as, besides done: as many trials
    as there are faults.
    """
    traceback: bool = False
    """The user's own exception shows its traceback."""

    def __or__(self, other: Expected) -> Expected:
        return Expected(
            self.codes | other.codes,
            "|".join(words for words in (self.words, other.words) if words),
            self.close or other.close,
            self.redo and other.redo,
            self.statuses | other.statuses,
            self.traceback or other.traceback,
        )


@dataclass(frozen=True)
class Case:
    """A scenario and its faults."""

    name: str
    scenario: Scenario
    faults: tuple[Fault, ...]

    @property
    def title(self) -> str:
        """The row of the table that it counts for."""
        is_one = len(self.faults) == 1 or "twice" in self.faults[0].name
        return self.faults[0].name if is_one else "two faults at once"

    @property
    def expected(self) -> Expected:
        """What must follow."""
        found = expect(self.scenario, self.faults[0])
        for fault in self.faults[1:]:
            found |= expect(self.scenario, fault)
        return found


def draw(seed: int, number: int, only: str = "", attempt: int = 0) -> Case:
    """The case of a seed and a number; `attempt` counts those that did not land.

    `only` names a scenario or a kind.
    """
    chance = random.Random(f"{seed} {number} {attempt} False")
    names = [only] if only in _SHARES else list(_SHARES)
    [name] = chance.choices(names, [_SHARES[name] for name in names])
    scenario = SCENARIOS[name]
    [kind] = (
        [only]
        if only in _KINDS
        else chance.choices(list(_KINDS), list(_KINDS.values()))
    )
    faults = (
        _two(chance, scenario)
        if kind == "two" and not scenario.on_s3
        else _one(chance, scenario, kind)
    )
    return Case(f"{seed}-{number}", scenario, faults)


def _one(
    chance: random.Random, scenario: Scenario, kind: str
) -> tuple[Fault, ...]:
    rank = chance.randrange(scenario.world)
    step = chance.randrange(2, scenario.steps - 20)
    at = Fault("", "", number=step, rank=rank, trial=_trial(chance, scenario))
    if kind == "signal":
        role = chance.choice(scenario.roles)
        signal = chance.choice(SIGNALS)
        return _signals(chance, scenario, at, role, signal)
    if scenario.on_s3 and kind not in ("raise", "clock"):
        detail = chance.choice(("503", "cut", "dawdle"))
        number = chance.randint(5, 400)
        return (
            Fault(
                f"S3: {_SERVER[detail]}",
                "server",
                "server",
                detail,
                event="request",
                number=number,
            ),
        )
    if kind == "storage":
        return (_storage(chance, scenario, at),)
    if kind == "raise":
        return (_in_phase(chance, scenario, at, "raise", "exception", PHASES),)
    if kind == "memory":
        return (
            _in_phase(
                chance,
                scenario,
                at,
                "oom",
                "out of memory",
                ("probe", "forward", "backward"),
            ),
        )
    if kind == "nan":
        return (replace(at, name="loss NaN", act="nan", event="loss"),)
    if kind == "hang":
        return (
            _in_phase(
                chance,
                scenario,
                at,
                "hang",
                "hang",
                ("setup", "dataset", "model", "forward", "evaluate"),
            ),
        )
    if kind == "clock":
        days = chance.choice((-400.0, -1.0, 1.0, 400.0))
        word = "back" if days < 0 else "forward"
        return (
            replace(
                at,
                name=f"clock jumps {word}",
                act="clock",
                detail=str(days * 86400),
            ),
        )
    act = chance.choice(("start", "fresh"))
    words = "a second start beside it" + (
        " with --fresh" if act == "fresh" else ""
    )
    return (replace(at, name=words, act=act),)


def _trial(chance: random.Random, scenario: Scenario) -> int | None:
    return chance.randrange(TRIALS) if scenario.kind == "sweep" else None


def _signals(
    chance: random.Random,
    scenario: Scenario,
    at: Fault,
    role: str,
    signal: str,
) -> tuple[Fault, ...]:
    victim = chance.randrange(scenario.world) if role == "worker" else None
    name = f"{signal.replace(' 3', ', then SIGCONT')}: {role}"
    counts = "loader" if role == "loader" else "worker"
    event = {
        "event": "collate",
        "number": chance.randint(1, 60),
        "role": counts,
        "rank": None,
    }
    at = replace(at, name=name, act="signal", target=role, victim=victim)
    if role == "loader":
        at = replace(at, **event)  # type: ignore[arg-type]
    if signal != "SIGINT twice":
        return (replace(at, detail=signal),)
    # The loop looks every ten steps: the second comes before it has looked.
    number = at.number - at.number % 10 + 3
    first = replace(at, detail="SIGINT", number=number)
    return (first, replace(first, number=number + 2))


def _storage(chance: random.Random, scenario: Scenario, at: Fault) -> Fault:
    act = chance.choice(
        ("killed", "errno", "errno", "slow", "stall", *_ON_DISK)
    )
    if act in _ON_DISK:
        return replace(at, name=_DISK[act], act=act)
    roles = [
        role
        for role in ("worker", "driver", "mailbox", "trial actor")
        if role in scenario.roles
    ]
    role = chance.choice(roles) if scenario.kind != "run" else "worker"
    # A driver or an actor does few operations, a worker a dozen for each
    # checkpoint.
    number = chance.randint(
        1, 250 if role == "worker" and scenario.kind == "run" else 12
    )
    if (
        role == "worker" and scenario.kind == "sweep"
    ):  # its trials keep nothing
        role = "trial actor"
        number = chance.randint(1, 4)
    at = replace(
        at,
        event="storage",
        number=number,
        role=role,
        rank=0 if role == "worker" else None,
        trial=None,
    )
    if act == "killed":
        name = f"storage: {role} killed at an operation"
        return replace(
            at,
            name=name,
            act="signal",
            target=role,
            detail="SIGKILL",
            victim=0,
        )
    detail = (
        chance.choice(("ENOSPC", "EROFS", "EIO")) if act == "errno" else ""
    )
    words = {
        "ENOSPC": "full (in one process)",
        "EROFS": "read-only",
        "EIO": "input/output error",
    }.get(detail, "")
    name = f"storage: {words or {'slow': 'slow', 'stall': 'stalled'}[act]}"
    return replace(at, name=name, act=act, detail=detail)


_SERVER = {
    "503": "answers 503",
    "cut": "cuts its answers",
    "dawdle": "is slow",
}
_DISK = {"fill": "storage: disk full", "delete": "storage: deleted in mid-run"}


def _in_phase(
    chance: random.Random,
    scenario: Scenario,
    at: Fault,
    act: str,
    words: str,
    phases: tuple[str, ...],
) -> Fault:
    phase = chance.choice(phases)
    if phase not in _STEPWISE:
        at = replace(at, number=_number(chance, phase), trial=None)
    if phase == "setup":
        at = replace(at, rank=0)  # only one process of a node does it
    role = (
        "loader"
        if phase == "collate" and "loader" in scenario.roles
        else "worker"
    )
    return replace(
        at, name=f"{words}: {phase}", act=act, event=phase, role=role
    )


def _number(chance: random.Random, phase: str) -> int:
    return chance.randint(_SOONER.get(phase, 1), _LATER.get(phase, 1))


def _two(chance: random.Random, scenario: Scenario) -> tuple[Fault, ...]:
    """Two faults at the same moment of one process; what ends that process comes last."""
    rank = chance.randrange(scenario.world)
    step = chance.randrange(2, scenario.steps - 20)
    at = Fault("", "", number=step, rank=rank, trial=_trial(chance, scenario))
    others = [
        role
        for role in scenario.roles
        if role not in ("worker", "loader") and role != scenario.root
    ]
    if chance.random() < 0.5 and (others or scenario.world > 1):
        role = chance.choice([*others, *["worker"] * (scenario.world > 1)])
        first = replace(
            at,
            name=f"SIGKILL: {role}",
            act="signal",
            target=role,
            detail="SIGKILL",
        )
        first = replace(
            first,
            victim=(rank + 1) % scenario.world if role == "worker" else None,
        )
    else:
        act = chance.choice(_ON_DISK)
        first = replace(at, name=_DISK[act], act=act)
    second = chance.choice(
        (
            replace(
                at,
                name="SIGKILL: worker",
                act="signal",
                target="worker",
                detail="SIGKILL",
                victim=rank,
            ),
            replace(at, name="loss NaN", act="nan", event="loss"),
            replace(
                at, name="exception: forward", act="raise", event="forward"
            ),
            replace(
                at,
                name=f"SIGKILL: {scenario.root}",
                act="signal",
                target=scenario.root,
                detail="SIGKILL",
            ),
        )
    )
    return (first, second)


def expect(scenario: Scenario, fault: Fault) -> Expected:
    """What must follow a fault, by README.md and docs/training.md."""
    return (
        _after_signal(scenario, fault)
        if fault.act == "signal"
        else _after(scenario, fault)
    )


def _after(scenario: Scenario, fault: Fault) -> Expected:
    many = scenario.kind != "run"
    if fault.act in ("errno", "fill", "delete"):
        words = {
            "ENOSPC": "No space left|disk is full",
            "EROFS": "[Rr]ead-only",
            "EIO": "[Ii]nput/output error",
            "fill": "No space left|disk is full",
            "delete": "could not|is gone|was deleted|is not there|no longer|No such file",
        }[fault.detail or fault.act]
        return Expected(
            frozenset({0, 1, 2}), words, redo=fault.act != "delete"
        )
    if fault.act in ("slow", "stall", "clock", "start", "fresh", "server"):
        return Expected()
    if fault.act == "nan":
        return Expected(
            frozenset({0} if many else {1}),
            "NaN|diverged",
            statuses=frozenset({"diverged"}),
        )
    if fault.act == "hang":
        restarts = scenario.on_ray
        codes = frozenset({0} if restarts else {1, 74})
        return Expected(
            codes,
            "hung|hangs|made no step|silent|" + fault.event,
            statuses=frozenset({"hung"}),
        )
    if fault.act == "oom":
        # A smaller microbatch, or, where the memory is not the step's, an end
        # that says so.
        return Expected(
            frozenset({0, 1}),
            "out of memory|OutOfMemory",
            True,
            statuses=frozenset({"out_of_memory"}),
        )
    early = fault.event in ("import", "constructor")
    codes = (
        frozenset({0})
        if many and not early
        else frozenset({0, 1, 2})
        if many
        else frozenset({1, 2})
    )
    return Expected(
        codes, "injected", statuses=frozenset({"error"}), traceback=True
    )


def _after_signal(scenario: Scenario, fault: Fault) -> Expected:
    signal = fault.detail.split()[0]
    role = fault.target
    many = scenario.kind != "run"
    if fault.detail == "SIGSTOP 3":
        return Expected()
    if role == scenario.root:
        if signal in (
            "SIGKILL",
            "SIGSTOP",
        ):  # the runner kills a stopped one as its user would
            return Expected(frozenset({-9}))
        stopped = {130} if many else {0, 130} if "twice" in fault.name else {0}
        if (
            role == "torchrun"
        ):  # the agent ends by the signal in its own words, after its workers
            stopped |= {1, 128 + -_DEADLY[signal]}
        if signal == "SIGHUP":
            stopped |= {-1, 129, 0}
        return Expected(frozenset(stopped), ".")
    if role in ("gcs", "raylet"):
        return Expected(frozenset({0, 1}), "Ray|GCS|raylet|cluster|node")
    if role == "controller":
        return Expected(frozenset({0, 1}), "controller|actor")
    if role == "mailbox":
        return Expected(frozenset({0, 1}), "mailbox")
    if role == "trial actor":
        return Expected(frozenset({0, 1}), "actor|trial")
    if role == "loader" and signal == "SIGSTOP":
        return Expected(
            frozenset({1, 74}), "hung|made no step|silent|DataLoader"
        )
    if role == "loader":
        words = (
            f"DataLoader.*({signal}|{signal[3:].title()}|[Kk]illed)|{signal}"
        )
        return Expected(frozenset({0, 1}), words, traceback=True)
    if scenario.on_ray:  # the group or the lane starts again
        return Expected(
            statuses=frozenset({"hung"} if signal == "SIGSTOP" else ())
        )
    if signal in (
        "SIGTERM",
        "SIGINT",
    ):  # one rank that is asked to stop stops all
        return Expected(
            frozenset({0, 1}), f"{signal}|interrupted|{_DEADLY[signal]}"
        )
    if signal == "SIGSTOP":
        return Expected(frozenset({1, 74}), "hung|made no step|stopped|silent")
    return Expected(
        frozenset({0, 1} if signal == "SIGHUP" else {1}),
        f"{signal}|exitcode *: {_DEADLY[signal]}",
    )
