"""What the configurations of a sweep would take on shapes that are not at hand: figures with 95 % intervals.

Time to target is samples to target over samples/s. Samples to target are those that trials of the configuration needed:
workers, devices and links divide the same global batch, so they do not change them, but as much as repeats of one
configuration differ (tune/trials/interval.py). Step times are those of step_time.py; memory is that of fake steps.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.files.prices import all_prices
from trainers.config import TrainConfig
from trainers.errors import MISSING, ConfigError
from trainers.launch.spec import RunSpec
from trainers.loop.memory_forecast import ERROR, usable_bytes
from tune.report.words import in_short, telling
from tune.search.space import trial_config
from tune.sweeps.spec import SweepSpec, read_kept
from tune.trials.interval import REPEATS, Interval
from tune.trials.journal import Journal
from tune.trials.microbatch_bounds import key_of
from tune.trials.record import Ran, TrialRecord
from tune.what_if.fake_steps import FakeSteps
from tune.what_if.shapes import LINKS, MEASURED, Shape, cheapest, device_of, measured_on
from tune.what_if.step_time import Array, Measured, StepTimes, Where, learn

_NOT_OF_A_CONFIGURATION = ("name", "storage_path", "scaling", "seed", "tracking", "launcher", "device", "task_dir")


@dataclass(frozen=True)
class Predicted:
    """A configuration on a shape."""

    shape: Shape
    configuration: str
    """Its values, in short."""
    config: dict[str, Any]
    link: str
    step_time_s: Interval
    samples_per_s: Interval
    microbatch_size: int
    memory_bytes: Interval
    """Of a GPU's tensors; not of a processor's process."""
    fits: bool | None
    """Whether a GPU's memory holds it; None where that is not known, as of processors."""
    time_to_target_s: Interval | None
    """None where no trial of the configuration has met the target, or there is none."""
    usd_per_hour: float | None
    machines: str
    usd_to_target: Interval | None

    def plain(self) -> dict[str, Any]:
        """Return it as plain data."""
        figures = {
            name: None if (one := getattr(self, name)) is None else [one.low, one.value, one.high]
            for name in ("step_time_s", "samples_per_s", "memory_bytes", "time_to_target_s", "usd_to_target")
        }
        return {
            "shape": self.shape.text,
            "configuration": self.config,
            "link": self.link if self.shape.workers > 1 else None,
            **figures,
            "microbatch_size": self.microbatch_size,
            "fits": self.fits,
            "usd_per_hour": self.usd_per_hour,
            "machines": self.machines or None,
        }


@dataclass(frozen=True)
class WhatIf:
    """The answer."""

    num_measured: int
    has_groups: bool
    """Whether runs of several workers were among them."""
    found: tuple[Predicted, ...]
    """Every configuration on every shape, the best first of each shape."""
    missing: Mapping[str, str]
    """Why nothing is said of a shape."""

    def best(self) -> Iterator[Predicted]:
        """Yield the best configuration of each shape."""
        seen = set[str]()
        for one in self.found:
            if one.shape.text not in seen:
                seen.add(one.shape.text)
                yield one


