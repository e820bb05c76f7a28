"""Monitoring: the dashboard asks only for metrics that there are, with tags that they have, and shows every one."""

from __future__ import annotations

import csv
import json
import re
from typing import Any

import pytest
import yaml

from tests.specs import REPOSITORY

MONITORING = REPOSITORY / "cluster" / "monitoring"
BOUNDED_TAGS = {"run", "rank", "lane", "status"}
# The words of PromQL in the dashboard's queries that are neither metrics nor labels.
FUNCTIONS = {"max", "sum", "count", "by", "label_values"}


@pytest.fixture
def metrics() -> dict[str, set[str]]:
    """Tags by metric."""
    with (MONITORING / "metrics.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert all(row["description"] and row["unit"] for row in rows)
    return {row["name"]: set(row["tags"].split()) for row in rows}


@pytest.fixture
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
    return loaded


def queries(dashboard: dict[str, Any]) -> list[str]:
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = dashboard["templating"]["list"]
    return found + [variable["query"]["query"] for variable in variables if variable["type"] == "query"]


def words(query: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", re.sub(r'"[^"]*"', "", query))) - FUNCTIONS


def test_queries_name_only_metrics_that_there_are_with_tags_that_they_have(
    metrics: dict[str, set[str]], dashboard: dict[str, Any]
) -> None:
    assert all("run" in tags <= BOUNDED_TAGS for tags in metrics.values())
    for query in queries(dashboard):
        [name] = [word for word in words(query) if word.startswith("ray_")]
        assert name in metrics, query
        assert words(query) - {name} <= metrics[name], query


def test_every_metric_is_shown(metrics: dict[str, set[str]], dashboard: dict[str, Any]) -> None:
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    assert set(metrics) <= set().union(*(words(target["expr"]) for target in targets))
    for target in targets:
        kept = set(re.findall(r"\w+", re.search(r"by \(([^)]*)\)", target["expr"])[1]))  # type: ignore[index]
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, target


def test_prometheus_finds_nodes_where_ray_writes_them() -> None:
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]
