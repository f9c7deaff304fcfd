"""What the commands that serve a page say: where it is, and who can reach it."""

from __future__ import annotations

import getpass
import socket

from kmatrix.track.page import LOOPBACK, Page

ALONE = (LOOPBACK, "localhost", "::1")


def announce(title: str, page: Page, links: list[str], *, host: str, wanted: int) -> None:
    """Print where a page is. wanted: the port that was asked for."""
    taken = f" (port {wanted} is taken)" if page.port != wanted else ""
    print(f"{title}{taken}")
    for line in [*links, reach(host, page.port)]:
        print(f"  {line}")
    print("Ctrl+C ends it", flush=True)


def reach(host: str, port: int) -> str:
    """Return how the page is reached from another machine, or by whom."""
    if host in ALONE:
        name = socket.gethostname()
        return f"from another machine: ssh -L {port}:{LOOPBACK}:{port} {_user()}@{name}, then the same URL there"
    return f"HOST={host}: whoever can reach port {port} of this machine can read everything here"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        return "<user>"
