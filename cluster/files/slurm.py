"""Read a Slurm batch script: its `#SBATCH` options as sbatch takes them, and its commands, a line each."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainers.config.yaml import read_text
from trainers.errors import MISSING, ConfigError

_SUFFIXES = (".sbatch", ".slurm")
_SHORT = {
    "-N": "nodes",
    "-n": "ntasks",
    "-c": "cpus-per-task",
    "-t": "time",
    "-G": "gpus",
    "-a": "array",
    "-o": "output",
    "-J": "job-name",
    "-p": "partition",
    "-A": "account",
}
_TEMPLATE = r"""(?<!\w){}=("[^"]*"|'[^']*'|[^\s;&|'"]*)"""


@dataclass(frozen=True)
class Command:
    """A command of the script, with what backslashes join to it."""

    line: int
    """The first of its lines, from 1."""
    text: str


@dataclass(frozen=True)
class SlurmScript:
    """A batch script; nothing in it is run to read it."""

    source: str
    """The path it was read from, for messages."""
    options: Mapping[str, str]
    """sbatch's options by their long names; "" where one has no value."""
    lines: Mapping[str, int]
    """The line of each of them."""
    ignored: tuple[Command, ...]
    """Lines that look like options and that sbatch does not read."""
    commands: tuple[Command, ...]

    def where(self, option: str) -> str:
        """Return an option's name for a message, with its line where it stands in the file."""
        return f"line {self.lines[option]}, --{option}" if option in self.lines else f"--{option}"

    def assignment(self, name: str) -> tuple[str, int] | None:
        """Return the last value that a variable is given, without its quotes, and the line; None without one."""
        found = None
        for command in self.commands:
            for match in re.finditer(_TEMPLATE.format(name), command.text):
                found = match[1].strip("'\""), command.line
        return found

    def search(self, pattern: str) -> Command | None:
        """Return the first command in which a regular expression is found."""
        return next((command for command in self.commands if re.search(pattern, command.text)), None)


def is_slurm(path: str | Path) -> bool:
    """Return whether a file is a batch script of Slurm's: by its name, or by an `#SBATCH` line."""
    try:
        return str(path).endswith(_SUFFIXES) or re.search(r"^#SBATCH\b", read_text(Path(path), ""), re.M) is not None
    except (ConfigError, FileNotFoundError):  # whoever reads it says so
        return False


def load_slurm(path: str | Path) -> SlurmScript:
    """Read a batch script; ConfigError for what sbatch would refuse."""
    source = str(path)
    try:
        lines = read_text(Path(path), source).splitlines()
    except FileNotFoundError as error:
        raise ConfigError("the file", MISSING, "does not exist", "give the path of a batch script", source) from error
    if not lines or not lines[0].startswith("#!"):
        raise ConfigError("line 1", lines[0] if lines else MISSING, "must name a shell", "write #!/bin/bash", source)
    options: dict[str, str] = {}
    places: dict[str, int] = {}
    ignored: list[Command] = []
    # sbatch reads options up to the first command, and takes the rest for comments.
    body = next((i for i, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")), len(lines))
    for number, line in enumerate(lines, start=1):
        if number <= body and line.startswith("#SBATCH"):
            found = _options(line.removeprefix("#SBATCH"), number, source)
            options |= found
            places |= dict.fromkeys(found, number)
        elif re.match(r"\s*#\s*SBATCH\s+-", line):
            ignored.append(Command(number, line.strip()))
    return SlurmScript(source, options, places, tuple(ignored), tuple(_commands(lines)))


def _options(text: str, number: int, source: str) -> dict[str, str]:
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        rule = f"cannot be read ({str(error).lower()})"
        raise ConfigError(f"line {number}", text.strip(), rule, "close the quote", source) from error
    found: dict[str, str] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
        elif word[:2] in _SHORT:
            name, value = _SHORT[word[:2]], word[2:]
        elif word.startswith("-") or name is None:
            name = None
            continue
        else:
            value = word
        found[name] = value
    return found


def _commands(lines: list[str]) -> list[Command]:
    found: list[Command] = []
    joined = False
    for number, line in enumerate(lines, start=1):
        if not joined and line.lstrip().startswith("#"):
            continue
        # A `#` with a quote after it may stand in a text.
        text = re.sub(r"(?:^|\s)#[^'\"]*$", "", line).strip()
        goes_on = text.endswith("\\")
        text = text.removesuffix("\\").strip()
        if joined:
            found[-1] = Command(found[-1].line, f"{found[-1].text} {text}")
        elif text:
            found.append(Command(number, text))
        joined = goes_on
    return found
