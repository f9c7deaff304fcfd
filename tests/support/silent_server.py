"""A black hole on loopback: it accepts every connection, counts them, and never answers."""

from __future__ import annotations

import contextlib
import socket
import threading


class SilentServer:
    """`with SilentServer() as hole`: hole.root is its address, hole.connections how many were made."""

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
        for held in (self._socket, *self._kept):
            held.close()
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


def refusing() -> str:
    """Return an address on loopback at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"
