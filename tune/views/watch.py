"""Serve the report of a sweep that runs, here or elsewhere, until Ctrl-C."""

import socket

from tune.views.follow import Follow
from tune.views.server import LOOPBACK, PageServer


def serve(location: str, port: int) -> None:
    """Print the address and answer requests; returns after Ctrl-C. Raises ConfigError for the place or the port."""
    follow = Follow(location)
    follow.storage.exists()  # a place that cannot be opened is an error, one that is not there yet is none
    with PageServer(follow.page, port) as server:
        own = server.server_port
        print(f"{follow.storage.uri} is shown at\n    {server.address}")
        print(f"from another machine, through `ssh -L {own}:{LOOPBACK}:{own} {socket.gethostname()}`")
        print("Ctrl-C ends this page, not the sweep", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("the page has ended", flush=True)
