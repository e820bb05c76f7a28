"""A sweep as plain data: how it is read, checked (without Ray) and saved."""

import contextlib
import shlex
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainers.config.function import FunctionConfig, build_run, kind_of
from trainers.config.model import Tree, build, override, refuse_changes
from trainers.config.sections import TrackerConfig, chosen
from trainers.config.yaml import dump_yaml
from trainers.errors import ConfigError
from trainers.launch.spec import (
    make_spec,
    read_file,
    read_mapping,
)
from trainers.lease import delete_own, fenced
from trainers.storage import Storage, inside_ray_job, storage_uri
from tune.config import MEASURED, SweepConfig, sample_values
from tune.forks.client import Zygote
from tune.forks.zygote import Preload
from tune.search.finalists import repeats_to_run
from tune.search.space import (
    check_space,
    error_in_space,
    known_space,
    open_trials,
    planned_trials,
    trial_tree,
)
from tune.trials.journal import Journal
from tune.trials.record import Records
from tune.trials.steering import Actions

SAVED = "sweep.yaml"


class KeptConfig(SweepConfig):
    """A sweep as saved in its directory, with its run in the same file."""

    train: Tree


class Interrupted(Exception):  # noqa: N818 (a wish, not an error)
    """Ctrl-C, or SIGTERM from `ray job stop`."""


@dataclass(frozen=True)
class SweepSpec:
    """Everything that a sweep needs."""

    config: SweepConfig
    train: Tree
    """The resolved configuration that trials vary: a TrainConfig, or a
    FunctionConfig.
    """
    path: tuple[str, ...]
    """Directories that are searched for the task's module."""
    source: str
    """The file that the sweep came from, for error messages."""
    uri: str
    """The sweep's directory."""
    token: str = ""
    """Token of the directory's lease, which is needed to write; empty if no
    lease is held.
    """
    is_kept: bool = False
    """Whether the sweep was read from its directory, with pending extensions applied."""

    @property
    def storage(self) -> Storage:
        """The sweep's directory."""
        return fenced(Storage(self.uri), SAVED, self.token)

    def resume(self) -> str:
        """Return the command that resumes the sweep; inside a Ray job, as another job."""
        submit = (
            "ray job submit --working-dir . -- " if inside_ray_job() else ""
        )
        return f"{submit}python -m tune {shlex.quote(self.uri)}"

    @property
    def is_of_function(self) -> bool:
        """Whether trials are runs of a training function, not of a task."""
        return kind_of(self.train) is FunctionConfig

    def zygote(self) -> Zygote:
        """Start the sweep's zygote on this node, without waiting until it is up."""
        modules = (
            ["tune.forks.function", "ray.tune"] if self.is_of_function else []
        )
        named = self.train["train_func" if self.is_of_function else "task"]
        modules.append(str(named).partition(":")[0])
        forks = self.config.isolation != "fresh"
        return Zygote(
            uuid.uuid4().hex[:12], Preload(self.path, tuple(modules), forks)
        )

    @property
    def trackers(self) -> list[TrackerConfig]:
        """The experiment trackers to which the sweep is sent."""
        return chosen(build_run(self.train, self.source).tracking)

    @property
    def num_trials(self) -> int:
        """The number of trials in the search."""
        return planned_trials(self.config)

    def saved(self) -> Tree:
        """Return the content of the sweep's file in its directory."""
        sweep = self.config.model_dump(exclude_none=True)
        task_dir = self.path[0] if self.path else None
        return sweep | {"train": self.train | {"task_dir": task_dir}}


def read_sweep(
    location: str, overrides: Tree, own_workers: bool = True
) -> SweepSpec:
    """Read and check a sweep file, before torch or Ray is imported.

    Overrides are keys of the sweep (`--lanes 2`, `--objective.metric
    val_loss`) or, below `train.`, of the run. `own_workers` says whether the
    sweep will run from this machine; a sweep that is only planned for a
    cluster need not fit here.
    """
    tree, directory = read_file(location)
    return sweep_with(tree, location, directory, overrides, own_workers)


def sweep_with(
    tree: Tree,
    location: str,
    directory: Path | None,
    overrides: Tree,
    own_workers: bool = True,
) -> SweepSpec:
    """Check a sweep's mapping from `location`, with overrides as in `read_sweep`."""
    of_sweep: Tree = {}
    sections: dict[str, Tree] = {"train": {}, "space": {}}
    for key, value in overrides.items():
        section, _, rest = key.partition(".")
        if rest and section in sections:
            sections[section][rest] = value
        else:
            of_sweep[key] = value
    tree = override(SweepConfig, tree, of_sweep)
    space = tree.get("space") or {}
    if isinstance(space, dict):
        tree["space"] = space | sections["space"]
    config = build(SweepConfig, tree, location)
    source = location
    train = config.train
    if isinstance(train, str):
        source = train
        is_relative = "://" not in train and not Path(train).is_absolute()
        if is_relative and directory is not None:
            source = str(directory / train)
        elif is_relative and "://" in location:
            source = Storage(location).parent.locate(train)
        train, directory = read_file(source)
    train = override(kind_of(train), train, sections["train"])
    return _spec(config, train, source, location, directory, own_workers)


