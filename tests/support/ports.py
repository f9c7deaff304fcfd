"""Reserve a port on loopback for a server that a test starts later."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Yield a port that the kernel gives to nobody else in the block, and that a server with SO_REUSEADDR may use.

    Until that server listens, a connection to it is refused. A port that is only tried and closed may be the local end
    of any connection of the machine before the server starts.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]
