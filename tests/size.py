"""Count what a reader has to read: code tokens and lines without comments and
docstrings, files, keys and commands.

Run as:
    python -m tests.size [FOLDER...]    (default: trainers cluster tune, then tests)
"""

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

from tests.rooms import PACKAGES, REPOSITORY, file_arrows

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


@dataclass(frozen=True)
class Size:
    """What some files hold."""

    num_files: int
    num_tokens: int
    num_code_lines: int

    def __str__(self) -> str:
        each = self.num_tokens / max(1, self.num_code_lines)
        return f"{self.num_files:4} files {self.num_tokens:8,} tokens {self.num_code_lines:7,} lines {each:5.1f} a line"


def size(files: list[Path]) -> Size:
    """Count the files together."""
    num_tokens = 0
    num_lines = 0
    for file in files:
        lines = set()
        for token in code_tokens(file.read_text()):
            num_tokens += 1
            lines.update(range(token.start[0], token.end[0] + 1))
        num_lines += len(lines)
    return Size(len(files), num_tokens, num_lines)


def code_tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of a module but for comments, docstrings and line ends."""
    docstrings = set(docstring_lines(ast.parse(text)))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = (
            token.type == tokenize.STRING and token.start[0] in docstrings
        )
        if token.type not in _NO_CODE and not is_docstring:
            yield token


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of strings that stand alone: of modules, classes and
    functions, and below attributes.
    """
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def with_one_importer() -> list[str]:
    """Return the modules that one other imports, and no more: pieces of
    somebody else's file.
    """
    importers = defaultdict(set)
    for module, imported in file_arrows().items():
        for name in imported:
            importers[name].add(module)
    return sorted(module for module, by in importers.items() if len(by) == 1)


def longest_chain() -> list[str]:
    """Return the modules of the longest chain of imports, the last one first."""
    arrows = file_arrows()
    chains: dict[str, list[str]] = {}
    for module in TopologicalSorter(arrows).static_order():
        below = [chains[imported] for imported in arrows.get(module, ())]
        chains[module] = [module, *max(below, key=len, default=[])]
    return max(chains.values(), key=len)


def main(folders: list[str]):
    """Print the table."""
    for folder in folders or [*PACKAGES, "tests"]:
        print(
            f"{folder:10} {size(sorted((REPOSITORY / folder).rglob('*.py')))}"
        )
    product = [
        file
        for package in PACKAGES
        for file in (REPOSITORY / package).rglob("*.py")
    ]
    print(f"{'product':10} {size(product)}")
    print(f"{len(with_one_importer())} files with one importer")
    print(f"{len(longest_chain())} files in the longest chain of imports")
    keys = set(
        re.findall(
            r"^\| (`.+?`)",
            (REPOSITORY / "docs/config.md").read_text(),
            re.MULTILINE,
        )
    )
    commands = (REPOSITORY / "docs/commands.md").read_text()
    print(f"{len(keys)} keys, {commands.count('usage: ')} commands")


if __name__ == "__main__":
    main(sys.argv[1:])
