"""What does a sweep save that begins with what an earlier one found, and what does it lose where that was wrong?

Run as: python -m benchmarks.knowledge [--keep] [--replays N]
        python -m benchmarks.knowledge --live [TASK ...] [--keep]   sweeps that run, of the tasks of benchmarks/rerun.py
Replays `search: frontier` on the frozen tables of benchmarks/ground_truth.py, as benchmarks/answer.py does: nothing is
trained, so the figures are counts, the same on any machine. A first sweep searches a related table; a second one begins
with its trials (tune/search/history.py), and is compared with a search of the same grid that knows nothing, seed by
seed. Related are: the same table again; an easier target; the smaller three quarters of the batch sizes, before the
larger three; a device that is three times as fast, 1.6 times more with bf16, and slower to fill (throughput times
B / (B + the smallest size)); and a memory that the largest two sizes do not fit. Histories that mislead are told as if
they were the same sweep's: its samples or its throughputs, or both, in the reverse order of the sizes; all of it at
places drawn at random; and the other table's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.answer import REPLAYS, Table, is_right, load, look_up, with_finalists
from benchmarks.measure import save
from benchmarks.rerun import TASKS, run, values_of
from tune.knowledge.taken import off
from tune.report.answer import answer
from tune.search.frontier import Belief, Choice, Ended, Seen, decide, past_of
from tune.search.history import Past
from tune.search.time_model import Place

Verdicts = dict[Place | None, tuple[bool, bool, float]]
"""Of every pick what `is_right` says."""

_EASIER = {"digits": 0.955, "rows": 0.765}

_QUALITIES = {
    "right": "right",
    "within 10 %": "within_10_percent",
    "with finalists right": "right_with_finalists",
    "within 10 %, so": "within_10_percent_with_finalists",
}


@dataclass(frozen=True)
class Limited(Table):
    """A table whose batch sizes from `limit` on run out of memory."""

    limit: int = 10**9


@dataclass(frozen=True)
class Found:
    """One search."""

    pick: Place | None
    seen: list[Seen]
    misled: bool

    @property
    def samples(self) -> float:
        """All that it trained on."""
        return sum(one.samples for one in self.seen)

    @property
    def num_out_of_memory(self) -> int:
        """Trials and probes that did not fit."""
        return sum(one.status == "out_of_memory" for one in self.seen)


def search(table: Table, seed: int, past: list[Past]) -> Found:
    """One replay of the search, with what it has heard of others."""
    rng, seen = random.Random(seed), list[Seen]()
    while True:
        step = decide(table.places, seen, [], past)
        if isinstance(step, Ended):
            belief = Belief(table.places, seen, past=past)
            pick = None if belief.best is None else table.places[belief.best]
            return Found(pick, seen, bool(belief.misled))
        assert isinstance(step, Choice)
        if isinstance(table, Limited) and step.place.size >= table.limit:
            seen.append(Seen(step.place, step.purpose, 0.0, None, status="out_of_memory"))
        else:
            seen.append(look_up(table, step, rng))


def related(table: Table) -> dict[str, tuple[Table, Table, list[str]]]:
    """Return by name the table of the first sweep, that of the second, and in what they differ."""
    sizes = sorted({place.size for place in table.places})
    quarter = len(sizes) // 4

    def fast(place: Place) -> float:
        return 3.0 * (1.6 if place.setting == "bf16" else 1.0) * place.size / (place.size + sizes[0])

    runs = {
        place: [{**run, "samples_per_s": run["samples_per_s"] * fast(place)} if run["curve"] else run for run in rows]
        for place, rows in table.runs.items()
    }
    smaller, larger = sizes[:-quarter], sizes[quarter:]
    limited = Limited(**vars(table), limit=sizes[-2])
    return {
        "the same again": (table, table, []),
        "an easier target": (replace(table, target=_EASIER[table.name]), table, ["the target"]),
        "another range": (_within(table, smaller), _within(table, larger), []),
        "another device": (replace(table, runs=runs), table, ["hardware"]),
        "a small memory": (limited, limited, []),
    }


def _within(table: Table, sizes: list[int]) -> Table:
    return replace(table, places=[place for place in table.places if place.size in sizes])


def misleading(table: Table, other: Table) -> dict[str, Callable[[int, list[Seen]], Past]]:
    """Return by name what makes of a first sweep's trials, or of nothing, what is not so."""
    swapped = {}
    for setting in {place.setting for place in table.places}:
        own = [place for place in table.places if place.setting == setting]
        swapped |= dict(zip(own, own[::-1], strict=True))

    def told(seen: list[Seen]) -> Past:
        return past_of("first", seen, *off([]))

    def moved(past: Past, needed: dict[Place, Place], speeds: dict[Place, Place]) -> Past:
        return replace(
            past,
            needed=tuple(replace(one, place=needed.get(one.place, one.place)) for one in past.needed),
            speeds={speeds.get(place, place): rate for place, rate in past.speeds.items()},
        )

    def at_random(seed: int, seen: list[Seen]) -> Past:
        places = dict(zip(table.places, random.Random(seed).sample(table.places, len(table.places)), strict=True))
        return moved(told(seen), places, places)

    return {
        "samples reversed": lambda seed, seen: moved(told(seen), swapped, {}),
        "throughputs reversed": lambda seed, seen: moved(told(seen), {}, swapped),
        "both reversed": lambda seed, seen: moved(told(seen), swapped, swapped),
        "places at random": at_random,
        "another task's": lambda seed, seen: told(search(other, seed, []).seen),
    }


