import errno
import json
import threading
from pathlib import Path

import pytest

from kmatrix.errors import FullError, path_problem
from kmatrix.records import disk, files
from kmatrix.records.disk import SpaceWait, has_space, held_s, waiting_for_space, when_there_is_space
from kmatrix.records.files import append_jsonl, end_torn_line, read_jsonl, write_json


class FullDisk:
    """A disk with space for a number of bytes, which gets space after a number of waits.

    at_close: it takes every byte, and reports that it is full when a file is closed, as network file systems do.
    """

    def __init__(self, monkeypatch, *, room=0, waits=3, at_close=False):
        self.room, self.left, self.written, self.at_close = room, waits, 0, at_close
        self.reports = []
        self.policy = SpaceWait(
            600.0, on_full=self.reports.append, on_space=lambda s: self.reports.append("space"), sleep=self.sleep
        )
        real = open

        def open_(path, mode="r", *arguments, **more):
            file = real(path, mode, *arguments, **more)
            return Limited(file, self) if "b" in mode and "r" not in mode else file

        monkeypatch.setattr(files, "open", open_, raising=False)

    def sleep(self, seconds):
        self.left -= 1

    def take(self, size):
        """Return how many of `size` bytes fit."""
        if self.left <= 0 or self.at_close:
            return size
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        fits, self.room = min(size, self.room), max(0, self.room - size)
        return fits


class Limited:
    def __init__(self, file, disk):
        self._file, self._disk = file, disk

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        if not self._file.closed:
            self._file.close()
            if self._disk.at_close and self._disk.left > 0:
                raise OSError(errno.EDQUOT, "Disk quota exceeded")

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        return self._file.write(data[: self._disk.take(len(data))])


@pytest.mark.parametrize("at_close", [False, True])
def test_a_held_line_is_written_once_and_completely(tmp_path, monkeypatch, at_close):
    log = tmp_path / "metrics.jsonl"
    append_jsonl(log, {"step": 1})
    full = FullDisk(monkeypatch, room=7, at_close=at_close)
    with waiting_for_space(full.policy):
        append_jsonl(log, {"step": 2})
    assert [line["step"] for line in read_jsonl(log)] == [1, 2]
    assert full.reports == [log, "space"]
    assert held_s() == 0.0  # the policy ended


def test_a_line_that_does_not_fit_leaves_no_part_of_it(tmp_path, monkeypatch):
    log = tmp_path / "metrics.jsonl"
    append_jsonl(log, {"step": 1})
    before = log.read_bytes()
    FullDisk(monkeypatch, room=7)
    with pytest.raises(OSError, match="No space"):  # no policy: at once
        append_jsonl(log, {"step": 2})
    assert log.read_bytes() == before


def test_threads_that_append_to_one_full_log_lose_nothing(tmp_path, monkeypatch):
    log = tmp_path / "events.jsonl"
    full = FullDisk(monkeypatch, room=150, waits=40)
    with waiting_for_space(full.policy):
        threads = [threading.Thread(target=append_jsonl, args=(log, {"n": n, "text": "x" * n})) for n in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(line["n"] for line in read_jsonl(log)) == list(range(30))
    assert len(log.read_text().splitlines()) == 30


def test_a_held_file_is_replaced_completely_and_leaves_no_temporary_file(tmp_path, monkeypatch):
    status = tmp_path / "status.json"
    write_json(status, {"status": "planned"})
    full = FullDisk(monkeypatch)
    with waiting_for_space(full.policy):
        write_json(status, {"status": "running"})
    assert json.loads(status.read_text())["status"] == "running"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_file_that_is_rewritten_every_second_is_not_held(tmp_path, monkeypatch):
    full = FullDisk(monkeypatch)
    with waiting_for_space(full.policy), pytest.raises(OSError, match="No space"):
        write_json(tmp_path / "state.json", {}, durable=False)
    assert full.reports == []


def test_after_the_limit_the_error_is_raised_and_later_writes_fail_at_once(tmp_path, monkeypatch):
    full = FullDisk(monkeypatch, waits=10**9)
    now = [0.0]
    monkeypatch.setattr(disk.time, "monotonic", lambda: now[0])

    def sleep(seconds):
        now[0] += seconds

    full.policy.sleep = sleep
    with waiting_for_space(full.policy):
        with pytest.raises(OSError, match="No space"):
            append_jsonl(tmp_path / "log", {})
        assert now[0] == held_s() == 600
        with pytest.raises(OSError, match="No space"):
            append_jsonl(tmp_path / "log", {})
        assert now[0] == 600


def test_a_stop_request_ends_the_wait(tmp_path, monkeypatch):
    full = FullDisk(monkeypatch, waits=10**9)
    slept = []
    full.policy.sleep = slept.append
    full.policy.is_cancelled = lambda: len(slept) == 3
    with waiting_for_space(full.policy), pytest.raises(OSError, match="No space"):
        append_jsonl(tmp_path / "log", {})
    assert len(slept) == 3


def test_another_error_than_a_full_disk_is_not_held(tmp_path):
    policy = SpaceWait(600.0, sleep=lambda seconds: pytest.fail("waited"))
    with waiting_for_space(policy), pytest.raises(IsADirectoryError):
        append_jsonl(tmp_path, {})


def test_an_error_while_bytes_are_written_names_the_file(tmp_path):
    def write():
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error") as caught:
        when_there_is_space(tmp_path / "status.json", write)
    assert path_problem(caught.value) == f"Input/output error: {tmp_path}/status.json"


def test_a_checkpoint_that_does_not_fit_is_held_too():
    tries = []

    def write():
        tries.append(1)
        if len(tries) < 3:
            raise FullError("no space for a checkpoint")
        return "written"

    with waiting_for_space(SpaceWait(600.0, sleep=lambda seconds: None)):
        assert when_there_is_space(Path("checkpoints"), write) == "written"


def test_a_report_that_writes_is_not_reported_itself(tmp_path, monkeypatch):
    log, events = tmp_path / "metrics.jsonl", tmp_path / "events.jsonl"
    full = FullDisk(monkeypatch)
    full.policy.on_space = lambda seconds: append_jsonl(events, {"event": "disk"})
    with waiting_for_space(full.policy):
        append_jsonl(log, {})
    assert len(list(read_jsonl(events))) == 1


def test_a_torn_line_is_ended_when_there_is_space(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b'{"a": 1}\n{"b"')
    end_torn_line(log)
    assert log.read_bytes() == b'{"a": 1}\n{"b"\n'


def test_space_is_tested_by_writing(tmp_path, monkeypatch):
    assert has_space(tmp_path)

    def full(**options):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(disk.tempfile, "TemporaryFile", full)
    assert not has_space(tmp_path)
    assert list(tmp_path.iterdir()) == []
