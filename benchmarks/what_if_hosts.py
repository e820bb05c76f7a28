"""What-if on hosts that are there: learn on one or two, predict more, and run those as well.

Run as: python -m benchmarks.what_if_hosts [--learn 2] [--most 6] [--share 0.2] [--mbit 100] [--other-seeds] [--keep]
Linux, as root. A host is a process in a network namespace of its own, with a share of a processor (a CFS quota) and a
link that `tc` shapes (a token bucket). The machine must have `--most` times `--share` processors, and be quiet: what is
measured is time. All that a host is made of is gone at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import save
from benchmarks.what_if import summarize
from trainers.config.yaml import dump_yaml
from trainers.measure.run_log import read_log
from trainers.storage import Storage
from tune.sweeps.spec import SweepSpec, prepare, read_sweep
from tune.trials.journal import Journal, trial_id
from tune.trials.record import TrialRecord, make_record
from tune.what_if.answer import what_if
from tune.what_if.shapes import read_shapes

REPOSITORY = Path(__file__).parents[1]
_NETWORK = "10.79.0"
_PORT = 29600
_QUOTA_US = 1_000
"""Of each period, the least that the kernel takes: a host is to be slow, not to stand still in every collective."""
# Steps of tenths of a second, as clusters have them: long beside the time slices of one kernel that runs all hosts on a
# few cores, which no cluster has.
_TRAIN: dict[str, Any] = {
    "task": "examples.digits.task:Digits",
    "task_args": {"channels": 96},
    "max_steps": 72,
    "precision": "fp32",
    "optimizer": {"name": "adamw", "lr": 0.002},
    "lr_scaling": {"rule": "sqrt", "base_batch_size": 64},
    "evaluate": {"every_steps": 2},
}
_TARGET = {"val_accuracy": 0.95}


class Hosts:
    """Namespaces on one bridge, and a control group each."""

    def __init__(self, count: int, share: float, mbit: float) -> None:
        self.names = [f"wi{os.getpid()}-{number}" for number in range(count)]
        self._bridge, self._share, self._mbit = f"wi{os.getpid()}-b", share, mbit
        self._root = Path("/sys/fs/cgroup/cpu")
        if not (self._root / "cpu.cfs_quota_us").exists():
            self._root = Path("/sys/fs/cgroup")

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as stack:
            stack.callback(self._remove)
            _ip("netns", "add", self._bridge)
            _ip("-n", self._bridge, "link", "add", "name", "switch", "type", "bridge")
            _ip("-n", self._bridge, "link", "set", "switch", "up")
            for number, name in enumerate(self.names):
                self._add(number, name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def _add(self, number: int, name: str) -> None:
        _ip("netns", "add", name)
        peer = ("peer", "name", f"h{number}", "netns", self._bridge)
        _ip("-n", name, "link", "add", "name", "eth0", "type", "veth", *peer)
        _ip("-n", self._bridge, "link", "set", f"h{number}", "master", "switch", "up")
        _ip("-n", name, "addr", "add", f"{_NETWORK}.{number + 10}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", name, "link", "set", device, "up")
        bucket = ("tbf", "rate", f"{self._mbit:g}mbit", "burst", "128k", "latency", "100ms")
        subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", *bucket], check=True)
        group = self.group(name)
        group.mkdir()
        period_us = round(_QUOTA_US / self._share)
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_period_us").write_text(str(period_us))
            (group / "cpu.cfs_quota_us").write_text(str(_QUOTA_US))
        else:
            (group / "cpu.max").write_text(f"{_QUOTA_US} {period_us}")

    def _remove(self) -> None:
        for name in (*self.names, self._bridge):
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
            with contextlib.suppress(OSError):
                self.group(name).rmdir()

    def group(self, name: str) -> Path:
        """Return the control group of a host."""
        return self._root / name

    def train(self, count: int, runs: Sequence[Mapping[str, Any]]) -> None:
        """Train runs, one after the other, on the first `count` hosts."""
        workers = []
        for rank, name in enumerate(self.names[:count]):
            of_rank = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            address = {"MASTER_ADDR": f"{_NETWORK}.10", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1}
            environment = os.environ | {key: str(value) for key, value in (of_rank | address).items()}
            command = ["nsenter", f"--net=/run/netns/{name}", sys.executable, "-m", "benchmarks.what_if_hosts"]
            command += ["--worker", json.dumps(list(runs)), "--group", str(self.group(name))]
            workers.append(subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.DEVNULL))
        try:
            codes = [worker.wait(timeout=1800) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        if any(codes):
            raise RuntimeError(f"workers ended with {codes}")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _work(runs: list[dict[str, Any]], group: Path) -> None:
    """Be the worker of a host: start at full speed, then train with its share of a processor."""
    from trainers import train

    (group / "cgroup.procs").write_text(str(os.getpid()))
    for number, run in enumerate(runs):
        os.environ["MASTER_PORT"] = str(_PORT + number)
        train(run, fresh=True)


def measured(hosts: Hosts, count: int, spec: SweepSpec, sizes: Sequence[int], other_seeds: bool) -> list[TrialRecord]:
    """Run every batch size on so many hosts; return their records, as a sweep would have them.

    The curve of a run is the same on any number of workers, but for rounding; with `other_seeds` each number of hosts
    has a seed of its own.
    """
    place = {"storage_path": spec.storage.parent.uri, "seed": count if other_seeds else 0}
    runs = [_TRAIN | place | {"name": f"{count}-{size}", "global_batch_size": size} for size in sizes]
    hosts.train(count, runs)
    records = []
    for run in runs:
        storage = Storage(f"{run['storage_path']}/{run['name']}")
        result = json.loads(storage.read("result.json"))
        curve = [row for row in read_log(storage) if "val_accuracy" in row and "train_time_s" in row]
        rows = [{key: float(value) for key, value in row.items() if isinstance(value, int | float)} for row in curve]
        config = {"global_batch_size": run["global_batch_size"]}
        outcome = {"status": result["status"], "result": result, "device": "cpu, 0 GiB"}
        records.append(make_record(trial_id(config), config, spec.config.objective, 0.0, rows, outcome))
    return records


def campaign(
    learn: int, most: int, share: float, mbit: float, sizes: Sequence[int], other_seeds: bool
) -> dict[str, Any]:
    """Learn on 1 to `learn` hosts, predict and measure `learn` + 1 to `most`."""
    with tempfile.TemporaryDirectory(prefix="what-if-") as directory, Hosts(most, share, mbit) as hosts:
        specs, learned = [_sweep(Path(directory), count, sizes) for count in range(1, learn + 1)], []
        for count, spec in enumerate(specs, 1):
            for record in measured(hosts, count, spec, sizes, other_seeds):
                Journal(spec.storage).append(record)
                times = {"step_time_s": record.step_time_s, "time_to_target_s": record.time_to_target_s}
                learned.append({"hosts": count} | record.config | times)
        counts = range(learn + 1, most + 1)
        link = "" if learn > 1 else f"@{mbit / 1000:g}Gbit"
        shapes = read_shapes(",".join(f"{count}xcpu{link}" for count in counts))
        found = what_if(specs[0], shapes, [spec.uri for spec in specs[1:]])
        rows = list(
            _compared(found.found, {count: measured(hosts, count, specs[0], sizes, other_seeds) for count in counts})
        )
    figures = {name: [row for row in rows if row["figure"] == name] for name in ("step time", "time to target")}
    given = {
        "learn": learn,
        "most": most,
        "share": share,
        "mbit": mbit,
        "sizes": list(sizes),
        "other_seeds": other_seeds,
    }
    return {"given": given, "learned": learned, "rows": rows} | {
        name: summarize([(name, [row["low"], row["predicted"], row["high"]], row["measured"]) for row in those])
        for name, those in figures.items()
        if those
    }


def _sweep(directory: Path, count: int, sizes: Sequence[int]) -> SweepSpec:
    file = directory / f"hosts-{count}.yaml"
    tree = {"name": f"hosts-{count}", "storage_path": str(directory), "train": _TRAIN | {"global_batch_size": sizes[0]}}
    tree |= {"space": {"global_batch_size": list(sizes)}}
    file.write_text(dump_yaml(tree | {"objective": {"metric": "time_to_target", "target": _TARGET}}))
    spec = read_sweep(str(file), {}, own_workers=False)
    prepare(spec, fresh=False)
    return spec


def _compared(found: Sequence[Any], there: Mapping[int, Sequence[TrialRecord]]) -> Iterator[dict[str, Any]]:
    for one in found:
        record = next(r for r in there[one.shape.workers] if r.config == one.config)
        pairs = {
            "step time": (one.step_time_s, record.step_time_s),
            "time to target": (one.time_to_target_s, record.time_to_target_s),
        }
        for name, (interval, value) in pairs.items():
            if interval is not None and value is not None:
                of_interval = {"predicted": interval.value, "low": interval.low, "high": interval.high}
                yield {"figure": name, "hosts": one.shape.workers, **one.config, "measured": value, **of_interval}


def main(argv: list[str] | None = None) -> None:
    """Hosts of this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learn", type=int, default=2, choices=(1, 2), help="hosts that are learned from")
    parser.add_argument("--most", type=int, default=6, help="hosts that are predicted, and run")
    parser.add_argument("--share", type=float, default=0.2, help="of a processor, a host")
    parser.add_argument("--mbit", type=float, default=100.0, help="of a link, a second")
    parser.add_argument("--other-seeds", action="store_true", help="each number of hosts trains with its own")
    parser.add_argument("--short", action="store_true", help="two batch sizes and three hosts")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker:
        _work(json.loads(given.worker), given.group)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the hosts go with it
    most = given.learn + 1 if given.short else given.most
    if most * given.share > math.floor(os.cpu_count() or 1):
        parser.error(f"{most} hosts with {given.share:g} of a processor each are more than there are")
    sizes = [32, 128] if given.short else [32, 64, 128, 256]
    found = campaign(given.learn, most, given.share, given.mbit, sizes, given.other_seeds)
    for row in found["learned"]:
        place = f"{row['hosts']} hosts, batch {row['global_batch_size']:4}, step time"
        print(f"  {place}     : learned from {row['step_time_s']:.4g} s")
    for row in found["rows"]:
        print(
            f"  {row['hosts']} hosts, batch {row['global_batch_size']:4}, {row['figure']:14}: measured "
            f"{row['measured']:.4g} s, predicted {row['predicted']:.4g} s [{row['low']:.4g}, {row['high']:.4g}]"
        )
    for name in ("step time", "time to target"):
        if name in found:
            print(f"  {name}: median error {found[name]['median_error']:.1%}, covered {found[name]['coverage']:.0%}")
    print(f"kept in {save('what-if-hosts', found, given.keep)}")


if __name__ == "__main__":
    main()
