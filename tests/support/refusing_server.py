"""A server on loopback that rejects every API key, and a port that is in use."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from local_server import LocalServer


@contextmanager
def server_refusing_keys(message: str) -> Iterator[str]:
    """Yield the URL of a server that replies 401 to everything. message: its error; {key} is the key it received."""

    def respond(request: BaseHTTPRequestHandler) -> bool:
        request.rfile.read(int(request.headers.get("Content-Length", 0)))
        _, _, credentials = request.headers.get("Authorization", "").partition(" ")
        text = message.replace("{key}", base64.b64decode(credentials).decode())
        body = json.dumps({"errors": [{"message": text}]}).encode()
        request.send_response(401)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
        return True

    with LocalServer({}, handler=respond) as server:
        yield server.url("").rstrip("/")


@contextmanager
def busy_port() -> Iterator[int]:
    """Yield a port on loopback that is in use."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]
