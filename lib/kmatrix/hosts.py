"""Host names of local servers: a request has to name the loopback interface.

A web page can let a name of its own point to 127.0.0.1 and then read a server there (DNS rebinding).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost", "::1")  # servers bind the first
REFUSED = 421  # Misdirected Request
ANSWER = b"open this server as localhost\n"

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def host_name(header: str) -> str:
    """Return the name in a Host header, without the port, which may be forwarded, and without brackets."""
    # An IPv6 address has colons of its own, in brackets.
    name = header.rpartition(":")[0] if ":" in header and not header.endswith("]") else header
    return name.strip("[]").lower().removesuffix(".")


def is_accepted(header: str) -> bool:
    """Return whether the Host header of a request names the loopback interface."""
    return host_name(header) in LOOPBACK


def guarded_asgi(app: AsgiApp) -> AsgiApp:
    """Return an ASGI application that answers only requests that name the loopback interface."""

    async def guarded(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        headers = dict(reversed(scope.get("headers") or ()))  # the first of several
        header = headers.get(b"host", b"").decode("latin-1")
        if scope["type"] not in ("http", "websocket") or is_accepted(header):
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            content = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": REFUSED, "headers": content})
            await send({"type": "http.response.body", "body": ANSWER})

    return guarded


def guarded_wsgi(app: WsgiApp) -> WsgiApp:
    """Return a WSGI application that answers only requests that name the loopback interface."""

    def guarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if is_accepted(str(environ.get("HTTP_HOST") or "")):
            return app(environ, start)
        start(f"{REFUSED} Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
        return [ANSWER]

    return guarded
