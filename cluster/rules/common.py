"""Find what is wrong in cluster files of every kind: token, storage, secrets, versions."""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.finding import Finding, error, warning
from trainers.errors import MISSING
from trainers.versions import package_versions

HEAD_WORKS = (
    "should be 0 on the head: work there slows the scheduler, and can end the cluster"
)
OPEN_PORT = (
    "must not open a port to the world: the Jobs API runs any code that reaches it"
)
_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_RAY_IN_IMAGE = re.compile(r"(?:rayproject/ray(?:-ml|-llm)?:|ray[-_]?)(\d+\.\d+\.\d+)")
_ASSIGNMENT = re.compile(r"(?<![\w$-])([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;&|'\"]*)")
# Keys of AWS, of Google and of anybody, and passwords in an address; what they match is
# never shown.
_KEYS = re.compile(
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|PRIVATE KEY-----|\b(?:AWS_SECRET_ACCESS_KEY|AZURE_CLIENT_SECRET)=|"
    r"\b(?:aws|gcp)_credentials\b|\bAccountKey=|aws_secret_access_key|://[^\s/:@'\"]*:[^\s/@'\"]+@"
)
_OWN_DISK = re.compile(r"(?:/tmp|/var/tmp|/dev/shm|/home|/root|~|\$HOME)(?:/|$)")
# Ray's own defaults (ray_config_def.h); with these a cut cable is noticed after 65 s at
# the latest, measured: 33 s.
_HEALTH_CHECK = {"period_ms": 3000, "timeout_ms": 10000, "failure_threshold": 5}
_NOTICED_WITHIN_S = 20.0
_STOP_WAIT_S = 30.0
_RAYS_STOP_WAIT_S = 3.0


def environment_findings(
    starts: Mapping[str, Mapping[str, str]], own_disk: re.Pattern[str] = _OWN_DISK
) -> Iterator[Finding]:
    """Find unsafe and contradictory environments where Ray starts.

    `starts` has them by field, the head's first.

    `own_disk` matches directories that each node has for itself.
    """
    storage = next(iter(starts.values())).get("PACELINE_STORAGE")
    for field, environment in starts.items():
        mode = environment.get("RAY_AUTH_MODE")
        if mode != "token":
            value = f"RAY_AUTH_MODE={mode}" if mode else MISSING
            rule = (
                "must turn token authentication on, or whoever reaches a port runs code"
            )
            yield error(field, value, rule, "set RAY_AUTH_MODE=token where Ray starts")
        token = environment.get("RAY_AUTH_TOKEN", "$")
        if not token.startswith("$"):
            rule = "must not hold RAY_AUTH_TOKEN: it is a secret"
            fix = "bring it in a file (`ray get-auth-token --generate` makes one), or from a Secret"
            yield error(field, MISSING, rule, fix)
        own = environment.get("PACELINE_STORAGE")
        if not own:
            rule = "must set PACELINE_STORAGE, or checkpoints stay on one node and die with it"
            yield warning(
                field,
                MISSING,
                rule,
                "name a bucket or a shared directory, such as s3://BUCKET/PREFIX",
            )
        elif storage and own != storage:
            yield error(
                field,
                f"PACELINE_STORAGE={own}",
                f"differs from the head's, {storage}",
                "write one place",
            )
    if storage and own_disk.match(storage):
        rule = "is on each node's own disk, where no other node finds a checkpoint"
        fix = "name a bucket, or a directory that all nodes share"
        yield error(next(iter(starts)), f"PACELINE_STORAGE={storage}", rule, fix)


