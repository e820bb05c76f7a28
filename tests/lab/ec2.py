"""AWS's API on this machine (moto), a proxy that logs who calls what, and hosts that obey every SSH command."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

from tests.conftest import REPOSITORY
from tests.http_body import read_body

_REFUSED = b"""<?xml version="1.0"?><Response><Errors><Error><Code>InsufficientInstanceCapacity</Code>
<Message>There is no Spot capacity available.</Message></Error></Errors><RequestID>lab</RequestID></Response>"""
_HOP_BY_HOP = ("connection", "transfer-encoding", "keep-alive")
_SSH = """#!{python}
import json, os, sys
with open(os.environ["LAB"] + "/ssh.jsonl", "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
"""
_RSYNC = """#!{python}
import os, shutil, sys
source, target = sys.argv[-2], os.path.basename(sys.argv[-1])
if os.path.isfile(source) and target.startswith("ray_bootstrap"):
    shutil.copy(source, os.environ["LAB"] + "/head/" + target)
"""


class Ec2(ThreadingHTTPServer):
    """A proxy before moto's server. The access key says who calls."""

    daemon_threads = True

    def __init__(self, backend: tuple[str, int], listening: socket.socket | None = None) -> None:
        """`listening`: a socket of another network than this process's."""
        super().__init__(("127.0.0.1", 0), _Handler, bind_and_activate=listening is None)
        if listening is not None:
            self.socket.close()
            self.socket, self.server_address = listening, listening.getsockname()
            self.server_port = self.server_address[1]
        self.backend = backend
        self.has_spot = True
        self.refused = 0
        self.launches: list[dict[str, str]] = []
        """What RunInstances was asked for, refused or not."""
        self.calls: set[tuple[str, str]] = set()
        """Who needs which action: those called, and those that EC2 wants to be allowed for a call."""
        self.changed: Callable[[], None] = lambda: None
        """Called when instances were started or ended, before the caller hears of it."""

    def client(self, service: str) -> Any:
        """A client behind the proxy, whose calls are not logged."""
        import boto3

        place = "http://{}:{}".format(*self.backend)
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        return boto3.client(service, region_name="us-east-1", endpoint_url=place, **keys)

    def instances(self) -> list[dict[str, Any]]:
        """All instances, oldest first."""
        answer = self.client("ec2").describe_instances()
        found = [one for group in answer["Reservations"] for one in group["Instances"]]
        return sorted(found, key=lambda one: one["LaunchTime"])

    def types(self) -> list[str]:
        """The node types of Ray's that are up."""
        return [tags_of(one)["ray-user-node-type"] for one in self.instances() if one["State"]["Name"] == "running"]

    def needed(self, who: str) -> Counter[str]:
        """The actions that somebody needs, each once."""
        return Counter(action for caller, action in self.calls if caller == who)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients whose host was switched off."""


class _Handler(BaseHTTPRequestHandler):
    server: Ec2
    protocol_version = "HTTP/1.1"

    def _pass_on(self) -> None:
        body = read_body(self)
        credential = re.search(r"Credential=(\w+)/\w+/[\w-]+/(\w+)/", self.headers.get("Authorization", ""))
        who, service = credential.groups() if credential is not None else ("nobody", "s3")
        asked = {} if service == "s3" else dict(parse_qsl(body.decode()))
        needed = [_s3_action(self.command, self.path)] if service == "s3" else _actions(service, asked)
        self.server.calls |= {(who, action) for action in needed}
        if asked.get("Action") == "RunInstances":
            self.server.launches.append(asked)
        if not self.server.has_spot and asked.get("InstanceMarketOptions.MarketType") == "spot":
            self.server.refused += 1
            self._respond(500, {}, _REFUSED)
            return
        if "MaxCount" in asked:  # of which EC2 starts as many as it has, and moto as few as it may
            body = urlencode(asked | {"MinCount": asked["MaxCount"]}).encode()
        connection = http.client.HTTPConnection(*self.server.backend)
        replaced = (*_HOP_BY_HOP, "content-length")
        passed = {name: value for name, value in self.headers.items() if name.lower() not in replaced}
        connection.request(self.command, self.path, body, passed | {"Content-Length": str(len(body))})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if answer.status == HTTPStatus.OK and asked.get("Action") in ("RunInstances", "TerminateInstances"):
            self.server.changed()
        self._respond(answer.status, dict(answer.getheaders()), data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815 (the names are http.server's)

    def _respond(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        replaced = _HOP_BY_HOP if self.command == "HEAD" else (*_HOP_BY_HOP, "content-length")
        kept = {name: value for name, value in headers.items() if name.lower() not in replaced}
        length = {} if self.command == "HEAD" else {"Content-Length": str(len(body))}
        for name, value in {**kept, **length}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Write nothing."""


def _s3_action(method: str, target: str) -> str:
    """The action that S3 wants to be allowed for a request, as its documentation lists them."""
    place = urlsplit(target)
    options = parse_qs(place.query, keep_blank_values=True)
    if not place.path.strip("/").partition("/")[2]:  # of the bucket itself
        known = {"HEAD": "ListBucket", "GET": "ListBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}
        deletes = method == "POST" and "delete" in options
        return f"s3:{'DeleteObject' if deletes else known[method]}"
    if "uploadId" in options and method in ("DELETE", "GET"):
        return f"s3:{'AbortMultipartUpload' if method == 'DELETE' else 'ListMultipartUploadParts'}"
    known = {"HEAD": "GetObject", "GET": "GetObject", "PUT": "PutObject", "POST": "PutObject", "DELETE": "DeleteObject"}
    return f"s3:{known[method]}"


def _actions(service: str, asked: dict[str, str]) -> Iterator[str]:
    """Yield the actions that EC2 wants to be allowed for a call, as its documentation lists them."""
    yield f"{service}:{asked['Action']}"
    if asked["Action"] == "RunInstances":
        if any(name.startswith("TagSpecification") for name in asked):
            yield "ec2:CreateTags"
        if any(name.startswith("IamInstanceProfile") for name in asked):
            yield "iam:PassRole"
        if asked["ImageId"].startswith("resolve:ssm:"):
            yield "ssm:GetParameters"


def tags_of(instance: dict[str, Any]) -> dict[str, str]:
    """The tags of an instance."""
    return {tag["Key"]: tag["Value"] for tag in instance["Tags"]}


class Account:
    """A laptop with an account at this EC2: `ray up` and `ray down` run there, and the autoscaler on its head."""

    def __init__(self, ec2: Ec2, directory: Path) -> None:
        self.ec2, self.directory = ec2, directory
        for home in ("laptop", "head"):
            (directory / home / ".ray").mkdir(parents=True)
            (directory / home / ".ray" / "auth_token").write_text("secret-of-the-lab")
        (directory / "head" / "paceline-src").symlink_to(REPOSITORY)
        (directory / "bin").mkdir()
        for name, text in {"ssh": _SSH, "rsync": _RSYNC}.items():
            (directory / "bin" / name).write_text(text.format(python=sys.executable))
            (directory / "bin" / name).chmod(0o755)
        self.file = directory / "aws.yaml"
        shipped = (REPOSITORY / "cluster" / "aws.yaml").read_text(encoding="utf-8")
        self.file.write_text(shipped.replace("MY-BUCKET", "lab"), encoding="utf-8")

    def environment(self, who: str) -> dict[str, str]:
        """What a process of the laptop, or of the head, finds."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "AWS_"))}
        programs = (self.directory / "bin", Path(sys.executable).parent)
        own = {"PATH": ":".join([*map(str, programs), os.environ["PATH"]]), "HOME": str(self.directory / who)}
        own |= {"LAB": str(self.directory), "TMPDIR": str(self.directory), "PYTHONPATH": str(REPOSITORY)}
        own |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.ec2.server_port}", "AWS_EC2_METADATA_DISABLED": "true"}
        return inherited | own | {"AWS_ACCESS_KEY_ID": who, "AWS_SECRET_ACCESS_KEY": "test"}

    def ray(self, command: str) -> None:
        """Run `ray up` or `ray down` on the shipped file."""
        asked = ["ray", command, str(self.file), "--yes"]
        done = subprocess.run(
            asked, env=self.environment("laptop"), cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    @contextmanager
    def autoscaler(self) -> Iterator[Callable[[int], list[str]]]:
        """A function that wants so many GPUs of the autoscaler on the head, and returns what types are up then."""
        [head] = [one["InstanceId"] for one in self.ec2.instances()]
        config = str(self.directory / "head" / "ray_bootstrap_config.yaml")
        asked = [sys.executable, "-m", "tests.lab.ec2_head", config, head]
        log = self.directory / "head.log"
        with (
            log.open("w") as words,
            subprocess.Popen(
                asked,
                env=self.environment("head"),
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            asks, answers = process.stdin, process.stdout

            def want(gpus: int) -> list[str]:
                print(gpus, file=asks, flush=True)
                assert answers.readline() == "done\n", log.read_text()
                return sorted(self.ec2.types())

            try:
                yield want
                asks.close()
            finally:
                if not asks.closed:
                    process.kill()

    def commands(self) -> list[str]:
        """What was said to hosts by SSH."""
        lines = (self.directory / "ssh.jsonl").read_text().splitlines()
        return [json.loads(line)[-1] for line in lines]


@contextmanager
def account(directory: Path) -> Iterator[Account]:
    """An account with the instance profile that aws.yaml asks for."""
    with aws() as ec2:
        yield Account(ec2, directory)


@contextmanager
def aws(listening: socket.socket | None = None) -> Iterator[Ec2]:
    """A new AWS, with the instance profile that aws.yaml asks for; `listening` is the proxy's own socket."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    reset = http.client.HTTPConnection(*server.get_host_and_port())
    reset.request("POST", "/moto-api/reset")  # its state is this process's: an earlier test's
    assert reset.getresponse().status == HTTPStatus.OK
    reset.close()
    ec2 = Ec2(server.get_host_and_port(), listening)
    ec2.client("iam").create_instance_profile(InstanceProfileName="paceline")
    thread = threading.Thread(target=ec2.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield ec2
    finally:
        ec2.shutdown()
        ec2.server_close()
        thread.join()
        server.stop()
