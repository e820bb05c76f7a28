"""Every code block of the Markdown pages, and what the suite does with it.

A block is fenced (its language says what it is) or indented. Shell commands are the
lines of `sh` blocks, the lines after `$ ` in `console` blocks, and the first paragraph
of an indented block that begins with a program in PROGRAMS; an indented block that
begins with a key of a configuration is YAML, any other is output. The suite runs each
(tests/commands/test_documents.py), all of a page in one directory, unless a comment in
the page right before the block says otherwise, for all of its commands or for those
that contain some words:

    <!-- not run: needs an account at AWS -->
    <!-- not run (s3://): needs a bucket -->
    <!-- run by tests/commands/test_predict.py::test_predict_writes_the_same_bytes -->
    <!-- run by (torchrun) tests/on_ray/test_launchers.py::test_launchers_agree -->

A block of `python` or `yaml` whose first line is a comment with a file's name is
written into that directory first.
"""

import itertools
import re
import runpy
from dataclasses import dataclass

from tests.specs import REPOSITORY
from trainers.config import TrainConfig
from trainers.config.model import keys_of
from tune.config import SweepConfig

PROGRAMS = (
    *(
        "make",
        "python",
        "python3",
        "pip",
        "torchrun",
        "ray",
        "git",
        "cd",
        "export",
    ),
    *("docker", "aws", "sbatch", "sky"),
)
PROGRAMS += (
    "paceline-train",
    "paceline-sweep",
    "paceline-cluster",
    ".venv/bin/python",
    ".venv/bin/pre-commit",
    "mkdir",
)
RUN = {
    "task": "task:Task",
    "epochs": 1,
    "global_batch_size": 32,
    "optimizer": {"lr": 0.1},
}
"""What a fragment of a configuration leaves to the reader."""
KEYS = {**keys_of(TrainConfig), **keys_of(SweepConfig)}
LANGUAGES = (
    "sh",
    "console",
    "python",
    "yaml",
    "json",
    "toml",
    "diff",
    "mermaid",
    "text",
)
"""What a fence may say; `text` is output."""
SITE = runpy.run_path(str(REPOSITORY / "docs/pages.py"))
pages = SITE["pages"]
_FENCE = re.compile(r"^( *)(`{3,}|~{3,})(.*)$")
_COMMENT = re.compile(r"<!-- (not run|run by)(?: \(([^)]+)\))?:? (.+?) -->")


@dataclass(frozen=True)
class Fate:
    """What a comment says of the commands of the next block that contain `words`."""

    kind: str
    words: str
    said: str


@dataclass(frozen=True)
class Block:
    """A code block."""

    page: str
    line: int
    """Of its first line of code, from 1."""
    language: str
    """Of a fence, or what an indented block looks like."""
    text: str
    fates: tuple[Fate, ...] = ()

    @property
    def name(self) -> str | None:
        """The file that it is, by its first line."""
        found = re.match(r"# (\S+\.(?:py|ya?ml))\b", self.text)
        return found[1] if found else None

    @property
    def commands(self) -> list[str]:
        """Its shell commands, each on one line, without comments."""
        if self.language not in ("sh", "console"):
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        found = (
            re.sub(r"(^|\s+)# .*$", "", " ".join(line.split()))
            for line in lines
        )
        return [command for command in found if command]

    @property
    def output(self) -> str:
        """Of a `console` block, what lies between and below its commands."""
        return "\n".join(
            line
            for line in self.text.splitlines()
            if not line.startswith("$ ")
        )

    def fate(self, command: str) -> Fate | None:
        """What the page says of a command; None: it is run."""
        return next(
            (fate for fate in self.fates if fate.words in command), None
        )


def blocks(page: str, text: str | None = None) -> list[Block]:
    """The code blocks of a page, in their order."""
    lines = (
        text if text is not None else (REPOSITORY / page).read_text()
    ).splitlines()
    found = []
    fates = []
    number = 0
    while number < len(lines):
        line = lines[number]
        if fence := _FENCE.match(line):
            start = number + 1
            end = number + 1
            while end < len(lines) and lines[end].strip() != fence[2]:
                end += 1
            code = "\n".join(
                one.removeprefix(fence[1]) for one in lines[start:end]
            )
            found.append(
                Block(page, start + 1, fence[3].strip(), code, tuple(fates))
            )
            fates = []
            number = end + 1
        elif line.startswith("    ") and (
            number == 0 or not lines[number - 1].strip()
        ):
            end = number
            while end < len(lines) and (
                lines[end].startswith("    ") or not lines[end].strip()
            ):
                end += 1
            found.append(
                _indented(
                    page,
                    number + 1,
                    [one[4:] for one in lines[number:end]],
                    tuple(fates),
                )
            )
            fates = []
            number = end
        else:
            if comment := _COMMENT.fullmatch(line.strip()):
                fates.append(Fate(comment[1], comment[2] or "", comment[3]))
            elif line.strip():
                fates = []
            number += 1
    return found


def _indented(
    page: str, line: int, code: list[str], fates: tuple[Fate, ...]
) -> Block:
    word = code[0].split()[0]
    if word not in PROGRAMS:
        language = (
            "yaml" if word.endswith(":") and word[:-1] in KEYS else "text"
        )
        return Block(page, line, language, "\n".join(code).rstrip(), fates)
    return Block(
        page,
        line,
        "sh",
        "\n".join(itertools.takewhile(str.strip, code)),
        fates,
    )
