"""Sends a sweep to its trackers, as a run with a child run for each trial.

`python -m tune.sweeps.tracking` is the process that
trainers/tracking/delivery.py starts.
"""

from typing import Any

from trainers.errors import redact
from trainers.storage import Storage
from trainers.tracking.delivery import History, as_params, serve
from trainers.tracking.sinks import Row
from tune.search.space import trial_tree
from tune.sweeps.spec import SAVED, SweepSpec, read_saved
from tune.trials.journal import Journal, in_order
from tune.trials.record import TrialRecord

_ARTIFACTS = ("best.yaml", "report.html", "results.parquet", "summary.json")
_FIGURES = [
    "samples_per_s",
    "step_time_s",
    "time_to_target_s",
    "peak_memory_bytes",
    "step_time_ci95_s",
    "samples",
    "epochs",
    "cpu_pressure",
    "disturbed_s",
]
_POSITION = ("step", "epoch", "train_time_s")


class SweepHistory:
    """A sweep's history for trackers: its trials as they end, and its report."""

    def __init__(self, sweep: Storage) -> None:
        self._sweep = sweep
        self._journal = Journal(sweep)
        self._read = set[str]()
        self._end = 0.0
        """When the last trial ended."""
        self._spec: SweepSpec | None = None

    def poll(self, ended: str | None) -> list[History]:
        """Return the sweep's history, and those of newly ended trials."""
        if self._spec is None:
            self._spec = read_saved(self._sweep.uri)
        spec = self._spec
        names = self._journal.names() - self._read
        self._read |= names
        found = map(self._journal.find, names)
        histories = []
        for record in in_order(filter(None, found)):
            self._end = max(self._end, record.end_time)
            histories.append(trial_history(spec, record))
        return [self._parent(spec, ended), *histories]

    def _parent(self, spec: SweepSpec, ended: str | None) -> History:
        params = as_params(spec.saved())
        tags = {"uri": redact(self._sweep.uri)}
        rows: list[Row] = []
        artifacts: dict[str, bytes] = {}
        if ended == "done":
            summary = self._sweep.read_json("summary.json", dict[str, Any])
            tags |= {
                **summary["environment"],
                "answer": redact(summary["answer"]),
            }
            values = {"trials": float(summary["trials"])}
            best = summary["best"]
            if best is not None:
                tags["best"] = best["id"]
                values[f"best/{spec.config.objective.metric}"] = float(
                    best["value"]
                )
            rows.append(Row(int(summary["trials"]), self._end, values))
            there = filter(self._sweep.exists, _ARTIFACTS)
            artifacts = {name: self._content(name) for name in there}
        return History(
            spec.config.name,
            "sweep",
            params,
            tags,
            rows,
            artifacts=artifacts,
            ended=ended,
        )

    def _content(self, name: str) -> bytes:
        content = self._sweep.read(name)
        if name.endswith(".yaml"):
            return redact(content.decode()).encode()
        return content


def trial_history(spec: SweepSpec, record: TrialRecord) -> History:
    """Return the history of an ended trial: its evaluations and final figures."""
    rows: dict[int, Row] = {}
    end_s = max((point["train_time_s"] for point in record.curve), default=0.0)
    # Counted back from the end, as a lane may begin a trial before Tune starts
    # it.
    began = record.end_time - end_s
    for point in record.curve:
        time_s = began + point["train_time_s"]
        step = int(point["step"])
        rows[step] = Row(step, time_s, _without_position(point))
    last = int(max([record.metrics.get("step", 0.0), *rows]))
    values = dict(rows[last].values) if last in rows else {}
    values["trial_time_s"] = record.on_lane_s
    for name in _FIGURES:  # a failed trial lacks most of them
        value = getattr(record, name)
        if value is not None:
            values[name] = float(value)
    for name, value in _without_position(record.metrics).items():
        values[f"metrics.{name}" if name in _FIGURES else name] = value
    rows[last] = Row(last, record.end_time, values)
    tags = {
        "status": record.status,
        "purpose": record.purpose,
        "message": record.message,
        "lane": str(record.lane),
    }
    if record.seed is not None:
        tags["seed"] = str(record.seed)
    words = [f"{key} {value}" for key, value in record.config.items()]
    words.append(record.id)
    return History(
        name=", ".join(words)[:128],
        kind="trial",
        params=as_params(trial_tree(spec.train, record.config)),
        tags=tags,
        rows=[rows[step] for step in sorted(rows)],
        key=record.id,
        ended=record.status,
    )


def _without_position(values: dict[str, float]) -> dict[str, float]:
    return {
        name: value for name, value in values.items() if name not in _POSITION
    }


if __name__ == "__main__":
    serve(SAVED, SweepHistory)
