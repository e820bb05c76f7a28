"""A worker of a lane: takes trials from the mailbox, and has the node's zygote fork a
process for each (Ray).

It holds nothing of a trial, and does not import torch.
"""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.collective import broadcast_from_rank_zero

from trainers.causes import death_of, forget_kernel_kills
from trainers.config.sections import FailureConfig
from trainers.errors import RunFailedError
from trainers.launch.log import setup_logging
from trainers.loop.watchdog import HUNG_EXIT_CODE
from trainers.on_ray.context import Gauges, WorkerContext
from trainers.on_ray.gpus import hide_unassigned_gpus, own_gpu
from trainers.on_ray.internals import is_leaving
from trainers.on_ray.process_group import listen
from tune.forks.client import Fork, NoOutcomeError, Zygote
from tune.forks.place import Given, Place
from tune.forks.zygote import Preload
from tune.lanes.messages import Assignment

_IDLE_S = 20.0  # an idle lane's ranks meet this often
_LOOK_S = 0.5
_CAUSE_S = 10.0
"""How long a rank whose collective failed waits for another to say why."""
_RETRIED = {-signal.SIGKILL, -signal.SIGTERM}
"""Signals that come from outside: the trial starts again."""


class Asked(WorkerContext):
    """What the process of a trial asks: reports go to the mailbox."""

    def __init__(
        self,
        mailbox: Any,
        lane: int,
        assignment: Assignment,
        gauges: Gauges,
        may_drain: bool,
    ) -> None:
        """`may_drain`: whether Ray may say that the lane's node will be taken away."""
        super().__init__(None, "lane")
        self._may_drain, self._asked_s = (
            may_drain,
            0.0,
        )  # the lane has asked before it took the trial
        self._mailbox = mailbox
        self._lane = lane
        self._gauges = gauges
        self._ticket = assignment.ticket
        self._target = assignment.target
        self.watches = assignment.watches
        self._used: dict[str, float] = {}
        """What this rank has used so far: the least that all ranks will have."""

    def report(self, metrics: dict[str, Any]) -> bool:  # type: ignore[override] # the process has decided who tells
        """Rank 0 tells the mailbox of an evaluation; returns whether the trial should
        go on.
        """
        goes_on: bool = ray.get(
            self._mailbox.report.remote(self._ticket, metrics | self._used)
        )
        return goes_on and not (
            self._target is not None and self._target.is_met(metrics)
        )

    def observe(self, figures: dict[str, float]) -> None:
        """The figures of whatever trial the lane runs."""
        self._gauges.set(figures)
        found = {
            "peak_memory_bytes": figures.get("peak_bytes"),
            "energy_j": figures.get("energy_j"),
        }
        self._used |= {
            name: value
            for name, value in found.items()
            if name in self.watches and value is not None
        }
        if disturbed_s := figures.get("disturbed_s"):
            self._used["disturbed_s"] = disturbed_s

    def preempted(self, elapsed_s: float) -> bool:
        """Whether the lane's node will be taken away: the trial keeps its state, and
        goes on in another lane.
        """
        return self._may_drain and super().preempted(elapsed_s)

    def fits(self, microbatch_size: int, fits: bool) -> None:
        """All other trials shall know it: rank 0 says what was agreed, any rank what
        did not fit.
        """
        if self.rank == 0 or not fits:
            ray.get(
                self._mailbox.observe.remote(
                    self._lane, self._ticket, microbatch_size, fits
                )
            )

    def too_large(self, microbatch_size: int) -> None:
        """The mailbox gives the trial out again with a smaller microbatch; a single
        worker goes on by itself.
        """
        if self.world_size > 1:
            ray.get(self._mailbox.too_large.remote(self._ticket, microbatch_size))

    def hung(self, failure: RunFailedError, stack: str) -> None:
        """The trial ends here."""
        ray.get(
            self._mailbox.hung.remote(
                self._lane, self._ticket, failure, stack, self.world_size
            )
        )


