"""report.html in a browser without a network: nothing asked for, nothing refused, the figures there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.browser import LOOKS, chromium, look_at
from tests.unit.report_records import ENVIRONMENT, TRAIN, config, done, failed
from trainers.storage import Storage
from tune.report.write import write_report

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine")

WIDTH = "document.documentElement.scrollWidth"
FIGURES = """JSON.stringify([...document.querySelectorAll('figure svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  return [box.width, box.height, svg.querySelectorAll('path').length];
}))"""
INK = "getComputedStyle(document.body).color + ' on ' + getComputedStyle(document.body).backgroundColor"
SMALL = """Math.min(...[...document.querySelectorAll('main p, main td, main th, main dd, main dt, pre')]
  .map(element => parseFloat(getComputedStyle(element).fontSize)))"""


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    sweep = Storage(str(tmp_path / "digits-sweep"))
    write_report(sweep, config(), TRAIN, done() + failed(), ENVIRONMENT, task_dir=None)
    page = look_at(tmp_path / "digits-sweep" / "report.html", WIDTH, FIGURES, INK, SMALL)

    assert page.asked == []
    assert page.said == []
    for look, ((width, _), _, _) in LOOKS.items():
        assert page.found[f"{look}: {WIDTH}"] <= width, "no scrolling to the side"
        figures = json.loads(page.found[f"{look}: {FIGURES}"])
        assert len(figures) == 5
        for wide, high, paths in figures:
            assert 0.6 * min(width, 500) <= wide <= width
            assert high > 100
            assert paths > 10
        assert page.found[f"{look}: {SMALL}"] >= 12
        assert page.pictures[look].startswith(b"\x89PNG")
    assert page.found[f"report-light: {INK}"] != page.found[f"report-dark: {INK}"]
