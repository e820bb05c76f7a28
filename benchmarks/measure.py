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
    """Call every peer once a round, in turn; return each peer's values.

    The first round is a warm-up and is dropped.

    With a `seed`, the order changes from round to round, and is equal on all
    ranks. So what a peer leaves behind (a cold cache, garbage) affects all other
    peers alike.
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
    """Return how far from 1 the median ratio of two equal peers may be by chance.

    `ratios` are those of a peer to itself, measured twice. If two peers' median
    ratio is nearer to 1 than this floor, the difference says nothing.

    95 % of a thousand bootstrapped medians of `ratios` are within the floor. For
    one or two ratios, the floor is the largest deviation from 1.
    """
    if len(ratios) < 3:
        return max(abs(ratio - 1) for ratio in ratios)
    return float(np.quantile(np.abs(_drawn_medians(ratios) - 1), 0.95))


def _drawn_medians(ratios: Sequence[float]) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(0).choice(
        np.asarray(ratios), (1000, len(ratios))
    )
    medians: np.ndarray[Any, Any] = np.median(drawn, axis=1)
    return medians


def ahead(
    found: dict[str, list[float]], ours: str
) -> dict[str, dict[str, float]]:
    """Return the ratio of `ours` to each other peer, with an interval.

    The ratio is the median of the ratios within the rounds. The interval holds
    95 % of the bootstrapped medians of these.

    No baseline is involved, so that no baseline's noise is in the result.
    """
    against = {}
    for name, values in found.items():
        if name != ours:
            ratios = [
                own / value
                for own, value in zip(found[ours], values, strict=True)
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
    """Return median and range of each peer's values, and of its ratios to `baseline`.

    Ratios are taken within a round. `twin` is the name of the baseline's second
    measurement, and its ratios give the A/A floor. A difference of medians below
    this floor says nothing.
    """
    ratios = {
        name: [
            value / base
            for value, base in zip(values, found[baseline], strict=True)
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
    """Print one table."""
    floor = summary["floor"]
    baseline = summary["baseline"]
    print(
        f"\n{title}   ({unit}; A/A floor {floor:.1%}: a smaller difference is none)"
    )
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
    """Print a figure with its threshold and, if not `small`, whether the figure held."""
    rule = f"at least {least:g}" if most == math.inf else f"at most {most:g}"
    word = "held" if least <= found <= most else "MISSED"
    print(
        f"{'seen' if small else word}: {name}: {found:.3g} ({rule})",
        flush=True,
    )


def failed(name: str, error: Exception) -> None:
    """Print that a figure could not be measured, without ending the benchmark."""
    traceback.print_exception(error, file=sys.stdout)
    print(
        f"MISSED: {name}: {type(error).__name__}: {first_line(error)}",
        flush=True,
    )


def earlier(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return a benchmark's newest results that were not kept, to continue from them.

    Empty unless they come from the same commit, with the same settings (`asked`).
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
    """Write the figures with date, hardware and versions; return the file's path.

    With `keep`, the file is in benchmarks/results, which the documents quote.
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
