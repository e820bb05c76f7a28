"""What a sweep leaves: the answer, a table, results.parquet, best.yaml, summary.json and report.html."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

from trainers.config import TrainConfig
from trainers.errors import POLICIES, STATUSES
from trainers.settings import build, dump_yaml, override
from trainers.storage import Storage
from tune.config import Objective, Range, SweepConfig
from tune.journal import TrialRecord
from tune.plots import FINISHED, figures, shown

if TYPE_CHECKING:
    import rich.table

Column = tuple[str, bool, Callable[[TrialRecord], str]]
"""A header, whether the column holds figures, and a trial's cell."""

_EQUAL = 0.05  # a smaller margin is within what repeats of one configuration differ by
_EQUAL_SCORE = 0.01


@dataclass(frozen=True)
class Answer:
    """What the sweep says."""

    best: TrialRecord | None
    sentence: str
    """Which trial is best, at what and by how much, or why none is; the throughput's winner, if another."""
    ranking: list[TrialRecord]
    """All trials that have a value of the objective, best first."""


def answer(config: SweepConfig, records: list[TrialRecord]) -> Answer:
    """Rank the trials by the objective and say the outcome."""
    ranked = _ranked(config.objective, records)
    best = ranked[0][1] if ranked else None
    verdict = _verdict(config, records, ranked) if ranked else _why_none(config, records)
    sentence = f"{verdict} {_fastest(config, records, best)}".rstrip()
    return Answer(best, sentence, [record for _, record in ranked])


def objective_value(objective: Objective, record: TrialRecord) -> float | None:
    """The figure that ranks a trial; None where it failed, has none, or has one that is not finite."""
    if record.status not in FINISHED:
        return None
    measured = {
        "time_to_target": record.time_to_target_s,
        "samples_per_s": record.samples_per_s,
        "step_time_s": record.step_time_s,
    }
    value = (measured if objective.metric in measured else record.metrics).get(objective.metric)
    return value if value is not None and math.isfinite(value) else None


