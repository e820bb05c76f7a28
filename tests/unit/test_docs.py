"""The documents are current: the reference page, the tree's map, and the files that the README names."""

from __future__ import annotations

import re
import runpy

from tests.specs import REPOSITORY


def test_the_configuration_reference_is_current() -> None:
    page = runpy.run_path(str(REPOSITORY / "docs/make.py"))["page"]()
    assert (REPOSITORY / "docs/config.md").read_text() == page, "run `make docs`"


def test_what_the_readme_names_is_there() -> None:
    text = (REPOSITORY / "README.md").read_text()
    for name in re.findall(r"(?:examples|cluster|docs)/[\w./-]*\w", text):
        assert (REPOSITORY / name).exists(), name
    targets = re.findall(r"^(\w+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"\bmake (sweep|test|lint|docs|install)\b", text):
        assert target in targets
    for name in re.findall(r"^    (\w+)/ ", text, re.MULTILINE):
        assert (REPOSITORY / name).is_dir(), name
