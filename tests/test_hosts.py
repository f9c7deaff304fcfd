"""Local servers answer only requests that name this machine, so that a web page cannot read them."""

from __future__ import annotations

import asyncio

import pytest

from kmatrix.hosts import (
    guarded_asgi,
    guarded_wsgi,
    host_name,
    is_accepted,
)

ALLOWED = ["localhost", "localhost:7860", "127.0.0.1:1", "[::1]:8000", "[::1]", "LOCALHOST:80", "localhost.:1"]
REFUSED = ["rebinding.invalid", "rebinding.invalid:7860", "", "127.0.0.1.nip.io", "localhost.evil.example", "10.0.0.7"]


@pytest.mark.parametrize("header", ALLOWED)
def test_names_of_the_loopback_interface_are_accepted(header):
    assert is_accepted(header)


@pytest.mark.parametrize("header", REFUSED)
def test_other_names_are_refused(header):
    assert not is_accepted(header)


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

    guarded = guarded_asgi(app)
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
    guarded = guarded_wsgi(lambda environ, start: [b"secret"])

    assert guarded({"HTTP_HOST": "rebinding.invalid"}, lambda status, headers: answers.append(status)) != [b"secret"]
    assert answers == ["421 Misdirected Request"]
    assert guarded({"HTTP_HOST": ""}, lambda *_: None) != [b"secret"]
    assert guarded({"HTTP_HOST": "localhost:6006"}, None) == [b"secret"]