def serve_trials(loop_config: Mapping[str, Any]) -> None:
    """Run trials as a worker of a lane, until the mailbox closes, or is gone: the
    driver ends the sweep then.
    """
    with contextlib.suppress(ray.exceptions.ActorDiedError):
        _Lane(loop_config).serve()


class _Lane:
    """One worker of it."""

    def __init__(self, loop_config: Mapping[str, Any]) -> None:
        self._mailbox = loop_config["mailbox"]
        self._number = loop_config["lane"]
        self._of_function = loop_config["of_function"]
        self._may_drain = loop_config["may_drain"]
        context = ray.train.get_context()
        self._rank = context.get_world_rank()
        self._world_size = context.get_world_size()
        hide_unassigned_gpus()
        self._place = Place(
            self._rank,
            self._world_size,
            context.get_local_rank(),
            context.get_local_world_size(),
            context.get_node_rank(),
            own_gpu(),
        )
        setup_logging(1)
        logging.getLogger("ray.train").setLevel(logging.WARNING)
        self._gauges = Gauges("", self._rank)
        # Where a function calls Ray, its process joins this cluster.
        os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        self._zygote = Zygote(loop_config["zygote"], Preload(**loop_config["preload"]))

    def serve(self) -> None:
        """Take trials until there will be none."""
        label = self._zygote.fork(
            "tune.forks.task:device_label", self._place.device_index
        ).serve(None)
        ray.get(
            self._mailbox.hello.remote(
                self._number, label, self._rank, self._world_size
            )
        )
        while True:
            if self._may_drain and is_leaving():
                self._leave_node()
                return
            assignment, place, files = self._take()
            if assignment == "close":
                return
            if assignment is None:
                continue
            with contextlib.ExitStack() as stack:
                for file in files:
                    stack.enter_context(file)
                if self._run(assignment, place, [file.fileno() for file in files]):
                    self._leave_node()
                    return

    def _take(self) -> tuple[Any, Place, list[Any]]:
        """The next trial, where its ranks meet, and on rank 0 the socket that they meet
        at.
        """
        files: list[Any] = []
        taken: Any = None
        if self._rank == 0:
            assignment = ray.get(self._mailbox.take.remote(self._number, _IDLE_S))
            address = ("", 0)
            if isinstance(assignment, Assignment) and (
                self._world_size > 1 or self._of_function
            ):
                server, host, port = listen()
                files.append(server)
                address = host, port
            taken = assignment, address
        if self._world_size > 1:
            taken = broadcast_from_rank_zero(taken)
        assignment, (host, port) = taken
        return assignment, self._place.meeting_at(host, port), files

    def _run(self, assignment: Assignment, place: Place, files: list[int]) -> bool:
        """Run one trial; returns whether the node is about to be taken away."""
        self._gauges.run = f"{assignment.sweep}/lane-{self._number}"
        self._say(assignment)
        pressure = Pressure()
        forget_kernel_kills()
        try:
            outcome = self._fork(assignment, place, files)
        except InterruptedError:  # another rank has ended it
            return False
        except NoOutcomeError as death:
            outcome = _death(death, self._rank)
        self._zygote.learn(outcome.pop("imported", ()))
        return self._tell(assignment, outcome | {"cpu_pressure": pressure.share()})

    def _say(self, assignment: Assignment) -> None:
        """Have a task of this actor say which trial it runs: Ray shows an actor's tasks
        beside it, whose name stays.
        """
        own: Any = ray.get_runtime_context().current_actor
        own.execute.options(
            name=f"{assignment.sweep}, lane {self._number}: trial {assignment.trial}"
        ).remote(int)

    def _fork(
        self, assignment: Assignment, place: Place, files: list[int]
    ) -> dict[str, Any]:
        """Run a trial in a process; returns its outcome."""
        if self._of_function:
            from tune.lanes.function import run_function

            given_to = (
                self._zygote,
                assignment,
                self._mailbox,
                self._number,
                place,
                files,
            )
            done: dict[str, Any] = run_function(
                *given_to, lambda fork, asked: self._serve(fork, asked, assignment)
            )
            return done
        asked = Asked(
            self._mailbox, self._number, assignment, self._gauges, self._may_drain
        )
        source = assignment.source
        refuge = None if assignment.refuge is None else assignment.refuge.uri
        given = Given(
            assignment.microbatch_ceiling,
            assignment.microbatch_bounds,
            source,
            refuge,
            assignment.watches,
        )
        arguments = (assignment.trial, assignment.tree, assignment.path, place, given)
        fork = self._zygote.fork("tune.forks.task:run_trial", *arguments, files=files)
        return self._serve(fork, asked, assignment)

    def _serve(self, fork: Fork, asked: Any, assignment: Assignment) -> dict[str, Any]:
        """Answer what the process of a trial asks, until its end."""
        hang_timeout_s = assignment.tree.get("failure", {}).get(
            "hang_timeout_s", FailureConfig().hang_timeout_s
        )
        outcome: dict[str, Any] = fork.serve(
            asked, lambda: self._is_wanted(assignment), _LOOK_S, hang_timeout_s
        )
        return outcome

    def _tell(self, assignment: Assignment, outcome: dict[str, Any]) -> bool:
        """Tell the mailbox how a trial has ended on this rank; returns whether the node
        is about to be taken away.
        """
        ticket = assignment.ticket
        if outcome["status"] == "preempted":
            if self._rank == 0:
                ray.get(
                    self._mailbox.hand_back.remote(
                        self._number, ticket, outcome["message"]
                    )
                )
            return True
        has_failed = "message" in outcome
        if outcome.pop("follows", False):  # another rank knows why
            deadline = time.monotonic() + _CAUSE_S
            while self._is_wanted(assignment) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        if outcome.pop("smaller", False) or outcome.pop("again", False):
            ray.get(
                self._mailbox.again.remote(
                    self._number, ticket, outcome.get("message", "")
                )
            )
        elif self._rank == 0 or has_failed:
            ray.get(self._mailbox.end.remote(self._number, ticket, outcome))
        return False

    def _is_wanted(self, assignment: Assignment) -> bool:
        """Whether the trial's other ranks still run it: one that has ended with a
        failure ends them all.
        """
        return self._world_size == 1 or bool(
            ray.get(self._mailbox.runs.remote(self._number, assignment.ticket))
        )

    def _leave_node(self) -> None:
        """Wait until Ray takes the node out and starts the lane again elsewhere, or the
        sweep is over.

        To return sooner would end the lane, and to raise might start it again on the
        very node that is leaving.
        """
        ray.get(self._mailbox.leave.remote(self._number))
        while not ray.get(self._mailbox.await_close.remote(_IDLE_S)):
            pass


