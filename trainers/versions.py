"""Installed packages: their versions, and torchao, which may be absent."""

import importlib
import importlib.util
import platform
from importlib import metadata
from typing import Any

from trainers.errors import ConfigError, first_line


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


def require_package(key: str, name: str, source: str | None = None) -> None:
    """Raise ConfigError if a package that one of our extras installs is missing."""
    if importlib.util.find_spec(name) is None:
        fix = f"run `pip install 'paceline[{name}]'`"
        raise ConfigError(key, name, f"needs the package {name}", fix, source)


def import_torchao(module: str, key: str, value: str, instead: str) -> Any:
    """Import a module of torchao, which `value` of the key needs.

    Raises ConfigError if it cannot be imported; its fix is to use `instead`.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            key,
            value,
            f"needs torchao, which cannot be imported here ({first_line(error)})",
            f"`pip install torchao`, or use {instead}",
        ) from error
