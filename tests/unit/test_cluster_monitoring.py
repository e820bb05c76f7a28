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


def test_names_are_rays_form_of_paceline_metrics_with_bounded_tags(metrics: dict[str, set[str]]) -> None:
    for name, tags in metrics.items():
        assert re.fullmatch(r"ray_paceline_[a-z_]+[a-z]", name)
        assert "run" in tags
        assert tags <= BOUNDED_TAGS


def test_queries_name_only_metrics_that_there_are(metrics: dict[str, set[str]], dashboard: dict[str, Any]) -> None:
    for query in queries(dashboard):
        named = {word for word in words(query) if word.startswith("ray_")}
        assert len(named) == 1, query
        (name,) = named
        assert name in metrics, query
        assert words(query) - named <= metrics[name], query


def test_every_metric_is_shown_once_or_more(metrics: dict[str, set[str]], dashboard: dict[str, Any]) -> None:
    shown = set().union(*(words(target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]))
    assert set(metrics) <= shown


def test_legends_name_labels_that_the_query_keeps(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            kept = set(re.findall(r"\w+", re.search(r"by \(([^)]*)\)", target["expr"])[1]))  # type: ignore[index]
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, target


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    cells = [
        (x, y)
        for position in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_prometheus_finds_nodes_where_ray_writes_them() -> None:
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job["file_sd_configs"][0]["files"] == [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]


def test_the_scale_page_marks_every_figure() -> None:
    """Each row with a figure of time or count says how sure it is."""
    text = (REPOSITORY / "docs" / "scale.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| [^-]", line) and "what bounds it" not in line]
    assert len(rows) > 15
    for row in rows:
        bound = row.split("|")[2]
        if re.search(r"\d+(?:\.\d+)? (?:s|hours|minutes|GB|calls|results)\b", bound):
            assert re.search(r"\(measured|\(extrapolated\)|\[Ray\]", bound), row
