"""`python -m tune knowledge`: what the store holds, what a sweep took from it, and forgetting."""

import time
from collections.abc import Iterator, Sequence

from trainers.errors import ConfigError, counted
from trainers.storage import Storage, storage_uri
from tune.knowledge.entry import Entry
from tune.knowledge.store import Store
from tune.knowledge.taken import read
from tune.report.heard import heard
from tune.report.words import number
from tune.search.frontier_grid import Frontier
from tune.sweeps.spec import read_kept
from tune.trials.journal import Journal


def listed(storage_path: str | None) -> Iterator[str]:
    """Yield a paragraph for each entry of a store, the oldest first."""
    store = Store(Storage(storage_uri(storage_path)))
    entries = store.entries()
    for entry in entries:
        yield from _shown(entry)
    yield f"{counted(len(entries), 'sweep')} in {store.storage.uri}"


def _shown(entry: Entry) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in entry.versions.items())
    when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(entry.time))
    yield f"{entry.id}  {entry.task}  code {entry.code or 'unknown'}  {when} UTC"
    yield f"  from   {entry.sweep}"
    yield f"  on     {entry.hardware}; {versions}"
    if rates := [(one.samples_per_s, one.size) for one in entry.trials if one.samples_per_s]:
        sizes = [size for _, size in rates]
        speeds = f"{number(min(rates)[0], 3)} to {number(max(rates)[0], 3)} samples/s"
        yield f"  speed  batch sizes {min(sizes)} to {max(sizes)}: {speeds} in {counted(len(rates), 'trial')}"
    if entry.target:
        (metric, value) = next(iter(entry.target.items()))
        whole = sum(one.purpose != "probe" and bool(one.curve) for one in entry.trials)
        yield f"  target {metric} {value:g}: {counted(whole, 'trial')} towards it"
    if noises := [one.noise_scale for one in entry.trials if one.noise_scale]:
        yield f"  noise  scale {number(min(noises), 2)} to {number(max(noises), 2)} samples"
    for bound in entry.bounds:
        known = [f"{bound.fits} fits"] * bool(bound.fits) + [f"{bound.misfit} does not"] * bool(bound.misfit)
        yield f"  memory {bound.label}: a microbatch of {', '.join(known)}"


def explained(location: str) -> Iterator[str]:
    """Yield which entries a sweep began with, in what it differs from them, and which of them were wrong."""
    spec = read_kept(location)
    taken = read(spec.storage) or []
    for one in taken:
        yield from _shown(one.entry)
        yield f"  differs in {', '.join(one.differs)}" if one.differs else "  differs in nothing that is compared"
    if spec.config.search == "frontier":
        yield from filter(
            None, [heard(Frontier(spec.config, spec.train, spec.past()), Journal(spec.storage).records())]
        )
    yield f"{spec.uri} began with what {counted(len(taken), 'sweep')} found"


def delete(storage_path: str | None, names: Sequence[str]) -> Iterator[str]:
    """Delete entries by their ids, and yield a line for each; ConfigError for one that is not there."""
    store = Store(Storage(storage_uri(storage_path)))
    for name in names:
        if not store.delete(name):
            fix = "`python -m tune knowledge` lists those that are"
            raise ConfigError("--delete", name, f"is no entry of {store.storage.uri}", fix)
        yield f"deleted {name}"
