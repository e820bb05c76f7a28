"""What proxies of the suite have in common: a request's body, the answer of
what is behind, and passing that on.
"""

import http.client
from http.server import BaseHTTPRequestHandler

_HOP_BY_HOP = ("connection", "transfer-encoding", "keep-alive")
_REPLACED = (*_HOP_BY_HOP, "content-length")
Answer = tuple[int, dict[str, str], bytes]
"""Status, headers and body."""


def read_body(request: BaseHTTPRequestHandler) -> bytes:
    """Read it whole, also where it comes in chunks."""
    if "chunked" not in request.headers.get("Transfer-Encoding", ""):
        return request.rfile.read(
            int(request.headers.get("Content-Length") or 0)
        )
    body = b""
    while size := int(request.rfile.readline().partition(b";")[0], 16):
        body += request.rfile.read(size)
        request.rfile.readline()
    while request.rfile.readline().strip():  # trailers
        pass
    return body


def ask(
    backend: tuple[str, int], request: BaseHTTPRequestHandler, body: bytes
) -> Answer:
    """What is behind answers to the request with this body."""
    connection = http.client.HTTPConnection(*backend)
    passed = {
        name: value
        for name, value in request.headers.items()
        if name.lower() not in _REPLACED
    }
    connection.request(
        request.command,
        request.path,
        body,
        passed | {"Content-Length": str(len(body))},
    )
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), data


def respond(
    request: BaseHTTPRequestHandler, answer: Answer, cut: bool = False
):
    """Pass an answer on; with `cut` half of its body, as if there was more,
    and the connection ends.
    """
    status, headers, data = answer
    is_head = (
        request.command == "HEAD"
    )  # its length is that of what it has not
    request.send_response_only(status)
    kept = {
        name: value
        for name, value in headers.items()
        if name.lower() not in (_HOP_BY_HOP if is_head else _REPLACED)
    }
    for name, value in (
        kept if is_head else kept | {"Content-Length": str(len(data) + cut)}
    ).items():
        request.send_header(name, value)
    request.end_headers()
    if not is_head:
        request.wfile.write(data[: len(data) // 2] if cut else data)
    request.close_connection = request.close_connection or cut
