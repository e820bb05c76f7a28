"""Versions of installed packages."""

from importlib import metadata


def package_versions(*names: str) -> dict[str, str]:
    """The installed version of each distribution in `names`; those not installed are
    left out.

    Imports none of them.
    """
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
