"""A server on loopback that accepts and counts every connection and never replies."""

from __future__ import annotations

import contextlib
import socket
import threading


class SilentServer:
    """`with SilentServer() as server`: server.root is its URL, server.connections the number of connections."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._kept: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> SilentServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for connection in (self._socket, *self._kept):
            connection.close()
        self._thread.join()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    @property
    def connections(self) -> int:
        return len(self._kept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._kept.append(self._socket.accept()[0])


def refusing_url() -> str:
    """Return a URL on loopback that refuses connections, because no server listens there."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))  # without listening, and for as long as this process: no other server gets the port
    _bound.append(bound)
    return f"http://127.0.0.1:{bound.getsockname()[1]}"


_bound: list[socket.socket] = []
