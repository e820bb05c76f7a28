"""Which versions a cluster installs, against those that Paceline is tested with."""

import functools
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from cluster.files.cluster_file import ClusterFile
from cluster.finding import Finding, error, warning
from cluster.rules.sentences import DIFFERS
from trainers.config.yaml import read_text
from trainers.errors import ConfigError
from trainers.versions import package_versions

_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_PIP_INSTALL = re.compile(r"\bpip3?\s+install\b([^;&|\n]*)")
_REQUIREMENT = re.compile(r"([A-Za-z][\w.-]*)(?:\[[^\]]*\])?\s*(?:==\s*([\w.+]+)|(.*))", re.DOTALL)
_RAY_IMAGE = re.compile(r"rayproject/ray(?:-ml|-llm)?(?::(\d+\.\d+\.\d+)?.*)?$")
# Nodes with other versions of these cannot talk to each other, or run the code differently.
_MUST_BE_PINNED = ("ray", "torch")


@functools.cache
def expected_versions(constraints: Path = _CONSTRAINTS) -> dict[str, str]:
    """Return the versions for every node: as in constraints.txt, ray and torch else as installed here."""
    return package_versions(*_MUST_BE_PINNED) | (_pins(constraints) or {})


def version_findings(cluster: ClusterFile) -> Iterator[Finding]:
    """Find what the commands and images of a `ray up` file install in other versions, or in any."""
    expected = expected_versions()
    for field, package, version in _installs(cluster):
        right = expected.get(package)
        fix = f"write {package}=={right}" if right else "write the version that you tested with"
        if version is None:
            yield warning(field, package, "must be pinned, or nodes that start later differ", fix)
        elif right is not None and not same_version(version, right):
            # Ray's client and cluster must be the same version; others merely should be.
            remark = error if package == "ray" else warning
            yield remark(field, f"{package}=={version}", DIFFERS.format(right), fix)
    yield from _constraint_files(cluster, expected)


def same_version(one: str, other: str) -> bool:
    """Return whether two versions are the same but for the build (2.15.0+cu130)."""
    return one.split("+")[0] == other.split("+")[0]


def _pins(constraints: Path) -> dict[str, str] | None:
    """The versions that a file pins; None where there is no file to read."""
    try:
        lines = read_text(constraints.expanduser(), str(constraints)).splitlines()
    except (OSError, RuntimeError, ConfigError):  # RuntimeError: the home of nobody
        return None
    matches = [_REQUIREMENT.fullmatch(line.split("#")[0].strip()) for line in lines]
    return {_normal(match[1]): match[2] for match in matches if match and match[2]}


def _normal(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def _pip_commands(cluster: ClusterFile) -> Iterator[tuple[str, list[str]]]:
    """(field, arguments) of each `pip install`."""
    fields = list(cluster.commands.items())
    for name, node_type in cluster.config["available_node_types"].items():
        for key in ("initialization_commands", "worker_setup_commands"):
            fields.append((f"available_node_types.{name}.{key}", tuple(node_type.get(key, ()))))
    for field, commands in fields:
        for command in commands:
            for arguments in _PIP_INSTALL.findall(command):
                yield field, _words(arguments)


def _installs(cluster: ClusterFile) -> Iterator[tuple[str, str, str | None]]:
    """(field, package, version or None) of each package whose version matters."""
    for field, words in _pip_commands(cluster):
        is_constrained = bool(_files(words))
        for word in words:
            match = _REQUIREMENT.fullmatch(word)
            if match is None or (match[3] and match[3][0] not in "=~<>!@"):
                continue  # an option, a path, or another kind of word
            package = _normal(match[1])
            # What a file of constraints pins needs no version here.
            if match[2] or (package in _MUST_BE_PINNED and not is_constrained):
                yield field, package, match[2]
    docker = cluster.config.get("docker") or {}
    for key in ("image", "head_image", "worker_image"):
        if match := _RAY_IMAGE.search(docker.get(key) or ""):
            yield f"docker.{key}", "ray", match[1]


def _constraint_files(cluster: ClusterFile, expected: Mapping[str, str]) -> Iterator[Finding]:
    mounts = {remote.replace("$HOME", "~"): local for remote, local in cluster.config["file_mounts"].items()}
    right = {package: expected[package] for package in _MUST_BE_PINNED if package in expected}
    for field, words in _pip_commands(cluster):
        for file in (file for file in _files(words) if "://" not in file):
            local = mounts.get(file.replace("$HOME", "~"))
            if local is None:
                rule = "must be brought to the nodes, which have no such file"
                yield error(field, file, rule, f"add `{file}: constraints.txt` to file_mounts")
            elif (pins := _pins(Path(local))) is None:
                rule = "is not in the directory from which `ray up` would read it"
                yield warning(f"file_mounts.{file}", local, rule, "run this and `ray up` in the root of the repository")
            elif not all(same_version(pins.get(package, ""), version) for package, version in right.items()):
                rule = f"must pin {' and '.join(f'{name}=={version}' for name, version in right.items())}"
                yield error(f"file_mounts.{file}", local, rule, "mount Paceline's own constraints.txt")


def _files(words: list[str]) -> list[str]:
    """The files and addresses that `-c` and `-r` name."""
    flags = ("-c", "-r", "--constraint", "--requirement")
    named = [words[i + 1] for i, word in enumerate(words[:-1]) if word in flags]
    return named + [word.split("=", 1)[1] for word in words if word.startswith(("--constraint=", "--requirement="))]


def _words(arguments: str) -> list[str]:
    try:
        return shlex.split(arguments)
    except ValueError:  # an open quote: the shell would fail as well
        return arguments.split()
