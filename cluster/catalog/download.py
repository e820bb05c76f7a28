"""Read a text file over HTTP(S), with limits on its size and time; every failure is one sentence."""

import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from datetime import date, datetime
from email.utils import parsedate_to_datetime
from typing import IO, Any

from trainers.errors import StorageError

MOST_BYTES = 64 * 2**20
"""The largest catalog has 3 MB."""
SILENCE_S = 30.0
"""Seconds without a byte after which a server is given up."""
WHOLE_S = 300.0
"""Seconds for the whole answer."""

# https://docs.github.com/rest/commits/commits#list-commits
_API = "https://api.github.com"
_RAW = re.compile(r"https://raw\.githubusercontent\.com/(?P<repo>[^/]+/[^/]+)/(?P<ref>[^/]+)/(?P<path>.+)")


@dataclass(frozen=True)
class Answer:
    """A file as a server has it."""

    text: str
    as_of: date | None
    """The day of its last change; None where the server does not say."""
    url: str
    """Where it was read, by commit where that is known."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but never from https to what is not."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if req.type == "https" and not newurl.startswith("https:"):
            raise urllib.error.URLError(f"it redirects to {newurl}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(url: str) -> Answer:
    """Read a text file. Of a file on GitHub the newest commit that changed it is asked for first, which has a date.

    Raises StorageError where it cannot be read whole.
    """
    changed = None
    if match := _RAW.fullmatch(url):
        changed = _last_commit(match["repo"], match["ref"], match["path"])
    if changed is not None and match is not None:
        sha, day = changed
        pinned = f"https://raw.githubusercontent.com/{match['repo']}/{sha}/{match['path']}"
        return Answer(_text(pinned)[0], day, pinned)
    text, modified = _text(url)
    return Answer(text, modified, url)


def _last_commit(repo: str, ref: str, path: str) -> tuple[str, date] | None:
    """The commit that last changed a file, and its day; None where GitHub's API does not say (its limit is used up)."""
    query = urllib.parse.urlencode({"path": path, "sha": ref, "per_page": 1})
    try:
        commit = json.loads(_text(f"{_API}/repos/{repo}/commits?{query}")[0])[0]
        day = datetime.fromisoformat(commit["commit"]["committer"]["date"]).date()
        sha = commit["sha"]
    except (StorageError, ValueError, LookupError, TypeError):
        return None
    return (sha, day) if re.fullmatch("[0-9a-f]{40}", str(sha)) else None


def _text(url: str) -> tuple[str, date | None]:
    """The text at a URL, and the day that its server gives as that of its last change."""
    if not url.startswith(("http://", "https://")):
        raise StorageError(f"{url} cannot be read: it is no address of http or https")
    opener = urllib.request.build_opener(_Redirects)
    request = urllib.request.Request(url, headers={"User-Agent": "paceline", "Accept": "*/*"})  # noqa: S310 (http only)
    try:
        with opener.open(request, timeout=SILENCE_S) as answer:
            text = _read(answer).decode()
            modified = answer.headers.get("Last-Modified")
    except urllib.error.HTTPError as error:
        error.close()
        reason = str(error.reason).partition("\n")[0]
        raise StorageError(f"{url} cannot be read: the server answers {error.code} {reason}") from error
    except UnicodeDecodeError as error:
        raise StorageError(f"{url} cannot be read: it is no text in UTF-8") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        words = str(getattr(error, "reason", None) or error) or type(error).__name__
        raise StorageError(f"{url} cannot be read: {words}") from error
    try:
        return text, parsedate_to_datetime(modified).date() if modified else None
    except ValueError:
        return text, None


def _read(answer: http.client.HTTPResponse) -> bytes:
    """All of an answer, of a length and in a time that have limits."""
    told, ends = answer.headers.get("Content-Length"), time.monotonic() + WHOLE_S
    found = bytearray()
    while chunk := answer.read1(2**16):
        found += chunk
        if len(found) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES >> 20} MB")
        if time.monotonic() > ends:
            raise ValueError(f"it is not whole after {WHOLE_S:.0f} seconds")
    if told is not None and int(told) != len(found):
        raise ValueError(f"it ends after {len(found)} of {told} bytes")
    return bytes(found)
