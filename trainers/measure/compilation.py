"""What torch.compile did in a run: graphs, graph breaks, recompilations and why."""

import logging
from collections import Counter

from torch._dynamo import utils

logger = logging.getLogger(__name__)

_KEPT = 1024
"""Compilations that dynamo remembers (64 by itself): a graph with its backward is two."""
_SHOWN = 5


class CompileWatch:
    """Counts from its creation on. Dynamo counts for the whole process, so there may be one at a time.

    Importing this file imports dynamo, which takes seconds: do it only for a run that compiles.
    """

    def __init__(self) -> None:
        utils.set_compilation_metrics_limit(_KEPT)
        utils.clear_compilation_metrics()
        self._before = {group: Counter(utils.counters[group]) for group in ("graph_break", "resumes", "stats")}
        self._graphs = utils.counters["stats"]["unique_graphs"]

    def figures(self) -> dict[str, int]:
        """`graphs` compiled, places with `graph_breaks`, and `recompiles` (of a graph that its guards refused)."""
        return {
            "graphs": self._new("stats")["unique_graphs"],
            # Breaks for one reason at two places make one reason and two resumed functions; some resume nothing.
            "graph_breaks": max(len(self._new("graph_break")), len(self._new("resumes"))),
            "recompiles": len(self._recompiles()),
        }

    def compiled_since(self) -> bool:
        """Whether a graph was compiled since the last call; costs next to nothing."""
        before, self._graphs = self._graphs, utils.counters["stats"]["unique_graphs"]
        return self._graphs != before

    def warn_of_breaks(self) -> None:
        """Say where the graph broke, if it did: to be called when the warm-up is over."""
        reasons = [reason.splitlines() for reason in self._new("graph_break")]
        if reasons:
            shown = "; ".join(lines[0].strip() for lines in reasons[:_SHOWN])
            advice = "TORCH_LOGS=graph_breaks shows where, `fullgraph: true` makes those of the model errors"
            places = self.figures()["graph_breaks"]
            logger.warning("torch.compile broke the graph at %d places: %s (%s)", places, shown, advice)

    def say_recompiles(self) -> None:
        """Why graphs were compiled again, the commonest reasons first."""
        reasons = Counter(self._recompiles())
        for reason, count in reasons.most_common(_SHOWN):
            logger.info("torch.compile compiled again (%d x): %s", count, reason)

    def _new(self, group: str) -> Counter[str]:
        return Counter(utils.counters[group]) - self._before[group]

    def _recompiles(self) -> list[str]:
        metrics = utils.get_compilation_metrics()
        found = [entry.recompile_reason for entry in metrics if entry.is_forward and entry.recompile_reason]
        # "0/1: tensor 'x' size mismatch ...": which of the earlier graphs refused says nothing to a user.
        return [reason.partition(": ")[2].strip() or reason for reason in found]
