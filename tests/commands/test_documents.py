"""The commands of the pages, as a reader types them: all of a page in one
directory, with the output that it shows.
"""

import re
import shutil

import pytest

from tests.documents import blocks, pages
from tests.specs import REPOSITORY

pytestmark = pytest.mark.full

TUTORIAL = "docs/tutorial.md"
"""It begins in an empty folder: tests/commands/test_installed.py runs it."""
RUN = [
    page
    for page in pages()
    if page != TUTORIAL
    and any(
        not block.fate(one) for block in blocks(page) for one in block.commands
    )
]


def script(page):
    """The page as a shell script: its files, and those commands that it does
    not leave out, each after its own text.
    """
    for number, block in enumerate(blocks(page)):
        if block.name is not None:
            yield f"cat > {block.name} <<'END OF {number}'\n{block.text}\nEND OF {number}"
        for command in block.commands:
            if block.fate(command) is None:
                yield f"cat <<'END OF {number}'\n$ {command}\nEND OF {number}\n{command} 2>&1"


def pattern(output):
    """Lines as a page shows them, for any figures, columns of any width, and
    any lines in place of `...`.
    """
    lines = [] if output.strip() else [""]
    for line in output.strip("\n").splitlines() if output.strip() else []:
        words = [
            r"\S+" if re.search(r"\d", word) else re.escape(word)
            for word in line.split()
        ]
        lines.append(
            r"(?:.*\n)*?" if line == "..." else r" ".join(words) + r"\n"
        )
    return "".join(lines)


def shown(block):
    """Each command of a block with the output below it."""
    parts = re.split(r"^\$ (.*)\n?", block.text + "\n", flags=re.MULTILINE)
    yield from zip(parts[1::2], parts[2::2], strict=True)


def test_output_is_compared_but_for_its_figures():
    seen = "step 1 of 20: 0.31\nmore\nand more\ndone: 20 steps\n"
    assert re.fullmatch(pattern("step 9 of 9:  7\n...\ndone: 1 steps"), seen)
    assert not re.fullmatch(pattern("step 9 of 9:  7\ndone: 1 steps"), seen)
    assert not re.fullmatch(
        pattern("step 9 of 9:  7\n...\ndone: 1 epochs"), seen
    )


def assert_runs(page, directory, command, environment):
    """All of a page, which says what it shows."""
    text = "\n".join(("set -eu", *script(page)))
    done = command(
        "-c", text, program=("bash",), cwd=directory, env=environment
    )
    assert done.code == 0, done.out + done.err
    said = re.split(
        r"^\$ (.*)\n",
        done.out.replace(str(directory), "/home/you"),
        flags=re.MULTILINE,
    )
    outputs = dict(zip(said[1::2], said[2::2], strict=True))
    for block in blocks(page):
        for typed, output in (
            shown(block) if block.language == "console" else ()
        ):
            seen = "".join(
                " ".join(line.split()) + "\n"
                for line in outputs[typed].splitlines()
            )
            assert re.fullmatch(pattern(output), seen), (
                f"{page}, `{typed}` says\n{outputs[typed]}"
            )


@pytest.mark.parametrize("page", RUN)
def test_a_page_runs(page, tmp_path, command):
    for folder in ("examples", "cluster"):
        shutil.copytree(
            REPOSITORY / folder,
            tmp_path / folder,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    assert_runs(page, tmp_path, command, {"PYTHONPATH": str(REPOSITORY)})
