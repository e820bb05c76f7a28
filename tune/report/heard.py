"""What a sweep says of earlier ones that it has heard."""

from collections.abc import Sequence

from tune.report.words import number
from tune.search.frontier_grid import Frontier
from tune.trials.record import TrialRecord


def heard(frontier: Frontier, records: Sequence[TrialRecord]) -> str:
    """Return from which sweeps search frontier began, and which of them were wrong; empty without any."""
    if not frontier.past:
        return ""
    belief = frontier.belief(records)
    kept = [one.name for one in belief.past if one.needed or one.speeds]
    text = f"It began from what {_listed(kept)} found (`knowledge`)." if kept else ""
    for one in belief.misled:
        text += " " * bool(text) + (
            f"The {one.of} of {one.name} did not count: {number(one.predicted, 3)} was expected by it at batch size "
            f"{one.place.size}, and {number(one.measured, 3)} was measured."
        )
    return text


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
