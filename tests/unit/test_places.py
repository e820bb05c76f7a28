"""SkyPilot's task file and the devcontainer: keys of their schemas, valid shell, our versions.

tests/lab/test_skypilot.py runs the commands.
"""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest
import yaml

from cluster.__main__ import main
from cluster.rules.common import expected_versions
from tests.specs import REPOSITORY

# docs.skypilot.co, "SkyPilot YAML"; containers.dev, "Dev Container metadata reference": read in November 2026.
KEYS = {
    "skypilot.yaml": "name workdir num_nodes resources envs secrets file_mounts setup run config",
    "skypilot.yaml, resources": "infra accelerators accelerator_args cpus memory instance_type use_spot disk_size "
    "disk_tier network_tier max_hourly_cost image_id ports labels autostop any_of ordered job_recovery",
    "devcontainer.json": "name image hostRequirements runArgs postCreateCommand customizations",
    "devcontainer.json, hostRequirements": "cpus memory storage gpu",
}


def tree_of(name: str) -> dict[str, Any]:
    text = (REPOSITORY / (".devcontainer" if name.endswith("json") else "cluster") / name).read_text(encoding="utf-8")
    # JSON with comments, each on a line of its own.
    tree: dict[str, Any]
    tree = json.loads(re.sub(r"(?m)^\s*//.*$", "", text)) if name.endswith("json") else yaml.safe_load(text)
    return tree


@pytest.mark.parametrize("place", KEYS)
def test_it_has_keys_of_its_schema_alone(place: str) -> None:
    name, _, part = place.partition(", ")
    tree = tree_of(name)
    assert set(tree[part] if part else tree) <= set(KEYS[place].split())


def test_skypilots_task_is_valid_shell_with_our_versions_a_token_and_storage() -> None:
    tree, versions = tree_of("skypilot.yaml"), expected_versions()
    script = f"{tree['setup']}\n{tree['run']}"
    packages = f'"ray[default,train,tune]=={versions["ray"]}" "torch=={versions["torch"]}" ".[examples]"'
    assert re.search(rf"uv pip install .*-c constraints.txt (?:\\\n\s*)?{re.escape(packages)}", script)
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert tree["secrets"] == {"RAY_AUTH_TOKEN": None}, "from the user's shell"
    assert "export RAY_AUTH_MODE=token" in tree["run"]
    assert tree["envs"] == {"PACELINE_STORAGE": "s3://MY-BUCKET/paceline"}
    assert not re.search(r"(?:=|:)(?:6380|8266)\b|symmetric-run|ray stop", tree["run"]), "SkyPilot's own Ray is there"


def test_validate_says_whose_file_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(REPOSITORY / "cluster" / "skypilot.yaml")]) == 2
    assert "SkyPilot" in capsys.readouterr().err


def test_the_devcontainer_sets_up_what_make_does() -> None:
    command = tree_of("devcontainer.json")["postCreateCommand"]
    assert command.split()[0] == "make"
    done = subprocess.run(["make", "-n", *command.split()[1:]], cwd=REPOSITORY, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
