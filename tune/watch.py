"""Serve the report of a sweep that runs, here or elsewhere, until Ctrl-C. Only reads
the sweep's directory.

The page is on the loopback, for who has the token in the address that is printed. The
first request with it gets a cookie and the address without it, so that it stays in no
history; `Authorization: Bearer TOKEN` will do as well. A page of elsewhere that has its
name resolve to 127.0.0.1 (DNS rebinding) is refused by the name in the Host header. No
path means a file.
"""

import hashlib
import hmac
import secrets
import shlex
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from trainers.config.function import build_run
from trainers.errors import (
    CheckpointError,
    ConfigError,
    PacelineError,
    StorageError,
    counted,
    first_line,
)
from trainers.lease import LEASE, STALE_S, Holder
from trainers.redaction import redact
from trainers.storage import Storage, storage_uri
from tune.report.answer import answer
from tune.report.page import contents, render, source
from tune.report.words import duration, in_words, labels
from tune.report.write import best_tree, read_environment
from tune.search.finalists import repeats_to_run
from tune.sweeps.spec import SAVED, SweepSpec, read_kept
from tune.trials.journal import Journal
from tune.trials.live import Live, read_live
from tune.trials.record import TrialRecord, trial_id

LOOPBACK = "127.0.0.1"
_HOSTS = (LOOPBACK, "localhost", "[::1]")
_POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

_LOOK_S = 1.0
_SHARE = 0.1
"""Of its time that the process may spend on drawing the page."""
_QUIET_S = 600.0
_QUIET_TRIALS = 3.0
"""Nothing new for this long, and for so many times the longest trial, is said."""

Kind = Literal["waiting", "running", "quiet", "cut", "ended"]


@dataclass(frozen=True)
class Seen:
    """What a look at the directory has found."""

    uri: str
    has_sweep: bool = False
    holder: Holder | None = None
    """Of the lease: the process that runs the sweep, or ran it until it was killed."""
    holder_idle_s: float = 0.0
    """For how long its lease has not moved, as far as this process has seen."""
    live: Live | None = None
    records: list[TrialRecord] = field(default_factory=list)
    idle_s: float = 0.0
    """For how long nothing of a trial is new."""

    @property
    def is_alive(self) -> bool:
        """Whether the sweep's process runs, as far as can be known from here."""
        if self.holder is None:
            return False
        return (
            self.holder.is_alive
            if self.holder.is_here
            else self.holder_idle_s <= STALE_S
        )

    @property
    def num_repeats(self) -> int:
        """Repeats of finalists that have ended."""
        return sum(record.purpose == "repeat" for record in self.records)

    @property
    def num_trials(self) -> int:
        """Trials that have ended."""
        return len(self.records) - self.num_repeats

    @property
    def ended(self) -> str:
        """What has ended, in words."""
        trials = counted(self.num_trials, "trial")
        return (
            f"{trials} and {counted(self.num_repeats, 'repeat')}"
            if self.num_repeats
            else trials
        )


def judge(seen: Seen) -> tuple[Kind, str]:
    """Return how a sweep is, and that as a sentence."""
    if not seen.has_sweep:
        begins = (
            f"A sweep begins in {seen.uri}."
            if seen.is_alive
            else f"{seen.uri} holds no sweep yet."
        )
        return "waiting", f"{begins} This page shows it as soon as it is there."
    if seen.is_alive:
        return _judge_running(seen)
    if seen.holder is not None:
        return "cut", _cut_off(seen, "its process has ended without an answer")
    if seen.live is not None and seen.live.state == "ended":
        return "ended", f"The sweep has ended, with {seen.ended}."
    return "cut", _cut_off(seen, "it was stopped before its end")


def _judge_running(seen: Seen) -> tuple[Kind, str]:
    live = seen.live
    if live is not None and live.state != "running":  # it is of the start before
        live = None
    if not seen.records and (live is None or not live.num_lanes):
        return "running", "Starting: no lane is up yet."
    longest_s = max(
        (record.end_time - record.start_time for record in seen.records), default=0.0
    )
    if seen.idle_s > max(_QUIET_S, _QUIET_TRIALS * longest_s):
        why = "its trials may hang, or wait for nodes"
        return (
            "quiet",
            f"Nothing new for {duration(seen.idle_s)}, though the sweep's process is alive: {why}.",
        )
    planned = f" of {live.total}" if live is not None and live.total else ""
    repeats = (
        f", and {counted(seen.num_repeats, 'repeat')} of the best"
        if seen.num_repeats
        else ""
    )
    lanes = f" {counted(live.num_lanes, 'lane')} up." if live is not None else ""
    return (
        "running",
        f"Running: {seen.num_trials}{planned} trials have ended{repeats}.{lanes}",
    )


