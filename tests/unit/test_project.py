"""What others meet first: one version everywhere, and files that GitHub, PyPI and citing tools can read."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.specs import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))


def test_the_version_is_one() -> None:
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\S+)", changes, re.MULTILINE)
    assert versions[:2] == ["Unreleased", PROJECT["version"]], "the newest first"
    assert set(re.findall(r"^### (.*)", changes, re.MULTILINE)) <= {
        "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"
    }  # fmt: skip
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == PROJECT["version"]


def steps(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_little_and_runs_what_is_there(path: Any) -> None:
    workflow = yaml.safe_load(path.read_text())
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert workflow["permissions"] == {"contents": "read"}
    for step in steps(workflow):
        if "run" in step:
            program, *words = step["run"].split()
            assert (words[0] in targets) if program == "make" else (REPOSITORY / program).is_file(), step
            assert "${{" not in step["run"], "what a pull request is called would be a command"
        else:
            assert re.fullmatch(r"[\w./-]+@(v\d+|release/v1)", step["uses"]), "a tag of a major version"
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360
        for version in job.get("strategy", {}).get("matrix", {}).get("python", []):
            assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]


def test_only_publishing_gets_an_identity_and_it_needs_the_environment() -> None:
    jobs = {
        name: job
        for path in WORKFLOWS
        for name, job in yaml.safe_load(path.read_text())["jobs"].items()
        if "permissions" in job
    }
    [(name, publish)] = jobs.items()
    assert (name, publish["permissions"], publish["environment"]) == ("publish", {"id-token": "write"}, "pypi")
    assert not any("run" in step or "checkout" in step["uses"] for step in publish["steps"]), (
        "no code of a package runs"
    )