def table(config: SweepConfig, records: list[TrialRecord], answer: Answer) -> rich.table.Table:
    """The end table of the terminal: a row a trial in the order of the space, the best one marked."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    columns = _columns(config, records)
    result = Table(box=SIMPLE, show_edge=False, padding=0)
    result.title = f"{config.name}: {len(records)} trials"
    result.caption = f"* best by {config.objective.metric}"
    for header, is_figure, _ in columns:
        narrow = header.replace("_", "_\n").replace(" ", "\n") if len(header) > 8 else header
        justify: Literal["left", "right"] = "right" if is_figure else "left"
        result.add_column(narrow, justify=justify, overflow="fold", min_width=6)
    for record in _in_order(config, records):
        is_best = answer.best is not None and record.id == answer.best.id
        cells = [cell(record) for _, _, cell in columns]
        style = "bold green" if is_best else "" if record.status in FINISHED else "dim"
        result.add_row(*map(Text, [f"* {cells[0]}" if is_best else cells[0], *cells[1:]]), style=style)
    return result


def write_report(
    sweep: Storage,
    config: SweepConfig,
    train: dict[str, Any],
    records: list[TrialRecord],
    environment: dict[str, str],
    *,
    task_dir: str | None,
) -> Answer:
    """Write results.parquet, best.yaml, summary.json and report.html into the sweep's storage.

    `train` is the sweep's TrainConfig mapping, `environment` the names and versions to show. Without a best
    trial there is no best.yaml: one that an earlier report left is deleted.
    """
    found = answer(config, records)
    sweep.write("results.parquet", _parquet(config, records))
    resolved = train
    if found.best:
        tree = override(TrainConfig, train, found.best.config)
        tree |= {"name": f"{config.name}-best", "storage_path": sweep.uri.rpartition("/")[0] or "/"}
        if task_dir is not None:
            tree["task_dir"] = task_dir
        resolved = build(TrainConfig, tree, "best.yaml").tree()
        value = objective_value(config.objective, found.best)
        header = (
            f"# The best trial of the sweep {config.name}: {found.best.id}, "
            f"{config.objective.metric} {value:.6g}.\n"
            f"# Run as: python -m trainers {shlex.quote(sweep.locate('best.yaml'))}\n"
        )
        sweep.write("best.yaml", (header + dump_yaml(tree)).encode())
    else:
        sweep.delete("best.yaml")
    summary = _summary(config, records, environment, found)
    sweep.write("summary.json", (json.dumps(summary, indent=2) + "\n").encode())
    sweep.write("report.html", _html(sweep, config, records, found, summary, dump_yaml(resolved)).encode())
    return found


def _ranked(objective: Objective, records: list[TrialRecord]) -> list[tuple[float, TrialRecord]]:
    pairs = [(objective_value(objective, record), record) for record in records]
    values = [(value, record) for value, record in pairs if value is not None]
    return sorted(values, key=lambda pair: pair[0], reverse=objective.direction == "max")


def _verdict(config: SweepConfig, records: list[TrialRecord], ranked: list[tuple[float, TrialRecord]]) -> str:
    """The winner and its margin over the runner-up."""
    labels, objective, (value, best) = _labels(config, records), config.objective, ranked[0]
    who, amount = _describe(labels, best), _amount(objective.metric, value)
    if objective.metric == "time_to_target":
        head = f"{who} reaches {_target(objective)} in {amount} of training"
    elif objective.metric == "samples_per_s":
        head = f"{who} has the highest throughput, {amount}"
    else:
        extreme = "lowest" if objective.direction == "min" else "highest"
        head = f"{who} has the {extreme} {objective.metric}, {amount}"
    if len(ranked) == 1:
        only = "it is the only trial" if len(records) == 1 else "no other trial has a value to compare"
        return f"{head}; {only}."
    second, runner_up = ranked[1]
    following = f"the next ({_short(labels, runner_up)})"
    margin = _margin(objective.metric, value, second)
    if margin:
        return f"{head}, {margin} {following}."
    equal = sum(_margin(objective.metric, value, other) is None for other, _ in ranked)
    group = "two" if equal == 2 else f"first {equal}"
    verb = "needs" if objective.metric == "time_to_target" else "has"
    return (
        f"{head}, but {following} {verb} {_amount(objective.metric, second)}: "
        f"the {group} are about equal, and one run each cannot tell them apart."
    )


def _margin(metric: str, value: float, other: float) -> str | None:
    """How much better `value` is than `other`, in words; None when the two are about equal.

    A ratio; but a difference between scores of at most 1, and where a sign makes a ratio meaningless.
    """
    direction, gap = "lower" if value < other else "higher", abs(value - other)
    low, high = sorted((value, other))
    is_score = metric.endswith(("accuracy", "f1", "auc")) and high <= 1
    if is_score or low <= 0:
        least = _EQUAL_SCORE if is_score else _EQUAL * max(abs(low), abs(high))
        return f"{_number(gap, 2)} {direction} than" if gap > least else None
    if high < low * (1 + _EQUAL):
        return None
    words = "faster" if metric in ("time_to_target", "samples_per_s") else direction
    return f"{_number(high / low, 3 if high < 1.2 * low else 2)} times {words} than"


def _why_none(config: SweepConfig, records: list[TrialRecord]) -> str:
    """Why no trial has a value of the objective."""
    finished = [record for record in records if record.status in FINISHED]
    if not finished:
        if not records:
            return "There is no best trial: none has run."
        counts = Counter(record.status for record in records).most_common()
        ended = ", ".join(f"{count} {status}" for status, count in counts)
        status, _ = counts[0]
        return f"There is no best trial: none finished ({ended}). For {status}: {POLICIES[status].advice}."
    metric = config.objective.metric
    if metric != "time_to_target":
        reported = ", ".join(_metrics(finished)) or "none"
        return f"There is no best trial: no finished one has a {metric} (metrics reported: {reported})."
    text = f"There is no best trial: no finished one reached {_target(config.objective)}"
    name = next(iter(config.objective.target or {}))
    rows = [(row, record) for record in finished for row in (*record.curve, record.metrics)]
    found = [(row[name], record) for row, record in rows if math.isfinite(row.get(name, math.nan))]
    if not found:
        return f"{text}, and none reported {name}."
    pick = min if Objective(metric=name).direction == "min" else max
    value, closest = pick(found, key=lambda pair: pair[0])
    who = _describe(_labels(config, records), closest)
    return f"{text}; the closest, {who}, came to {_number(value, 4)}."


def _fastest(config: SweepConfig, records: list[TrialRecord], best: TrialRecord | None) -> str:
    """The throughput's winner, in a sentence of its own, where it is not the best trial."""
    objective = config.objective
    ranked = _ranked(Objective(metric="samples_per_s"), records)
    if not ranked or objective.metric == "samples_per_s" or (best and best.id == ranked[0][1].id):
        return ""
    rate, fastest = ranked[0]
    value = objective_value(objective, fastest)
    if objective.metric == "time_to_target":
        rest = f"does not reach {_target(objective)}" if value is None else f"needs {_duration(value)}"
    else:
        metric = objective.metric
        rest = f"has no {metric}" if value is None else f"has {metric} {_number(value, 4)}"
    who = _describe(_labels(config, records), fastest)
    return f"The highest throughput, {_amount('samples_per_s', rate)}, has {who}, which {rest}."


