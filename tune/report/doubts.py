"""What a sweep does not know, each with what would settle it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainers.errors import counted
from tune.config import SweepConfig
from tune.objective import MEASURED
from tune.report.words import (
    capitalized,
    duration,
    in_words,
    listed,
    number,
    printable,
    telling,
)
from tune.search.finalists import MOST_FINALISTS, Final, pressure, rivals
from tune.trials.interval import EQUAL
from tune.trials.record import TrialRecord, trial_id

_BUSY = 0.25
_TELLING = 10.0
"""A bound on how much faster another trial may be says nothing above it."""


@dataclass(frozen=True)
class Doubt:
    """Something that the sweep does not know."""

    what: str
    """In a sentence without its full stop."""
    settled_by: str
    """What would tell: a key, or another machine."""

    @property
    def text(self) -> str:
        """Both in one line."""
        return f"{self.what}. Settled by {self.settled_by}."


def doubts(
    config: SweepConfig,
    records: Sequence[TrialRecord],
    found: Sequence[Final],
    most_ahead: float | None,
) -> list[Doubt]:
    """Return what is in doubt: the order, then the machine while this was measured."""
    kinds = (
        _once(config, records, found, most_ahead),
        _one_seed(config, records),
        _by_hand(config, records),
        _disturbed(config, records),
        _busy(records),
    )
    return [doubt for doubt in kinds if doubt is not None]


def _once(
    config: SweepConfig,
    records: Sequence[TrialRecord],
    found: Sequence[Final],
    most_ahead: float | None,
) -> Doubt | None:
    """Doubt the order where configurations ran once and may be faster."""
    if most_ahead is None or most_ahead <= 1 + EQUAL:
        return None
    bound = f"up to {number(most_ahead, 2)} times as fast (95 % confidence)"
    how_much = (
        bound if most_ahead <= _TELLING else "faster by an amount that nothing limits"
    )
    repeated = [final.record.id for final in found]
    rest = [record for record in rivals(config, records) if record.id not in repeated]
    if not found:
        return Doubt(
            f"One run each: another trial may be {how_much}",
            "repeats (`finalists: 2` or more)",
        )
    if not rest:
        return Doubt(
            f"Another trial may be {how_much}",
            "more repeats, for which a longer search leaves time",
        )
    names = telling(config, records)
    who = listed([in_words(names, record) for record in rest])
    wanted = min(MOST_FINALISTS, len(repeated) + len(rest))
    return Doubt(
        f"{printable(capitalized(who))} ran once: another trial may be {how_much}",
        f"`finalists: {wanted}`",
    )


def _one_seed(config: SweepConfig, records: Sequence[TrialRecord]) -> Doubt | None:
    """Doubt figures that differ between seeds, of one run each."""
    is_measured = config.objective.metric in MEASURED
    is_compared = sum(record.finished for record in records) > 1
    if is_measured or "seed" in config.space or not is_compared:
        return None
    return Doubt(
        "One seed each: another may change the order", "`seed: [0, 1, 2]` in the space"
    )


def _by_hand(config: SweepConfig, records: Sequence[TrialRecord]) -> Doubt | None:
    """Doubt trials that a user has stopped, and that no clone replaces."""
    ended = {trial_id(record.config) for record in records if not record.is_censored}
    names = telling(config, records)
    stopped = [
        in_words(names, record)
        for record in records
        if record.is_censored and trial_id(record.config) not in ended
    ]
    if not stopped:
        return None
    who = printable(capitalized(listed(stopped)))
    if len(stopped) == 1:
        what = f"{who} was stopped by hand: how good it would have been is open"
    else:
        what = f"{who} were stopped by hand: how good they would have been is open"
    return Doubt(what, "a clone (`python -m tune steer SWEEP clone TRIAL`)")


def _disturbed(config: SweepConfig, records: Sequence[TrialRecord]) -> Doubt | None:
    disturbed = [record for record in records if record.disturbed_s]
    if not disturbed:
        return None
    worst = max(disturbed, key=lambda record: record.disturbed_s or 0.0)
    who = printable(in_words(telling(config, records), worst))
    longest = duration(worst.disturbed_s or 0.0)
    what = f"{counted(len(disturbed), 'trial')} stood still or had no processor, for up to {longest} ({who})"
    return Doubt(f"{what}: samples/s leave that out", "a machine without other work")


def _busy(records: Sequence[TrialRecord]) -> Doubt | None:
    waits = {"trials": pressure(records), "repeats": pressure(records, repeats=True)}
    shares = [
        f"{who} {share:.0%}"
        for who, share in waits.items()
        if share is not None and share > _BUSY
    ]
    if not shares:
        return None
    what = (
        f"Work on the nodes waited for a processor ({', '.join(shares)} of their time)"
    )
    return Doubt(
        f"{what}: times are those of a busy machine",
        "`lanes: 1`, or a machine without other work",
    )
