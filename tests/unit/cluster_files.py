"""Changes to cluster files: the tests make broken variants of the shipped ones
with these.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.files.ray_up import load_cluster
from cluster.files.rules import findings
from tests.specs import REPOSITORY

Tree = Any
Change = Callable[[Tree], object]
HEAD = "head_start_ray_commands"
WORKER = "worker_start_ray_commands"
TYPES = "available_node_types"
LOCAL = {
    "cluster_name": "lab",
    "provider": {
        "type": "local",
        "head_ip": "10.0.0.1",
        "worker_ips": ["10.0.0.2", "10.0.0.3"],
    },
    "auth": {"ssh_user": "root"},
    "file_mounts": {"/root/.ray/auth_token": "~/.ray/auth_token"},
    "head_start_ray_commands": [
        "ray stop",
        (
            "export RAY_AUTH_MODE=token; export PACELINE_STORAGE=/nfs;"
            "ray start --head --autoscaling-config=x"
        ),
    ],
    "worker_start_ray_commands": [
        "RAY_AUTH_MODE=token PACELINE_STORAGE='/nfs' ray start --address=$RAY_HEAD_IP:6379"
    ],
}


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    """Paths in file_mounts are relative to where `ray up` runs; nothing is set
    for provider local.
    """
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("RAY_UP_enable_autoscaler_v2", raising=False)


def shipped(name: str) -> Tree:
    """A shipped file, without YAML's aliases: a change is of one place,
    not of all its aliases.
    """
    text = (REPOSITORY / "cluster" / f"{name}.yaml").read_text(
        encoding="utf-8"
    )
    return yaml.safe_load(yaml.dump(yaml.safe_load(text), Dumper=_NoAliases))


def write(tmp_path: Path, tree: object) -> str:
    """The path of a file with this text, or this tree as YAML."""
    path = tmp_path / "cluster.yaml"
    text = (
        tree
        if isinstance(tree, str)
        else yaml.dump(tree, Dumper=_NoAliases, sort_keys=False)
    )
    path.write_text(text, encoding="utf-8")
    return str(path)


def broken(name: str, change: Change, tmp_path: Path) -> str:
    """The path of a shipped file with one change."""
    tree = shipped(name)
    change(tree)
    return write(tmp_path, tree)


def remarks(file: str) -> list[tuple[str, str]]:
    """(level, field) of each finding on a file."""
    found = findings(load_cluster(file), {})
    assert all(finding.rule and finding.fix for finding in found)
    return [(finding.level, finding.field) for finding in found]


def parent_of(tree: Tree, dotted: str) -> tuple[Tree, Any]:
    """The mapping or list that holds the last part of a path, and its key there."""
    *path, last = dotted.split(".")
    for part in path:
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree, int(last) if isinstance(tree, list) else last


def put(dotted: str, value: object) -> Change:
    """A value written."""

    def change(tree: Tree) -> None:
        parent, key = parent_of(tree, dotted)
        parent[key] = value

    return change


def drop(dotted: str) -> Change:
    """A field taken out."""

    def change(tree: Tree) -> None:
        parent, key = parent_of(tree, dotted)
        del parent[key]

    return change


def replace(field: str, old: str, new: str = "") -> Change:
    """A text in the commands of a field replaced."""

    def change(tree: Tree) -> None:
        before = list(tree[field])
        tree[field] = [command.replace(old, new) for command in before]
        assert tree[field] != before

    return change
