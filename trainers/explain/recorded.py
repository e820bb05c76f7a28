"""What a run's own records say of its time: pure functions of its result, its log and its configuration."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainers.config import TrainConfig
from trainers.explain.readings import Profile, Readings, Span, Suspicion
from trainers.explain.suspect import WORTH
from trainers.measure.clock import WARMUP_STEPS
from trainers.measure.ranks import findings
from trainers.measure.result import Pauses, RunResult

_SWAPPING = 10.0
_WAITS_FOR_CORE = 0.1
_ENOUGH = 0.01  # of the time, which evaluations and checkpoints may take


@dataclass(frozen=True)
class Recorded:
    """What a run has left; without a result it runs, or has failed."""

    config: TrainConfig
    result: RunResult | None = None
    log: list[dict[str, Any]] = field(default_factory=list)

    @property
    def wall_s(self) -> float:
        """Of the last launch."""
        assert self.result is not None
        paused = self.result.pauses
        counted = 0.0 if paused is None else paused.evaluation_s + paused.checkpoint_s
        return max(self.result.wall_time_s, self.training_s + counted, 1e-9)

    @property
    def training_s(self) -> float:
        """In steps of the last launch."""
        assert self.result is not None
        return self.result.train_time_s - self.result.earlier_time_s

    def part(self, one: Suspicion) -> float:
        """Share of the run's time of which a suspicion's gain is a share."""
        if self.result is None or one.of_run:
            return 1.0
        pauses = self.result.pauses or Pauses()
        return (self.training_s + pauses.evaluation_s * one.in_evaluation) / self.wall_s

    def excess_s(self) -> float:
        """Time of steps that the throughput leaves out, beyond what as many usual ones take: they compiled."""
        result = self.result
        if result is None or result.compile is None or result.throughput is None or result.earlier_time_s:
            return 0.0
        first = max(0.0, (result.first_step_s or 0.0) - result.throughput.step_time_s)
        return max(0.0, self.training_s - first - result.steps * result.throughput.step_time_s)


def run_shares(recorded: Recorded, profile: Profile | None) -> dict[str, float]:
    """Return the shares of the last launch's time, which add up to 1: steps by the profile's segments, or without one
    by what the run measured itself; without a result those of the profile alone.
    """
    result = recorded.result
    inside = profile.readings.shares() if profile is not None else {}
    if result is None:
        lost = profile.readings.recompiled_share if profile is not None else 0.0
        return {name: share * (1 - lost) for name, share in inside.items()} | ({"recompiles": lost} if lost else {})
    wall_s, training_s = recorded.wall_s, recorded.training_s
    if not inside:
        waited = result.throughput.data_wait_share if result.throughput is not None else 0.0
        inside = {"waiting for data": waited, "steps": 1 - waited}
    pauses = result.pauses
    outside = {} if pauses is None else {"evaluation": pauses.evaluation_s, "checkpoints": pauses.checkpoint_s}
    if result.compile is not None and result.first_step_s is not None:
        outside["first step"] = min(training_s, result.first_step_s)
        outside["recompiles"] = min(training_s - outside["first step"], recorded.excess_s())
    usual_s = training_s - outside.get("first step", 0.0) - outside.get("recompiles", 0.0)
    found = {name: share * usual_s / wall_s for name, share in inside.items()}
    for name, seconds in outside.items():
        found[name] = found.get(name, 0.0) + seconds / wall_s
    found["between"] = max(0.0, 1 - sum(found.values()))
    total = sum(found.values())
    return {name: share / total for name, share in found.items() if share > 0}


def suspect_records(recorded: Recorded, readings: Readings | None) -> list[Suspicion]:
    """Return what the records show; gains are shares of the run's time."""
    found = [
        *_pauses(recorded, readings),
        *_recompiled(recorded, readings),
        *_slowed(recorded, readings),
        *(_unprofiled(recorded) if readings is None else ()),
    ]
    return [one for one in found if one.gain.value > WORTH]


def _slower(recorded: Recorded, readings: Readings | None) -> float:
    """Share of their time by which the run's steps took longer than they do now."""
    result = recorded.result
    if readings is None or result is None or result.throughput is None:
        return 0.0
    return max(0.0, 1 - readings.plain_step_s / result.throughput.step_time_s)


