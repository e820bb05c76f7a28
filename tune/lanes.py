"""Lanes: long-lived TorchTrainers whose workers run trial after trial from the mailbox (Ray).

A lane is a thread of the driver that keeps one TorchTrainer alive. Its worker group serves trials until the mailbox
closes; after a crash Ray starts the group again and the trial that was lost is queued again. With `isolation: fresh`
a group serves one trial and ends, and the thread starts the next.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

from trainers.config import TrainConfig
from trainers.errors import DivergedError, PacelineError, RunFailedError
from trainers.launch import TIMEOUT_S, setup_logging
from trainers.parallel import Group
from trainers.run import RunSpec
from trainers.storage import Storage
from trainers.torch_trainer import own_gpu, ray_scaling
from tune.mailbox import Assignment, Mailbox

logger = logging.getLogger(__name__)

_IDLE_S = 20.0  # an idle lane's ranks hear of each other this often, well inside the process group's timeout
_MAX_FAILED_STARTS = 3


def start_mailbox() -> Any:
    """The sweep's mailbox, an actor without a CPU."""
    return ray.remote(Mailbox).options(num_cpus=0, max_concurrency=10_000).remote()


class Lanes:
    """The lanes of a sweep."""

    def __init__(
        self, mailbox: Any, count: int, config: TrainConfig, path: Sequence[str], gpu: bool, uri: str, fresh: bool
    ) -> None:
        """`config` gives the shape of the worker groups; `uri` is where Ray keeps its own records of them."""
        self._mailbox, self._config, self._path, self._gpu = mailbox, config, tuple(path), gpu
        self._uri, self._fresh, self.count = uri, fresh, count
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._keep, args=(lane,), name=f"lane-{lane}", daemon=True) for lane in range(count)
        ]

    def start(self) -> None:
        """Start all lanes; returns at once, while their workers come up."""
        for thread in self._threads:
            thread.start()

    def abandon(self) -> None:
        """Leave the lanes to die with the connection to the cluster; their threads end without another try."""
        self._closing.set()

    def close(self, timeout_s: float = 30.0) -> None:
        """Send the lanes home and wait for them."""
        self._closing.set()
        ray.get(self._mailbox.close.remote())
        for thread in self._threads:
            thread.join(timeout_s)

    def _keep(self, lane: int) -> None:
        """Keep one worker group alive until the sweep closes."""
        failed = 0
        while not self._closing.is_set():
            try:
                self._trainer(lane).fit()
                failed = 0
            except Exception as error:
                if self._closing.is_set():
                    return
                failed += 1
                logger.warning("lane %d ended: %s", lane, str(error).strip().splitlines()[-1])
                if failed == _MAX_FAILED_STARTS:
                    ray.get(self._mailbox.close.remote(f"lane {lane} failed {failed} times: {error}"))
                    return

    def _trainer(self, lane: int) -> TorchTrainer:
        loop_config = {"lane": lane, "mailbox": self._mailbox, "path": list(self._path), "fresh": self._fresh}
        return TorchTrainer(
            serve,
            train_loop_config=loop_config,
            torch_config=TorchConfig(timeout_s=TIMEOUT_S),
            scaling_config=ray_scaling(self._config.scaling, self._gpu),
            run_config=ray.train.RunConfig(
                name=f"lane-{lane}",
                storage_path=self._uri,
                failure_config=ray.train.FailureConfig(max_failures=-1),
            ),
        )


class LaneContext:
    """RunContext of a trial in a lane: keeps nothing, and reports to the mailbox."""

    launcher = "lane"
    storage: Storage | None = None

    def __init__(self, mailbox: Any, ticket: str) -> None:
        context = ray.train.get_context()
        self._mailbox, self._ticket, self._stop = mailbox, ticket, False
        self.rank, self.world_size = context.get_world_rank(), context.get_world_size()
        self.local_rank, self.local_world_size = context.get_local_rank(), context.get_local_world_size()
        self.device_index = own_gpu()

    def report(self, metrics: dict[str, Any], checkpoint: str | None, elapsed_s: float) -> None:
        """Rank 0 tells the mailbox, and hears whether the trial should go on."""
        if self.rank == 0:
            self._stop = not ray.get(self._mailbox.report.remote(self._ticket, metrics))

    def should_stop(self) -> bool:
        """Whether the search has stopped the trial."""
        return self._stop


def serve(loop_config: Mapping[str, Any]) -> None:
    """What each worker of a lane runs: trials, until the mailbox closes."""
    mailbox, lane = loop_config["mailbox"], loop_config["lane"]
    context = ray.train.get_context()
    setup_logging(1)  # trials of many lanes would talk at once: warnings only
    logging.getLogger("ray.train").setLevel(logging.WARNING)
    group = Group(context.get_world_rank(), context.get_world_size(), _collective_device())
    if group.rank == 0:
        ray.get(mailbox.hello.remote(lane))
    while True:
        assignment = group.first(ray.get(mailbox.take.remote(lane, _IDLE_S)) if group.rank == 0 else None)
        if assignment == "close":
            return
        if assignment is None:
            continue
        outcome = _run(assignment, LaneContext(mailbox, assignment.ticket), tuple(loop_config["path"]))
        if group.rank == 0 or "raised" in outcome:
            raised = outcome.pop("raised", None)
            ray.get(mailbox.end.remote(lane, assignment.ticket, outcome))
            if raised is not None:
                raise raised
        reset_process()
        if loop_config["fresh"]:
            return


def _collective_device() -> Any:
    import torch

    return torch.device("cuda", own_gpu()) if torch.cuda.is_available() else torch.device("cpu")


def _run(assignment: Assignment, context: LaneContext, path: tuple[str, ...]) -> dict[str, Any]:
    """One trial on this worker: its outcome as plain data; with `raised` when this process must not be used again."""
    spec = RunSpec(assignment.tree, path, f"trial {assignment.trial}", "")
    try:
        result = spec.execute(context)
    except Exception as error:
        failure = RunFailedError.of(error, context.rank)
        outcome: dict[str, Any] = {"status": failure.status, "message": failure.message}
        if not isinstance(error, PacelineError) and failure.status == "error":
            outcome["traceback"] = traceback.format_exc(limit=-20)
        # Divergence is agreed by all ranks; anything else may have left the others waiting in a collective.
        agreed = context.world_size == 1 or isinstance(error, DivergedError)
        if "CUDA error" in str(error) or not agreed:
            outcome["raised"] = failure
        return outcome
    return {"status": result.status, "result": asdict(result)}


def reset_process() -> None:
    """Let go of all that a trial held; flags, threads, default dtype and seeds are set anew by the next one."""
    import torch

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