def _cut_off(seen: Seen, why: str) -> str:
    resume = f"python -m tune resume {shlex.quote(seen.uri)}"
    return f"Cut off: {why}; {seen.ended} are kept. `{resume}` goes on."


class Follow:
    """A sweep's directory, which need not be there yet; from any thread."""

    def __init__(
        self, location: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.storage = Storage(storage_uri(location))
        self._clock = clock
        self._lock = threading.Lock()
        self._look_at = 0.0
        self._page = ("", "")
        self._forget()

    def _forget(self) -> None:
        """Know nothing of the sweep: it is another one."""
        self._saved = b""
        self._spec: SweepSpec | None = None
        self._records: dict[str, TrialRecord] = {}
        self._damaged: dict[str, str] = {}
        self._drawn_of: Any = None
        self._drawn: dict[str, Any] | None = None
        self._lease = b""
        self._lease_at = self._clock()
        self._news: Any = None
        self._news_at = self._clock()

    def page(self) -> tuple[str, str]:
        """Return the page as it was a second ago, or longer where it takes long to
        draw, and its version.
        """
        with self._lock:
            began = self._clock()
            if began >= self._look_at:
                html = self._look()
                self._page = html, f'"{hashlib.sha256(html.encode()).hexdigest()[:32]}"'
                cost_s = self._clock() - began
                self._look_at = began + max(_LOOK_S, cost_s / _SHARE)
            return self._page

    def _look(self) -> str:
        try:
            seen = self._see()
        except (PacelineError, OSError) as error:
            shown = self._shown(
                "waiting" if self._drawn is None else "quiet",
                redact(f"{error}"),
                [],
                None,
            )
        else:
            kind, sentence = judge(seen)
            self._draw(seen.records, kind == "ended")
            live = seen.live if kind in ("running", "quiet") else None
            shown = self._shown(
                kind, redact(sentence), list(self._damaged.values()), live
            )
        if self._drawn is None:
            return render("waiting.html", live=shown)
        return render("report.html", **{**self._drawn, "live": shown})

    def _shown(
        self, kind: Kind, sentence: str, notes: list[str], live: Live | None
    ) -> dict[str, Any]:
        """Return what live.html shows."""
        rows = []
        running = live.running if live is not None else []
        repeats = self._repeats() if running else {}
        for one in running:
            if one.trial in self._records:
                continue
            words = one.trial
            config, seed = repeats.get(one.trial, (one.config, None))
            if self._spec is not None and config:
                known = TrialRecord(one.trial, config, "done", 0.0, 0.0)
                words = in_words(labels(self._spec.config, [known]), known) + (
                    f", repeat, seed {seed}" if seed else ""
                )
            newest = [
                f"{key} {one.metrics[key]:.4g}"
                for key in one.metrics
                if key.startswith(("val_", "train_l"))
            ]
            step = f"{one.metrics['step']:g}" if "step" in one.metrics else ""
            rows.append(
                (
                    one.lane,
                    words,
                    step,
                    "  ".join(newest),
                    duration(max(0.0, time.time() - one.started)),
                )
            )
        return {"kind": kind, "sentence": sentence, "notes": notes, "running": rows}

    def _see(self) -> Seen:
        """Read what is new."""
        storage = self.storage
        now = self._clock()
        lease = storage.read(LEASE) if storage.exists(LEASE) else b""
        holder = Holder.read(lease) if lease else None
        before = Holder.read(self._lease) if self._lease else None
        saved = storage.read(SAVED) if storage.exists(SAVED) else b""
        is_another = (
            holder is not None and before is not None and holder.token != before.token
        )
        if saved != self._saved or is_another:
            self._forget()
            self._saved = saved
            self._spec = read_kept(storage.uri) if saved else None
        if lease != self._lease:
            self._lease = lease
            self._lease_at = now
        live = read_live(storage)
        self._read_records()
        records = sorted(
            self._records.values(), key=lambda record: (record.start_time, record.id)
        )
        news = (
            len(records),
            live and [(one.trial, one.metrics.get("step")) for one in live.running],
        )
        if news != self._news:
            self._news = news
            self._news_at = now
        return Seen(
            storage.uri,
            bool(saved),
            holder,
            now - self._lease_at,
            live,
            records,
            now - self._news_at,
        )

    def _read_records(self) -> None:
        """Read the records that are new, each once; one that is damaged is named."""
        names = {
            name.removesuffix(".json")
            for name in self.storage.names("trials")
            if name.endswith(".json")
        }
        journal = Journal(self.storage)
        self._records = {
            name: record for name, record in self._records.items() if name in names
        }
        self._damaged = {
            name: words for name, words in self._damaged.items() if name in names
        }
        for name in sorted(names - self._records.keys() - self._damaged.keys()):
            try:
                record = journal.find(name)
            except CheckpointError as error:
                self._damaged[name] = redact(f"{error}")
            except StorageError:
                continue  # it was deleted between the list and the look
            else:
                if record is not None:
                    self._records[name] = record

    def _repeats(self) -> dict[str, tuple[dict[str, Any], int]]:
        """Return configuration and seed of the repeats that are to come, by their ids."""
        if self._spec is None:
            return {}
        wanted = repeats_to_run(
            self._spec.config, self._spec.train, list(self._records.values())
        )
        return {
            trial_id(one.config, "repeat", seed): (one.config, seed)
            for one, seed in wanted
        }

    def _draw(self, records: list[TrialRecord], has_ended: bool) -> None:
        """Make the report anew where a record is new or the sweep has ended."""
        spec = self._spec
        what = [record.id for record in records], has_ended
        if spec is None or self._drawn_of == what:
            return
        found = answer(spec.config, records)
        tree = best_tree(spec.config, spec.train, found, spec.storage, None)
        try:
            resolved = (
                build_run(tree, "best.yaml").tree() if tree is not None else spec.train
            )
        except ConfigError:  # of a version with other keys
            resolved = tree or spec.train
        args = (
            spec.storage,
            spec.config,
            resolved,
            records,
            read_environment(spec.storage),
            found,
        )
        self._drawn_of = what
        self._drawn = contents(*args)


class PageServer(ThreadingHTTPServer):
    """Serves what `page` returns, HTML and its version, to who has `token`."""

    daemon_threads = True

    def __init__(self, page: Callable[[], tuple[str, str]], port: int = 0) -> None:
        """`port` 0: any free one. Raises ConfigError where it is taken."""
        self.page = page
        self.token = secrets.token_urlsafe(32)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            rule = f"cannot be used ({first_line(error)})"
            raise ConfigError(
                "--port", port, rule, "give another, or none for any that is free"
            ) from error

    @property
    def address(self) -> str:
        """Where the page is, with the token."""
        return f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version = "paceline"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30  # s, for a request to come

    def do_GET(self) -> None:
        """Answer with the page, its script, or why not."""
        parts = urlsplit(self.path)
        given = parse_qs(parts.query).get("token", [""])[0]
        host = self.headers.get("Host", "")
        if host.rpartition(":")[0] not in _HOSTS and host not in _HOSTS:
            self._say(403, "This page is served to 127.0.0.1 and localhost only.")
        elif parts.path == "/" and self._is_token(given):
            cookie = (
                f"{self._cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Lax"
            )
            self._answer(303, b"", {"Location": "/", "Set-Cookie": cookie})
        elif not self._may():
            self._say(
                401,
                "Open the address that `python -m tune watch` has printed: it holds a token.",
            )
        elif parts.path == "/":
            page, version = self.server.page()
            is_known = self.headers.get("If-None-Match") == version
            kind = {"ETag": version, "Content-Type": "text/html; charset=utf-8"}
            self._answer(
                304 if is_known else 200, b"" if is_known else page.encode(), kind
            )
        elif parts.path in ("/table.js", "/watch.js"):
            self._answer(
                200,
                source(parts.path[1:]).encode(),
                {"Content-Type": "text/javascript; charset=utf-8"},
            )
        else:
            self._say(404, "There is only one page here.")

    @property
    def _cookie(self) -> str:
        # cookies are one host's, not one port's
        return f"paceline-watch-{self.server.server_port}"

    def _may(self) -> bool:
        """Whether the request has the token, in a header or in the cookie."""
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie)
        except CookieError:
            cookie = None
        return (kind.lower() == "bearer" and self._is_token(token)) or (
            cookie is not None and self._is_token(cookie.value)
        )

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(
            text.encode(errors="replace"), self.server.token.encode()
        )

    def _say(self, status: int, words: str) -> None:
        self._answer(
            status, f"{words}\n".encode(), {"Content-Type": "text/plain; charset=utf-8"}
        )

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        fixed = {
            "Cache-Control": "no-store",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": _POLICY,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in (fixed | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Log no request: the first one's address holds the token."""


def serve(location: str, port: int) -> None:
    """Print the address and answer requests; returns after Ctrl-C. Raises ConfigError
    for the place or the port.
    """
    follow = Follow(location)
    # a place that cannot be opened is an error, one that is not there yet is none
    follow.storage.exists()
    with PageServer(follow.page, port) as server:
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
