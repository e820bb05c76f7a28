"""Does a training function give the same in a lane as in Ray's own way? Those of tests/on_ray/functions, in both.

Run as: python -m benchmarks.functions [NAME ...] [--workers 1 2] [--imported] [--keep]

One driver function for both ways: only the import of Tuner and TorchTrainer differs. The functions are pickled as those
of a script are; with --imported the workers import them instead. Each way has a process and an embedded cluster of its
own, one after the other, with the CPUs that Ray's way needs: one for each trial and one for each worker. Under ASHA
trials run one at a time, so that both ways know the same when they decide. Compared, bit by bit: all that each rank
reported, what Tune made of it, the contents of the checkpoints, what a function returned, and how trials failed.
Exit code 1: a difference, or a trial that did not end as the table says.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.cloudpickle
import ray.train
from ray import tune
from ray.train import UserCallback

import tests.on_ray.functions
from benchmarks.measure import save
from tests.on_ray.functions.table import TRAIN, TUNE, Case

REPOSITORY = Path(__file__).parents[1]
WAYS = ("ray", "lanes")
_AT_A_TIME = 2
_SPARE_CPUS = 2
"""For the tasks of Ray Data."""
_HANGS_S = 600
"""A sweep that takes longer is given up."""
_OF_TUNE = {"date", "done", "hostname", "node_ip", "pid", "timestamp", "trial_id", "experiment_tag", "config"}
_OF_TUNE |= {"checkpoint_dir_name", "checkpoint_path", "time_since_restore", "time_this_iter_s", "time_total_s"}
_TIMES = ("_runtime", "_per_second")
"""How the names of transformers' own clock readings end."""
_OF_THE_PLACE = {"training_args.bin", ".metadata"}
"""Files of a checkpoint that say where and when it was made: transformers' arguments, torch's index of shards."""


def same_everywhere(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics without what Tune adds and what a clock said."""
    return {
        name: value
        for name, value in metrics.items()
        if name not in _OF_TUNE and not name.startswith("config/") and not name.endswith(_TIMES)
    }


def digests(directory: Path) -> dict[str, str]:
    """What each file of a checkpoint holds, as a hash."""
    found = {}
    for path in sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in _OF_THE_PLACE):
        content = path.read_bytes()
        if path.name == "trainer_state.json":
            state = json.loads(content)
            state["log_history"] = [same_everywhere(line) for line in state["log_history"]]
            content = json.dumps(state, sort_keys=True).encode()
        found[str(path.relative_to(directory))] = hashlib.sha256(content).hexdigest()
    return found


class Record(UserCallback):
    """Notes what all ranks report, and the checkpoints that come with it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Called by Ray once all ranks have reported."""
        event: dict[str, Any] = {"metrics": [same_everywhere(of_rank) for of_rank in metrics]}
        if checkpoint is not None:
            path = Path(checkpoint.path)
            event["checkpoint"] = digests(path)
            if not path.name.startswith("checkpoint_"):  # by Ray, with the time
                event["name"] = path.name
        self._write(event)

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called by Ray; whether it has heard of the second rank by then is chance."""
        causes = [getattr(error, "_base_exc", error) for error in worker_exceptions.values()]
        self._write({"failed": sorted({type(cause).__name__ for cause in causes})})

    def _write(self, event: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(event, default=str) + "\n")


def make_driver(
    case: Case, label: str, workers: int, directory: Path, trainer: Any
) -> Callable[[dict[str, Any]], None]:
    """Return what Tune calls for each trial, in the form that Ray documents, with a class for the trainer."""
    function, further, max_failures = case.function, case.trainer or dict, case.max_failures

    def driver(config: dict[str, Any]) -> None:
        from ray.tune.integration.ray_train import TuneReportCallback

        number = tune.get_context().get_trial_id().rpartition("_")[2]
        record = directory / f"{label}-{number}"
        callbacks: list[Any] = [TuneReportCallback(), Record(record.with_suffix(".jsonl"))]
        run = trainer(
            function,
            train_loop_config=config["train_loop_config"],
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(
                name=record.name,
                storage_path=str(directory / "train"),
                failure_config=ray.train.FailureConfig(max_failures=max_failures),
                callbacks=callbacks,
            ),
            **further(),
        )
        result = run.fit()
        end = {
            "returned": result.return_value,
            "metrics": same_everywhere(result.metrics or {}),
            "num_checkpoints": len(result.best_checkpoints or []),
        }
        record.with_suffix(".json").write_text(json.dumps(end, default=str))

    return driver


def as_space(grid: list[dict[str, Any]]) -> dict[str, Any]:
    """A grid of configurations, which differ in one key, as a search space of Tune."""
    columns = {name: [config[name] for config in grid] for name in grid[0]}
    return {
        name: values[0] if values.count(values[0]) == len(values) else tune.grid_search(values)
        for name, values in columns.items()
    }


def drop_ins(way: str) -> tuple[Any, Any]:
    """TorchTrainer and Tuner: all that differs."""
    if way == "lanes":
        from tune.ray import TorchTrainer, Tuner

        return TorchTrainer, Tuner
    import ray.train.torch

    return ray.train.torch.TorchTrainer, tune.Tuner


def sweep(name: str, way: str, workers: int, directory: Path) -> dict[str, Any]:
    """All trials of a function in one way."""
    trainer, tuner = drop_ins(way)
    case = (TRAIN | TUNE)[name]
    label = f"{name}-{workers}"
    if workers:
        trainable: Any = make_driver(case, label, workers, directory, trainer)
        space: dict[str, Any] = {"train_loop_config": tune.grid_search(case.grid)}
    else:
        trainable, space = case.function, as_space(case.grid)
    asha = tune.schedulers.ASHAScheduler(metric="loss", mode="min", grace_period=1, reduction_factor=2)
    run = tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(
            scheduler=asha if case.asha else None,
            max_concurrent_trials=1 if case.asha or case.trainer else _AT_A_TIME,
        ),
        run_config=tune.RunConfig(
            name=label,
            storage_path=str(directory / "tune"),
            failure_config=tune.FailureConfig(max_failures=0 if workers else case.max_failures),
            verbose=0,
        ),
    )
    began = time.perf_counter()
    results: Any = run.fit()
    elapsed_s = time.perf_counter() - began
    trials = [outcome(result, directory / f"{label}-{number:05d}") for number, result in enumerate(results)]
    return {"elapsed_s": elapsed_s, "trials": trials}


