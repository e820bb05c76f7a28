"""Ask the metadata services of EC2, Google Cloud and Azure for spot notices.

A machine asks a link-local address by plain HTTP, without credentials and
without a proxy, even if the environment sets one.
"""

import email.utils
import http
import json
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

ADDRESS = "169.254.169.254"
_TIMEOUT_S = 5.0
_LONGEST = 2**20


@dataclass(frozen=True)
class Notice:
    """A notice that this machine is about to be taken back."""

    deadline_s: float
    """Unix time in seconds from which the machine may be gone."""
    reason: str


class MetadataService(ABC):
    """The metadata service of one cloud, at `address` (HOST or HOST:PORT)."""

    every_s: ClassVar[float]
    """Seconds between two requests."""

    def __init__(self, address: str = ADDRESS) -> None:
        self._address = address
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({})
        )

    @abstractmethod
    def notice(self) -> Notice | None:
        """Return the notice for this machine, if any.

        Raises any exception if the service does not answer as it should.
        """

    def _ask(
        self, path: str, headers: Mapping[str, str], method: str = "GET"
    ) -> str:
        """Send a request; return the text of the answer."""
        request = urllib.request.Request(
            f"http://{self._address}{path}",
            headers=dict(headers),
            method=method,
        )
        with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
            return str(answer.read(_LONGEST).decode().strip())


class Ec2(MetadataService):
    """EC2's instance metadata, version 2: `spot/instance-action`, two minutes ahead.

    Each request needs a session token, which a PUT request returns.

    A rebalance recommendation does not count as a notice: it names no time,
    and most machines that get one stay.
    """

    every_s = 5.0  # as EC2's documentation advises
    _NOTICE_S = 120.0

    def notice(self) -> Notice | None:
        """Return the notice for this instance; status 404 means that there is none."""
        token = self._ask(
            "/latest/api/token",
            {"X-aws-ec2-metadata-token-ttl-seconds": "60"},
            "PUT",
        )
        try:
            text = self._ask(
                "/latest/meta-data/spot/instance-action",
                {"X-aws-ec2-metadata-token": token},
            )
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.NOT_FOUND:
                return None
            raise
        said = json.loads(text)
        deadline_s = time.time() + self._NOTICE_S
        if "time" in said:
            deadline_s = datetime.fromisoformat(said["time"]).timestamp()
        return Notice(deadline_s, f"EC2's notice: {said['action']}")


class Google(MetadataService):
    """Google Cloud's `instance/preempted`: TRUE half a minute before the end."""

    every_s = 1.0
    _NOTICE_S = 30.0

    def notice(self) -> Notice | None:
        """Return the notice for this instance, if any."""
        path = "/computeMetadata/v1/instance/preempted"
        if self._ask(path, {"Metadata-Flavor": "Google"}) != "TRUE":
            return None
        return Notice(
            time.time() + self._NOTICE_S, "Google Cloud's notice: preempted"
        )


class Azure(MetadataService):
    """Azure's scheduled events: `Preempt`, at least half a minute ahead.

    All machines of a scale set see an event, so an event counts only if it
    names this machine.
    """

    every_s = 1.0  # as Azure's documentation advises
    _NOTICE_S = 30.0
    _HEADERS: ClassVar = {"Metadata": "true"}

    def notice(self) -> Notice | None:
        """Return the earliest eviction of this machine."""
        path = "/metadata/scheduledevents?api-version=2020-07-01"
        events = json.loads(self._ask(path, self._HEADERS))["Events"]
        evictions = [
            event for event in events if event["EventType"] == "Preempt"
        ]
        if not evictions:
            return None
        path = "/metadata/instance/compute?api-version=2021-02-01"
        own = json.loads(self._ask(path, self._HEADERS))["name"].casefold()
        times = [
            self._deadline_s(eviction["NotBefore"])
            for eviction in evictions
            if own in [name.casefold() for name in eviction["Resources"]]
        ]
        return Notice(min(times), "Azure's notice: Preempt") if times else None

    def _deadline_s(self, not_before: str) -> float:
        if not not_before:  # the eviction has begun
            return time.time() + self._NOTICE_S
        return email.utils.parsedate_to_datetime(not_before).timestamp()


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
    """Wait for a notice that this machine is about to be taken back, and return it.

    Returns None once Ray has ended on this machine.

    `has_ended` waits the given number of seconds for Ray to end, and returns
    whether Ray has ended. If the service gives no usable answer, it is asked
    again. `say` is called once when such trouble begins, and once when it is
    over.
    """
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
        except Exception as error:
            trouble = f"the metadata service gives no usable answer ({type(error).__name__}: {error})"
        if bool(trouble) != bool(before):
            say(trouble or "the metadata service answers again")
    return None
