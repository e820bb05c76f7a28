"""The page of `python -m tune watch` on the loopback: GET of one page and its script, for who has the token.

The token is in the address that is printed. The first request with it gets a cookie and the address without it, so that
it stays in no history; `Authorization: Bearer TOKEN` will do as well. A page of elsewhere that has its name resolve to
127.0.0.1 (DNS rebinding) is refused by the name in the Host header. No path means a file.
"""

import hmac
import secrets
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from trainers.errors import ConfigError, first_line
from tune.report.page import source

LOOPBACK = "127.0.0.1"
_HOSTS = (LOOPBACK, "localhost", "[::1]")
_POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageServer(ThreadingHTTPServer):
    """Serves what `page` returns, HTML and its version, to who has `token`."""

    daemon_threads = True

    def __init__(self, page: Callable[[], tuple[str, str]], port: int = 0) -> None:
        """`port` 0: any free one. Raises ConfigError where it is taken."""
        self.page, self.token = page, secrets.token_urlsafe(32)
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            rule = f"cannot be used ({first_line(error)})"
            raise ConfigError("--port", port, rule, "give another, or none for any that is free") from error

    @property
    def address(self) -> str:
        """Where the page is, with the token."""
        return f"http://{LOOPBACK}:{self.server_port}/?token={self.token}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "paceline", ""
    protocol_version = "HTTP/1.1"
    timeout = 30  # s, for a request to come

    def do_GET(self) -> None:
        """Answer with the page, its script, or why not."""
        parts = urlsplit(self.path)
        given = parse_qs(parts.query).get("token", [""])[0]
        host = self.headers.get("Host", "")
        if host.rpartition(":")[0] not in _HOSTS and host not in _HOSTS:
            self._say(403, "This page is served to 127.0.0.1 and localhost only.")
        elif parts.path == "/" and self._is_token(given):
            cookie = f"{self._cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Lax"
            self._answer(303, b"", {"Location": "/", "Set-Cookie": cookie})
        elif not self._may():
            self._say(401, "Open the address that `python -m tune watch` has printed: it holds a token.")
        elif parts.path == "/":
            page, version = self.server.page()
            is_known = self.headers.get("If-None-Match") == version
            kind = {"ETag": version, "Content-Type": "text/html; charset=utf-8"}
            self._answer(304 if is_known else 200, b"" if is_known else page.encode(), kind)
        elif parts.path == "/watch.js":
            self._answer(200, source("watch.js").encode(), {"Content-Type": "text/javascript; charset=utf-8"})
        else:
            self._say(404, "There is only one page here.")

    @property
    def _cookie(self) -> str:
        return f"paceline-watch-{self.server.server_port}"  # cookies are one host's, not one port's

    def _may(self) -> bool:
        """Whether the request has the token, in a header or in the cookie."""
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie)
        except CookieError:
            cookie = None
        return (kind.lower() == "bearer" and self._is_token(token)) or (
            cookie is not None and self._is_token(cookie.value)
        )

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), self.server.token.encode())

    def _say(self, status: int, words: str) -> None:
        self._answer(status, f"{words}\n".encode(), {"Content-Type": "text/plain; charset=utf-8"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        fixed = {
            "Cache-Control": "no-store",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": _POLICY,
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in (fixed | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Log no request: the first one's address holds the token."""
