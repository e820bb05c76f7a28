"""A token for an embedded cluster, in a file of its own (Ray).

From 2.59 on Ray protects every cluster that `ray.init()` starts by a token, and writes one to ~/.ray/auth_token where
the user has none. From then on `ray start` asks for it too, and scripts that worked before fail. So an embedded cluster
of any Ray has a token that ends with it, unless the user has one.
"""

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from trainers.on_ray.internals import asks_for_token, has_token, new_token, read_token_again

_PATH = "RAY_AUTH_TOKEN_PATH"


class OwnToken:
    """While entered, a new cluster's token is a temporary one, readable by this user alone.

    A token or a mode that the user has chosen is left as it is.
    """

    def __init__(self) -> None:
        self.directory: Path | None = None
        self._changes_mode = "RAY_AUTH_MODE" not in os.environ

    def __enter__(self) -> Self:
        if self._changes_mode:
            if not has_token():
                self.directory = Path(tempfile.mkdtemp(prefix="paceline-token-"))  # of mode 0700
                file = self.directory / "token"
                file.write_text(new_token())
                os.environ[_PATH] = str(file)
            os.environ["RAY_AUTH_MODE"] = "token"
            read_token_again()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)
            os.environ.pop(_PATH, None)
        if self._changes_mode:
            os.environ.pop("RAY_AUTH_MODE", None)
            read_token_again()


def where_the_token_is() -> str:
    """Return what to say of the token that a dashboard asks for; empty where it asks for none."""
    if not asks_for_token():
        return ""
    if path := os.environ.get(_PATH):
        return f" (it asks for the token in {path})"
    return " (it asks for the token that `ray get-auth-token` prints)"
