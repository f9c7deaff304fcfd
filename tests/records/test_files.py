"""Atomic writes, tolerant reads, and reads of growing files."""

from __future__ import annotations

import errno
import math
import socket
from pathlib import Path

import pytest

from kmatrix.records.files import (
    CHUNK,
    LineTail,
    append_jsonl,
    end_torn_line,
    finite,
    last_lines,
    read_json,
    replacing,
    write_bytes,
    write_json,
)


def test_a_file_is_replaced_when_the_block_succeeds(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"

    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.json", "new")]


def test_a_file_is_unchanged_if_the_block_fails(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    with pytest.raises(FileNotFoundError), replacing(path) as temporary:
        assert not temporary.exists()  # and no reader creates it

    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.json", "old")]


def test_two_writers_never_share_a_temporary_file(tmp_path):
    path = tmp_path / "a.json"
    with replacing(path) as left, replacing(path) as right:
        assert left != right
        assert socket.gethostname()[:16] in left.name
        left.touch()
        right.touch()


def test_a_write_creates_the_directory(tmp_path):
    write_bytes(tmp_path / "new" / "a.bin", b"x")
    assert (tmp_path / "new" / "a.bin").read_bytes() == b"x"


def test_a_file_is_read_back_as_written(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    assert read_json(tmp_path / "a.json") == {"schema": 1, "x": 1}


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        (0.5, 0.5),
        (math.nan, None),
        (-math.inf, None),
        (10**400, None),
        (True, None),
        ("3", None),
        (None, None),
        ([1], None),
    ],
)
def test_only_finite_numbers_count_as_numbers(value, number):
    assert finite(value) == number


def test_a_tail_returns_each_complete_line_once(tmp_path):
    path = tmp_path / "a.jsonl"
    tail = LineTail(path, dict)
    assert tail.read() == []

    append_jsonl(path, {"n": 1})
    with path.open("a") as file:
        file.write('{"n": 2')
    assert [line["n"] for _, line in tail.read()] == [1]
    assert tail.read() == []

    with path.open("a") as file:
        file.write("}\nnot json\n")
    append_jsonl(path, {"n": 3})
    assert [line["n"] for _, line in tail.read()] == [2, 3]


def test_a_tail_may_start_at_the_end_of_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    append_jsonl(path, {"n": 1})
    tail = LineTail(path, dict, last_bytes=0)
    append_jsonl(path, {"n": 2})
    assert [line["n"] for _, line in tail.read()] == [2]


def test_a_tail_rereads_a_truncated_file_from_the_start(tmp_path):
    path = tmp_path / "a.jsonl"
    append_jsonl(path, {"n": 1, "long": "x" * 100})
    tail = LineTail(path, dict)
    tail.read()
    path.write_text('{"n": 2}\n')
    assert [line["n"] for _, line in tail.read()] == [2]


def test_a_line_longer_than_a_chunk_is_one_line(tmp_path):
    path = tmp_path / "a.jsonl"
    append_jsonl(path, {"n": 1, "long": "x" * 2 * CHUNK})
    assert [line["n"] for _, line in LineTail(path, dict).read()] == [1]


@pytest.mark.parametrize(
    ("most_bytes", "start", "lines"),
    [
        (100, 0, ["one\n", "two\n", "thr"]),
        (8, 0, ["two\n", "thr"]),
        (6, 0, ["thr"]),
        (100, 4, ["two\n", "thr"]),
        (2, 0, ["hr"]),
        (100, 99, []),
    ],
)
def test_the_last_lines_of_a_file_are_read(tmp_path, most_bytes, start, lines):
    path = tmp_path / "a.log"
    path.write_text("one\ntwo\nthr")
    with path.open("rb") as file:
        assert last_lines(file, most_bytes=most_bytes, start=start) == lines
        assert file.read() == b""


def test_a_folder_that_was_moved_away_does_not_begin_again(tmp_path):
    path = tmp_path / "moved" / "state.json"
    with pytest.raises(FileNotFoundError):
        write_json(path, {}, durable=False, parents=False)
    assert not path.parent.exists()
    write_json(path, {}, durable=False)
    write_json(path, {"again": True}, durable=False, parents=False)
    assert read_json(path)["again"]


class FullFile:
    """A file on a disk that has space for a few bytes more."""

    def __init__(self, file, room):
        self._file, self._room = file, room

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        if not self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        fits, self._room = min(len(data), self._room), max(0, self._room - len(data))
        return self._file.write(data[:fits])


def test_a_line_that_does_not_fit_on_the_disk_leaves_no_part_of_it_and_its_error_names_the_file(tmp_path, monkeypatch):
    log, real = tmp_path / "metrics.jsonl", Path.open
    append_jsonl(log, {"step": 1})
    before = log.read_bytes()
    monkeypatch.setattr(Path, "open", lambda *given, **more: FullFile(real(*given, **more), 7))
    with pytest.raises(OSError, match="No space left on device") as caught:
        append_jsonl(log, {"step": 2})
    monkeypatch.undo()
    assert (log.read_bytes(), caught.value.filename) == (before, str(log))


def test_an_error_names_the_file_to_write_and_not_a_temporary_one(tmp_path):
    with pytest.raises(OSError, match="Is a directory") as caught:
        write_bytes(tmp_path, b"")
    assert caught.value.filename == str(tmp_path)


def test_a_torn_line_is_ended(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b'{"a": 1}\n{"b"')
    end_torn_line(log)
    assert log.read_bytes() == b'{"a": 1}\n{"b"\n'
