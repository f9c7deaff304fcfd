"""Host names of local servers: which a request may name, and which others can reach."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost", "::1")
REFUSED = 421  # Misdirected Request
ANYWHERE = "192.0.2.1"  # of a network that exists in documentation only (RFC 5737): nothing is sent there

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server: the one that is bound decides which names are accepted, not the way it was written."""

    address: str  # numeric, to bind
    names: tuple[str, ...]  # the host names that requests may name; (): any, the address is not a loopback one
    url_host: str  # for URLs, with brackets around an IPv6 address

    @property
    def is_open(self) -> bool:
        """Return whether others than the users of this machine may reach the server, under any name."""
        return not self.names


def server_address(host: str) -> ServerAddress:
    """Return the address of a server on `host`: a name or an address in any spelling, "" for the loopback interface.

    A web page can let a name of its own point to 127.0.0.1 and then read the server (DNS rebinding). Only the names of
    the loopback interface are known; the names by which others reach this machine are not, so that any is accepted on
    the other interfaces. Raises OSError for an unknown name.
    """
    host = host.strip() or LOOPBACK[0]
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    # localhost is both 127.0.0.1 and ::1, of which many programs try only the first.
    address = ipaddress.ip_address(sorted(found, key=lambda entry: entry[0] != socket.AF_INET)[0][4][0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    text = str(address)
    if address.is_loopback:
        return ServerAddress(text, tuple(dict.fromkeys((*LOOPBACK, text, host.lower()))), _in_url(text))
    return ServerAddress(text, (), reachable_host(text) if address.is_unspecified or _is_address(host) else host)


def is_accepted(header: str, hosts: Sequence[str]) -> bool:
    """Return whether the Host header of a request names one of these hosts; True if any is accepted."""
    return not hosts or host_name(header) in hosts


def host_name(header: str) -> str:
    """Return the name in a Host header, without the port, which may be forwarded, and without brackets."""
    # An IPv6 address has colons of its own, in brackets.
    name = header.rpartition(":")[0] if ":" in header and not header.endswith("]") else header
    return name.strip("[]").lower().removesuffix(".")


def reachable_host(address: str) -> str:
    """Return a host for the URL of a server on this address: for 0.0.0.0 and ::, an address of this machine."""
    if not ipaddress.ip_address(address).is_unspecified:
        return _in_url(address)
    # The address that this machine would send from. Without a network there is none, and nobody else to reach it.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((ANYWHERE, 9))
        return str(probe.getsockname()[0])
    return LOOPBACK[0]


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def guarded_asgi(app: AsgiApp, hosts: Sequence[str]) -> AsgiApp:
    """Return an ASGI application that answers only requests that name one of these hosts."""

    async def guarded(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        headers = dict(reversed(scope.get("headers") or ()))  # the first of several
        header = headers.get(b"host", b"").decode("latin-1")
        if scope["type"] not in ("http", "websocket") or is_accepted(header, hosts):
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            content = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": REFUSED, "headers": content})
            await send({"type": "http.response.body", "body": refusal(header).encode()})

    return guarded


def guarded_wsgi(app: WsgiApp, hosts: Sequence[str]) -> WsgiApp:
    """Return a WSGI application that answers only requests that name one of these hosts."""

    def guarded(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        header = str(environ.get("HTTP_HOST") or "")
        if is_accepted(header, hosts):
            return app(environ, start)
        start(f"{REFUSED} Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
        return [refusal(header).encode()]

    return guarded


def refusal(header: str) -> str:
    """Return the body of the response to a request that names another host."""
    name = host_name(header)
    return f"this server is not {name}: open it as localhost\n" if name else "no host: open this server as localhost\n"
