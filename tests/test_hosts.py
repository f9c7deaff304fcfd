"""Local servers answer only requests that name this machine, so that a web page cannot read them."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from kmatrix.hosts import (
    LOOPBACK,
    guarded_asgi,
    guarded_wsgi,
    host_name,
    is_accepted,
    reachable_host,
    server_address,
)

ALLOWED = ["localhost", "localhost:7860", "127.0.0.1:1", "[::1]:8000", "[::1]", "LOCALHOST:80", "localhost.:1"]
REFUSED = ["rebinding.invalid", "rebinding.invalid:7860", "", "127.0.0.1.nip.io", "localhost.evil.example", "10.0.0.7"]


@pytest.mark.parametrize("header", ALLOWED)
def test_names_of_the_loopback_interface_are_accepted(header):
    assert is_accepted(header, server_address("127.0.0.1").names)


@pytest.mark.parametrize("header", REFUSED)
def test_other_names_are_refused(header):
    assert not is_accepted(header, server_address("127.0.0.1").names)


# Every spelling of an address of the loopback interface that the system accepts, and HOST= without a value.
SPELLINGS = [
    *("127.0.0.1", "localhost", "Localhost", "LOCALHOST", "127.1", "2130706433", "0x7f.1", "127.0.0.9", "127.255.1.2"),
    *("::ffff:127.0.0.1", "::FFFF:7f00:1", "", " ", "::1", "0:0:0:0:0:0:0:1"),
]


@pytest.mark.parametrize("host", SPELLINGS)
def test_a_loopback_server_knows_its_names_however_its_address_is_written(host):
    found = server_address(host)
    assert ipaddress.ip_address(found.address).is_loopback
    assert not found.is_open
    assert not is_accepted("rebinding.invalid", found.names)
    assert all(is_accepted(name, found.names) for name in ("localhost", "127.0.0.1:80", f"{found.url_host}:1"))


def test_the_address_that_a_name_stands_for_decides(monkeypatch):
    """Debian's /etc/hosts has a line for the name of the machine with 127.0.1.1."""
    known = {"Mybox": ["127.0.1.1"], "gpu1": ["10.0.0.7"], "both": ["::1", "127.0.0.1"], "six": ["::1", "fd00::1"]}

    def lookup(host, *_, **__):
        found = known.get(host, [host])
        return [(socket.AF_INET6 if ":" in one else socket.AF_INET, 0, 0, "", (one, 0)) for one in found]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    mine = server_address("Mybox")
    assert (mine.address, is_accepted("MYBOX:80", mine.names), is_accepted("gpu1", mine.names)) == (
        *("127.0.1.1", True, False),
    )
    assert server_address("both").address == "127.0.0.1"
    assert server_address("six").address == "::1"
    other = server_address("gpu1")
    assert (other.address, other.is_open, other.url_host) == ("10.0.0.7", True, "gpu1")


@pytest.mark.process
@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::", "::ffff:0.0.0.0", "10.0.0.7", "::ffff:10.0.0.7", "fe80::7"])
def test_on_another_interface_every_name_is_accepted(host):
    assert server_address(host).is_open
    assert is_accepted("any.example", server_address(host).names)


def test_the_port_is_not_part_of_the_name():
    assert [host_name(header) for header in ("a:1", "a", "[::1]:2", "[::1]")] == ["a", "a", "::1", "::1"]


def call_asgi(app, scope):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, None, send))
    return sent


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_an_asgi_application_is_not_reached_by_other_names(kind):
    reached = []

    async def app(scope, receive, send):
        reached.append(scope["type"])

    guarded = guarded_asgi(app, LOOPBACK)
    sent = call_asgi(guarded, {"type": kind, "headers": [(b"host", b"rebinding.invalid")]})
    assert (reached, sent[0].get("status", sent[0].get("code"))) == ([], 421 if kind == "http" else 1008)
    call_asgi(guarded, {"type": kind, "headers": []})
    call_asgi(guarded, {"type": kind, "headers": [(b"host", b"evil.example"), (b"host", b"localhost")]})
    assert reached == []
    call_asgi(guarded, {"type": kind, "headers": [(b"host", b"localhost:1")]})
    call_asgi(guarded, {"type": "lifespan"})
    assert reached == [kind, "lifespan"]


def test_a_wsgi_application_is_not_reached_by_other_names():
    answers = []
    guarded = guarded_wsgi(lambda environ, start: [b"secret"], LOOPBACK)

    assert guarded({"HTTP_HOST": "rebinding.invalid"}, lambda status, headers: answers.append(status)) != [b"secret"]
    assert answers == ["421 Misdirected Request"]
    assert guarded({"HTTP_HOST": ""}, lambda *_: None) == [b"no host: open this server as localhost\n"]
    assert guarded({"HTTP_HOST": "localhost:6006"}, None) == [b"secret"]


class Hello(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_):
        """Print nothing."""


@pytest.mark.process
def test_the_url_of_a_server_on_all_interfaces_reaches_it():
    server = HTTPServer(("0.0.0.0", 0), Hello)
    Thread(target=server.handle_request, daemon=True).start()

    host = reachable_host("0.0.0.0")

    assert host != "0.0.0.0"
    assert urllib.request.urlopen(f"http://{host}:{server.server_port}/", timeout=60).read() == b"hello"
    server.server_close()


def test_without_a_network_the_url_is_that_of_this_machine(monkeypatch):
    def no_network(*_):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    assert reachable_host("::") == "127.0.0.1"
    assert reachable_host("fe80::7") == "[fe80::7]"