def outcome(result: Any, record: Path) -> dict[str, Any]:
    """What is left of a trial: in Tune, and where its driver wrote."""
    events, end = record.with_suffix(".jsonl"), record.with_suffix(".json")
    frame = result.metrics_dataframe
    lines = [] if frame is None else frame.to_dict(orient="records")
    return {
        "error": None if result.error is None else type(result.error).__name__,
        "metrics": same_everywhere(result.metrics or {}),
        "lines": [same_everywhere(line) for line in lines],
        "events": [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else [],
        "end": json.loads(end.read_text()) if end.exists() else None,
        "checkpoints": [digests(Path(checkpoint.path)) for checkpoint, _ in result.best_checkpoints or []],
    }


def differences(ray_way: dict[str, Any], lanes: dict[str, Any], asha: bool) -> list[str]:
    """In which respects two trials differ.

    A trial that ASHA has stopped may have reported once more before it heard of that: its ranks' reports and its end
    are compared as far as both ways have them.
    """
    kinds = ["error", "metrics", "lines", "checkpoints"]
    first, second = dict(ray_way), dict(lanes)
    stopped = asha and first["error"] is None and (first["end"] is None or second["end"] is None)
    if stopped:
        both = min(len(first["events"]), len(second["events"]))
        first["events"], second["events"] = first["events"][:both], second["events"][:both]
    else:
        kinds.append("end")
    found = [first_difference(first[kind], second[kind], kind) for kind in [*kinds, "events"]]
    return [words for words in found if words]


def first_difference(one: Any, other: Any, where: str) -> str:
    """In words; empty where there is none. As text NaN is equal to NaN, and 0.0 not to -0.0."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        pairs = [(one[key], other[key], f"{where}.{key}") for key in one]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(*both, f"{where}[{index}]") for index, both in enumerate(zip(one, other, strict=True))]
    else:
        first, second = (json.dumps(value, sort_keys=True, default=str) for value in (one, other))
        return "" if first == second else f"{where} is {first:.80} and {second:.80}"
    return next((words for pair in pairs if (words := first_difference(*pair))), "")


def unexpected(case: Case, way: dict[str, Any]) -> list[str]:
    """What the trials of one way did that the table does not say."""
    trials = way["trials"]
    failed = tuple(number for number, trial in enumerate(trials) if trial["error"])
    found = [] if failed == case.fails else [f"failed: {list(failed)}, not {list(case.fails)}"]
    if len(trials) != len(case.grid):
        found.append(f"{len(trials)} trials of {len(case.grid)}")
    if case.asha and not num_stopped(way):
        found.append("ASHA stopped none")
    return found


def num_stopped(way: dict[str, Any]) -> int:
    """How many trials have fewer reports than the longest, and no error."""
    most = max((len(trial["lines"]) for trial in way["trials"]), default=0)
    return sum(trial["error"] is None and len(trial["lines"]) < most for trial in way["trials"])


def run_way(names: list[str], way: str, workers: int, directory: Path, imported: bool) -> dict[str, dict[str, Any]]:
    """One way, in a process of its own; a function that ends it has no result, and another goes on with the next."""
    directory.mkdir(parents=True)
    left = list(names)
    while left:
        command = [sys.executable, "-m", "benchmarks.functions", *left, "--workers", str(workers), "--way", way]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with (directory / "log").open("ab") as log:
            arguments = [*command, "--into", str(directory), *(["--imported"] if imported else [])]
            subprocess.run(arguments, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, check=False)
        left = left[sum((directory / f"{name}.result").exists() for name in left) + 1 :]
    files = {name: directory / f"{name}.result" for name in names}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def serve(names: list[str], way: str, workers: int, directory: Path, imported: bool) -> None:
    """The process of one way."""
    if not imported:
        ray.cloudpickle.register_pickle_by_value(tests.on_ray.functions)
    num_cpus = _AT_A_TIME * (1 + workers) + _SPARE_CPUS
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False)
    for name in names:
        faulthandler.dump_traceback_later(_HANGS_S, exit=True)
        kept = sweep(name, way, workers, directory)
        (directory / f"{name}.result").write_text(json.dumps(kept, default=str))
    faulthandler.cancel_dump_traceback_later()


def compare(name: str, workers: int, ways: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A row of the table."""
    case = (TRAIN | TUNE)[name]
    problems = [f"{way}: no result" for way in WAYS if way not in ways]
    row: dict[str, Any] = {"function": name, "workers": workers, "trials": len(case.grid), "problems": problems}
    if problems:
        return row
    for way in WAYS:
        problems += [f"{way}: {words}" for words in unexpected(case, ways[way])]
    for number, (first, second) in enumerate(zip(*(ways[way]["trials"] for way in WAYS), strict=False)):
        if kinds := differences(first, second, case.asha):
            problems.append(f"trial {number}: {'; '.join(kinds)}")
    return {
        **row,
        "stopped": num_stopped(ways["lanes"]),
        "failed": sum(trial["error"] is not None for trial in ways["lanes"]["trials"]),
        **{f"{way}_s": ways[way]["elapsed_s"] for way in WAYS},
    }


def show(row: dict[str, Any]) -> None:
    """A line of the table."""
    ended = f"{row['stopped']:8d}{row['failed']:7d}" if "stopped" in row else f"{'':15}"
    times = "".join(f"{row[f'{way}_s']:10.1f}" if f"{way}_s" in row else f"{'':10}" for way in WAYS)
    verdict = "; ".join(row["problems"]) or "equal"
    print(f"{row['function']:26}{row['workers']:7d}{row['trials']:7d}{ended}{times}   {verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join([*TRAIN, *TUNE])}")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="of each trial")
    parser.add_argument("--imported", action="store_true", help="workers import the functions")
    parser.add_argument("--keep", action="store_true", help="write to benchmarks/results")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = args.names or [*TRAIN, *TUNE]
    if wrong := [name for name in names if name not in TRAIN | TUNE]:
        parser.error(f"NAME is {wrong[0]}, but must be one of {', '.join([*TRAIN, *TUNE])}")
    if args.way:
        serve(names, args.way, args.workers[0], args.into, args.imported)
        return
    directory = Path(tempfile.mkdtemp(prefix="paceline-functions-"))
    rows = []
    print(f"{'function':26}{'workers':>7}{'trials':>7}{'stopped':>8}{'failed':>7}{'Ray, s':>10}{'lanes, s':>10}")
    for workers in [*args.workers, 0]:
        wanted = [name for name in names if workers in (TRAIN | TUNE)[name].workers]
        ways = {
            way: run_way(wanted, way, workers, directory / f"{way}-{workers}", args.imported) for way in WAYS if wanted
        }
        for name in wanted:
            rows.append(compare(name, workers, {way: ways[way][name] for way in WAYS if name in ways[way]}))
            show(rows[-1])
    print(save("functions", {"rows": rows}, args.keep))
    if any(row["problems"] for row in rows):
        print(f"all that was recorded: {directory}")
        sys.exit(1)
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
