"""Spot machines on Ray: a notice drains the node, a refusal makes way for on-demand.

(Ray) Needs Linux.

At a notice runs write a checkpoint. Ray 2.60 ranks node types by whether they could be
had of late before it looks at their `priority`: for ten minutes after a failure the
other type is taken, and then the preferred one again. But it counts as failures only
machines that never came up (ALLOCATION_TIMEOUT), none that the cloud refused at once,
such as EC2's InsufficientInstanceCapacity (ALLOCATION_FAILED): it asks for those again
every few seconds, for ever. `autoscale` alone knows of it.

Ask the metadata services of EC2, Google Cloud and Azure for the end of a machine.

The machine asks its own link-local address by plain HTTP: no credentials, and no proxy,
whatever the environment says.
"""

import email.utils
import http.client
import json
import os
import runpy
import select
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from trainers.errors import ClusterError
from trainers.on_ray.internals import autoscaler_parts, drain_node

ADDRESS = "169.254.169.254"
_TIMEOUT_S = 5.0
_LONGEST = 2**20


class UnansweredError(Exception):
    """The metadata service is out of reach, refuses, or its answer cannot be read."""


@dataclass(frozen=True)
class Notice:
    """A machine is about to be taken back."""

    deadline_s: float
    """UNIX time at which it may be gone."""
    reason: str


class MetadataService(ABC):
    """The metadata service of one cloud, at `address` (HOST or HOST:PORT)."""

    every_s: ClassVar[float]
    """Seconds between two looks."""

    def __init__(self, address: str = ADDRESS) -> None:
        self._address = address

    @abstractmethod
    def is_spot(self) -> bool:
        """Return whether this machine can be taken back; raises UnansweredError."""

    @abstractmethod
    def notice(self) -> Notice | None:
        """Return the notice for this machine, if any; raises UnansweredError."""

    def _ask(
        self, path: str, headers: Mapping[str, str], method: str = "GET"
    ) -> tuple[int, str]:
        """Return status and text of an answer."""
        try:
            connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
            try:
                connection.request(method, path, headers=dict(headers))
                answer = connection.getresponse()
                return answer.status, answer.read(_LONGEST).decode().strip()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UnansweredError(
                f"{method} {path}: {type(error).__name__}: {error}"
            ) from None

    def _read(self, path: str, headers: Mapping[str, str]) -> Any:
        """Return the JSON of an answer."""
        return _as_json(_require(path, *self._ask(path, headers)), path)


class Ec2(MetadataService):
    """EC2's instance metadata, version 2: `spot/instance-action`, two minutes ahead.

    A token comes first, by PUT.

    A rebalance recommendation is no notice: it names no time, and most of those
    machines stay.
    """

    every_s = 5.0  # as its documentation advises
    _TTL_S = 6 * 3600
    _NOTICE_S = 120.0

    def __init__(self, address: str = ADDRESS) -> None:
        super().__init__(address)
        self._token = ""

    def is_spot(self) -> bool:
        """Return whether the instance's life cycle is `spot`."""
        path = "instance-life-cycle"
        return _require(path, *self._get(path)) == "spot"

    def notice(self) -> Notice | None:
        """Return what is about to be done to the instance; 404 says nothing."""
        path = "spot/instance-action"
        status, text = self._get(path)
        if status == http.HTTPStatus.NOT_FOUND:
            return None
        said = _as_json(_require(path, status, text), path)
        if "action" not in said:
            raise UnansweredError(f"{path}: no action")
        return Notice(
            _unix_time(said.get("time"), self._NOTICE_S),
            f"EC2's notice: {said['action']}",
        )

    def _get(self, item: str) -> tuple[int, str]:
        """Return status and text of an item; replace a token that has expired."""
        status = http.HTTPStatus.UNAUTHORIZED.value
        text = ""
        if self._token:
            status, text = self._get_once(item)
        if status == http.HTTPStatus.UNAUTHORIZED:
            path = "/latest/api/token"
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._TTL_S)}
            self._token = _require(path, *self._ask(path, headers, "PUT"))
            status, text = self._get_once(item)
        return status, text

    def _get_once(self, item: str) -> tuple[int, str]:
        return self._ask(
            f"/latest/meta-data/{item}", {"X-aws-ec2-metadata-token": self._token}
        )


class Google(MetadataService):
    """Google Cloud's `instance/preempted`: TRUE half a minute before the end."""

    every_s = 1.0
    _NOTICE_S = 30.0
    _HEADERS: ClassVar = {"Metadata-Flavor": "Google"}

    def is_spot(self) -> bool:
        """Return whether the instance is preemptible, as spot instances are."""
        return self._flag("scheduling/preemptible")

    def notice(self) -> Notice | None:
        """Return the notice once there is one."""
        if not self._flag("preempted"):
            return None
        return Notice(time.time() + self._NOTICE_S, "Google Cloud's notice: preempted")

    def _flag(self, item: str) -> bool:
        path = f"/computeMetadata/v1/instance/{item}"
        text = _require(path, *self._ask(path, self._HEADERS))
        if text not in ("TRUE", "FALSE"):
            raise UnansweredError(f"GET {path}: neither TRUE nor FALSE")
        return text == "TRUE"