@dataclass(frozen=True)
class _Trial:
    """A trial that was measured."""

    record: TrialRecord
    ran: Ran
    config: TrainConfig

    @property
    def setting(self) -> str:
        """Names all on which the time of a step depends, but samples, workers and device."""
        return key_of({**self.config.tree(), "scaling": {}}, "")

    @property
    def configuration(self) -> str:
        """Names all on which samples to target depend, and what a trial of it takes."""
        tree = self.config.with_global_batch().tree()
        kept = {key: value for key, value in tree.items() if key not in _NOT_OF_A_CONFIGURATION}
        return json.dumps(kept, sort_keys=True)

    @property
    def measured(self) -> Measured:
        """Its step time."""
        device, ran, step_s = device_of(self.ran.device), self.ran, self.record.step_time_s or 0.0
        share = -(-ran.global_batch_size // ran.workers)
        error = (self.record.step_time_ci95_s or 0.0) / 1.96 / step_s
        return Measured(
            Where(device, ran.workers, share, ran.accumulation, measured_on(device)), step_s, min(error, 0.5)
        )


@dataclass(frozen=True)
class _Known:
    """What is known of a setting."""

    steps: FakeSteps
    times: StepTimes
    taken: float
    """What its trials took of GPUs' memory, as a multiple of what was predicted."""


def what_if(spec: SweepSpec, shapes: Sequence[Shape], others: Sequence[str] = ()) -> WhatIf:
    """Predict what the measured configurations of a sweep, and of `others` by their directories, take on shapes.

    Raises ConfigError where nothing was measured, or of a training function, whose steps cannot be taken apart.
    """
    if spec.is_of_function:
        rule = "is a training function, whose steps cannot be taken apart"
        raise ConfigError("train_func", spec.train["train_func"], rule, "write it as a `task`", spec.source)
    trials = [one for sweep in (spec, *map(read_kept, others)) for one in _trials(sweep)]
    if not trials:
        fix = f"run `python -m tune {spec.source}` on what is at hand first: two batch sizes tell more than one"
        raise ConfigError("--what-if", MISSING, f"has nothing to go by: no trial of {spec.uri} has ended", fix)
    known = _learned(spec, trials, shapes)
    labels = telling(spec.config, [one.record for one in trials])
    by_configuration = defaultdict(list)
    for one in trials:
        by_configuration[one.configuration].append(one)
    groups: dict[str, int] = {}
    for at in (one.measured.where for one in trials):
        if at.workers > 1:
            groups[at.link] = max(at.workers, groups.get(at.link, 0))
    found, missing = [], dict[str, str]()
    for shape in shapes:
        rows = []
        for alike in by_configuration.values():
            setting = known[alike[0].setting]
            if not setting.times.can(shape.device):
                missing[shape.text] = _why_not(shape, alike[0])
                continue
            samples = _samples_to_target(spec, alike)
            rows.append(_predict(shape, alike[0], setting, groups, samples, in_short(labels, alike[0].record)))
        found += sorted(rows, key=_rank)
    missing = {text: why for text, why in missing.items() if not any(one.shape.text == text for one in found)}
    return WhatIf(len(trials), bool(groups), tuple(found), missing)


def _trials(spec: SweepSpec) -> Iterator[_Trial]:
    for record in Journal(spec.storage).records():
        if record.ran is not None and record.step_time_s and not record.schedule:
            yield _Trial(record, record.ran, trial_config(spec.train, record.config))


def _learned(spec: SweepSpec, trials: Sequence[_Trial], shapes: Sequence[Shape]) -> dict[str, _Known]:
    """Learn each setting, those first that were measured with several workers: they tell the others of links."""
    by_setting = defaultdict(list)
    for one in trials:
        by_setting[one.setting].append(one)
    links = LINKS | {one.measured.where.link: MEASURED for one in trials}
    links |= {shape.text: shape.link for shape in shapes if shape.link is not None}
    sheets = {one.device: one.sheet for one in shapes if one.sheet is not None}
    sheets |= {one.device: one.sheet for one in (Shape("", 1, device_of(t.ran.device)) for t in trials) if one.sheet}
    found: dict[str, _Known] = {}
    told = None
    for setting, alike in sorted(by_setting.items(), key=lambda item: -sum(one.ran.workers > 1 for one in item[1])):
        config = alike[0].config
        steps = FakeSteps(RunSpec(config.tree(), spec.path, spec.source, ""), config)
        batches = [one.ran.global_batch_size for one in trials]
        shares = [-(-batch // shape.workers) for batch in batches for shape in shapes] + batches
        sizes = min(shares), max(max(shares), min(shares) + 1)
        rooflines = {device: line for device, sheet in sheets.items() if (line := steps.roofline(sheet, sizes))}
        times = learn([one.measured for one in alike], steps.gradient_bytes, links, rooflines, told)
        found[setting] = _Known(steps, times, _memory_taken(steps, alike))
        if told is None and any(one.ran.workers > 1 for one in alike):
            told = times.draws
    return found


def _memory_taken(steps: FakeSteps, alike: Sequence[_Trial]) -> float:
    ratios = [
        one.record.peak_memory_bytes
        / steps.peak_bytes(one.ran.global_batch_size, one.ran.workers, one.ran.microbatch_size)
        for one in alike
        if one.record.peak_memory_bytes and device_of(one.ran.device) != "cpu"
    ]
    return float(np.median(ratios)) if ratios else 1.0


def _why_not(shape: Shape, one: _Trial) -> str:
    if shape.sheet is None:
        return "no trial was measured on a processor"
    precision = one.config.precision
    return f"its data sheet has no bandwidth, or no peak in {precision}"


def _samples_to_target(spec: SweepSpec, alike: Sequence[_Trial]) -> tuple[float, float] | None:
    """Return the median and the standard deviation of the logarithm of the samples that a run needs to the target."""
    logs = []
    for one in alike:
        reached = next((row for row in one.record.curve if spec.config.objective.reached(row)), None)
        if reached is not None and reached.get("step"):
            logs.append(math.log(reached["step"] * one.ran.global_batch_size))
    return (float(np.mean(logs)), REPEATS * math.sqrt(1 + 1 / len(logs))) if logs else None


def _predict(
    shape: Shape,
    one: _Trial,
    known: _Known,
    groups: Mapping[str, int],
    samples: tuple[float, float] | None,
    words: str,
) -> Predicted:
    batch, prices, times = one.ran.global_batch_size, tuple(all_prices().values()), known.times
    share = -(-batch // shape.workers)
    microbatch, memory, fits = _memory(shape, one, known, share)
    link = shape.link_name(groups, prices)
    where = Where(shape.device, shape.workers, share, -(-share // max(1, microbatch)), link)
    drawn = times.predict(where)
    time_s = usd = None
    if samples is not None:
        rng = np.random.default_rng(1)
        needed = np.exp(samples[0] + samples[1] * rng.standard_normal(len(drawn)))
        time_s = needed / batch * drawn
    price = cheapest(shape, link, prices)
    if price is not None and time_s is not None:
        usd = time_s / 3600 * price[0]
    return Predicted(
        shape,
        words,
        one.record.config,
        link,
        _interval(drawn),
        _interval(batch / drawn),
        microbatch,
        memory,
        fits,
        None if time_s is None else _interval(time_s),
        price and price[0],
        price[1] if price else "",
        None if usd is None else _interval(usd),
    )


def _memory(shape: Shape, one: _Trial, known: _Known, share: int) -> tuple[int, Interval, bool | None]:
    """Return the microbatch size, what it takes of memory, and whether that is there."""
    batch, wanted, workers = one.ran.global_batch_size, one.config.microbatch_size, shape.workers
    size, fits = min(share, one.ran.microbatch_size if wanted == "auto" else wanted), None
    if shape.sheet is not None and shape.sheet.memory_bytes:
        size = share if wanted == "auto" else size
        room = usable_bytes(shape.sheet.memory_bytes) / known.taken
        fits = known.steps.peak_bytes(batch, workers, size) <= room
        if not fits and wanted == "auto":
            largest = known.steps.largest(batch, workers, int(room))
            size, fits = max(1, largest), largest > 0
    peak = known.steps.peak_bytes(batch, workers, size) * known.taken
    return size, Interval(peak, peak * (1 - ERROR), peak * (1 + ERROR)), fits


def _interval(drawn: Array) -> Interval:
    low, middle, high = np.quantile(drawn, [0.025, 0.5, 0.975])
    return Interval(float(middle), float(low), float(high))


def _rank(one: Predicted) -> tuple[bool, float, float]:
    """The best first: what fits, by time to target; without one, by samples/s."""
    time_s = math.inf if one.time_to_target_s is None else one.time_to_target_s.value
    return one.fits is False, time_s, -one.samples_per_s.value
