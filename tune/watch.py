"""Serve the report of a sweep that is running, here or elsewhere, until Ctrl-C.

The page is served on the loopback interface, to those who have the token in
the printed address. The first request with the token gets a cookie and is
redirected to the same address without the token, so that the browser's history
does not keep the token. The header `Authorization: Bearer TOKEN` works as
well. If the name of another site resolves to 127.0.0.1 (DNS rebinding), the
Host header holds that name, and the request is refused. No URL path is mapped
to a file.

The buttons do what `python -m tune steer` does; nothing else writes to the
sweep's directory. Cookies are not sufficient for steering, because requests
from other pages carry them, too. A steering request needs the token in a
header, which the page sends.
"""

import hashlib
import hmac
import json
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

from pydantic import Field

from trainers.errors import (
    CheckpointError,
    ConfigError,
    PacelineError,
    counted,
    first_line,
    redact,
)
from trainers.lease import LEASE, STALE_S, Holder
from trainers.storage import Storage, storage_uri, validated
from tune.report.answer import answer
from tune.report.words import duration, in_a_line, newest
from tune.report.write import contents, read_environment, render, source
from tune.sweeps.spec import SAVED, SweepSpec, read_kept
from tune.sweeps.steer import steer_in_words, trials_of
from tune.trials.journal import Journal, Live, Running, in_order, read_live
from tune.trials.record import Records, TrialRecord
from tune.trials.steering import Actions

LOOPBACK = "127.0.0.1"
_HOSTS = (LOOPBACK, "localhost", "[::1]")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; connect-src 'self'; "
        "style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_MOST_CHOICES = 200
"""The greatest number of trials that the page offers to steer."""
_LONGEST = 4096
"""The greatest size of a steering request, in bytes."""
_Words = Annotated[list[str], Field(min_length=1)]
_ELSEWHERE = "This page is served to 127.0.0.1 and localhost only."
_NOT_OPENED = "Open the address that `python -m tune watch` has printed: it holds a token."
_LOOK_S = 1.0
_SHARE = 0.1
"""The share of its time that the process may spend on drawing the page."""

Kind = Literal["waiting", "running", "unread", "cut", "ended"]


@dataclass(frozen=True)
class Seen:
    """The state of a sweep, as read from its directory."""

    uri: str
    has_sweep: bool = False
    holder: Holder | None = None
    """The lease's holder: the process that runs the sweep, or was killed doing so."""
    holder_idle_s: float = 0.0
    """How long this process has seen no renewal of the lease."""
    live: Live | None = None
    records: list[TrialRecord] = field(default_factory=list)

    @property
    def is_alive(self) -> bool:
        """Whether the sweep's process seems to run, as seen from this machine."""
        if self.holder is None:
            return False
        if self.holder.is_here:
            return self.holder.is_alive
        return self.holder_idle_s <= STALE_S

    @property
    def num_repeats(self) -> int:
        """The number of finalists' repeats that have ended."""
        return sum(record.purpose == "repeat" for record in self.records)

    @property
    def num_trials(self) -> int:
        """The number of trials that have ended."""
        return len(self.records) - self.num_repeats

    @property
    def ended(self) -> str:
        """The trials and repeats that have ended, in words."""
        trials = counted(self.num_trials, "trial")
        if not self.num_repeats:
            return trials
        return f"{trials} and {counted(self.num_repeats, 'repeat')}"


def judge(seen: Seen) -> tuple[Kind, str]:
    """Return the state of a sweep, and a sentence about it."""
    if not seen.has_sweep:
        so_far = f"{seen.uri} holds no sweep yet."
        if seen.is_alive:
            so_far = f"A sweep begins in {seen.uri}."
        return (
            "waiting",
            f"{so_far} This page shows the sweep as soon as it has begun.",
        )
    if seen.is_alive:
        return _judge_running(seen)
    if seen.holder is not None:
        return "cut", _cut_off(
            seen, "the sweep's process has ended without an answer"
        )
    if seen.live is not None and seen.live.state == "ended":
        return "ended", f"The sweep has ended, with {seen.ended}."
    return "cut", _cut_off(seen, "the sweep was stopped before its end")


def _judge_running(seen: Seen) -> tuple[Kind, str]:
    live = seen.live
    if live is None or live.state != "running":  # left by an earlier start
        live = Live("running")
    if not seen.records and not live.num_lanes:
        return "running", "Starting: no lane is up yet."
    ended = counted(seen.num_trials, "trial")
    if live.total:
        ended = f"{seen.num_trials} of {counted(live.total, 'trial')}"
    repeats = ""
    if seen.num_repeats:
        repeats = f", and {counted(seen.num_repeats, 'repeat')} of the best"
    lanes = counted(live.num_lanes, "lane")
    return "running", f"Running: {ended} ended{repeats}. {lanes} up."