def _pauses(recorded: Recorded, readings: Readings | None) -> Iterator[Suspicion]:
    result, config = recorded.result, recorded.config
    if result is None or (pauses := result.pauses) is None:
        return
    evaluate, checkpoint = config.evaluate, config.checkpoint
    # What is written beside the steps slows them where cores are few.
    beside_s = min(pauses.written_s, _slower(recorded, readings) * recorded.training_s)
    each_checkpoint_s = (pauses.checkpoint_s + beside_s) / max(1, pauses.checkpoints)
    for kind, count, each_s, section, every in (
        ("evaluation too often", pauses.evaluations, pauses.each_evaluation_s, "evaluate", evaluate),
        ("checkpoint stalls", pauses.checkpoints, each_checkpoint_s, "checkpoint", checkpoint),
    ):
        share = count * each_s / recorded.wall_s
        if count < 2 or share <= WORTH:
            continue
        # The last one is always made.
        factor = max(2, round(share / _ENOUGH))
        kept = max(1, count // factor)
        each = f"{each_s * 1e3:.3g} ms each"
        words = f"{count} of them, {each}, took {share:.0%} of the run's time"
        key, value = next(
            (name, value)
            for name, value in (
                ("every_steps", every.every_steps),
                ("every_s", getattr(every, "every_s", None)),
                ("every_epochs", every.every_epochs or 1),
            )
            if value
        )
        gain = share * (1 - kept / count)
        fix = "`checkpoint.async: true` writes them beside the steps" if section == "checkpoint" else ""
        changes = {f"{section}.{key}": value * factor}
        yield Suspicion(kind, words, Span(gain, 0.9 * gain, min(1.0, 1.1 * gain)), changes, fix, of_run=True)


def _recompiled(recorded: Recorded, readings: Readings | None) -> Iterator[Suspicion]:
    """By the records, and where there are none by the profile."""
    share = readings.recompiled_share if readings is not None else 0.0
    words = f"steps after the warm-up compiled again, which is {share:.0%} of the whole run's time"
    if recorded.result is not None:
        times = (recorded.result.compile or {}).get("recompiles", 0)
        share = recorded.excess_s() / recorded.wall_s if times else 0.0
        words = f"{times} graphs were compiled again in mid-training, which took {share:.0%} of the run's time"
    fix = "give the model batches of one shape (`drop_last: true`, padding) and no Python numbers that change; or set "
    fix += "`compile: off`"
    yield Suspicion("recompiles", words, Span(share, 0.8 * share, share), fix=fix, of_run=True)


def _slowed(recorded: Recorded, readings: Readings | None) -> Iterator[Suspicion]:
    """Causes outside the run, by the readings of the driver and the operating system; what they cost is how much slower
    the run was than its own fastest windows, or than its steps are now.
    """
    result = recorded.result
    if result is None or result.throughput is None:
        return
    windows = [one["step_time_s"] for one in recorded.log if one.get("step", 0) > WARMUP_STEPS and "step_time_s" in one]
    lost = max(_lost(windows), _slower(recorded, readings))
    gain = Span(lost, 0.5 * lost, lost).scaled(recorded.training_s / recorded.wall_s)
    machines = [row.get("machine") or {} for row in result.ranks]
    reasons = sorted({reason for row in result.ranks for reason in (row["gpu"] or {}).get("slowed_by", [])})  # type: ignore[union-attr]
    if any("heat" in reason or reason in ("hardware", "power brake", "power cap") for reason in reasons):
        heat = statistics.fmean(float((row["gpu"] or {}).get("temperature_c", 0.0)) for row in result.ranks)  # type: ignore[arg-type]
        words = f"the driver slowed the GPU's clocks ({', '.join(reasons)}; {heat:.0f} C)"
        fix = "cool it, raise its power limit, or leave the node out by `scaling.label_selector`"
        yield Suspicion("thermal throttling", words, gain, fix=fix, of_run=True)
    swapped = max((one.get("swapped_bytes", 0.0) for one in machines), default=0.0)
    faults = max((one.get("major_faults", 0.0) for one in machines), default=0.0)
    if swapped > 0 and faults > _SWAPPING:
        words = f"{swapped / 2**20:,.0f} MiB of the run were swapped out, and {faults:,.0f} pages a second came back"
        fix = "give it more memory: fewer `data.num_workers`, `data.resident: false`, another node"
        yield Suspicion("swapped memory", words, gain, fix=fix, of_run=True)
    pressure = max((one.get("cpu_pressure", 0.0) for one in machines), default=0.0)
    if pressure > _WAITS_FOR_CORE and readings is None:
        words = f"in {pressure:.0%} of the time something on the machine waited for a core"
        fix = "end what else runs there; `scaling.cpus_per_worker` reserves cores"
        yield Suspicion("busy neighbour", words, gain, fix=fix, of_run=True)


def _lost(windows: Sequence[float]) -> float:
    """Share of the time that is lost against the fastest tenth of a run's windows."""
    if len(windows) < 10:
        return 0.0
    fast = statistics.quantiles(windows, n=10)[0]
    return max(0.0, 1 - fast / statistics.fmean(windows))


def _unprofiled(recorded: Recorded) -> Iterator[Suspicion]:
    """What a run without a profile shows by itself."""
    result = recorded.result
    if result is None or result.throughput is None:
        return
    part, waited = recorded.training_s / recorded.wall_s, result.throughput.data_wait_share
    words = f"rank 0 waited {waited:.0%} of its steps for batches: for the loader or the task's transform()"
    workers = max(1, 2 * recorded.config.data.num_workers)
    share = Span(waited, 0.5 * waited, waited).scaled(part)
    yield Suspicion("slow loader", words, share, {"data.num_workers": workers}, of_run=True)
    for key, sentence in findings(result.ranks):
        if not key.endswith("slow"):
            continue
        known = [row["backward_s"] for row in result.ranks if row["backward_s"] is not None]
        late = (max(known) - statistics.median_low(known)) / result.throughput.step_time_s * part
        fix = "`python -m cluster check --exclude-bad` prints the label_selector that leaves out a slow node"
        yield Suspicion("straggling rank", sentence, Span(late, 0.5 * late, late), fix=fix, of_run=True)
