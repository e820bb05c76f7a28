"""AWS on this machine: moto behind a proxy that logs who calls what, and a
host of the lab for each instance.
"""

import http.client
import json
import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import yaml

from tests.http_body import ask, read_body, respond
from tests.lab.hosts import CONTROL, REPOSITORY, Lab, Site, address_of
from tests.lab.on_premises import RayUp
from tests.metadata_service import metadata_service

BUCKET = "lab"
LOGIN = "ubuntu"
FILE = "/root/aws.yaml"
_ROUTER = "172.31.0.1"
_PREFIX = 16
"""The gateway of the default network of an account, which is moto's."""
_METADATA = "169.254.169.254"
_ROLE = "paceline"
_INSTALLED = "grep -q paceline-src ~/.bashrc || echo 'export PYTHONPATH=$HOME/paceline-src' >> ~/.bashrc"
"""In the place of pip: the hosts show this environment as ~/paceline, and what
was brought comes first in it.
"""
_REFUSED = b"""<?xml version="1.0"?><Response><Errors><Error><Code>InsufficientInstanceCapacity</Code>
<Message>There is no Spot capacity available.</Message></Error></Errors><RequestID>lab</RequestID></Response>"""


class Ec2(ThreadingHTTPServer):
    """A proxy before moto's server. The access key says who calls."""

    daemon_threads = True

    def __init__(self, backend: tuple[str, int], listening: socket.socket):
        """`listening`: a socket of another network than this process's."""
        super().__init__(("127.0.0.1", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening
        self.server_address = listening.getsockname()
        self.server_port = self.server_address[1]
        self.backend = backend
        self.has_spot = True
        self.refused = 0
        self.calls = set()
        """Who needs which action: those called, and those that EC2 wants to be
        allowed for a call.
        """
        self.changed = lambda: None
        """Called when instances were started or ended, before the caller hears
        of it.
        """

    def client(self, service: str) -> Any:
        """A client behind the proxy, whose calls are not logged."""
        import boto3

        place = "http://{}:{}".format(*self.backend)
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test"}
        return boto3.client(
            service, region_name="us-east-1", endpoint_url=place, **keys
        )

    def instances(self) -> list[dict[str, Any]]:
        """All instances, oldest first."""
        answer = self.client("ec2").describe_instances()
        found = [
            instance
            for group in answer["Reservations"]
            for instance in group["Instances"]
        ]
        return sorted(found, key=lambda instance: instance["LaunchTime"])

    def needed(self, who: str) -> Counter[str]:
        """The actions that somebody needs, each once."""
        return Counter(
            action for caller, action in self.calls if caller == who
        )

    def handle_error(self, request: Any, client_address: Any):
        """Say nothing of clients whose host was switched off."""


class _Handler(BaseHTTPRequestHandler):
    server: Ec2
    protocol_version = "HTTP/1.1"

    def _pass_on(self):
        body = read_body(self)
        credential = re.search(
            r"Credential=(\w+)/\w+/[\w-]+/(\w+)/",
            self.headers.get("Authorization", ""),
        )
        who, service = (
            credential.groups() if credential is not None else ("nobody", "s3")
        )
        asked = {} if service == "s3" else dict(parse_qsl(body.decode()))
        needed = (
            [_s3_action(self.command, self.path)]
            if service == "s3"
            else _actions(service, asked)
        )
        self.server.calls |= {(who, action) for action in needed}
        if (
            not self.server.has_spot
            and asked.get("InstanceMarketOptions.MarketType") == "spot"
        ):
            self.server.refused += 1
            respond(self, (500, {}, _REFUSED))
            return
        if (
            "MaxCount" in asked
        ):  # of which EC2 starts as many as it has, and moto as few as it may
            body = urlencode(asked | {"MinCount": asked["MaxCount"]}).encode()
        answer = ask(self.server.backend, self, body)
        if answer[0] == HTTPStatus.OK and asked.get("Action") in (
            "RunInstances",
            "TerminateInstances",
        ):
            self.server.changed()
        respond(self, answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815 (the names are http.server's)

    def log_message(self, *args: object):
        """Write nothing."""


def _s3_action(method: str, target: str) -> str:
    """The action that S3 wants to be allowed for a request, as its
    documentation lists them.
    """
    place = urlsplit(target)
    options = parse_qs(place.query, keep_blank_values=True)
    if not place.path.strip("/").partition("/")[2]:  # of the bucket itself
        known = {
            "HEAD": "ListBucket",
            "GET": "ListBucket",
            "PUT": "CreateBucket",
            "DELETE": "DeleteBucket",
        }
        deletes = method == "POST" and "delete" in options
        return f"s3:{'DeleteObject' if deletes else known[method]}"
    if "uploadId" in options and method in ("DELETE", "GET"):
        return f"s3:{'AbortMultipartUpload' if method == 'DELETE' else 'ListMultipartUploadParts'}"
    known = {
        "HEAD": "GetObject",
        "GET": "GetObject",
        "PUT": "PutObject",
        "POST": "PutObject",
        "DELETE": "DeleteObject",
    }
    return f"s3:{known[method]}"


def _actions(service: str, asked: dict[str, str]) -> Iterator[str]:
    """Yield the actions that EC2 wants to be allowed for a call, as its
    documentation lists them.
    """
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


@contextmanager
def aws(listening: socket.socket) -> Iterator[Ec2]:
    """A new AWS, with the instance profile that aws.yaml asks for; `listening`
    is the proxy's own socket.
    """
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    reset = http.client.HTTPConnection(*server.get_host_and_port())
    reset.request(
        "POST", "/moto-api/reset"
    )  # its state is this process's: an earlier test's
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


class Instances:
    """A host for each instance that runs; follows what EC2 starts and ends."""

    def __init__(self, lab: Lab, ec2: Ec2, endpoint: str):
        self.lab = lab
        self.ec2 = ec2
        self.hosts = {}
        """Of the instances that run."""
        self.machines = {}
        """Their metadata services."""
        self.endpoint = endpoint
        self._count = 0
        self._services = {}
        # A host ends with the thread that has started it, and a request's
        # thread with the request.
        self._keeper = ThreadPoolExecutor(max_workers=1)

    def follow(self):
        """Switch on and off what is to be."""
        self._keeper.submit(self._follow).result()

    def close(self):
        """End the metadata services; hosts end with the lab."""
        for service in self._services.values():
            service.close()
        self._keeper.shutdown()

    def types(self) -> dict[str, str]:
        """Ray's node types of the instances that run."""
        running = [
            found
            for found in self.ec2.instances()
            if found["InstanceId"] in self.hosts
        ]
        return {
            found["InstanceId"]: tags_of(found)["ray-user-node-type"]
            for found in running
        }

    def notify(self, instance: str, notice_s: float):
        """Say that an instance will be taken back."""
        until = (datetime.now(UTC) + timedelta(seconds=notice_s)).replace(
            microsecond=0
        )
        self.machines[instance].action = {
            "action": "terminate",
            "time": until.isoformat().replace("+00:00", "Z"),
        }

    def take_back(self, instance: str):
        """End an instance when its notice says, as EC2 does by itself."""
        notice = self.machines[instance].action
        until = datetime.fromisoformat(notice["time"])
        time.sleep(max(0.0, (until - datetime.now(UTC)).total_seconds()))
        self.ec2.client("ec2").terminate_instances(InstanceIds=[instance])
        self.follow()

    def _follow(self):
        for instance in self.ec2.instances():
            name = instance["InstanceId"]
            runs = instance["State"]["Name"] == "running"
            if runs and name not in self.hosts:
                self._switch_on(instance)
            elif not runs and name in self.hosts:
                self.lab.remove(self.hosts.pop(name))
                self._services.pop(name).close()
                del self.machines[name]

    def _switch_on(self, instance: dict[str, Any]):
        self._count += 1
        host = f"e{self._count}"
        name = instance["InstanceId"]
        found = self.ec2.client("ec2").describe_key_pairs(
            KeyNames=[instance["KeyName"]], IncludePublicKey=True
        )
        site = Site(
            instance["PrivateIpAddress"],
            _ROUTER,
            _PREFIX,
            (instance["PublicIpAddress"],),
        )
        self.lab.add(host, site, found["KeyPairs"][0]["PublicKey"], LOGIN)
        # What an image of ours would bring, and that nobody out there is
        # asked.
        settings = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        lines = [f"export {key}={value}\n" for key, value in settings.items()]
        (self.lab.home(host) / ".bashrc").write_text("".join(lines))
        self.lab.run(
            host, "ip", "address", "add", f"{_METADATA}/32", "dev", "lo"
        )
        service = self._services[name] = ExitStack()
        machine = service.enter_context(
            metadata_service(self.lab.listen(host, _METADATA, 80))
        )
        who = (
            "head"
            if tags_of(instance)["ray-node-type"] == "head"
            else "worker"
        )
        machine.items |= _credentials(who)
        self.hosts[name], self.machines[name] = host, machine


def _credentials(who: str) -> dict[str, str]:
    """What the metadata service says of the role: here its access key is the
    caller's name.
    """
    now = datetime.now(UTC)
    said = {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "AccessKeyId": who,
        "SecretAccessKey": "secret",
        "Token": "token",
        "LastUpdated": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "Expiration": (now + timedelta(hours=6)).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        ),
    }
    place = "iam/security-credentials"
    return {place: _ROLE, f"{place}/{_ROLE}": json.dumps(said)}


@contextmanager
def instances(lab: Lab) -> Iterator[Instances]:
    """An account whose instances are hosts of the lab, and a bucket."""
    lab.answer_to(f"{_ROUTER}/{_PREFIX}")
    listening = lab.listen(CONTROL, address_of(CONTROL))
    endpoint = "http://{}:{}".format(*listening.getsockname())
    with aws(listening) as ec2:
        ec2.client("s3").create_bucket(Bucket=BUCKET)
        made = Instances(lab, ec2, endpoint)
        ec2.changed = made.follow
        try:
            yield made
        finally:
            made.close()


def derived() -> dict[str, Any]:
    """cluster/aws.yaml for the lab: its bucket, nothing to install, and nodes
    that idle for a minute.
    """
    text = (REPOSITORY / "cluster" / "aws.yaml").read_text(encoding="utf-8")
    tree = yaml.safe_load(text.replace("MY-BUCKET", BUCKET))
    [paceline] = [
        command
        for command in tree["setup_commands"]
        if "/pip install " in command
    ]
    tree["setup_commands"][tree["setup_commands"].index(paceline)] = _INSTALLED
    [boto] = tree["head_setup_commands"]
    assert "/pip install " in boto
    tree["head_setup_commands"] = ["~/paceline/bin/python -c 'import boto3'"]
    tree["idle_timeout_minutes"] = 1
    return tree


class OnAws(RayUp):
    """The cluster of cluster/aws.yaml, typed on `ctl`, whose user is the
    account's `laptop`.
    """

    def __init__(self, instances: Instances):
        keys = {
            "AWS_ACCESS_KEY_ID": "laptop",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        super().__init__(
            instances.lab, FILE, AWS_ENDPOINT_URL=instances.endpoint, **keys
        )
        self.instances = instances
        (self.lab.home(CONTROL) / Path(FILE).name).write_text(
            yaml.safe_dump(derived(), sort_keys=False)
        )