def _cut_off(seen: Seen, why: str) -> str:
    resume = f"python -m tune {shlex.quote(seen.uri)}"
    return (
        f"Cut off: {why}; kept: {seen.ended}. `{resume}` continues the sweep."
    )


class Follow:
    """Follows a sweep's directory, which need not exist yet; thread-safe."""

    def __init__(
        self, location: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.storage = Storage(storage_uri(location))
        self._clock = clock
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._page = ("", "")
        self._said = ""
        self.token = secrets.token_urlsafe(32)
        """The token for the page and for steering requests."""
        self._forget()

    def _forget(self) -> None:
        """Reset all state, because the directory holds a new sweep or a new start."""
        self._sweep = b"", ""
        """The content of the sweep's file, and the token of its lease."""
        self._spec: SweepSpec | None = None
        self._records: dict[str, TrialRecord] = {}
        self._actions = Actions(self.storage)
        self._drawn_of: Any = None
        self._drawn: dict[str, Any] | None = None
        self._lease = b""
        self._lease_at = self._clock()

    def page(self) -> tuple[str, str]:
        """Return the page and its version; a page slow to draw is cached for longer."""
        with self._lock:
            began = self._clock()
            if began >= self._look_at:
                html = self._look()
                self._page = (
                    html,
                    f'"{hashlib.sha256(html.encode()).hexdigest()[:32]}"',
                )
                cost_s = self._clock() - began
                self._look_at = began + max(_LOOK_S, cost_s / _SHARE)
            return self._page

    def steer(self, words: list[str]) -> tuple[bool, str]:
        """Run a steering command; return whether it succeeded, and a message.

        The page shows the message, too.
        """
        is_done = False
        try:
            name = steer_in_words(self.storage.uri, *words)
            said = f"{words[0]} {name}".rstrip()
            is_done = True
        except PacelineError as error:
            said = str(error)
        with self._lock:
            self._said = said
            self._look_at = 0.0
        return is_done, said

    def _look(self) -> str:
        running: list[tuple[int, str, str, str, str]] = []
        choices: list[tuple[str, str]] = []
        try:
            seen = self.see()
            kind, sentence = judge(seen)
            live = seen.live if kind == "running" else None
            if live is not None:
                known = self._records
                running = [
                    _row(run) for run in live.running if run.trial not in known
                ]
            if kind in ("running", "cut"):
                choices = self._choices(live)
            self._draw(seen.records, kind == "ended")
        except (PacelineError, OSError) as error:
            kind = "unread"
            sentence = f"{error}"
        shown = {
            "kind": kind,
            "sentence": redact(sentence),
            "note": self._said,
            "running": running,
            "choices": choices,
            "token": self.token,
        }
        if self._drawn is None:
            return render("waiting.html", live=shown)
        return render("report.html", **{**self._drawn, "live": shown})

    def _choices(self, live: Live | None) -> list[tuple[str, str]]:
        """Return the ID and description of trials to steer, running ones first."""
        if self._spec is None:
            return []
        clones = self._actions.read().clones
        known = trials_of(
            self._spec, list(self._records.values()), clones, live
        )
        order = {"running": 0, "waiting": 1}
        found = sorted(
            known.items(), key=lambda trial: order.get(trial[1].status, 2)
        )
        return [
            (
                name,
                f"{trial.status}: {redact(in_a_line(trial.config))} ({name})",
            )
            for name, trial in found[:_MOST_CHOICES]
        ]

    def see(self) -> Seen:
        """Read what is new in the directory, and return the sweep's state."""
        storage = self.storage
        now = self._clock()
        lease = storage.read(LEASE) if storage.exists(LEASE) else b""
        holder = Holder.read(lease) if lease else None
        saved = storage.read(SAVED) if storage.exists(SAVED) else b""
        sweep = saved, holder.token if holder else self._sweep[1]
        if sweep != self._sweep:
            self._forget()
            self._sweep = sweep
            self._spec = read_kept(storage.uri) if saved else None
        if lease != self._lease:
            self._lease = lease
            self._lease_at = now
        live = read_live(storage)
        self._read_records()
        records = in_order(self._records.values())
        idle_s = now - self._lease_at
        return Seen(storage.uri, bool(saved), holder, idle_s, live, records)

    def _read_records(self) -> None:
        """Read records that are new, each once."""
        journal = Journal(self.storage)
        names = journal.names()
        for name in self._records.keys() - names:
            del self._records[name]
        for name in sorted(names - self._records.keys()):
            record = journal.find(name)
            if record is not None:
                self._records[name] = record

    def _draw(self, records: Records, has_ended: bool) -> None:
        """Draw the report again if records have changed or the sweep has ended."""
        spec = self._spec
        what = [record.id for record in records], has_ended
        if spec is None or self._drawn_of == what:
            return
        self._drawn_of = what
        self._drawn = contents(
            spec.storage,
            spec.config,
            spec.train,
            records,
            read_environment(spec.storage),
            answer(spec.config, records),
        )


def _row(trial: Running) -> tuple[int, str, str, str, str]:
    """Return the table cells of a running trial."""
    words = redact(in_a_line(trial.config)) or trial.trial
    age = duration(max(0.0, time.time() - trial.started))
    return trial.lane, words, *newest(trial.metrics), age


class PageServer(ThreadingHTTPServer):
    """Serves the page of a sweep to clients that have its token."""

    daemon_threads = True

    def __init__(self, follow: Follow, port: int = 0) -> None:
        """Port 0 means any free port. Raises ConfigError if the port is taken."""
        self.follow = follow
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            rule = f"cannot be used ({first_line(error)})"
            raise ConfigError(
                "--port",
                port,
                rule,
                "give another port, or leave it out for any free port",
            ) from error

    @property
    def address(self) -> str:
        """The page's address, with the token."""
        return (
            f"http://{LOOPBACK}:{self.server_port}/?token={self.follow.token}"
        )

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors, such as a browser that has disconnected."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "paceline"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30  # s, to wait for a request

    def do_GET(self) -> None:
        """Send the page or one of its scripts, or an error message."""
        parts = urlsplit(self.path)
        given = parse_qs(parts.query).get("token", [""])[0]
        if self._is_elsewhere():
            self._say(403, _ELSEWHERE)
        elif parts.path == "/" and self._is_token(given):
            cookie = f"{self._cookie}={given}; Path=/; HttpOnly; SameSite=Lax"
            self._answer(
                303, "", "text/plain", Location="/", Set_Cookie=cookie
            )
        elif not (self._has_cookie() or self._has_header()):
            self._say(401, _NOT_OPENED)
        elif parts.path == "/":
            page, version = self.server.follow.page()
            is_known = self.headers.get("If-None-Match") == version
            status = 304 if is_known else 200
            self._answer(
                status, "" if is_known else page, "text/html", ETag=version
            )
        elif parts.path in ("/table.js", "/watch.js"):
            self._answer(200, source(parts.path[1:]), "text/javascript")
        else:
            self._say(404, "There is only one page here.")

    def do_POST(self) -> None:
        """Steer the sweep by the request's body, a JSON list of the command's words."""
        self.close_connection = True  # its body may not have been read
        length = self.headers.get("Content-Length", "")
        if self._is_elsewhere():
            self._say(403, _ELSEWHERE)
        elif not self._has_header():
            self._say(401, "Steering needs the token in a header.")
        elif self.path != "/steer":
            self._say(404, "Only /steer takes requests.")
        elif not length.isdecimal() or int(length) > _LONGEST:
            self._say(400, f"A request has at most {_LONGEST} bytes.")
        else:
            try:
                words = validated(
                    json.loads(self.rfile.read(int(length))), _Words
                )
            except (ValueError, RecursionError, CheckpointError):
                self._say(400, 'Write a list of words: ["stop", "3f2a"].')
                return
            is_done, said = self.server.follow.steer(words)
            self._say(200 if is_done else 400, said)

    def _is_elsewhere(self) -> bool:
        """Return whether the request's Host or Origin names a host other than ours."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin", f"http://{host}")
        is_ours = host.rpartition(":")[0] in _HOSTS or host in _HOSTS
        return not is_ours or origin != f"http://{host}"

    @property
    def _cookie(self) -> str:
        # a cookie belongs to a host, not to a port
        return f"paceline-watch-{self.server.server_port}"

    def _has_cookie(self) -> bool:
        cookies = self.headers.get("Cookie", "").split("; ")
        given = [cookie.removeprefix(f"{self._cookie}=") for cookie in cookies]
        return any(map(self._is_token, given))

    def _has_header(self) -> bool:
        given = self.headers.get("Authorization", "")
        return self._is_token(given.removeprefix("Bearer "))

    def _is_token(self, given: str) -> bool:
        token = self.server.follow.token
        return hmac.compare_digest(
            given.encode(errors="replace"), token.encode()
        )

    def _say(self, status: int, words: str) -> None:
        self._answer(status, f"{words}\n", "text/plain")

    def _answer(
        self, status: int, text: str, kind: str, **headers: str
    ) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (_HEADERS | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Log no request: the first one's address holds the token."""


def serve(location: str, port: int) -> None:
    """Print the page's address and serve it until Ctrl-C.

    Raises:
        ConfigError: The directory or the port cannot be used.
    """
    follow = Follow(location)
    # Raises if the storage cannot be opened; a directory that does not exist
    # yet is no error.
    follow.storage.exists()
    with PageServer(follow, port) as server:
        own = server.server_port
        print(f"{follow.storage.uri} is shown at\n    {server.address}")
        print(
            f"from another machine, through `ssh -L {own}:{LOOPBACK}:{own} {socket.gethostname()}`"
        )
        print("Ctrl-C ends this page, not the sweep", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("the page has ended", flush=True)