def _spec(
    config: SweepConfig,
    train: Tree,
    train_file: str,
    source: str,
    directory: Path | None,
    own_workers: bool,
) -> SweepSpec:
    # A trial's own name and storage have no effect: only the journal stores
    # results.
    own = ("name", "storage_path")
    given = {key: value for key, value in train.items() if key not in own}
    space = known_space(config.space, given, source)
    # Use the first value of each swept key, since some keys may be in the
    # space only.
    first = {key: sample_values(values)[0] for key, values in space.items()}
    base = trial_tree(given, first)
    try:
        if kind_of(base) is FunctionConfig:
            config.check_function()
        uri = Storage(storage_uri(config.storage_path)).child(config.name).uri
    except ConfigError as error:
        raise error.at(source) from error
    try:
        run = make_spec(
            base | {"storage_path": uri}, train_file, directory, own_workers
        )
    except ConfigError as error:
        if error.field in space:
            raise error_in_space(error, first, source) from error
        raise
    kept = dict(run.tree)
    kept.pop("storage_path")
    config = config.model_copy(update={"space": space})
    check_space(config, kept, source)
    return SweepSpec(config, kept, run.path, source, uri)


def read_saved(location: str, overrides: Tree | None = None) -> SweepSpec:
    """Read the sweep in a directory, with its extensions and `overrides`, to run it.

    Raises ConfigError if the directory holds no sweep that can run here.
    """
    kept = read_kept(location)
    task_dir = kept.train.get("task_dir")
    directory = Path(str(task_dir)) if task_dir else None
    keys = Actions(kept.storage).read().extension
    given = overrides or {}
    for key in given:
        keys.pop(key, None)
    keys |= given
    tree = kept.config.model_dump(exclude_none=True)
    return replace(
        sweep_with(tree, kept.source, directory, keys), is_kept=True
    )


def read_kept(location: str) -> SweepSpec:
    """Read the sweep in a directory without its task, which need not be present.

    Raises ConfigError if the directory holds no sweep.
    """
    storage = Storage(storage_uri(location))
    if not storage.exists(SAVED):
        fix = f"give a directory with a {SAVED}"
        raise ConfigError("the directory", location, "holds no sweep", fix)
    source = storage.locate(SAVED)
    tree = read_mapping(storage, SAVED)
    config = build(
        KeptConfig, tree | {"storage_path": storage.parent.uri}, source
    )
    return SweepSpec(config, config.train, (), source, storage.uri)


def is_complete(spec: SweepSpec) -> bool:
    """Return whether all trials, clones and repeats of finalists have records.

    If a random search draws a configuration twice, this returns False although
    all trials have run.
    """
    records = Journal(spec.storage).records()
    ended = {record.id for record in records}
    clones = Actions(spec.storage).read().clones
    if num_missing(spec.config, records) or not clones.keys() <= ended:
        return False
    return not repeats_to_run(spec.config, spec.train, records)


def num_missing(config: SweepConfig, records: Records) -> int:
    """Return how many trials of the search have no record."""
    if config.search == "grid":
        return len(open_trials(config, records))
    ended = {record.id for record in records if record.purpose == "trial"}
    return max(0, planned_trials(config) - len(ended))


def prepare(spec: SweepSpec, fresh: bool) -> int:
    """Prepare the sweep's directory; the caller holds its lease.

    Returns how many trials already have a record there.

    Raises ConfigError if the directory holds another sweep of this name.
    """
    if fresh:
        delete_own(spec.storage, SAVED)
    count = num_kept(spec)
    # A saved extension would be lost.
    if not (count and Actions(spec.storage).read().extension):
        spec.storage.write(SAVED, dump_yaml(spec.saved()).encode())
    return count


def num_kept(spec: SweepSpec) -> int:
    """Return how many records the sweep's directory holds; change nothing.

    Raises ConfigError as `prepare` does.
    """
    storage = spec.storage
    count = len(Journal(storage).names())
    if storage.exists(SAVED):
        then = known_keys(read_mapping(storage, SAVED), spec.source)
        now = known_keys(spec.saved(), spec.source)
        # Without records these may change: a wrong metric, or workers that fit
        # on no node, may have ended the sweep.
        if not count:
            now["objective"] = then["objective"]
            now["train.scaling"] = then.get("train.scaling")
        fix = f"continue that sweep with `python -m tune {shlex.quote(storage.uri)}`, give another `--name`, or start over with `--fresh`"
        refuse_untrue(spec, then, now, fix)
    return count


def refuse_untrue(spec: SweepSpec, then: Tree, now: Tree, fix: str) -> None:
    """Raise ConfigError for the first change of a key that records depend on.

    `scaling` changes the speed, what a training function does, and the batch
    if the space gives it for each worker.
    """
    is_by_worker = (
        spec.config.objective.metric in MEASURED
        or "batch_size_per_worker" in spec.config.space
        or spec.is_of_function
    )
    free = ["train.task_dir", "train.tracking"]
    if not is_by_worker:
        free.append("train.scaling")
    for key in free:
        then.pop(key, None)
        now.pop(key, None)
    refuse_changes(then, now, spec.uri, fix, spec.source)


def known_keys(saved: Tree, source: str) -> Tree:
    """Return a saved sweep's space, search, objective, and its run's keys (train.KEY)."""
    found = {key: saved.get(key) for key in ("space", "search", "objective")}
    for key, value in with_defaults(saved.get("train"), source).items():
        found[f"train.{key}"] = value
    return found


def with_defaults(train: Any, source: str) -> Tree:
    """Return a saved `train`, with defaults for keys that an older version lacked."""
    tree = train if isinstance(train, dict) else {}
    with contextlib.suppress(
        ConfigError
    ):  # an invalid run is compared unchanged
        return build_run(tree, source).tree()
    return tree
