"""A job with a deadline on machines that come and go, step by step: what each choice costs and brings."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from cluster.spot.availability import Bools, checkpoint_interval_s

Machine = Literal["none", "spot", "on-demand"]


@dataclass(frozen=True)
class Job:
    """What there is to do, by when, and what the machines for it cost."""

    work_s: float
    """Seconds of work without interruption on the machines."""
    deadline_s: float
    """Seconds from the start."""
    changeover_s: float
    """Seconds from the start of machines until they work, of either kind; paid for."""
    spot_usd_per_hour: float
    on_demand_usd_per_hour: float
    checkpoint_s: float = 0.0
    """Seconds for which a checkpoint holds the work up."""
    interval_s: float | None = None
    """Seconds of work between checkpoints; None: from the preemption rate, anew for each spell on spot machines."""

    @property
    def on_demand_usd(self) -> float:
        """Dollars of on-demand machines from start to end."""
        return (self.work_s + self.changeover_s) / 3600 * self.on_demand_usd_per_hour


@dataclass
class State:
    """What a policy sees at the start of a step."""

    job: Job
    step_s: float
    now_s: float = 0.0
    is_available: bool = False
    """Whether spot machines can be had, and go on if they run, in this step."""
    running: Machine = "none"
    booting_s: float = 0.0
    """Seconds that are left of the changeover."""
    kept_s: float = 0.0
    """Seconds of work that were done before the machines that run now."""
    since_s: float = 0.0
    """Seconds of work and of checkpoints on the machines that run now."""
    interval_s: float = math.inf
    """Seconds of work between their checkpoints."""
    usd: float = 0.0
    """Dollars that have been spent."""

    @property
    def safe_s(self) -> float:
        """Seconds of work that no preemption can take."""
        if self.running != "spot":
            return self.done_s
        whole = math.floor(self.since_s / (self.interval_s + self.job.checkpoint_s) + 1e-9)
        return self.kept_s + (whole * self.interval_s if whole else 0.0)

    @property
    def done_s(self) -> float:
        """Seconds of work that are done."""
        if self.running != "spot":
            return self.kept_s + self.since_s
        cycle_s = self.interval_s + self.job.checkpoint_s
        whole = math.floor(self.since_s / cycle_s + 1e-9)
        if not whole:
            return self.kept_s + min(self.since_s, self.interval_s)
        return self.kept_s + whole * self.interval_s + min(max(0.0, self.since_s - whole * cycle_s), self.interval_s)

    @property
    def left_s(self) -> float:
        """Seconds of work that are left."""
        return self.job.work_s - self.done_s

    @property
    def slack_s(self) -> float:
        """Seconds that may pass without progress before on-demand machines must be started at the latest, if what is
        in no checkpoint is lost.
        """
        return self.job.deadline_s - self.now_s - (self.job.work_s - self.safe_s) - self.job.changeover_s

    def worst_usd(self, choice: Machine, interval_s: float) -> float:
        """Return the dollars of the whole job if `choice` starts now, goes before its first checkpoint has been
        written, and on-demand machines do the rest.
        """
        job = self.job
        risked_s = job.changeover_s + interval_s + job.checkpoint_s + self.step_s if choice == "spot" else 0.0
        risked = risked_s / 3600 * job.spot_usd_per_hour
        return self.usd + risked + (self.left_s + job.changeover_s) / 3600 * job.on_demand_usd_per_hour

    def leave(self, for_next: Machine, mean_up_s: float, preempted: bool = False) -> None:
        """Change the machines; spot machines that are left by choice write a checkpoint first, if that pays."""
        if self.running == "spot":
            self.kept_s = self.safe_s if preempted else max(self.safe_s, self.done_s - self.job.checkpoint_s)
        else:
            self.kept_s = self.done_s
        self.running, self.since_s = for_next, 0.0
        self.booting_s = 0.0 if for_next == "none" else self.job.changeover_s
        if for_next == "spot":
            self.interval_s = self.job.interval_s or checkpoint_interval_s(self.job.checkpoint_s, mean_up_s)
            self.interval_s = max(self.interval_s, 1.0)

    def advance(self) -> float:
        """Let the machines work for a step, or until the work is done; return the seconds that are paid for."""
        needed_s = self.left_s
        if self.running == "spot":
            total_s = needed_s + self.done_s - self.kept_s
            writes = max(0, math.ceil(total_s / self.interval_s - 1e-9) - 1)
            needed_s = total_s + writes * self.job.checkpoint_s - self.since_s
        used_s = min(self.step_s, self.booting_s + needed_s)
        worked_s = max(0.0, used_s - self.booting_s)
        self.booting_s = max(0.0, self.booting_s - used_s)
        self.since_s += worked_s
        return used_s


class Policy(Protocol):
    """Chooses the machines of each step."""

    def choose(self, state: State) -> Machine:
        """Return the machines of this step: "spot" only where they are available."""

    @property
    def mean_up_s(self) -> float:
        """Expected seconds until spot machines are taken back."""


@dataclass(frozen=True)
class Outcome:
    """How a job went."""

    usd: float
    end_s: float
    """Seconds from the start; infinite where the work was not done in the steps that there were."""
    preemptions: int
    lost_s: float
    """Seconds of work that were done again."""
    spot_s: float
    on_demand_s: float


def play(job: Job, available: Bools, step_s: float, policy: Policy) -> Outcome:
    """Do a job under a policy, with spot machines where they are `available` (a flag a step of `step_s` seconds).

    Spot machines are gone at the start of the first step in which they are not available: without notice, so the work
    since their newest checkpoint is lost. On-demand machines stay until they are left, and lose nothing.
    """
    state = State(job, step_s)
    used = {"spot": 0.0, "on-demand": 0.0}
    end_s, lost_s, preemptions = math.inf, 0.0, 0
    for index, flag in enumerate(available):
        state.now_s, state.is_available = index * step_s, bool(flag)
        if state.running == "spot" and not flag:
            preemptions += 1
            lost_s += state.done_s - state.safe_s
            state.leave("none", policy.mean_up_s, preempted=True)
        choice = policy.choose(state)
        assert flag or choice != "spot"
        if choice != state.running:
            state.leave(choice, policy.mean_up_s)
        if choice == "none":
            continue
        used_s = state.advance()
        used[choice] += used_s
        price = job.spot_usd_per_hour if choice == "spot" else job.on_demand_usd_per_hour
        state.usd += used_s / 3600 * price
        if state.left_s <= 1e-6:
            end_s = state.now_s + used_s
            break
    return Outcome(state.usd, end_s, preemptions, lost_s, used["spot"], used["on-demand"])
