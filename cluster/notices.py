"""Ask the metadata services of EC2, Google Cloud and Azure for spot notices.

A machine asks a link-local address by plain HTTP, without credentials and without a
proxy, even if the environment sets one.
"""

import email.utils
import http.client
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

ADDRESS = "169.254.169.254"
_TIMEOUT_S = 5.0
_LONGEST = 2**20


class UnansweredError(Exception):
    """Raised if the metadata service is unreachable, refuses, or answers nonsense."""


@dataclass(frozen=True)
class Notice:
    """A notice that a machine is about to be taken back."""

    deadline_s: float
    """Unix time from which on the machine may be gone."""
    reason: str


class MetadataService(ABC):
    """The metadata service of one cloud, at `address` (HOST or HOST:PORT)."""

    every_s: ClassVar[float]
    """Seconds between two requests."""

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
        """Send a request; return the status and the text of the answer."""
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
        """Send a request; return the JSON of the answer."""
        return _as_json(_require(path, *self._ask(path, headers)), path)


class Ec2(MetadataService):
    """EC2's instance metadata, version 2: `spot/instance-action`, two minutes ahead.

    The service requires a session token, which is fetched first, by PUT.

    A rebalance recommendation does not count as a notice: it names no time, and most
    machines that get one stay.
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
        """Return the notice for this instance; status 404 means that there is none."""
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
        """Return status and text of an item; renew the token if it has expired."""
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
        """Return the notice for this instance, if any."""
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

    All machines of a scale set see an event, so it counts only if it names this one.
    """

    every_s = 1.0  # as its documentation advises
    _NOTICE_S = 30.0
    _HEADERS: ClassVar = {"Metadata": "true"}

    def is_spot(self) -> bool:
        """Return whether the machine's priority is other than `Regular`."""
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
    """Wait for a notice that this machine is to be taken back, and return it.

    Returns None if this is no spot machine, or once Ray has ended here.

    `has_ended` waits the given number of seconds for Ray to end, and returns whether it
    has. If the service does not answer, it is asked again, and `say` is called once.
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
    """Return the text of an answer; UnansweredError unless its status is 200."""
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
    """Return whether a machine's name is in Azure's list, ignoring case."""
    if not isinstance(names, list):
        return False
    return name.casefold() in [str(other).casefold() for other in names]


def _unix_time(text: object, notice_s: float) -> float:
    """Parse a time in ISO 8601 or HTTP format; if invalid, `notice_s` from now."""
    for parse in (datetime.fromisoformat, email.utils.parsedate_to_datetime):
        try:
            moment = parse(str(text))
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            continue
    return time.time() + notice_s
