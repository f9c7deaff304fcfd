"""A web server on loopback that serves given files, supports ranges, and can break off a transfer."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

RequestHandler = Callable[[BaseHTTPRequestHandler], bool]  # returns True if it replied


class LocalServer:
    """`with LocalServer({"name": b"..."}) as server`: server.url("name") is served; server.requests lists all requests.

    cut: name -> bytes after which the connection is broken once.  handler: called first, for other protocols.
    """

    def __init__(self, files: Mapping[str, bytes], *, handler: RequestHandler | None = None) -> None:
        self.files, self.handler = dict(files), handler
        self.cut: dict[str, list[int]] = {}
        self.requests: list[tuple[str, str, str]] = []  # method, path, range
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.handle(self)

            do_HEAD = do_GET  # noqa: N815
            do_POST = do_GET  # noqa: N815

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def url(self, name: str) -> str:
        return f"{self.root}/{name}"

    def requests_for(self, text: str, method: str = "GET") -> list[tuple[str, str, str]]:
        """Return the requests whose path contains a text."""
        return [request for request in self.requests if text in request[1] and request[0] == method]

    def __enter__(self) -> LocalServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.requests.append((request.command, path, request.headers.get("Range") or ""))
        if self.handler and self.handler(request):
            return
        self.send_file(request, path.lstrip("/"))

    def send_file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        """Reply with a file or a range of it."""
        body = self.files.get(name)
        if body is None:
            send(request, 404)
            return
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
        start = int(byte_range[1]) if byte_range else 0
        end = int(byte_range[2]) + 1 if byte_range and byte_range[2] else len(body)
        if byte_range and start >= len(body):
            send(request, 416)
            return
        part = body[start : min(end, len(body))]
        headers = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(body)}"} if byte_range else {}
        cuts = self.cut.get(name)
        if request.command == "GET" and cuts:
            _send_and_break(request, part, cuts.pop(0), 206 if byte_range else 200, headers)
        else:
            send(request, 206 if byte_range else 200, part, headers)


def send(
    request: BaseHTTPRequestHandler, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> None:
    """Send a complete response."""
    request.send_response(status)
    for name, text in {"Accept-Ranges": "bytes", "Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, text)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def _send_and_break(
    request: BaseHTTPRequestHandler, body: bytes, after: int, status: int, headers: Mapping[str, str]
) -> None:
    """Announce the full length, send a part, and break the connection."""
    request.send_response(status)
    for name, text in {"Content-Length": str(len(body)), **headers}.items():
        request.send_header(name, text)
    request.end_headers()
    request.wfile.write(body[:after])
    request.wfile.flush()
    request.close_connection = True
    request.connection.close()