def _labels(config: SweepConfig, records: list[TrialRecord]) -> dict[str, str]:
    """Dotted keys and their column names: the last part, or the whole key where that is ambiguous."""
    keys = dict.fromkeys([*config.space, *(key for record in records for key in record.config)])
    count = Counter(key.rpartition(".")[2] for key in keys)
    return {key: last if count[last := key.rpartition(".")[2]] == 1 else key for key in keys}


def _describe(labels: dict[str, str], record: TrialRecord) -> str:
    """A trial in full: "global_batch_size 64 with bf16 and lr 0.001"."""
    keys = sorted(labels, key=lambda key: "batch_size" not in key)
    first, *rest = (
        ("" if key == "precision" and key != keys[0] else f"{labels[key]} ") + shown(record.config.get(key))
        for key in keys
    )
    return f"{first} with {' and '.join(rest)}" if rest else first


def _short(labels: dict[str, str], record: TrialRecord) -> str:
    """A trial by its values where they say enough: "64, bf16, lr 0.001"."""
    return ", ".join(
        ("" if "batch_size" in key or key == "precision" else f"{label} ") + shown(record.config.get(key))
        for key, label in labels.items()
    )


def _in_order(config: SweepConfig, records: list[TrialRecord]) -> list[TrialRecord]:
    """The trials in the order of the space: of its lists, and rising in its ranges."""

    def place(record: TrialRecord) -> list[tuple[float, str]]:
        places = []
        for key, space in config.space.items():
            value = record.config.get(key)
            number = float(value) if isinstance(value, int | float) else math.inf
            if isinstance(space, list) and value in space:
                number = float(space.index(value))
            places.append((number, shown(value)))
        return places

    return sorted(records, key=place)


def _metrics(records: list[TrialRecord]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record.metrics))


def _columns(config: SweepConfig, records: list[TrialRecord]) -> list[Column]:
    """The table's columns; the objective is one of them."""
    columns: list[Column] = [
        (label, False, lambda record, key=key: shown(record.config.get(key)))  # type: ignore[misc]
        for key, label in _labels(config, records).items()
    ]
    columns.append(("status", False, lambda record: record.status))

    def add(header: str, name: str, form: Callable[[float], str]) -> None:
        def cell(record: TrialRecord) -> str:
            value = record.metrics.get(name) if header == name else getattr(record, name)
            return "-" if value is None else form(value)

        columns.append((header, True, cell))

    add("samples/s", "samples_per_s", lambda value: _number(value, 4))
    add("step time, ms", "step_time_s", lambda value: _number(value * 1e3, 3))
    add("peak memory", "peak_memory_bytes", _memory)
    for name in _metrics(records):
        if name.startswith("val_") or name == config.objective.metric:
            add(name, name, lambda value: _number(value, 4))
    if config.objective.target:
        add("time to target", "time_to_target_s", _duration)
    return columns


def _target(objective: Objective) -> str:
    return " ".join(f"{name} {value:g}" for name, value in (objective.target or {}).items())


def _amount(metric: str, value: float) -> str:
    if metric == "time_to_target":
        return _duration(value)
    return f"{_number(value, 3)} samples/s" if metric == "samples_per_s" else _number(value, 4)


def _number(value: float, digits: int) -> str:
    """Rounded to so many digits; thousands are set apart."""
    rounded = float(f"{value:.{digits}g}")
    return f"{rounded:,.0f}" if 1000 <= abs(rounded) < 1e15 else f"{rounded:g}"


