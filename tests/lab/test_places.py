"""The commands of cluster/skypilot.yaml and cluster/paceline.dstack.yml on two hosts, with the platforms' variables."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest
import yaml

from tests.lab.fixtures import lab_of
from tests.lab.hosts import REPOSITORY, Lab, address_of
from tests.waits import HANG_S

pytestmark = [pytest.mark.campaign, pytest.mark.lab]

NODES = ["h0", "h1"]
SWEEP = "python -m tune examples/digits/sweep.yaml"
# Two workers that fit on no single host.
TRAIN = "python -m trainers examples/digits/train.yaml --name {} --max_steps 20 --scaling.num_workers 2"
OWN = {"PACELINE_STORAGE": "/srv/nfs/paceline", "RAY_AUTH_TOKEN": "0" * 64}
SKYPILOTS_RAY = "ray start --head --port=6380 --dashboard-port=8266 --num-cpus=1 --object-store-memory=100000000"


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_of(len(NODES)) as lab:
        yield lab


def run_on_both(lab: Lab, script: str, settings: dict[str, str], rank: str) -> list[tuple[int, str]]:
    """(exit code, output) of a script that each host runs at the same time, under its rank."""
    assert SWEEP not in script
    script = re.sub(r"ray (start|symmetric-run) ", r"ray \1 --num-cpus=1 --object-store-memory=200000000 ", script)
    assignments = [f"{name}={value}" for name, value in (settings | OWN).items()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    started = [
        lab.popen(name, "env", *assignments, f"{rank}={number}", "bash", "-c", script, cwd=str(REPOSITORY), **pipes)
        for number, name in enumerate(NODES)
    ]
    outputs = [process.communicate(timeout=HANG_S)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def check_run(lab: Lab, name: str, found: list[tuple[int, str]]) -> None:
    [(head, log), (other, others_log)] = found
    assert (head, other) == (0, 0), log[-6000:] + others_log[-3000:]
    assert re.search(r"step 20/20 ", log), log[-6000:]
    ips = set(re.findall(r"\(ip=([\d.]+), pid=\d+\) world_rank=", log))
    assert ips == {address_of(each) for each in NODES}, log[-6000:]
    assert (lab.shared / "paceline" / name / "checkpoints" / "step-000000000020" / "manifest.json").exists()


def test_skypilots_commands_beside_its_own_ray(lab: Lab) -> None:
    lab.run("h0", "env", "RAY_TMPDIR=/tmp/ray_skypilot", "RAY_AUTH_MODE=disabled", *SKYPILOTS_RAY.split())
    task = yaml.safe_load((REPOSITORY / "cluster" / "skypilot.yaml").read_text(encoding="utf-8"))
    ips = "\n".join(map(address_of, NODES))
    settings = {"SKYPILOT_NODE_IPS": ips, "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    check_run(
        lab, "sky", run_on_both(lab, task["run"].replace(SWEEP, TRAIN.format("sky")), settings, "SKYPILOT_NODE_RANK")
    )
    for name in NODES:
        left = lab.run(name, "pgrep", "-af", "[r]aylet/raylet|[g]cs/gcs_server", check=False).stdout.splitlines()
        assert [line for line in left if ":6380" not in line and "_port=6380" not in line] == []
        assert bool(left) == (name == "h0"), "SkyPilot's goes on"


def test_dstacks_commands(lab: Lab) -> None:
    task = yaml.safe_load((REPOSITORY / "cluster" / "paceline.dstack.yml").read_text(encoding="utf-8"))
    commands = [command for command in task["commands"] if not command.startswith("uv pip install ")]
    given = dict(entry.split("=", 1) for entry in task["env"] if "=" in entry)
    settings = {"DSTACK_MASTER_NODE_IP": address_of("h0"), "DSTACK_NODES_NUM": "2", "DSTACK_GPUS_PER_NODE": "0"}
    script = " && ".join(commands).replace(SWEEP, TRAIN.format("dstack"))
    check_run(lab, "dstack", run_on_both(lab, script, given | settings, "DSTACK_NODE_RANK"))