def reaction_findings(field: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Judge how fast the head notices a dead node, and how long a stopped job may take."""
    checks = {
        name: _number(environment.get(f"RAY_health_check_{name}"), default)
        for name, default in _HEALTH_CHECK.items()
    }
    slowest_s = (
        checks["failure_threshold"]
        * (checks["period_ms"] + checks["timeout_ms"])
        / 1000
    )
    if slowest_s > _NOTICED_WITHIN_S:
        rule = f"should let a dead node be noticed within {_NOTICED_WITHIN_S:g} s, not {slowest_s:g}"
        names = ("period_ms=1000", "timeout_ms=1000", "failure_threshold=3")
        yield warning(
            field,
            MISSING,
            rule,
            f"set {', '.join(f'RAY_health_check_{name}' for name in names)}",
        )
    wait_s = _number(environment.get("RAY_JOB_STOP_WAIT_TIME_S"), _RAYS_STOP_WAIT_S)
    if wait_s < _STOP_WAIT_S:
        rule = f"should leave a stopped job {_STOP_WAIT_S:g} s or more for its last checkpoint, not {wait_s:g}"
        yield warning(field, MISSING, rule, "set RAY_JOB_STOP_WAIT_TIME_S=120")


def key_findings(written: object) -> Iterator[Finding]:
    """Find a long-lived key or a password in what a file says."""
    if _KEYS.search(str(written)):
        rule = "must not stand in the file: it is a long-lived key, and is copied to every node"
        fix = "give the nodes a role (instance profile, service account, managed identity)"
        yield error("a cloud key", MISSING, rule, fix)


def version_finding(field: str, package: str, version: str) -> Iterator[Finding]:
    """Compare what a file installs with what Paceline has here.

    `version` is "" where it is not pinned.
    """
    right = expected_versions().get(package)
    fix = f"write {package}=={right}"
    if not version:
        yield warning(
            field, package, "must be pinned, or nodes that start later differ", fix
        )
    elif (
        right is not None and version.split("+")[0] != right.split("+")[0]
    ):  # but for the build: 2.15.0+cu130
        # Ray's client and cluster must be the same version; others merely should be.
        level = error if package == "ray" else warning
        yield level(
            field,
            f"{package}=={version}",
            f"differs from {right}, which Paceline has here",
            fix,
        )


def image_finding(field: str, image: str | None) -> Iterator[Finding]:
    """Find an image that is not pinned, or that is named after another Ray."""
    name, _, digest = (image or "").partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    if not (tag or digest) or tag.startswith("latest"):
        rule = "must be pinned by a tag, or nodes that start later differ"
        yield warning(
            field, image or MISSING, rule, "write a tag that names the versions in it"
        )
        return
    version = _RAY_IN_IMAGE.search(name)
    if version:
        yield from version_finding(field, "ray", version[1])


def pip_arguments(command: str) -> list[str]:
    """Return what each `pip install` of a shell command is told."""
    return re.findall(r"\bpip3?\s+install\b([^;&|\n]*)", command)


def constraint_files(arguments: str) -> list[str]:
    """Return the files and addresses that `-c` and `-r` name."""
    return re.findall(r"(?:-c|-r|--constraint|--requirement)[\s=]+(\S+)", arguments)


def installs(arguments: str) -> list[tuple[str, str]]:
    """Return (package, version) of each package whose version matters.

    The version is "" where it is not pinned at all.
    """
    found = re.findall(
        r"(?<![\w./-])(ray|torch)(?:\[[^\]]*\])?(?:==([\w.+]+))?(?![\w.-])", arguments
    )
    is_constrained = bool(constraint_files(arguments))
    return [
        (package, version)
        for package, version in found
        if version or not is_constrained
    ]


def assignments(text: str) -> dict[str, str]:
    """Return the variables that shell commands set, without quotes; the last of each."""
    return {name: value.strip("'\"") for name, value in _ASSIGNMENT.findall(text)}


@functools.cache
def expected_versions() -> dict[str, str]:
    """Return the versions for every node: of constraints.txt, else as installed here."""
    text = _CONSTRAINTS.read_text(encoding="utf-8") if _CONSTRAINTS.is_file() else ""
    return package_versions("ray", "torch") | dict(
        re.findall(r"^([\w.-]+)==([\w.+]+)", text, re.MULTILINE)
    )


def _number(text: Any, default: float) -> float:
    try:
        value = float(text)
    except (TypeError, ValueError):
        return default
    return value if math.isfinite(value) else default
