"""The metadata services of EC2, Google Cloud and Azure as an HTTP server."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Answer = tuple[int, str]


@dataclass
class Machine:
    """What the three services know of one machine; tests change it while the
    server runs.
    """

    action: dict[str, str] | None = None
    """EC2's `spot/instance-action`."""
    items: dict[str, str] = field(default_factory=dict)
    """What else EC2's service says, by path."""
    preempted: bool = False
    events: list[Any] = field(default_factory=list)
    """Azure's scheduled events."""
    token: int = 1
    """The one of EC2's tokens that counts; those before it have expired."""
    faults: list[Callable[[BaseHTTPRequestHandler], None]] = field(
        default_factory=list
    )
    """What is done, each once, in the place of an answer."""
    asked: list[str] = field(default_factory=list)
    address: str = ""

    def answer(self, method: str, path: str, headers: Any) -> Answer:
        """Return status and text of the answer, as the clouds document them."""
        url = urlsplit(path)
        if path == "/latest/api/token":
            ttl = headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            is_asked_well = (
                method == "PUT" and ttl.isdigit() and 1 <= int(ttl) <= 21600
            )
            return (200, str(self.token)) if is_asked_well else (400, "")
        if path.startswith("/latest/meta-data/"):
            if headers.get("X-aws-ec2-metadata-token") != str(self.token):
                return 401, "Unauthorized"
            if (
                item := path.removeprefix("/latest/meta-data/").rstrip("/")
            ) in self.items:
                return 200, self.items[item]
            is_notice = (
                path.endswith("/spot/instance-action")
                and self.action is not None
            )
            return (
                (200, json.dumps(self.action))
                if is_notice
                else (404, "Not Found")
            )
        if path.startswith("/computeMetadata/v1/instance/"):
            return (
                self._google(path)
                if headers.get("Metadata-Flavor") == "Google"
                else (403, "")
            )
        if headers.get("Metadata") != "true" or "api-version" not in url.query:
            return 400, "Bad request"
        if url.path == "/metadata/instance/compute":
            return 200, json.dumps({"name": "worker-7"})
        if url.path == "/metadata/scheduledevents":
            return 200, json.dumps(
                {
                    "DocumentIncarnation": len(self.events),
                    "Events": self.events,
                }
            )
        return 404, ""

    def _google(self, path: str) -> Answer:
        return (
            (200, str(self.preempted).upper())
            if path.endswith("/preempted")
            else (404, "")
        )


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any):
        """Say nothing of clients that did not want to wait."""


@contextmanager
def metadata_service(
    listening: socket.socket | None = None,
) -> Iterator[Machine]:
    """A machine whose metadata service runs at `address`; `listening` is a
    socket of another network.
    """
    machine = Machine()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self):
            machine.asked.append(f"{self.command} {self.path}")
            if machine.faults:
                machine.faults.pop(0)(self)
                return
            respond(
                self, *machine.answer(self.command, self.path, self.headers)
            )

        do_GET = do_PUT = _serve  # noqa: N815 (the names are http.server's)

        def log_message(self, *args: object):
            """Write nothing."""

    server = _Server(
        ("127.0.0.1", 0), Handler, bind_and_activate=listening is None
    )
    if listening is not None:
        server.socket.close()
        server.socket = listening
    machine.address = "{}:{}".format(*server.socket.getsockname())
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield machine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def respond(handler: BaseHTTPRequestHandler, status: int, text: str):
    """Send an answer."""
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(text)))
    handler.end_headers()
    handler.wfile.write(text.encode())


def hang(handler: BaseHTTPRequestHandler):
    """Answer nothing until the client goes away."""
    handler.connection.recv(1)


def hang_up(handler: BaseHTTPRequestHandler):
    """Promise more than is sent."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{")
