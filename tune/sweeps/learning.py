"""What a sweep takes from earlier ones when it begins, and leaves to later ones when it has ended (Ray)."""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from trainers.errors import StorageError, counted
from trainers.storage import Storage
from trainers.versions import package_versions
from tune.knowledge.code import task_digest
from tune.knowledge.entry import Bound, Entry, plain_train, told
from tune.knowledge.store import Store, entry_id
from tune.knowledge.taken import Here, Taken, choose, keep, read
from tune.sweeps.spec import SweepSpec
from tune.trials.record import TrialRecord

logger = logging.getLogger(__name__)


def here(spec: SweepSpec, use_gpu: bool) -> Here:
    """Return what tells a sweep on this cluster from others."""
    task = str(spec.train.get("task") or spec.train.get("train_func"))
    versions = package_versions("paceline", "torch")
    return Here(task, task_digest(task, spec.path), _hardware(use_gpu), versions)


def _hardware(use_gpu: bool) -> str:
    """Return the models of the cluster's GPUs as Ray knows them, or of this machine's processors and their number."""
    if use_gpu:
        names = {name for node in ray.nodes() if node["Alive"] for name in node["Resources"]}
        found = sorted(name.partition(":")[2] for name in names if name.startswith("accelerator_type:"))
        return ", ".join(found) or "an unknown GPU"
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return f"{model[1] if model else 'cpu'}, {os.cpu_count()} CPUs"


def take(spec: SweepSpec, where: Here) -> list[Taken]:
    """Return what a sweep begins with, and keep it in its directory; one that goes on has what it began with."""
    if not spec.config.knowledge:
        return []
    try:
        taken = read(spec.storage)
        if taken is None:
            # What was begun without goes on without: its trials would be chosen anew.
            is_new = not spec.storage.names("trials")
            entries = Store(_beside(spec)).related(where.task, where.code) if is_new else []
            taken = choose(entries, where, spec.config, spec.train)
            keep(spec.storage, taken)
            if taken:
                logger.info("earlier sweeps count: %s", words(taken))
    except StorageError as error:
        logger.warning("what earlier sweeps found cannot be read: %s", error)
        return []
    return taken


def words(taken: Sequence[Taken]) -> str:
    """Return what was taken from where."""
    parts = []
    for one in taken:
        what = counted(len(one.entry.trials), "trial") if one.entry.trials else "microbatches"
        but = f" (another: {', '.join(one.differs)})" if one.differs else ""
        parts.append(f"{one.entry.id}, {what} of {one.entry.sweep}{but}")
    return "; ".join(parts)


def leave(spec: SweepSpec, where: Here, records: Sequence[TrialRecord], bounds: Sequence[dict[str, Any]]) -> None:
    """Write what a sweep that has ended has found into the store."""
    known = [Bound(**one) for one in bounds if one["fits"] or one["misfit"]]
    trials = told(spec.config, spec.train, records)
    if not (spec.config.knowledge and records and (trials or known)):
        return
    ended, began = max(one.end_time for one in records), min(one.start_time for one in records)
    entry = Entry(
        entry_id(spec.uri, began),
        spec.uri,
        ended,
        where.task,
        where.code,
        plain_train(spec.train),
        where.hardware,
        where.versions,
        spec.config.objective.target or {},
        trials,
        known,
    )
    try:
        Store(_beside(spec)).write(entry)
    except StorageError as error:
        logger.warning("what this sweep found is not kept for later ones: %s", error)


def _beside(spec: SweepSpec) -> Storage:
    return Storage(spec.uri).parent
