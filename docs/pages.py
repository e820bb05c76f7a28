"""Build the site below build/site from the pages that mkdocs.yml names; a warning is an error.

The pages stay as GitHub shows them: they are copied to build/pages in the repository's own layout, so that their links
to each other and to files hold, and three things that a site has no other way for are changed in the copy.

Run as: python docs/pages.py        (make site)
"""

from __future__ import annotations

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
_LINK = re.compile(r"(\[(?:[^][]|\[[^]]*\])*\])\(([^)#\s]+)(#[^)\s]*)?\)")
_FILE = re.compile(r'(?:src|srcset)="([^"]+)"')
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages(nav: Any) -> Iterator[str]:
    """The pages of a nav, as paths in the repository."""
    if isinstance(nav, str):
        yield nav
    else:
        for below in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(below)


def configured() -> list[str]:
    """The pages of mkdocs.yml."""
    return list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))


def prepare(names: list[str], target: Path) -> None:
    """Copy pages, and the files that they link or show."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(_page(name, (ROOT / name).read_text(), target))


def _page(name: str, text: str, target: Path) -> str:
    def link(found: re.Match[str]) -> str:
        words, address, anchor = found[1], found[2], found[3] or ""
        if "://" in address:
            return found[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(name), address))
        if (ROOT / file).is_dir():  # GitHub lists a directory, a site cannot
            return f"{words}({address}/README.md{anchor})" if (ROOT / file / "README.md").exists() else words[1:-1]
        copy(file)
        return found[0]

    def copy(file: str) -> None:
        if not file.endswith(".md") and (ROOT / file).is_file():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, target / file)

    for address in _FILE.findall(text):
        copy(posixpath.normpath(posixpath.join(posixpath.dirname(name), address)))
    return _MERMAID.sub(lambda found: _drawn(found[1]), _LINK.sub(link, text))


def _drawn(source: str) -> str:
    """A Mermaid diagram as SVG: in the browser it would need a script from elsewhere."""
    import mermaidx

    return f'<div class="drawing">{mermaidx.render(source).svg()}</div>\n'


def main() -> int:
    """The command; returns its exit code."""
    target = ROOT / "build/pages"
    shutil.rmtree(target, ignore_errors=True)
    prepare(configured(), target)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
