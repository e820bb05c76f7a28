"""report.html in a browser without a network: nothing asked for, nothing
refused, the figures there.
"""

import json
from dataclasses import replace

import pytest

from tests.browser import LOOKS, chromium, look_at
from tests.unit.report_records import ENVIRONMENT, TRAIN, config, done, failed
from trainers.storage import Storage
from tune.report.write import write_report
from tune.trials.record import Spent

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no Chromium on this machine"
)

WIDTH = "document.documentElement.scrollWidth"
FIGURES = """JSON.stringify([...document.querySelectorAll('figure svg')].map(svg => {
  const box = svg.getBoundingClientRect();
  return [box.width, box.height, svg.querySelectorAll('path').length];
}))"""
INK = "getComputedStyle(document.body).color + ' on ' + getComputedStyle(document.body).backgroundColor"
SMALL = """Math.min(...[...document.querySelectorAll('main p, main td, main th, main dd, main dt, pre')]
  .map(element => parseFloat(getComputedStyle(element).fontSize)))"""


def test_the_page_in_a_browser(tmp_path):
    sweep = Storage(tmp_path / "digits-sweep")
    write_report(
        sweep, config(), TRAIN, done() + failed(), ENVIRONMENT, task_dir=None
    )
    page = look_at(
        tmp_path / "digits-sweep" / "report.html", WIDTH, FIGURES, INK, SMALL
    )

    assert page.asked == []
    assert page.said == []
    for look, ((width, _), _, _) in LOOKS.items():
        assert page.found[f"{look}: {WIDTH}"] <= width, (
            "no scrolling to the side"
        )
        figures = json.loads(page.found[f"{look}: {FIGURES}"])
        assert len(figures) == 5
        for wide, high, paths in figures:
            assert 0.6 * min(width, 500) <= wide <= width
            assert high > 100
            assert paths > 10
        assert page.found[f"{look}: {SMALL}"] >= 12
        assert page.pictures[look].startswith(b"\x89PNG")
    assert (
        page.found[f"report-light: {INK}"] != page.found[f"report-dark: {INK}"]
    )


def test_a_wide_table_fits_the_page(tmp_path):
    """Keys that never vary are in a line above it, and on a narrow page rows
    become lists.
    """
    keys = {f"task_args.a_rather_long_name_of_a_key_{n}": n for n in range(4)}
    constant = {"task_args.the_same_for_all": "x" * 60}
    records = [
        replace(one, config={**one.config, **{key: n * (at + 1) for key, at in keys.items()}, **constant},
                spent=Spent(0.0, 1.0, 2.0, 3.0))
        for n, one in enumerate(done() + failed())
    ]  # fmt: skip
    sweep = Storage(tmp_path / "wide")
    write_report(sweep, config(), TRAIN, records, ENVIRONMENT, task_dir=None)
    inside = "(() => { const e = document.querySelector('.scroll'); return e.scrollWidth - e.clientWidth; })()"
    heads = "getComputedStyle(document.querySelector('thead')).display"
    looks = {
        f"{width}": ((width, 900), False, "light") for width in (1280, 800)
    }
    page = look_at(
        tmp_path / "wide" / "report.html", WIDTH, inside, heads, looks=looks
    )
    for width in (1280, 800):
        assert page.found[f"{width}: {WIDTH}"] == width
        assert page.found[f"{width}: {inside}"] == 0
    assert page.found[f"1280: {heads}"] == "table-header-group"
    assert page.found[f"800: {heads}"] == "none"
    text = sweep.read("report.html").decode()
    assert (
        f"The same for all trials: the_same_for_all {'x' * 60}."
        in " ".join(text.split())
    )
    assert ">the_same_for_all</th>" not in text


def test_the_table_can_be_sorted_and_filtered_and_shows_the_first_fifty(
    tmp_path,
):
    records = [
        replace(
            record,
            id=f"{record.id}-{copy}",
            samples_per_s=(record.samples_per_s or 0.0) + copy,
        )
        for copy in range(9)
        for record in done()
    ]
    sweep = Storage(tmp_path / "many")
    write_report(sweep, config(), TRAIN, records, ENVIRONMENT, task_dir=None)
    shown = """[...document.querySelector('#trials tbody').rows].filter(row => !row.hidden)
      .map(row => [...row.cells].map(cell => cell.textContent.trim()))"""
    header = "[...document.querySelectorAll('#trials th')].find(head => head.textContent == 'samples/s')"
    input_ = "document.querySelectorAll('#trials input')[1]"
    steps = {
        "first": "0",
        "all": "document.getElementById('all-trials').click()",
        "rising": f"{header}.click()",
        "falling": f"({header}.click(), 1)",
        "by size": "document.querySelector('#trials th').click()",
        "filtered": f"({input_}.value = 'bf16', {input_}.dispatchEvent(new Event('input', {{bubbles: true}})))",
    }
    asked = [f"({step}, JSON.stringify({shown}))" for step in steps.values()]
    page = look_at(
        tmp_path / "many" / "report.html",
        *asked,
        looks={"wide": ((1280, 900), False, "light")},
    )
    assert page.said == []
    rows = {
        name: json.loads(page.found[f"wide: {text}"])
        for name, text in zip(steps, asked, strict=True)
    }
    assert [len(rows[name]) for name in steps] == [50, 72, 72, 72, 72, 36]
    rates = [float(row[3].replace(",", "")) for row in rows["rising"]]
    assert rates == sorted(rates)
    assert [row[3] for row in rows["falling"]] == [
        row[3] for row in rows["rising"]
    ][::-1]
    sizes = [int(row[0]) for row in rows["by size"]]
    assert sizes == sorted(sizes)
    assert {row[1] for row in rows["filtered"]} == {"bf16"}
