"""Download the published files of benchmarks, from a server on loopback."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from gpt2.benchmarks import __main__ as program
from gpt2.benchmarks import published
from kmatrix.experiment.inputs.benchmarks import PUBLISHED as NAMES
from local_server import LocalServer

pytestmark = pytest.mark.process

BODY = b"PK" + bytes(range(256)) * 200


@pytest.fixture
def server(monkeypatch):
    with LocalServer({"bundle": BODY}) as server:
        file = replace(published.PUBLISHED["core"], url=server.url("bundle"), sha256=hashlib.sha256(BODY).hexdigest())
        monkeypatch.setitem(published.PUBLISHED, "core", file)
        yield server


def run(folder, *names):
    return program.main([*names, "--data-dir", str(folder)])


def test_both_sides_know_the_files_by_the_same_names():
    assert {field: file.name for field, file in published.PUBLISHED.items()} == NAMES


def test_a_file_is_downloaded_once_and_then_kept(server, tmp_path, capsys):
    assert run(tmp_path / "data", "core") == 0
    assert (tmp_path / "data" / "eval_bundle.zip").read_bytes() == BODY
    assert "CORE: downloading eval_bundle.zip, 162 MB, from http" in capsys.readouterr().err
    assert run(tmp_path / "data", "core") == 0
    assert len(server.requests) == 1


def test_a_download_that_breaks_off_leaves_nothing(server, tmp_path):
    server.cut["bundle"] = [1000]
    assert run(tmp_path, "core") == 2
    assert not (tmp_path / "eval_bundle.zip").exists()
    assert run(tmp_path, "core") == 0


def test_another_content_is_refused_and_not_kept(server, tmp_path, capsys):
    server.files["bundle"] = BODY[:-1] + b"?"

    assert run(tmp_path, "core") == 2
    error = capsys.readouterr().out
    assert "has changed" in error
    assert not (tmp_path / "eval_bundle.zip").exists()


def test_without_a_network_the_error_names_the_file_and_its_place(server, tmp_path, capsys, monkeypatch):
    closed = replace(published.PUBLISHED["core"], url="http://127.0.0.1:9/eval_bundle.zip")
    monkeypatch.setitem(published.PUBLISHED, "core", closed)

    assert run(tmp_path, "core") == 2
    error = " ".join(json.loads(capsys.readouterr().out).values())
    assert "CORE: eval_bundle.zip is missing, and cannot download" in error
    assert f"put http://127.0.0.1:9/eval_bundle.zip at {tmp_path / 'eval_bundle.zip'}" in error
    assert closed.sha256 in error


def test_a_file_of_the_user_is_never_replaced(server, tmp_path):
    (tmp_path / "eval_bundle.zip").write_bytes(b"own")

    assert run(tmp_path, "core") == 0
    assert (tmp_path / "eval_bundle.zip").read_bytes() == b"own"
    assert server.requests == []