class Azure(MetadataService):
    """Azure's scheduled events: `Preempt`, at least half a minute ahead.

    An event is shown to all machines of a scale set, so it counts only where it names
    this one.
    """

    every_s = 1.0  # as its documentation advises
    _NOTICE_S = 30.0
    _HEADERS: ClassVar = {"Metadata": "true"}

    def is_spot(self) -> bool:
        """Return whether the machine's priority is another than `Regular`."""
        priority = self._machine().get("priority")
        if priority is None:
            raise UnansweredError("/metadata/instance/compute: no priority")
        return priority not in ("Regular", "")

    def notice(self) -> Notice | None:
        """Return the earliest eviction of this machine."""
        said = self._read(
            "/metadata/scheduledevents?api-version=2020-07-01", self._HEADERS
        )
        events = said.get("Events")
        if not isinstance(events, list):
            raise UnansweredError("/metadata/scheduledevents: no list of events")
        evictions = [
            event
            for event in events
            if isinstance(event, dict) and event.get("EventType") == "Preempt"
        ]
        if not evictions:
            return None
        own = str(self._machine().get("name"))
        times = [
            _unix_time(eviction.get("NotBefore"), self._NOTICE_S)
            for eviction in evictions
            if _is_among(own, eviction.get("Resources"))
        ]
        return Notice(min(times), "Azure's notice: Preempt") if times else None

    def _machine(self) -> Any:
        return self._read(
            "/metadata/instance/compute?api-version=2021-02-01", self._HEADERS
        )


SERVICES: Mapping[str, type[MetadataService]] = {
    "aws": Ec2,
    "gcp": Google,
    "azure": Azure,
}
"""The metadata services by the `provider.type` of a cluster file."""


def wait_for_notice(
    service: MetadataService,
    has_ended: Callable[[float], bool],
    say: Callable[[str], None],
) -> Notice | None:
    """Wait until the machine is to be taken back.

    Returns None where it is no spot machine, or Ray has ended here before.

    `has_ended` waits so many seconds for Ray's end. A service that does not answer is
    asked again, and `say` told once.
    """
    is_spot = False
    trouble = ""
    pause_s = 0.0
    while not has_ended(pause_s):
        pause_s = service.every_s
        before = trouble
        trouble = ""
        try:
            notice = service.notice()
            if notice is not None:
                return notice
            is_spot = is_spot or service.is_spot()
        except UnansweredError as error:
            trouble = str(error)
        else:
            if not is_spot:
                say("this is no spot machine")
                return None
        if bool(trouble) != bool(before):
            say(trouble or "the metadata service answers again")
    return None


def _require(path: str, status: int, text: str) -> str:
    """Return the text of an answer with status 200; raises UnansweredError."""
    if status != http.HTTPStatus.OK or not text:
        raise UnansweredError(f"{path}: status {status}, {len(text)} characters")
    return text


