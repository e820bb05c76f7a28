"""An S3 server over HTTP (moto), and before it a proxy that spoils requests:
the n-th of a case, or a share of all.
"""

from __future__ import annotations

import http.client
import importlib.util
import itertools
import json
import logging
import math
import os
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.faults.cases import Fault
from tests.http_body import ask, read_body, respond

LASTS = {"503": 3, "cut": 2, "dawdle": 4}
"""Requests that each fault spoils, one after the other."""
DAWDLE_S = 4.0
_INTERNAL = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>injected</Message></Error>"
_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>injected: reduce your rate</Message></Error>"


def installed() -> bool:
    """Whether there is a server to run."""
    return importlib.util.find_spec("moto") is not None


@contextmanager
def bucket(
    spoils: Callable[[str, str], str] = lambda method, target: "",
    bytes_per_s: float = math.inf,
) -> Iterator[tuple[Proxy, str, str]]:
    """A proxy that `spoils` requests, by method and target; the URI of a new
    bucket behind it, and the same bucket's without the proxy.

    Each answer takes as long as `bytes_per_s` has it.
    """
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(
        logging.ERROR
    )  # a line for every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        proxy = Proxy(server.get_host_and_port(), spoils, bytes_per_s)
        thread = threading.Thread(
            target=proxy.serve_forever, name="s3-proxy", daemon=True
        )
        thread.start()
        try:
            name = f"faults-{secrets.token_hex(6)}"
            connection = http.client.HTTPConnection(
                *server.get_host_and_port()
            )
            connection.request("PUT", f"/{name}")
            assert connection.getresponse().status == 200
            yield (
                proxy,
                _uri(name, proxy.server_port),
                _uri(name, proxy.backend[1]),
            )
        finally:
            proxy.shutdown()
            proxy.server_close()
    finally:
        server.stop()


def _uri(name: str, port: int) -> str:
    return f"s3://{name}/runs?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{port}"


def of_case(
    directory: Path, faults: Sequence[Fault]
) -> Callable[[str, str], str]:
    """Spoils what a case's faults say, while it is armed."""
    count = itertools.count(1)

    def spoils(method: str, target: str) -> str:
        number = next(count)
        for index, fault in enumerate(faults):
            if (
                fault.act != "server"
                or not fault.number
                <= number
                < fault.number + LASTS[fault.detail]
            ):
                continue
            if (directory / "armed").exists():
                words = {
                    "when": time.monotonic(),
                    "pid": 0,
                    "role": "server",
                    "trial": 0,
                }
                (directory / f"landed-{index}").write_text(json.dumps(words))
                return fault.detail
        return ""

    return spoils


def fetch(uri: str, directory: Path):
    """Copy the run from the bucket to where the oracle looks."""
    from pyarrow import fs

    os.environ |= {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
    }
    place, path = fs.FileSystem.from_uri(uri)
    if place.get_file_info(f"{path}/run").type != fs.FileType.NotFound:
        (directory / "run").mkdir(
            exist_ok=True
        )  # copy_files makes only those below it
        fs.copy_files(
            f"{path}/run", str(directory / "run"), source_filesystem=place
        )


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server, but for those that are spoiled, which it counts."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any):
        """Say nothing of clients that were killed, or did not want to wait."""

    def __init__(
        self,
        server: tuple[str, int],
        spoils: Callable[[str, str], str],
        bytes_per_s: float,
    ):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.backend = server
        self.bytes_per_s = bytes_per_s
        self._spoils = spoils
        self._lock = threading.Lock()
        self.requests = 0
        self.spoiled = Counter()
        """Requests by what was done to them, and by what they wanted."""

    def fault(self, method: str, target: str) -> str:
        """What spoils a request, if anything does."""
        with self._lock:
            self.requests += 1
            if spoiled := self._spoils(method, target):
                self.spoiled[
                    spoiled,
                    f"{method} part" if "uploadId=" in target else method,
                ] += 1
            return spoiled


KINDS = ("503", "500", "dawdle", "cut request", "cut", "lost")
"""What is done to requests: 503 SlowDown, 500, an answer that is late, a
connection that is cut in the middle of the request, or of the answer, or after
the request and before any answer.
"""


def noise(seed: int, share: float) -> Callable[[str, str], str]:
    """Spoils this share of all requests, drawn by a seed; one in four of those
    again and again, up to the client's own last try and beyond.
    """
    draw = random.Random(seed)
    stubborn = {}

    def spoils(method: str, target: str) -> str:
        what = method, target.partition("uploadId=")[0]
        if what in stubborn:
            kind, times = stubborn.pop(what)
            if times > 1:
                stubborn[what] = kind, times - 1
            return kind
        if draw.random() >= share:
            return ""
        kind = draw.choice(KINDS)
        if kind != "dawdle" and draw.random() < 0.25:
            stubborn[what] = kind, draw.randint(1, 4)
        return kind

    return spoils


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass_on(self):
        spoiled = self.server.fault(self.command, self.path)
        if spoiled == "cut request":
            self.rfile.read(
                min(16, int(self.headers.get("Content-Length") or 0))
            )
            self.close_connection = True
            return
        body = read_body(self)
        if spoiled in ("503", "500"):
            said = _SLOW_DOWN if spoiled == "503" else _INTERNAL
            respond(
                self, (int(spoiled), {"Content-Type": "application/xml"}, said)
            )
            return
        if spoiled == "dawdle":
            time.sleep(DAWDLE_S)
        answer = ask(self.server.backend, self, body)
        if spoiled == "lost":
            self.close_connection = True
            return
        time.sleep(len(answer[2]) / self.server.bytes_per_s)
        respond(self, answer, cut=spoiled == "cut")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815 (the base class calls them)

    def log_message(self, format: str, *args: Any):  # noqa: A002 (its name in the base class)
        """Say nothing."""
