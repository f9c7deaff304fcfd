"""A web server on loopback that serves given files, with ranges, and breaks off where a test asks for it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], bool]  # True: it was answered


class LocalServer:
    """`with LocalServer({"name": b"..."}) as server`: server.url("name") answers; server.requests lists what came.

    cut: name -> bytes after which the connection is broken once.  answer: asked first, for other protocols.
    """

    def __init__(self, files: Mapping[str, bytes], *, answer: Answer | None = None) -> None:
        self.files, self.answer = dict(files), answer
        self.cut: dict[str, list[int]] = {}
        self.requests: list[tuple[str, str, str]] = []  # method, path, range
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.handle(self)

            do_HEAD = do_GET  # noqa: N815
            do_POST = do_GET  # noqa: N815

            def log_message(self, *words: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def url(self, name: str) -> str:
        return f"{self.root}/{name}"

    def asked(self, text: str, method: str = "GET") -> list[tuple[str, str, str]]:
        """Return the requests whose path holds a text."""
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
        if self.answer and self.answer(request):
            return
        self.send_file(request, path.lstrip("/"))

    def send_file(self, request: BaseHTTPRequestHandler, name: str) -> None:
        """Answer with a file or a part of it."""
        body = self.files.get(name)
        if body is None:
            send(request, 404)
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range") or "")
        start = int(asked[1]) if asked else 0
        end = int(asked[2]) + 1 if asked and asked[2] else len(body)
        if asked and start >= len(body):
            send(request, 416)
            return
        part = body[start : min(end, len(body))]
        headers = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(body)}"} if asked else {}
        cuts = self.cut.get(name)
        if request.command == "GET" and cuts:
            _send_and_break(request, part, cuts.pop(0), 206 if asked else 200, headers)
        else:
            send(request, 206 if asked else 200, part, headers)


def send(
    request: BaseHTTPRequestHandler, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> None:
    """Answer a request whole."""
    request.send_response(status)
    for name, text in {"Accept-Ranges": "bytes", "Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, text)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)


def _send_and_break(
    request: BaseHTTPRequestHandler, body: bytes, after: int, status: int, headers: Mapping[str, str]
) -> None:
    """Promise the whole, send a part, and break the connection."""
    request.send_response(status)
    for name, text in {"Content-Length": str(len(body)), **headers}.items():
        request.send_header(name, text)
    request.end_headers()
    request.wfile.write(body[:after])
    request.wfile.flush()
    request.close_connection = True
    request.connection.close()
