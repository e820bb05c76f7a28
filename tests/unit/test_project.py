"""What others read: one version everywhere, workflows, the dashboard's
metrics, SkyPilot's file, the devcontainer.
"""

import csv
import json
import re
import subprocess
import tomllib
from typing import Any

import pytest
import yaml

from cluster.files.rules import expected_versions
from tests.specs import REPOSITORY, read_json

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((REPOSITORY / ".github/workflows").glob("*.yml"))


def test_the_version_is_one():
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (\S+)", changes, re.MULTILINE)
    assert versions[:2] == ["Unreleased", PROJECT["version"]], (
        "the newest first"
    )
    assert set(re.findall(r"^### (.*)", changes, re.MULTILINE)) <= {
        "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"
    }  # fmt: skip
    assert (
        yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"]
        == PROJECT["version"]
    )


def steps(workflow):
    for job in workflow["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_little_and_runs_what_is_there(path):
    workflow = yaml.safe_load(path.read_text())
    targets = re.findall(
        r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE
    )
    assert workflow["permissions"] == {"contents": "read"}
    for step in steps(workflow):
        if "run" in step:
            program, *words = step["run"].split()
            assert (
                (words[0] in targets)
                if program == "make"
                else (REPOSITORY / program).is_file()
            ), step
            assert "${{" not in step["run"], (
                "what a pull request is called would be a command"
            )
        else:
            assert re.fullmatch(r"[\w./-]+@(v\d+|release/v1)", step["uses"]), (
                "a tag of a major version"
            )
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 360
        for version in (
            job.get("strategy", {}).get("matrix", {}).get("python", [])
        ):
            assert (
                f"Programming Language :: Python :: {version}"
                in PROJECT["classifiers"]
            )


def test_only_publishing_gets_an_identity_and_it_needs_the_environment():
    jobs = {
        name: job
        for path in WORKFLOWS
        for name, job in yaml.safe_load(path.read_text())["jobs"].items()
        if "permissions" in job
    }
    [(name, publish)] = jobs.items()
    assert (name, publish["permissions"], publish["environment"]) == (
        "publish",
        {"id-token": "write"},
        "pypi",
    )
    assert not any(
        "run" in step or "checkout" in step["uses"]
        for step in publish["steps"]
    ), "no code of a package runs"


MONITORING = REPOSITORY / "cluster" / "monitoring"
BOUNDED_TAGS = {"run", "rank", "lane", "status"}
# The words of PromQL in the dashboard's queries that are neither metrics nor
# labels.
FUNCTIONS = {"max", "sum", "count", "by", "label_values"}


@pytest.fixture
def metrics():
    """Tags by metric."""
    with (MONITORING / "metrics.csv").open(
        newline="", encoding="utf-8"
    ) as stream:
        rows = list(csv.DictReader(stream))
    assert all(row["description"] and row["unit"] for row in rows)
    return {row["name"]: set(row["tags"].split()) for row in rows}


@pytest.fixture
def dashboard():
    return read_json(MONITORING / "grafana.json")


def queries(dashboard):
    found = [
        target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]
    variables = dashboard["templating"]["list"]
    return found + [
        variable["query"]["query"]
        for variable in variables
        if variable["type"] == "query"
    ]


def words(query):
    return (
        set(re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", query)))
        - FUNCTIONS
    )


def test_queries_name_only_metrics_that_there_are_with_tags_that_they_have(
    metrics, dashboard
):
    assert all("run" in tags <= BOUNDED_TAGS for tags in metrics.values())
    for query in queries(dashboard):
        [name] = [word for word in words(query) if word.startswith("ray_")]
        assert name in metrics, query
        assert words(query) - {name} <= metrics[name], query


def test_every_metric_is_shown(metrics, dashboard):
    targets = [
        target for panel in dashboard["panels"] for target in panel["targets"]
    ]
    assert set(metrics) <= set().union(
        *(words(target["expr"]) for target in targets)
    )
    for target in targets:
        kept = set(
            re.findall(r"\w+", re.search(r"by \(([^)]*)\)", target["expr"])[1])
        )
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, (
            target
        )


def test_prometheus_finds_nodes_where_ray_writes_them():
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    config = yaml.safe_load(
        (MONITORING / "prometheus.yml").read_text(encoding="utf-8")
    )
    (job,) = config["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == [
        f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"
    ]


# docs.skypilot.co, "SkyPilot YAML"; containers.dev, "Dev Container metadata
# reference": read in November 2026.
KEYS = {
    "skypilot.yaml": "name workdir num_nodes resources envs secrets file_mounts setup run config",
    "skypilot.yaml, resources": "infra accelerators accelerator_args cpus memory instance_type use_spot disk_size "
    "disk_tier network_tier max_hourly_cost image_id ports labels autostop any_of ordered job_recovery",
    "devcontainer.json": "name image hostRequirements runArgs postCreateCommand customizations",
    "devcontainer.json, hostRequirements": "cpus memory storage gpu",
}


def tree_of(name):
    text = (
        REPOSITORY
        / (".devcontainer" if name.endswith("json") else "cluster")
        / name
    ).read_text(encoding="utf-8")
    # JSON with comments, each on a line of its own.
    tree: dict[str, Any]
    tree = (
        json.loads(re.sub(r"(?m)^\s*//.*$", "", text))
        if name.endswith("json")
        else yaml.safe_load(text)
    )
    return tree


@pytest.mark.parametrize("place", KEYS)
def test_it_has_keys_of_its_schema_alone(place):
    name, _, part = place.partition(", ")
    tree = tree_of(name)
    assert set(tree[part] if part else tree) <= set(KEYS[place].split())


def test_skypilots_task_is_valid_shell_with_our_versions_a_token_and_storage():
    tree = tree_of("skypilot.yaml")
    versions = expected_versions()
    script = f"{tree['setup']}\n{tree['run']}"
    packages = f'"ray[default,train,tune]=={versions["ray"]}" "torch=={versions["torch"]}" ".[examples]"'
    assert re.search(
        rf"uv pip install .*-c constraints.txt (?:\\\n\s*)?{re.escape(packages)}",
        script,
    )
    checked = subprocess.run(
        ["bash", "-n"],
        input=script,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    assert tree["secrets"] == {"RAY_AUTH_TOKEN": None}, "from the user's shell"
    assert "export RAY_AUTH_MODE=token" in tree["run"]
    assert tree["envs"] == {"PACELINE_STORAGE": "s3://MY-BUCKET/paceline"}
    assert not re.search(
        r"(?:=|:)(?:6380|8266)\b|symmetric-run|ray stop", tree["run"]
    ), "SkyPilot's own Ray is there"


def test_the_devcontainer_sets_up_what_make_does():
    command = tree_of("devcontainer.json")["postCreateCommand"]
    assert command.split()[0] == "make"
    done = subprocess.run(
        ["make", "-n", *command.split()[1:]],
        cwd=REPOSITORY,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
