"""What trackers say of the runs that they have: read back by their own clients
and formats.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Curves = dict[str, list[tuple[int, float]]]
"""For each metric its values by step, in the order in which the tracker has them."""


@dataclass
class Kept:
    """A run as a tracker has it."""

    id: str
    curves: Curves = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    parent: str | None = None
    status: str = ""
    files: dict[str, bytes] = field(default_factory=dict)


def mlflow_runs(uri: str, experiment: str, scratch: Path) -> dict[str, Kept]:
    """Runs of an experiment by name, from a store or a server."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    runs = {}
    for run in client.search_runs([found.experiment_id]):
        id_ = run.info.run_id
        tags = run.data.tags
        curves = {
            name: [
                (metric.step, metric.value)
                for metric in client.get_metric_history(id_, name)
            ]
            for name in run.data.metrics
        }
        files = {}
        for file in client.list_artifacts(id_):
            files[file.path] = Path(
                client.download_artifacts(id_, file.path, str(scratch))
            ).read_bytes()
        assert run.info.run_name not in runs
        parent = tags.get("mlflow.parentRunId")
        runs[run.info.run_name] = Kept(
            id_, curves, run.data.params, tags, parent, run.info.status, files
        )
    return runs


def wandb_records(file: Path) -> Iterator[Any]:
    """What an offline run's file holds, whose last record may not be whole:
    W&B's head, then LevelDB's log format.
    """
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    head = 7
    block = 32768
    data = file.read_bytes()
    place = head
    whole = b""
    while place + head <= len(data):
        left = block - place % block
        if left < head:  # padding
            place += left
            continue
        length, kind = struct.unpack_from("<4xHB", data, place)
        start = place + head
        place = place + head + length
        if place > len(data):
            return
        whole += data[start:place]
        if kind in (1, 4):  # a record in one piece, or the last of several
            yield Record.FromString(whole)
            whole = b""


def wandb_runs(directory: Path) -> dict[str, Kept]:
    """Offline runs by name; the files of all starts of one id are one run, in
    which a step that comes again stands in place of the one before.
    """
    runs = {}
    for file in sorted(
        directory.glob("offline-run-*/run-*.wandb"),
        key=lambda path: path.stat().st_mtime,
    ):
        kept = None
        for record in wandb_records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run = record.run
                kept = runs.setdefault(run.display_name, Kept(run.run_id))
                assert kept.id == run.run_id
                kept.parent = run.run_group or None
                kept.status = run.job_type
                kept.params |= {
                    item.key: json.loads(item.value_json)
                    for item in run.config.update
                }
            elif kind == "artifact":
                assert kept is not None
                kept.files[record.artifact.name] = b""
            elif kind == "history":
                assert kept is not None
                row = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                for name, value in row.items():
                    if not name.startswith("_"):
                        curve = dict(kept.curves.get(name, ()))
                        kept.curves[name] = [
                            *(curve | {row["_step"]: value}).items()
                        ]
    return runs
