"""`ray up cluster/aws.yaml` against EC2's API: what is started and refused, what is called, and that nothing stays.

The hosts obey every SSH command and run none of them; Ray's autoscaler is the head's own. Needs no root and no network.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.lab.ec2 import account, tags_of

pytestmark = pytest.mark.full


def policy(name: str) -> Counter[str]:
    """What a policy in docs/aws allows."""
    document = json.loads((REPOSITORY / "docs" / "aws" / f"{name}.json").read_text(encoding="utf-8"))
    assert {statement["Effect"] for statement in document["Statement"]} == {"Allow"}
    return Counter(action for statement in document["Statement"] for action in statement["Action"])


def test_spot_first_then_on_demand_then_nothing(tmp_path: Path) -> None:
    pytest.importorskip("moto.server")
    with account(tmp_path) as aws:
        ec2 = aws.ec2
        aws.ray("up")
        assert "paceline-cluster autoscale ~/ray_bootstrap_config.yaml" in aws.commands()[-1]
        with aws.autoscaler() as want:
            assert want(3) == ["gpu_spot"] * 3 + ["head"], "from zero"
            ec2.has_spot = False
            assert want(5) == ["gpu_on_demand"] * 2 + ["gpu_spot"] * 3 + ["head"]
            assert ec2.refused > 0
            for instance in ec2.instances():
                tags = tags_of(instance)
                kind = tags["ray-user-node-type"]
                assert instance["InstanceType"] == ("m5.2xlarge" if kind == "head" else "g5.2xlarge")
                assert instance.get("InstanceLifecycle") == ("spot" if kind == "gpu_spot" else None)
                assert (tags["ray-cluster-name"], tags["ray-node-status"]) == ("paceline", "up-to-date")
            assert {launch["IamInstanceProfile.Name"] for launch in ec2.launches} == {"paceline"}
            assert {launch["MetadataOptions.HttpTokens"] for launch in ec2.launches} == {"required"}
            joined = [command for command in aws.commands() if "ray start --address=" in command]
            assert len(joined) == 5
            assert all("paceline-cluster watch aws" in command for command in joined)
            assert want(0) == ["head"], "idle nodes are ended"
        aws.ray("down")
        assert {one["State"]["Name"] for one in ec2.instances()} == {"terminated"}
        for name in ("laptop", "head"):
            assert policy(name) == ec2.needed(name), name
