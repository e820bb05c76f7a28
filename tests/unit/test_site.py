"""The site: it builds without a warning, every page is in it, and it asks no
network for anything.
"""

import re

import pytest

from tests.documents import SITE
from tests.specs import REPOSITORY, read_json

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("site")
    assert SITE["build"](directory) == 0
    return directory / "site"


def html(built):
    return {
        str(path.relative_to(built)): path.read_text()
        for path in built.rglob("*.html")
    }


def test_every_page_is_in_it(built):
    expected = {
        re.sub(r"README\.md$", "index.html", page).replace(".md", ".html")
        for page in SITE["pages"]()
    }
    assert expected | {"404.html"} == set(html(built))
    found = {
        item["location"].partition("#")[0]
        for item in read_json(built / "search.json")["items"]
    }
    assert {"docs/tutorial.html", "docs/config.html"} <= found, (
        "and can be searched"
    )


def test_it_asks_no_network_and_lists_are_lists(built):
    for name, text in html(built).items():
        loaded = re.findall(
            r"<(?:script|img|iframe|source)\b[^>]*\bsrc(?:set)?=\"?(https?:[^\" >]+)",
            text,
        )
        loaded += re.findall(
            r"<link\b(?![^>]*rel=\"?canonical)[^>]*\bhref=\"?(https?:[^\" >]+)",
            text,
        )
        assert loaded == [], name
        assert not re.search(r"class=\"?[\w -]*mermaid", text), (
            f"{name}: its script would come from elsewhere"
        )
        prose = re.findall(r"<p>(.*?)</p>", text, re.DOTALL)
        assert [
            one for one in prose if re.search(r"\n(?:[-*]|\d+\.) ", one)
        ] == [], name
    assert (built / "docs/architecture-1.svg").read_text().startswith("<svg")


def test_a_page_that_is_not_right_is_named(tmp_path, monkeypatch):
    copied = SITE["copied"]
    with pytest.raises(
        SystemExit,
        match=r"docs/x\.md links images/none\.png, which is not there",
    ):
        copied("docs/x.md", "![a](images/none.png)", tmp_path)
    with pytest.raises(SystemExit, match=r"docs/x\.md links none\.md"):
        copied("docs/x.md", "[a](none.md#b)", tmp_path)
    with pytest.raises(SystemExit, match=r"none\.svg"):
        copied("docs/x.md", '<source srcset="none.svg">', tmp_path)
    text = "[a](../examples/digits) [b](migrations) [c](https://b.c/d)\n```text\n[e](f)\n```\nlist:\n- one\n"
    changed = "[a](../examples/digits/README.md) b [c](https://b.c/d)\n```text\n[e](f)\n```\nlist:\n\n- one\n"
    assert copied("docs/x.md", text, tmp_path) == changed
    monkeypatch.setitem(
        SITE["build"].__globals__,
        "pages",
        lambda: [*SITE["pages"](), "docs/new.md"],
    )
    with pytest.raises(
        SystemExit, match=r"mkdocs\.yml and the pages differ by docs/new\.md"
    ):
        SITE["build"](tmp_path)


def test_an_anchor_that_is_not_there_fails_the_build(tmp_path, monkeypatch):
    root = tmp_path / "repository"
    root.mkdir()
    (root / "llms.txt").touch()
    settings = (REPOSITORY / "mkdocs.yml").read_text()
    (root / "mkdocs.yml").write_text(
        settings[: settings.index("nav:")] + "nav:\n  - README.md\n"
    )
    (root / "README.md").write_text(
        "# Title\n\n[there](#title) [not there](#titel)\n"
    )
    monkeypatch.setitem(SITE["build"].__globals__, "ROOT", root)
    assert SITE["build"](tmp_path / "build") != 0
    (root / "README.md").write_text("# Title\n\n[there](#title)\n")
    assert SITE["build"](tmp_path / "build") == 0