def _as_json(text: str, path: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise UnansweredError(f"{path}: no JSON object")
    return said


def _is_among(name: str, names: object) -> bool:
    """Whether Azure's name of a machine is listed; case does not count."""
    if not isinstance(names, list):
        return False
    return name.casefold() in [str(other).casefold() for other in names]


def _unix_time(text: object, notice_s: float) -> float:
    """Return a time in ISO 8601 or HTTP's form; without one `notice_s` from now."""
    for parse in (datetime.fromisoformat, email.utils.parsedate_to_datetime):
        try:
            moment = parse(str(text))
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            continue
    return time.time() + notice_s


MONITOR = "ray.autoscaler.v2.monitor"
_RPC_S = 5.0
_AGAIN_S = 1.0


@dataclass(frozen=True)
class Raylet:
    """Ray's process for this node."""

    node_id: str
    gcs_address: str
    logs: str
    """The directory of its session's logs."""
    process: int
    """A file descriptor that is readable once the process has ended."""

    def has_ended(self, wait_s: float) -> bool:
        """Wait for its end for so many seconds; return whether it has ended."""
        poll = select.poll()
        poll.register(self.process, select.POLLIN)
        return bool(poll.poll(wait_s * 1e3))


def watch(cloud: str, address: str, node_id: str | None = None) -> int:
    """Wait for this machine's spot notice, and drain its Ray node; return the exit code.

    Ends with Ray, and at once on a machine that is not spot. Raises ClusterError where
    there is no such node.
    """
    raylet = find_raylet(node_id)
    try:
        say(f"waiting for a notice that {cloud} takes Ray's node {raylet.node_id} back")
        notice = wait_for_notice(SERVICES[cloud](address), raylet.has_ended, say)
        return 0 if notice is None or drain(raylet, notice) else 1
    finally:
        os.close(raylet.process)


def find_raylet(node_id: str | None = None) -> Raylet:
    """Return this machine's raylet, of several that of `node_id`; raises ClusterError."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            program, *arguments = (
                (process / "cmdline").read_text(errors="replace").split("\0")
            )
            if program.endswith("/raylet/raylet"):
                flags = dict(
                    argument.lstrip("-").split("=", 1)
                    for argument in arguments
                    if "=" in argument
                )
                found.append((int(process.name), flags))
    chosen = [
        (pid, flags) for pid, flags in found if node_id in (None, flags.get("node_id"))
    ]
    if len(chosen) != 1:
        nodes = (
            ", ".join(flags.get("node_id", "one unnamed") for _, flags in found)
            or "none"
        )
        raise ClusterError(
            f"one node of Ray is watched, and on this machine run {nodes}: start Ray, or give --node"
        )
    [(pid, flags)] = chosen
    logs = Path(flags.get("raylet_socket_name", "")).parents[1] / "logs"
    try:
        return Raylet(
            flags["node_id"], flags["gcs-address"], str(logs), os.pidfd_open(pid)
        )
    except ProcessLookupError:
        raise ClusterError(
            "Ray has just ended on this machine: start it again"
        ) from None


def drain(raylet: Raylet, notice: Notice) -> bool:
    """Have Ray drain the node until the notice's deadline; return whether it will.

    Asked again until then.
    """
    say(f"{notice.reason}; gone in {notice.deadline_s - time.time():.0f} s")
    is_first = True
    while is_first or (
        time.time() < notice.deadline_s and not raylet.has_ended(_AGAIN_S)
    ):
        is_first = False
        deadline_ms = int(
            max(notice.deadline_s, time.time() + 1) * 1e3
        )  # 0 would be none at all
        try:
            accepted, words = drain_node(
                raylet.gcs_address, raylet.node_id, notice.reason, deadline_ms, _RPC_S
            )
        except (
            Exception
        ) as error:  # whatever it is, the time that is left is for trying again
            accepted = False
            words = f"{type(error).__name__}: {error}"
        if accepted:
            say("Ray drains the node")
            return True
        say(f"Ray does not drain the node: {words}")
    return False


def say(words: str) -> None:
    """Print a line with the time."""
    print(time.strftime("%Y-%m-%d %H:%M:%S"), words, flush=True)


def heed_refusals() -> None:
    """Have Ray's autoscaler count machines that the cloud refuses as failed."""
    reconciler, subscriber, failed = autoscaler_parts()
    for step in ("_try_resolve_pending_allocation", "_handle_stuck_requested_instance"):
        setattr(
            reconciler,
            step,
            staticmethod(_naming_the_type(getattr(reconciler, step), failed)),
        )
    notify = subscriber.notify

    def notify_of_refusals(monitor: Any, events: list[Any]) -> None:
        notify(monitor, events)
        for event in events:
            if event.new_instance_status == failed and event.instance_type:
                monitor.allocation_timeout(event)

    subscriber.notify = notify_of_refusals


def _naming_the_type(step: Callable[..., Any], failed: int) -> Callable[..., Any]:
    """Wrap a step of Ray's that decides on a requested instance.

    A failure then says of which node type it is.
    """

    def named(instance: Any, *args: Any, **kwargs: Any) -> Any:
        update = step(instance, *args, **kwargs)
        if update is not None and update.new_instance_status == failed:
            update.instance_type = instance.instance_type
        return update

    return named


def autoscale(config: str, node_id: str | None = None) -> int:
    """Run Ray's autoscaler for the head on this machine, until Ray ends.

    In the place of the one that `ray start --no-monitor` leaves out, with its log where
    that one has it.
    """
    raylet = find_raylet(node_id)
    threading.Thread(target=_end_with, args=(raylet,), daemon=True).start()
    heed_refusals()
    options = {
        "gcs-address": raylet.gcs_address,
        "autoscaling-config": config,
        "logs-dir": raylet.logs,
    }
    options["monitor-ip"] = raylet.gcs_address.rpartition(":")[0]
    sys.argv = [MONITOR, *(f"--{name}={value}" for name, value in options.items())]
    runpy.run_module(MONITOR, run_name="__main__", alter_sys=True)
    return 0


def _end_with(raylet: Raylet) -> None:
    while not raylet.has_ended(3600.0):
        pass
    os._exit(0)
