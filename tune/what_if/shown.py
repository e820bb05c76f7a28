"""The answer of what-if as the terminal shows it, and as data."""

from collections.abc import Callable, Iterator

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from tune.report.words import amount, duration, memory_unit, number
from tune.sweeps.spec import SweepSpec
from tune.trials.interval import Interval
from tune.what_if.answer import Predicted, WhatIf

_COLUMNS = ("shape", "best of it", "step time", "samples/s", "memory", "fits", "time to target", "USD to target")


def table(spec: SweepSpec, found: WhatIf) -> Table:
    """Return a row a shape, of its best configuration."""
    result = Table(box=SIMPLE, show_edge=False, padding=(0, 1, 0, 0))
    result.title = f"{spec.config.name}: expected, with 95 % intervals, from {found.num_measured} measured trials"
    for header in _COLUMNS:
        result.add_column(header, justify="left" if header in _COLUMNS[:2] else "right", overflow="fold")
    for one in found.best():
        fits = {True: "yes", False: "no", None: "-"}[one.fits]
        cells = [
            one.shape.text,
            one.configuration,
            _of(one.step_time_s, lambda value: f"{number(value * 1e3, 3)} ms"),
            _of(one.samples_per_s, lambda value: number(value, 3)),
            _of(one.memory_bytes, _memory),
            fits,
            _of(one.time_to_target_s, duration),
            _of(one.usd_to_target, lambda value: number(value, 3)),
        ]
        result.add_row(*map(Text, cells), style="dim" if one.fits is False else "")
    return result


def remarks(spec: SweepSpec, found: WhatIf) -> Iterator[str]:
    """Yield what the figures go by."""
    for text, why in found.missing.items():
        yield f"{text}: nothing is said, since {why}."
    for one in found.best():
        yield _remark(one)
    name = spec.config.name
    if not found.has_groups and any(one.shape.workers > 1 for one in found.found):
        yield (
            "No run of several workers was measured, so that all-reduce may be hidden or not. "
            f"`python -m tune {spec.source} --name {name}-2 --train.scaling.num_workers 2`, "
            f"then `--measured {spec.storage.parent.uri}/{name}-2`, says more."
        )
    if found.found and all(one.time_to_target_s is None for one in found.found):
        yield "No time to target: no trial has met a target, or the objective has none."
    yield "Samples to target are those measured: the same global batch needs as many on any machines, within repeats."


def _remark(one: Predicted) -> str:
    parts = []
    if one.shape.workers > 1:
        parts.append(f"link {one.shape.text.partition('@')[2] if one.shape.link is not None else one.link}")
    parts.append(f"microbatches of {one.microbatch_size}")
    if one.usd_per_hour is not None:
        parts.append(f"{one.machines}, {amount('usd_to_target', one.usd_per_hour)} an hour")
    return f"{one.shape.text}: {'; '.join(parts)}."


def _of(interval: Interval | None, form: Callable[[float], str]) -> str:
    if interval is None:
        return "-"
    low, high = (form(value).split()[0] for value in (interval.low, interval.high))
    same = {form(value).split()[-1] for value in (interval.low, interval.value, interval.high)}
    if len(form(interval.value).split()) > 1 and len(same) > 1:
        low, high = form(interval.low), form(interval.high)
    return f"{form(interval.value)} [{low}, {high}]"


def _memory(size: float) -> str:
    unit, name = memory_unit(size)
    return f"{number(size / unit, 3)} {name}"
