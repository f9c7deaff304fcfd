"""Download a file atomically, and keep partial downloads."""

from __future__ import annotations

import hashlib

import pytest

from gpt2.data.download import fetch
from kmatrix.errors import DataError
from local_server import LocalServer

pytestmark = pytest.mark.process

BODY = bytes(range(256)) * 400
SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def server(monkeypatch):
    # Pauses between attempts double from this value; the real one would take seconds.
    monkeypatch.setattr("gpt2.data.download.FIRST_PAUSE_S", 0.01)
    with LocalServer({"text": BODY}) as server:
        yield server


def test_a_file_is_downloaded_once(server, tmp_path):
    for _ in range(2):
        assert fetch(server.url("text"), tmp_path / "a" / "text", sha256=SHA256).read_bytes() == BODY
    assert len(server.requests) == 1
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["text"]


def test_an_interrupted_download_resumes(server, tmp_path):
    server.cut["text"] = [1000, 50_000]
    assert fetch(server.url("text"), tmp_path / "text", sha256=SHA256).read_bytes() == BODY
    assert [request[2] for request in server.requests] == ["", "bytes=1000-", "bytes=51000-"]


def test_a_transfer_that_breaks_inside_a_chunk_continues(server, tmp_path):
    def break_once(request):
        if request.headers.get("Range"):
            return False
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.wfile.write(b"2000\r\n" + BODY[:1000])  # 0x2000 bytes are announced
        request.close_connection = True
        return True

    server.handler = break_once
    assert fetch(server.url("text"), tmp_path / "text", sha256=SHA256).read_bytes() == BODY
    assert [request[2] for request in server.requests] == ["", "bytes=1000-"]


def test_bytes_received_by_a_killed_process_are_kept(server, tmp_path):
    (tmp_path / ".text.part").write_bytes(BODY[:70_000])
    assert fetch(server.url("text"), tmp_path / "text", sha256=SHA256).read_bytes() == BODY
    assert [request[2] for request in server.requests] == ["bytes=70000-"]


def test_a_file_with_a_wrong_hash_is_refused_and_deleted(server, tmp_path):
    with pytest.raises(DataError, match="has changed"):
        fetch(server.url("text"), tmp_path / "text", sha256="0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_an_unreachable_address_is_named(server, tmp_path):
    with pytest.raises(DataError, match=r"cannot download .*/nothing") as raised:
        fetch(server.url("nothing"), tmp_path / "text", sha256=SHA256)
    assert "404" in raised.value.why
    assert len(server.requests) == 1