def _death(death: NoOutcomeError, rank: int) -> dict[str, Any]:
    """Return the outcome of a trial whose process has ended by itself, or by a signal."""
    if death.code == HUNG_EXIT_CODE:
        return {"status": "hung", "message": f"rank {rank} made no step"}
    if death.code == -signal.SIGSTOP:
        return {
            "status": "hung",
            "message": f"rank {rank}: its process was stopped, and not continued",
        }
    failure = death_of(rank, death.code)
    status = "error" if failure.status == "node_lost" else failure.status
    return {
        "status": status,
        "message": failure.message,
        "again": status == "error" and death.code in _RETRIED,
    }


class Pressure:
    """Measures, from its creation on, in how much of the time work of this machine or
    container waited for a CPU, by Linux's pressure stall information (PSI).
    """

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._before_us = _waited_us()

    def share(self) -> float | None:
        """Return a share, 0 to 1; None where Linux has no such information."""
        elapsed_s = time.monotonic() - self._began_s
        now_us = _waited_us()
        if self._before_us is None or now_us is None or elapsed_s <= 0:
            return None
        return min(1.0, (now_us - self._before_us) / 1e6 / elapsed_s)


def _waited_us() -> int | None:
    try:
        some, *_ = Path("/proc/pressure/cpu").read_text().splitlines()
        return int(some.rpartition("total=")[2])
    except (OSError, ValueError):
        return None
