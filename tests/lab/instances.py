"""Instances of the lab's AWS that are hosts: each has its addresses, its key, a metadata service and credentials."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from tests.lab.ec2 import Ec2, aws, tags_of
from tests.lab.hosts import CONTROL, REPOSITORY, Lab, Site, address_of
from tests.lab.on_premises import RayUp
from tests.metadata_service import Machine, metadata_service

BUCKET = "lab"
LOGIN = "ubuntu"
FILE = "/root/aws.yaml"
_ROUTER, _PREFIX = "172.31.0.1", 16
"""The gateway of the default network of an account, which is moto's."""
_METADATA = "169.254.169.254"
_ROLE = "paceline"
_INSTALLED = "grep -q paceline-src ~/.bashrc || echo 'export PYTHONPATH=$HOME/paceline-src' >> ~/.bashrc"
"""In the place of pip: the hosts show this environment as ~/paceline, and what was brought comes first in it."""


class Instances:
    """A host for each instance that runs; follows what EC2 starts and ends."""

    def __init__(self, lab: Lab, ec2: Ec2, endpoint: str) -> None:
        self.lab, self.ec2 = lab, ec2
        self.hosts: dict[str, str] = {}
        """Of the instances that run."""
        self.machines: dict[str, Machine] = {}
        """Their metadata services."""
        self.endpoint, self._count = endpoint, 0
        self._services: dict[str, ExitStack] = {}
        # A host ends with the thread that has started it, and a request's thread with the request.
        self._keeper = ThreadPoolExecutor(max_workers=1)

    def follow(self) -> None:
        """Switch on and off what is to be."""
        self._keeper.submit(self._follow).result()

    def close(self) -> None:
        """End the metadata services; hosts end with the lab."""
        for service in self._services.values():
            service.close()
        self._keeper.shutdown()

    def types(self) -> dict[str, str]:
        """Ray's node types of the instances that run."""
        running = [one for one in self.ec2.instances() if one["InstanceId"] in self.hosts]
        return {one["InstanceId"]: tags_of(one)["ray-user-node-type"] for one in running}

    def notify(self, instance: str, notice_s: float) -> None:
        """Say that an instance will be taken back."""
        until = (datetime.now(UTC) + timedelta(seconds=notice_s)).replace(microsecond=0)
        self.machines[instance].action = {"action": "terminate", "time": until.isoformat().replace("+00:00", "Z")}

    def take_back(self, instance: str) -> None:
        """End an instance when its notice says, as EC2 does by itself."""
        notice = self.machines[instance].action
        assert notice is not None
        until = datetime.fromisoformat(notice["time"])
        time.sleep(max(0.0, (until - datetime.now(UTC)).total_seconds()))
        self.ec2.client("ec2").terminate_instances(InstanceIds=[instance])
        self.follow()

    def _follow(self) -> None:
        for instance in self.ec2.instances():
            name, runs = instance["InstanceId"], instance["State"]["Name"] == "running"
            if runs and name not in self.hosts:
                self._switch_on(instance)
            elif not runs and name in self.hosts:
                self.lab.remove(self.hosts.pop(name))
                self._services.pop(name).close()
                del self.machines[name]

    def _switch_on(self, instance: dict[str, Any]) -> None:
        self._count += 1
        host, name = f"e{self._count}", instance["InstanceId"]
        found = self.ec2.client("ec2").describe_key_pairs(KeyNames=[instance["KeyName"]], IncludePublicKey=True)
        site = Site(instance["PrivateIpAddress"], _ROUTER, _PREFIX, (instance["PublicIpAddress"],))
        self.lab.add(host, site, found["KeyPairs"][0]["PublicKey"], LOGIN)
        # What an image of ours would bring, and that nobody out there is asked.
        settings = {"AWS_ENDPOINT_URL": self.endpoint, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        lines = [f"export {key}={value}\n" for key, value in settings.items()]
        (self.lab.home(host) / ".bashrc").write_text("".join(lines))
        self.lab.run(host, "ip", "address", "add", f"{_METADATA}/32", "dev", "lo")
        service = self._services[name] = ExitStack()
        machine = service.enter_context(metadata_service(self.lab.listen(host, _METADATA, 80)))
        machine.is_spot = instance.get("InstanceLifecycle") == "spot"
        who = "head" if tags_of(instance)["ray-node-type"] == "head" else "worker"
        machine.items |= _credentials(who)
        self.hosts[name], self.machines[name] = host, machine


def _credentials(who: str) -> dict[str, str]:
    """What the metadata service says of the role: here its access key is the caller's name."""
    now = datetime.now(UTC)
    said = {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "AccessKeyId": who,
        "SecretAccessKey": "secret",
        "Token": "token",
        "LastUpdated": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "Expiration": (now + timedelta(hours=6)).strftime("%Y-%m-%dT%H:%M:%SZ"),
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
    """cluster/aws.yaml for the lab: its bucket, and nothing to install."""
    text = (REPOSITORY / "cluster" / "aws.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.safe_load(text.replace("MY-BUCKET", BUCKET))
    [paceline] = [command for command in tree["setup_commands"] if "/pip install " in command]
    tree["setup_commands"][tree["setup_commands"].index(paceline)] = _INSTALLED
    [boto] = tree["head_setup_commands"]
    assert "/pip install " in boto
    tree["head_setup_commands"] = ["~/paceline/bin/python -c 'import boto3'"]
    return tree


class OnAws(RayUp):
    """The cluster of cluster/aws.yaml, typed on `ctl`, whose user is the account's `laptop`."""

    def __init__(self, instances: Instances) -> None:
        keys = {"AWS_ACCESS_KEY_ID": "laptop", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
        super().__init__(instances.lab, FILE, AWS_ENDPOINT_URL=instances.endpoint, **keys)
        self.instances = instances
        (self.lab.home(CONTROL) / Path(FILE).name).write_text(yaml.safe_dump(derived(), sort_keys=False))
