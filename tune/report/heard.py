"""What a sweep says of earlier ones that it has heard."""

from collections.abc import Sequence

from tune.search.frontier_grid import Frontier
from tune.trials.record import TrialRecord


def heard(frontier: Frontier, records: Sequence[TrialRecord]) -> str:
    """Return from which sweeps search frontier began, and which of them were wrong; empty without any."""
    if not frontier.past:
        return ""
    belief = frontier.belief(records)
    kept = [one.name for one in belief.past if one.needed or one.speeds]
    text = f"It began from what {_listed(kept)} found (`knowledge`)." if kept else ""
    return " ".join(filter(None, [text, *map(str, belief.misled)]))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
