"""Build the site from the pages of mkdocs.yml, by Zensical.

They are copied to build/pages in the repository's own layout.
The pages stay as GitHub shows them. Their links to each other and to files hold in the
copy; what a site has another way for is changed there: a directory's README, Mermaid
(drawn here: in a browser it would need a script from elsewhere), and lists right below
a line. A warning of Zensical's is an error, and so is what it does not look for: a file
that is not there, and a page in no section.

Run as: python docs/pages.py        (make site)
"""

from __future__ import annotations

import itertools
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
FOLDERS = (
    "*.md",
    "docs/**/*.md",
    "examples/**/*.md",
    "benchmarks/*.md",
    "cluster/**/*.md",
)
"""Where pages lie."""
_LINK = re.compile(r"(!?\[(?:[^][]|\[[^]]*\])*\])\(([^)#\s]+)(#[^)\s]*)?\)")
_ADDRESS = re.compile(r'(?:src|srcset)="([^"]+)"')
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ITEM = re.compile(r" {0,3}([-*]|\d+\.) ")


def pages() -> list[str]:
    """Every Markdown page of the repository, as a path in it."""
    return sorted(
        {
            str(path.relative_to(ROOT))
            for folder in FOLDERS
            for path in ROOT.glob(folder)
        }
    )


def listed(nav: Any) -> Iterator[str]:
    """The pages of a nav."""
    if isinstance(nav, str):
        yield nav
    else:
        for below in nav.values() if isinstance(nav, dict) else nav:
            yield from listed(below)


def build(target: Path) -> int:
    """Build `target`/site and return Zensical's exit code.

    Raises:
        SystemExit: A page is not right.
    """
    settings = (ROOT / "mkdocs.yml").read_text()
    names = list(listed(yaml.safe_load(settings)["nav"]))
    if wrong := sorted(set(names) ^ set(pages())):
        raise SystemExit(
            f"mkdocs.yml and the pages differ by {', '.join(wrong)}: give each page its line below `nav`"
        )
    shutil.rmtree(target / "pages", ignore_errors=True)
    for name in names:
        (target / "pages" / name).parent.mkdir(parents=True, exist_ok=True)
        (target / "pages" / name).write_text(
            copied(name, (ROOT / name).read_text(), target / "pages")
        )
    shutil.copy(ROOT / "llms.txt", target / "pages")
    (target / "mkdocs.yml").write_text(settings)
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--clean",
        "--strict",
        "-f",
        "mkdocs.yml",
    ]
    return subprocess.run(command, cwd=target, check=False).returncode


def copied(name: str, text: str, target: Path) -> str:
    """The text of a page for the site; copies the files that it names to `target`."""

    def locate(address: str) -> str:
        file = posixpath.normpath(
            posixpath.join(posixpath.dirname(name), address)
        )
        if not (ROOT / file).exists():
            raise SystemExit(f"{name} links {address}, which is not there")
        if (ROOT / file).is_file() and not file.endswith(".md"):
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, target / file)
        return file

    def link(found: re.Match[str]) -> str:
        words = found[1]
        address = found[2]
        anchor = found[3] or ""
        if "://" in address or address.startswith("mailto:"):
            return found[0]
        file = locate(address)
        if (ROOT / file).is_dir():
            return (
                f"{words}({address}/README.md{anchor})"
                if (ROOT / file / "README.md").exists()
                else words[1:-1]
            )
        return found[0]

    numbers = itertools.count(1)

    def drawn(found: re.Match[str]) -> str:
        import mermaidx

        file = f"{Path(name).stem}-{next(numbers)}.svg"
        svg = (
            mermaidx.render(found[1])
            .svg()
            .replace(
                "background-color: transparent", "background-color: white", 1
            )
        )
        (target / name).with_name(file).write_text(svg)
        return f"[![a drawing; opens alone]({file})]({file})"

    for address in _ADDRESS.findall(text):
        locate(address)
    prose = re.split(
        r"(^```.*?^```$)", _lists(text), flags=re.MULTILINE | re.DOTALL
    )
    linked = (
        part if part.startswith("```") else _LINK.sub(link, part)
        for part in prose
    )
    return _MERMAID.sub(drawn, "".join(linked))


def _lists(text: str) -> str:
    """Put a blank line above each list, which Python's Markdown needs, not GitHub's."""
    lines: list[str] = []
    is_code = is_list = False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        if not is_code and _ITEM.match(line):
            if not is_list and lines and lines[-1].strip():
                lines.append("")
            is_list = True
        elif not line.strip():
            is_list = False
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(build(ROOT / "build"))