def judge(name: str, other: str, replays: int) -> dict[str, Any]:
    """All searches on one table."""
    table, rows = load(name), {}
    cold: dict[int, list[Found]] = {}
    firsts: dict[int, list[Found]] = {}
    judged: dict[int, Verdicts] = {}

    def verdicts(of: Table) -> Verdicts:
        if id(of) not in judged:
            judged[id(of)] = _verdicts(of)
        return judged[id(of)]

    def once(known: dict[int, list[Found]], of: Table, seeds: range) -> list[Found]:
        if id(of) not in known:
            known[id(of)] = [search(of, seed, []) for seed in seeds]
        return known[id(of)]

    before = range(10_000, 10_000 + replays)
    kinds = related(table)
    for kind, (first, second, differs) in kinds.items():
        told = [past_of("first", one.seen, *off(differs)) for one in once(firsts, first, before)]
        if differs:  # as tune/knowledge/taken.py has it
            told = [replace(one, misfits=()) for one in told]
        found = [search(second, seed, [past]) for seed, past in enumerate(told)]
        rows[kind] = _summary(second, found, once(cold, second, range(replays)), verdicts(second))
    for kind, of in misleading(table, load(other)).items():
        told = [of(seed, one.seen) for seed, one in enumerate(once(firsts, table, before))]
        found = [search(table, seed, [past]) for seed, past in enumerate(told)]
        rows[kind] = _summary(table, found, once(cold, table, range(replays)), verdicts(table))
    return {
        "related": {kind: rows[kind] for kind in kinds},
        "misleading": {k: r for k, r in rows.items() if k not in kinds},
    }


def _verdicts(table: Table) -> Verdicts:
    places = [place for place in table.places if not isinstance(table, Limited) or place.size < table.limit]
    truth = {place: table.true_time_s(place, table.runs[place]) for place in places}
    return {place: is_right(table, place, truth) for place in [*places, None]}


