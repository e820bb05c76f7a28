"""The body of a request, for proxies of the suite."""

from http.server import BaseHTTPRequestHandler


def read_body(request: BaseHTTPRequestHandler) -> bytes:
    """Read it whole, also where it comes in chunks."""
    if "chunked" not in request.headers.get("Transfer-Encoding", ""):
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))
    body = b""
    while size := int(request.rfile.readline().partition(b";")[0], 16):
        body += request.rfile.read(size)
        request.rfile.readline()
    while request.rfile.readline().strip():  # trailers
        pass
    return body
