"""An S3 server over HTTP (moto), and before it a proxy that answers 503, cuts connections or dawdles at a request."""

from __future__ import annotations

import http.client
import importlib.util
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.faults.cases import Fault

LASTS = {"503": 3, "cut": 2, "dawdle": 4}
"""Requests that each fault spoils, one after the other."""
DAWDLE_S = 4.0
_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>injected: reduce your rate</Message></Error>"


def installed() -> bool:
    """Whether there is a server to run."""
    return importlib.util.find_spec("moto") is not None


@contextmanager
def bucket(directory: Path, faults: Sequence[Fault], bytes_per_s: float = math.inf) -> Iterator[str]:
    """The URI of a new bucket behind a proxy, which lets the faults happen while the case is armed."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for every request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        proxy = Proxy(server.get_host_and_port(), directory, faults, bytes_per_s)
        thread = threading.Thread(target=proxy.serve_forever, name="s3-proxy", daemon=True)
        thread.start()
        try:
            name = f"faults-{secrets.token_hex(6)}"
            connection = http.client.HTTPConnection(*server.get_host_and_port())
            connection.request("PUT", f"/{name}")
            assert connection.getresponse().status == 200
            yield f"s3://{name}/runs?scheme=http&region=us-east-1&endpoint_override=127.0.0.1:{proxy.server_port}"
        finally:
            proxy.shutdown()
            proxy.server_close()
    finally:
        server.stop()


def fetch(uri: str, directory: Path) -> None:
    """Copy the run from the bucket to where the oracle looks."""
    from pyarrow import fs

    os.environ |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    place, path = fs.FileSystem.from_uri(uri)
    if place.get_file_info(f"{path}/run").type != fs.FileType.NotFound:
        (directory / "run").mkdir(exist_ok=True)  # copy_files makes only those below it
        fs.copy_files(f"{path}/run", str(directory / "run"), source_filesystem=place)


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server, but for those that a fault spoils."""

    daemon_threads = True

    def __init__(self, server: tuple[str, int], directory: Path, faults: Sequence[Fault], bytes_per_s: float) -> None:
        """Each answer takes as long as `bytes_per_s` has it."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bytes_per_s = bytes_per_s
        self.backend, self._directory, self._faults = server, directory, faults
        self._lock, self._count = threading.Lock(), 0

    def fault(self) -> str:
        """Count a request; what spoils it, if anything does."""
        with self._lock:
            self._count += 1
            for index, fault in enumerate(self._faults):
                last = fault.number + LASTS.get(fault.detail, 0)
                if fault.act != "server" or not fault.number <= self._count < last:
                    continue
                if (self._directory / "armed").exists():
                    words = {"when": time.monotonic(), "pid": 0, "role": "server", "trial": 0}
                    (self._directory / f"landed-{index}").write_text(json.dumps(words))
                    return fault.detail
        return ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass_on(self) -> None:
        body = self._body()
        spoiled = self.server.fault()
        if spoiled == "503":
            self._answer(503, {"Content-Type": "application/xml"}, _SLOW_DOWN)
            return
        if spoiled == "dawdle":
            time.sleep(DAWDLE_S)
        connection = http.client.HTTPConnection(*self.server.backend)
        passed = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        connection.request(self.command, self.path, body, passed | {"Content-Length": str(len(body))})
        answer = connection.getresponse()
        data = answer.read()
        time.sleep(len(data) / self.server.bytes_per_s)
        dropped = _HOP_BY_HOP if self.command == "HEAD" else (*_HOP_BY_HOP, "content-length")
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in dropped}
        self._answer(answer.status, headers, data, cut=spoiled == "cut")
        connection.close()

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():  # trailers
            pass
        return body

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on  # noqa: N815 (the base class calls them)

    def _answer(self, status: int, headers: dict[str, Any], data: bytes, cut: bool = False) -> None:
        self.send_response_only(status)
        if self.command != "HEAD":
            headers = {**headers, "Content-Length": str(len(data) + cut)}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (its name in the base class)
        """Say nothing."""


_HOP_BY_HOP = ("connection", "transfer-encoding", "keep-alive")
