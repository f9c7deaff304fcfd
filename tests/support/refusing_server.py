"""A server on loopback that knows no key, and somebody else's port."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from local_server import LocalServer


@contextmanager
def refusing(message: str) -> Iterator[str]:
    """Yield the URL of a server that answers 401 to everything. message: its words; {key} is the key that it got."""

    def answer(request: BaseHTTPRequestHandler) -> bool:
        request.rfile.read(int(request.headers.get("Content-Length", 0)))
        _, _, word = request.headers.get("Authorization", "").partition(" ")
        words = message.replace("{key}", base64.b64decode(word).decode())
        body = json.dumps({"errors": [{"message": words}]}).encode()
        request.send_response(401)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
        return True

    with LocalServer({}, answer=answer) as server:
        yield server.url("").rstrip("/")


@contextmanager
def busy() -> Iterator[int]:
    """Yield a port of loopback that is taken."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]
