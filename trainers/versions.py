"""Versions of installed packages."""

from importlib import metadata


def package_versions(*names: str) -> dict[str, str]:
    """Return the version of each installed distribution in `names`.

    Imports none of them.
    """
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