def _summary(table: Table, found: list[Found], cold: list[Found], verdicts: Verdicts) -> dict[str, Any]:
    """Return what second sweeps cost and picked, beside searches of the same grid without a history."""
    row: dict[str, Any] = {}
    for name, searches in (("second", found), ("without", cold)):
        final = [with_finalists(table, seed, one.seen) for seed, one in enumerate(searches)]
        row[name] = {
            "samples": statistics.mean(one.samples for one in searches),
            "probes": statistics.mean(sum(one.purpose == "probe" for one in each.seen) for each in searches),
            "trials": statistics.mean(sum(one.purpose == "trial" for one in each.seen) for each in searches),
            "out_of_memory": sum(one.num_out_of_memory for one in searches),
            "right": statistics.mean(verdicts[one.pick][0] for one in searches),
            "within_10_percent": statistics.mean(verdicts[one.pick][1] for one in searches),
            "right_with_finalists": statistics.mean(verdicts[pick][0] for pick, _ in final),
            "within_10_percent_with_finalists": statistics.mean(verdicts[pick][1] for pick, _ in final),
            "finalists_samples": statistics.mean(cost for _, cost in final),
        }
    ratios = sorted(one.samples / other.samples for one, other in zip(found, cold, strict=True))
    row["samples_ratio"] = row["second"]["samples"] / row["without"]["samples"]
    row["samples_ratio_median"] = statistics.median(ratios)
    row["samples_ratio_90_percent"] = ratios[int(0.9 * len(ratios))]
    row["dropped"] = statistics.mean(one.misled for one in found)
    return row


def live(tasks: Sequence[str], keep: bool) -> None:
    """Sweeps of a task by frontier: one, the same again, another range; beside one of that range that knows nothing.

    Samples are those of probes and trials; repeats of finalists are as many with a history as without.
    """
    rows: dict[str, Any] = {}
    for task in tasks:
        _, space, _ = TASKS[task]
        sizes = space["global_batch_size"]
        kinds = {
            "first": (sizes[:-1], True),
            "the same again": (sizes[:-1], True),
            "another range": (sizes[1:], True),
            "another range, without": (sizes[1:], False),
        }
        with tempfile.TemporaryDirectory() as directory:
            for number, (kind, (own, knows)) in enumerate(kinds.items()):
                more = {"search": "frontier", "knowledge": knows, "space": {**space, "global_batch_size": own}}
                name = f"{task}-{number}"
                spec, records = run(Path(directory), task, name, more, seed=1000 * number)
                searched = [one for one in records if one.purpose != "repeat"]
                found = answer(spec.config, records, spec.train)
                rows[f"{task}, {kind}"] = {
                    "samples": sum(one.samples or 0 for one in searched),
                    "probes": sum(one.purpose == "probe" for one in searched),
                    "trials": sum(one.purpose == "trial" for one in searched),
                    "pick": values_of(found.best.config) if found.best else None,
                    "out_of_memory": sum(one.status == "out_of_memory" for one in searched),
                }
                print(f"{task}, {kind}: {rows[f'{task}, {kind}']}", flush=True)
    print(f"\nkept in {save('knowledge-live', rows, keep)}")


def main(replays: int, keep: bool) -> None:
    """Both tables."""
    results: dict[str, Any] = {"replays": replays}
    for name, other in (("digits", "rows"), ("rows", "digits")):
        results[name] = judge(name, other, replays)
        print(f"\n{name}, {replays} replays (samples as a ratio of the search without a history)")
        for group in ("related", "misleading"):
            for kind, row in results[name][group].items():
                second, without = row["second"], row["without"]
                parts = [
                    f"samples {row['samples_ratio']:.2f}",
                    f"(median {row['samples_ratio_median']:.2f}, 90 % {row['samples_ratio_90_percent']:.2f})",
                    *(f"{key} {second[key]:.1f} of {without[key]:.1f}" for key in ("probes", "trials")),
                    f"out of memory {second['out_of_memory']} of {without['out_of_memory']}",
                    *(f"{name} {second[key]:.0%} ({without[key]:.0%})" for name, key in _QUALITIES.items()),
                    f"dropped {row['dropped']:.0%}",
                ]
                print(f"  {kind:22} {'  '.join(parts)}", flush=True)
    print(f"\nkept in {save('knowledge', results, keep)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replays", type=int, default=REPLAYS)
    parser.add_argument("--live", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)} (default: all)")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    if args.live is None:
        main(args.replays, args.keep)
    else:
        live(args.live or list(TASKS), args.keep)
