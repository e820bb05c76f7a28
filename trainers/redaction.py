"""What may be shown or saved of foreign text: no secrets, no control characters.

Environment read: the values of all variables that are named as secrets (RAY_AUTH_TOKEN,
AWS_SECRET_ACCESS_KEY, ...).
"""

import os
import re
from urllib.parse import urlsplit

_HIDDEN = "***"
# A password may hold anything, even an `@` or a `/` that should have been quoted: up to
# the last `@` of the word.
_USER = re.compile(
    r"(://)[^\s/?#:'\"]{0,300}:[^\s'\"]{0,300}@|(\bhttps?://)[^\s/?#'\"@]{1,300}@",
    re.IGNORECASE,
)
_NAMED = re.compile(
    r"""((?:secret|password|passwd|signature|credentials?|authorization
    |(?:access|account|api|auth|private|secret)[_-]?key|(?:access|api|auth|refresh|security|session)[_-]?token
    |(?<![\w-])(?:token|sig|pwd))
    (?:['"]?\s{0,9}[=:]|`\ is)\s{0,9}(?:(?:bearer|basic)\s)?)
    (?:"[^"\n]{0,999}"|'[^'\n]{0,999}'|[^\s'"&,;)}\]]+)""",
    re.IGNORECASE | re.VERBOSE,
)
_VARIABLE = re.compile(r"(?:KEY|KEY_ID|SECRET|TOKEN|PASSWORD|PASSWD)$", re.IGNORECASE)
# characters of a variable's value that is looked for: less than that is part of
# harmless words
_SHORTEST = 8
_MOVING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def redact(text: str) -> str:
    """Return `text` without secrets and with control characters escaped.

    Secrets are passwords in URIs, values named as secrets, and those of this process's
    environment.
    """
    for value in sorted(_environment_secrets(), key=len, reverse=True):
        text = text.replace(value, _HIDDEN)
    text = _NAMED.sub(rf"\1{_HIDDEN}", _USER.sub(rf"\1\2{_HIDDEN}@", text))
    return escape_controls(text)


def escape_controls(text: str) -> str:
    """Return `text` with control characters as Python would write them in a string."""
    return _MOVING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def holds_secret(uri: str) -> bool:
    """Return whether a URI has a password, or a parameter that is named as a secret."""
    try:
        parts = urlsplit(uri)
    except ValueError:  # no URI at all, which whoever opens it says
        return False
    return bool(parts.password) or redact(parts.query) != parts.query


def _environment_secrets() -> set[str]:
    found = (value for name, value in os.environ.items() if _VARIABLE.search(name))
    return {value for value in found if len(value) >= _SHORTEST}
