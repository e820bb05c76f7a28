"""What every benchmark shares: interleaved rounds, medians, floors and JSON."""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainers.errors import first_line
from trainers.versions import environment

KEPT = Path(__file__).parent / "results"
"""Figures that documents quote: committed, and checked against the README."""
SCRATCH = Path("results/benchmarks")


def interleave(
    peers: dict[str, Callable[[], float]], rounds: int, seed: int | None = None
) -> dict[str, list[float]]:
    """Call every peer once a round, in turn.

    The first round is a warm-up and is dropped.

    With a `seed` each round has an order of its own, the same on every rank: what one
    leaves to the next (a cold cache, garbage) falls on all alike.
    """
    found: dict[str, list[float]] = {name: [] for name in peers}
    order = list(peers)
    shuffled = random.Random(seed)
    for number in range(rounds + 1):
        if seed is not None:
            shuffled.shuffle(order)
        for name in order:
            value = peers[name]()
            if number:
                found[name].append(value)
    return found


def aa_floor(ratios: Sequence[float]) -> float:
    """Return how far from 1 the median of a thing's ratios to itself may be.

    A median that is nearer says nothing.

    Of a thousand medians of as many ratios, drawn with replacement (bootstrap), 95 %
    are within it. Of one or two ratios it is the largest deviation.
    """
    if len(ratios) < 3:
        return max(abs(ratio - 1) for ratio in ratios)
    return float(np.quantile(np.abs(_drawn_medians(ratios) - 1), 0.95))


def _drawn_medians(ratios: Sequence[float]) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(0).choice(np.asarray(ratios), (1000, len(ratios)))
    medians: np.ndarray[Any, Any] = np.median(drawn, axis=1)
    return medians


def ahead(found: dict[str, list[float]], ours: str) -> dict[str, dict[str, float]]:
    """Return how many times as much as each peer `ours` is, with an interval.

    It is the median of the ratios within a round. The interval holds 95 % of the
    medians of as many, drawn with replacement.

    A baseline's noise is in none of them.
    """
    against = {}
    for name, values in found.items():
        if name != ours:
            ratios = [
                own / value for own, value in zip(found[ours], values, strict=True)
            ]
            low, high = np.quantile(_drawn_medians(ratios), [0.025, 0.975])
            against[name] = {
                "ratio": statistics.median(ratios),
                "low": float(low),
                "high": float(high),
            }
    return against


def summarize(
    found: dict[str, list[float]], baseline: str, twin: str
) -> dict[str, Any]:
    """Medians, spread, and each peer's ratio to `baseline`, round by round.

    `twin` is the baseline measured a second time: its ratios give the A/A floor, below
    which a difference of medians is no difference.
    """
    ratios = {
        name: [
            value / base for value, base in zip(values, found[baseline], strict=True)
        ]
        for name, values in found.items()
    }
    floor = aa_floor(ratios[twin])
    rows = {
        name: {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
            "n": len(values),
            "ratio": statistics.median(ratios[name]),
            "ratio_min": min(ratios[name]),
            "ratio_max": max(ratios[name]),
        }
        for name, values in found.items()
    }
    return {"baseline": baseline, "floor": floor, "rows": rows}


def show(title: str, unit: str, summary: dict[str, Any]) -> None:
    """One table."""
    floor = summary["floor"]
    baseline = summary["baseline"]
    print(f"\n{title}   ({unit}; A/A floor {floor:.1%}: a smaller difference is none)")
    for name, row in summary["rows"].items():
        verdict = (
            "equal"
            if abs(row["ratio"] - 1) <= floor
            else ("more" if row["ratio"] > 1 else "less")
        )
        print(
            f"  {name:24} {row['median']:>12,.0f}   {row['ratio']:5.2f} x {baseline}"
            f"   [{row['ratio_min']:.2f}, {row['ratio_max']:.2f}] n={row['n']}   {verdict}"
        )


def verdict(
    name: str,
    found: float,
    least: float = -math.inf,
    most: float = math.inf,
    small: bool = False,
) -> None:
    """Print whether a figure is within its threshold; a miniature's is only said."""
    rule = f"at least {least:g}" if most == math.inf else f"at most {most:g}"
    word = "held" if least <= found <= most else "MISSED"
    print(f"{'seen' if small else word}: {name}: {found:.3g} ({rule})", flush=True)


def failed(name: str, error: Exception) -> None:
    """Print that a figure could not be measured; the others go on."""
    traceback.print_exception(error, file=sys.stdout)
    print(f"MISSED: {name}: {type(error).__name__}: {first_line(error)}", flush=True)


def earlier(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the newest results of a benchmark that were not kept.

    Only where the same code was `asked` the same: it goes on with them.
    """
    for path in sorted(SCRATCH.glob(f"{name}-[0-9]*.json"))[-1:]:
        found = json.loads(path.read_text())
        results: dict[str, Any] = found["results"]
        commit = environment(torch.device("cpu")).get("git_commit")
        if (
            found["environment"].get("git_commit") == commit
            and asked.items() <= results.items()
        ):
            return results
    return {}


def save(name: str, results: dict[str, Any], keep: bool) -> Path:
    """Write the figures with date, hardware and versions.

    `keep` puts them where documents quote from.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kept = {
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(device),
        "results": results,
    }
    directory = KEPT if keep else SCRATCH
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{kept['date']}-{device.type}.json"
    path.write_text(json.dumps(kept, indent=2) + "\n")
    return path
