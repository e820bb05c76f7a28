"""docs/migrate.md as the tests use it: what its diffs make of the scripts in
docs/migrations, and its other files.
"""

import re
from pathlib import Path

from tests.specs import REPOSITORY

PAGE = (REPOSITORY / "docs/migrate.md").read_text()
SCRIPTS = REPOSITORY / "docs/migrations"


def diffs(section: str) -> list[tuple[str, str, str]]:
    """Of each diff in a section of the page: the script before, the name of
    the file after, and the hunks.
    """
    blocks = re.findall(
        r"^```diff\n(.*?)^```$", _text(section), re.MULTILINE | re.DOTALL
    )
    heads = [
        re.fullmatch(
            r"--- docs/migrations/(\S+)\n\+\+\+ (\S+)\n(@@\n.*)",
            block,
            re.DOTALL,
        )
        for block in blocks
    ]
    return [(head[1], head[2], head[3]) for head in heads if head is not None]


def sections() -> list[str]:
    """The headings of the page."""
    return re.findall(r"^## (.*)", PAGE, re.MULTILINE)


def before(section: str, directory: Path) -> str:
    """Copy the script of a section to a directory; its name."""
    [(name, _, _)] = diffs(section)
    (directory / name).write_text((SCRIPTS / name).read_text())
    return name


def after(section: str, directory: Path):
    """Write what a section's diff makes of its script, and the YAML files that
    it shows.
    """
    for name, changed, hunks in diffs(section):
        (directory / changed).write_text(
            patched((SCRIPTS / name).read_text(), hunks)
        )
    for name, text in re.findall(
        r"^```yaml\n# (\S+\.yaml)\n(.*?)^```$",
        _text(section),
        re.MULTILINE | re.DOTALL,
    ):
        (directory / name).write_text(text)


def patched(text: str, hunks: str) -> str:
    """Apply hunks, one after the other; the old lines of each must be in the
    text exactly once.

    A removed line of three dots stands for any lines.
    """
    text = "\n" + text
    for hunk in re.split(r"^@@\n", hunks, flags=re.MULTILINE)[1:]:
        lines = [line or " " for line in hunk.splitlines()]
        assert {line[0] for line in lines} <= set(" -+"), hunk
        before = (line for line in lines if line[0] in " -")
        old = "".join(
            r"(?:\n.*)*?"
            if line.split() == ["-", "..."]
            else re.escape(f"\n{line[1:]}")
            for line in before
        )
        new = "".join(f"\n{line[1:]}" for line in lines if line[0] in " +")
        text, found = re.subn(f"{old}(?=\n)", lambda _, new=new: new, text)
        assert found == 1, f"not in the script, or more than once:{hunk}"
    return text[1:]


def _text(section: str) -> str:
    [text] = re.findall(
        rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)",
        PAGE,
        re.MULTILINE | re.DOTALL,
    )
    return str(text)
