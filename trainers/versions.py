"""What a measurement depends on: installed packages and hardware.

Also imports torchao, which may be absent.
"""

import contextlib
import importlib
import importlib.util
import os
import platform
import subprocess
from importlib import metadata
from typing import TYPE_CHECKING, Any

from trainers.errors import ConfigError, first_line

if TYPE_CHECKING:
    import torch


def package_versions(*names: str) -> dict[str, str]:
    """Return the versions of Python and of each installed distribution in `names`.

    Imports none of them.
    """
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment(device: "torch.device") -> dict[str, str]:
    """Collect what a measurement depends on: versions, hardware, git commit.

    The report is saved with every run.
    """
    import torch  # only here: it takes seconds

    report = {"platform": platform.platform(), "cpus": str(os.cpu_count())}
    report |= package_versions("paceline", "torch", "ray", "pyarrow", "numpy")
    report["device"] = str(device)
    if device.type == "cuda":
        report["gpu"] = torch.cuda.get_device_name(device)
        report["cuda"] = torch.version.cuda or "none"
    # no git here, or no repository
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.check_output(
            ["git", "rev-parse", "HEAD"],  # noqa: S607
            timeout=5,
            stderr=subprocess.DEVNULL,
        )
        report["git_commit"] = commit.decode().strip()
    return report


def require_package(key: str, name: str, source: str | None = None) -> None:
    """Raise ConfigError if a package that one of our extras installs is missing."""
    if importlib.util.find_spec(name) is None:
        fix = f"run `pip install 'paceline[{name}]'`"
        raise ConfigError(key, name, f"needs the package {name}", fix, source)


def import_torchao(module: str, key: str, value: str, instead: str) -> Any:
    """Import a module of torchao, which the key's `value` needs.

    Raises ConfigError if the import fails; the error's fix names `instead`.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            key,
            value,
            f"needs torchao, which cannot be imported here ({first_line(error)})",
            f"run `pip install torchao`, or use {instead}",
        ) from error