def _duration(time_s: float) -> str:
    size, unit = (1, "s") if time_s < 120 else (60, "min") if time_s < 7200 else (3600, "h")
    return f"{_number(time_s / size, 3)} {unit}"


def _memory(amount_bytes: float) -> str:
    size, unit = (2**30, "GiB") if amount_bytes >= 2**30 else (2**20, "MiB")
    return f"{_number(amount_bytes / size, 3)} {unit}"


def _parquet(config: SweepConfig, records: list[TrialRecord]) -> bytes:
    """A row a trial, in the order given; a column's type does not depend on which trials have run."""
    import pyarrow as pa
    from pyarrow import parquet

    columns: dict[str, Any] = {}

    def add(kind: Any, *names: str) -> None:
        for name in names:
            columns[name] = pa.array([getattr(record, name) for record in records], kind)

    add(pa.string(), "id", "status")
    for key in _labels(config, records):
        columns[key] = _config_column(config, key, [record.config.get(key) for record in records])
    add(pa.float64(), "samples_per_s", "step_time_s", "time_to_target_s")
    add(pa.int64(), "peak_memory_bytes", "lane")
    add(pa.string(), "message")
    for name in ("start_time", "end_time"):
        times = [round(getattr(record, name) * 1e6) for record in records]
        columns[name] = pa.array(times, pa.timestamp("us", tz="UTC"))
    taken = frozenset(columns)
    for name in _metrics(records):
        values = [record.metrics.get(name) for record in records]
        columns[f"metrics.{name}" if name in taken else name] = pa.array(values, pa.float64())
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


def _config_column(config: SweepConfig, key: str, values: list[Any]) -> Any:
    """One key's values as an Arrow array, typed by all that the space may give it."""
    import pyarrow as pa

    space = config.space.get(key, [])
    listed = space.choice or [] if isinstance(space, Range) else space
    kinds = {type(value) for value in [*values, *listed] if value is not None}
    for kind, arrow in ((bool, pa.bool_()), (int, pa.int64()), (float, pa.float64()), (str, pa.string())):
        if kinds == {kind}:
            return pa.array(values, arrow)
    if kinds == {int, float}:
        return pa.array([value if value is None else float(value) for value in values], pa.float64())
    texts = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
    return pa.array(texts, pa.string())


def _summary(
    config: SweepConfig, records: list[TrialRecord], environment: dict[str, str], found: Answer
) -> dict[str, Any]:
    counts = Counter(record.status for record in records)
    best = found.best
    value = objective_value(config.objective, best) if best else None
    first = min((record.start_time for record in records), default=0.0)
    last = max((record.end_time for record in records), default=0.0)
    return {
        "name": config.name,
        "sentence": found.sentence,
        "objective": config.objective.model_dump(exclude_none=True) | {"mode": config.objective.direction},
        "best": {"id": best.id, "config": best.config, "value": value} if best else None,
        "trials": len(records),
        "status": {status: counts[status] for status in STATUSES if counts[status]},
        "wall_time_s": round(last - first, 3),
        "trial_time_s": round(sum(record.end_time - record.start_time for record in records), 3),
        "environment": environment,
    }


def _html(
    sweep: Storage,
    config: SweepConfig,
    records: list[TrialRecord],
    found: Answer,
    summary: dict[str, Any],
    train: str,
) -> str:
    """The page; everything in it but the figures' markup is escaped."""
    import jinja2

    labels = _labels(config, records)
    fastest = _fastest(config, records, found.best)
    text = resources.files("tune").joinpath("report.html").read_text(encoding="utf-8")
    strict = jinja2.StrictUndefined
    page = jinja2.Environment(autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    return page.from_string(text).render(
        best=found.best,
        columns=_columns(config, records),
        command=f"python -m trainers {shlex.quote(sweep.locate('best.yaml'))}",
        fastest=fastest,
        figures=figures(config, records, labels, {r.id: _short(labels, r) for r in records}, found.best),
        finished=FINISHED,
        records=_in_order(config, records),
        summary=summary,
        times=[_duration(summary["wall_time_s"]), _duration(summary["trial_time_s"])],
        train=train,
        verdict=found.sentence.removesuffix(fastest).rstrip(),
    )
