"""Download the published files of benchmarks, from a server on loopback."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from gpt2.benchmarks import __main__ as program
from kmatrix.experiment.inputs.benchmarks import PUBLISHED as NAMES
from local_server import LocalServer

pytestmark = pytest.mark.process

BODY = b"PK" + bytes(range(256)) * 200


@pytest.fixture
def server(monkeypatch):
    with LocalServer({"bundle": BODY}) as server:
        file = replace(program.PUBLISHED["core"], url=server.url("bundle"), sha256=hashlib.sha256(BODY).hexdigest())
        monkeypatch.setitem(program.PUBLISHED, "core", file)
        yield server


def run(folder):
    return program.main(["core", "--data-dir", str(folder)])


def test_both_sides_know_the_files_by_the_same_names():
    assert {field: file.name for field, file in program.PUBLISHED.items()} == NAMES


def test_a_file_is_downloaded_once_and_one_that_is_there_is_kept(server, tmp_path, capsys):
    path = tmp_path / "data" / "eval_bundle.zip"
    assert run(path.parent) == 0
    assert path.read_bytes() == BODY
    assert "downloading eval_bundle.zip, 162 MB, from http" in capsys.readouterr().err
    path.write_bytes(b"own")
    assert run(path.parent) == 0
    assert path.read_bytes() == b"own"
    assert len(server.requests) == 1


def test_a_download_that_breaks_off_or_has_another_content_leaves_nothing(server, tmp_path, capsys):
    server.cut["bundle"] = [1000]
    assert run(tmp_path) == 2
    server.files["bundle"] = BODY[:-1] + b"?"
    assert run(tmp_path) == 2
    assert not (tmp_path / "eval_bundle.zip").exists()
    error = " ".join(json.loads(capsys.readouterr().out.splitlines()[-1]).values())
    assert "eval_bundle.zip is missing, and " in error
    assert "has changed" in error
    file = program.PUBLISHED["core"]
    assert f"put {file.url} at {tmp_path / 'eval_bundle.zip'} (SHA-256 {file.sha256})" in error
