"""The commands of cluster/skypilot.yaml on two hosts, with SkyPilot's
variables, beside its own Ray.
"""

import re
import subprocess

import pytest
import yaml

from tests.lab.hosts import REPOSITORY, address_of, lab_of
from tests.waits import HANG_S

pytestmark = [pytest.mark.campaign, pytest.mark.lab]

NODES = ["h0", "h1"]
# Two workers that fit on no single host.
TRAIN = "python -m trainers examples/digits/train.yaml --name sky --max_steps 20 --scaling.num_workers 2"
OWN = {"PACELINE_STORAGE": "/srv/nfs/paceline", "RAY_AUTH_TOKEN": "0" * 64}
SKYPILOTS = {
    "SKYPILOT_NODE_IPS": "\n".join(map(address_of, NODES)),
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "0",
}
SKYPILOTS_RAY = "ray start --head --port=6380 --dashboard-port=8266 --num-cpus=1 --object-store-memory=100000000"


def test_skypilots_commands_beside_its_own_ray():
    with lab_of(len(NODES)) as lab:
        lab.run(
            "h0",
            "env",
            "RAY_TMPDIR=/tmp/ray_skypilot",
            "RAY_AUTH_MODE=disabled",
            *SKYPILOTS_RAY.split(),
        )
        task = yaml.safe_load(
            (REPOSITORY / "cluster" / "skypilot.yaml").read_text(
                encoding="utf-8"
            )
        )
        script = re.sub(
            "ray start ",
            "ray start --num-cpus=1 --object-store-memory=200000000 ",
            task["run"],
        )
        script = script.replace(
            "python -m tune examples/digits/sweep.yaml", TRAIN
        )
        given = [
            f"{name}={value}" for name, value in (SKYPILOTS | OWN).items()
        ]
        pipes = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "cwd": str(REPOSITORY),
        }
        started = [
            lab.popen(
                name,
                "env",
                *given,
                f"SKYPILOT_NODE_RANK={rank}",
                "bash",
                "-c",
                script,
                **pipes,
            )
            for rank, name in enumerate(NODES)
        ]
        log, others_log = [
            process.communicate(timeout=HANG_S)[0] for process in started
        ]
        assert [process.returncode for process in started] == [0, 0], (
            log[-6000:] + others_log[-3000:]
        )
        assert re.search(r"step 20/20 ", log), log[-6000:]
        ips = set(re.findall(r"\(ip=([\d.]+), pid=\d+\) world_rank=", log))
        assert ips == set(map(address_of, NODES)), log[-6000:]
        assert (
            lab.shared
            / "paceline"
            / "sky"
            / "checkpoints"
            / "step-000000000020"
            / "manifest.json"
        ).exists()
        for name in NODES:
            left = lab.run(
                name,
                "pgrep",
                "-af",
                "[r]aylet/raylet|[g]cs/gcs_server",
                check=False,
            ).stdout.splitlines()
            assert [
                line
                for line in left
                if ":6380" not in line and "_port=6380" not in line
            ] == []
            assert bool(left) == (name == "h0"), "SkyPilot's goes on"
