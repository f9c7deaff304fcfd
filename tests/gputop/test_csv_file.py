"""The table of samples: its rows, its continuation, and what ends it."""

from __future__ import annotations

import csv
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from datetime import datetime
from functools import partial

import pytest

import kmatrix.simulate.library as simulate
from gputop_values import ROOT, SCRIPT, T0, gpu_sample
from kmatrix.errors import RecordError
from kmatrix.gpu.formats.columns import read_columns
from kmatrix.gpu.formats.samples import LIVE_FIELDS, Snapshot, csv_header, csv_row
from kmatrix.gputop import csv_file
from kmatrix.gputop.csv_file import CsvFile
from kmatrix.output import Interrupted
from skips import require_program
from waiting import wait_until

LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
os.execv(sys.argv[1], sys.argv[1:])
"""
IGNORING = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""
HEADER = "timestamp,elapsed_sec,gpu0_power_w,gpu0_temp_c,gpu0_util_pct,gpu0_mem_used_mb,gpu0_sm_clock_mhz\n"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    require_program("gcc")
    folder = tmp_path_factory.mktemp("nvml")
    path = folder / "x.scn"
    path.write_text("gpus 2\n0 * power 150..250\n0 * temp 60\n0 * util 95\n0 * mem 9000\n0 1 fan !not_supported\n")
    return {**os.environ, **simulate.environment(simulate.build(folder), path)}


def command(*arguments):
    return [sys.executable, str(SCRIPT), "--csv", *arguments]


def program(driver, *arguments):
    return subprocess.run(
        command(*arguments), cwd=ROOT, env=driver, capture_output=True, text=True, check=False, timeout=240
    )


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_samples_are_written_at_the_rate_without_drift(driver, tmp_path):
    path = tmp_path / "x.csv"
    done = program(driver, str(path), "--hz", "50", "--seconds", "1")
    assert done.returncode == 0, done.stderr
    titles, *found = rows(path)
    assert titles[-1] == "simulated"
    assert titles[2:7] == [f"gpu0_{name}" for name in ("power_w", "temp_c", "util_pct", "mem_used_mb", "sm_clock_mhz")]
    assert {tuple(row[2:]) for row in found} == {
        ("150", "60", "95", "9000", "1710", "250", "60", "95", "9000", "1710", "1")
    }
    late = int(done.stdout.split(", ")[1].split()[0])
    assert len(found) + late == 50, "every tick is a sample, or counted"
    assert f"wrote {len(found)} samples of 2 GPUs to {path}" in done.stdout
    times = [float(row[1]) for row in found]
    assert times == sorted(times)
    assert times[-1] >= 49 / 50 - 0.001, "the last tick is not early"
    assert all(datetime.fromisoformat(row[0]).tzinfo for row in found)


def test_the_table_is_read_by_the_reports(driver, tmp_path):
    path = tmp_path / "x.csv"
    program(driver, str(path), "--hz", "20", "--seconds", "0.5", "--gpus", "1")
    (block,) = read_columns(path)
    (part,) = block.parts
    assert (part.gpu_index, part.gpu_name) == (1, "GPU 1 (simulated)")
    assert set(part.columns["power"]) == {250}
    assert set(part.columns["sm_clock"]) == {1710}
    assert set(part.columns["memory_used"]) == {9000}


def test_standard_output_has_the_table_alone(driver):
    done = program(driver, "-", "--hz", "10", "--seconds", "0.3")
    assert done.returncode == 0
    titles, *found = csv.reader(done.stdout.splitlines())
    assert titles == csv_header([0, 1], LIVE_FIELDS, simulated=True)
    assert 1 <= len(found) <= 3
    assert {len(row) for row in found} == {len(titles)}


def test_a_table_has_one_writer(driver, tmp_path):
    """The samples of a second one would replace those of the first."""
    path = tmp_path / "x.csv"
    process = subprocess.Popen(
        command(str(path), "--hz", "50"), cwd=ROOT, env=driver, stdout=subprocess.PIPE, text=True
    )
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) > 5, "it writes")
    second = program(driver, str(path), "--seconds", "0.1")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert second.returncode == 2
    assert f"another gputop writes {path}" in second.stderr
    assert f"wrote {len(rows(path)) - 1} samples" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_every_line_is_complete_after_an_end_and_the_table_is_continued(driver, tmp_path, number):
    path = tmp_path / "x.csv"
    words = command(str(path), "--hz", "200")
    process = subprocess.Popen(words, cwd=ROOT, env=driver, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) > 100, "it writes")
    process.send_signal(number)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 0)
    text = path.read_text()
    if number != signal.SIGKILL:
        assert text.endswith("\n")
        assert said.startswith(f"wrote {len(text.splitlines()) - 1} samples of 2 GPUs"), "no sample was lost"
    path.write_text(text + "2025-01-01T00:00:00.0")  # as a kill in the middle of a line leaves it
    assert program(driver, str(path), "--hz", "10", "--seconds", "0.3").returncode == 0
    found = rows(path)
    assert path.read_text().startswith(text)
    assert {len(row) for row in found} == {13}
    assert sum(row[0] == "timestamp" for row in found) == 1


def test_nohup_is_respected(driver, tmp_path):
    path = tmp_path / "x.csv"
    ignoring = [sys.executable, "-c", IGNORING, *command(str(path), "--hz", "50", "--seconds", "3")]
    process = subprocess.Popen(ignoring, cwd=ROOT, env=driver, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) > 10, "it writes")
    process.send_signal(signal.SIGHUP)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert float(rows(path)[-1][1]) > 2.5, said


def test_lines_that_a_signal_has_interrupted_are_written_once_and_whole(tmp_path):
    path = tmp_path / "x.csv"
    table = CsvFile(str(path), [0])

    class Interrupting:
        """Takes a part of the lines before a signal comes."""

        def __init__(self, file):
            self._file = file

        def write(self, data):
            self._file.write(data[:5])
            raise Interrupted(signal.SIGTERM)

        def __getattr__(self, name):
            return getattr(self._file, name)

    table.append(["a"] * 7)
    table.flush()
    file, table._file = table._file, Interrupting(table._file)
    table.append(["b"] * 7)
    with pytest.raises(Interrupted):
        table.flush()
    table._file = file
    table.flush()
    table.flush()
    assert path.read_text() == HEADER + "a,a,a,a,a,a,a\nb,b,b,b,b,b,b\n"


def test_every_sample_is_in_the_table_when_a_signal_comes_in_a_write(monkeypatch, tmp_path):
    """The signal comes at each step of Python within `flush`."""
    snapshot = Snapshot(time=T0, samples=(gpu_sample(0),))
    row = partial(csv_row, fields=LIVE_FIELDS)
    step = 0
    interrupted = True
    while interrupted:
        path = tmp_path / f"{step}.csv"
        table = CsvFile(str(path), [0])
        monkeypatch.setattr(csv_file, "time", Clock())
        with signal_at(step) as came:
            taken, _ = csv_file._sample(lambda: snapshot, row, table, hz=4, seconds=1.6)
        table.close()
        interrupted = bool(came)
        assert path.read_text().count("\n") == taken + 1
        assert path.read_text().endswith("\n")
        step += 1
    assert step > 12, "two calls, the last one at the end"


@contextmanager
def signal_at(step):
    """Send a signal at a line of `flush`, counted from 0. Yields a list that is empty if there is no such line."""
    left, came = [step], []

    def trace(frame, event, _argument):
        if frame.f_code is not CsvFile.flush.__code__:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == -1:
                came.append(frame.f_lineno)
                signal.raise_signal(signal.SIGTERM)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield came
    finally:
        sys.settrace(before)


class Clock:
    """The module `time`, without waiting."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds + 0.0001  # never early


class Table:
    """Notes how long each sample waited until it was written."""

    def __init__(self, clock):
        self.clock, self.waiting, self.delays = clock, [], []

    def append(self, _row):
        self.waiting.append(self.clock.now)

    def flush(self):
        self.delays += [self.clock.now - at for at in self.waiting]
        self.waiting.clear()


@pytest.mark.parametrize("hz", [0.1, 0.7, 0.99, 1, 1.5, 1.9, 3, 100])
def test_a_sample_is_written_within_a_second_at_any_rate(monkeypatch, hz):
    clock = Clock()
    monkeypatch.setattr(csv_file, "time", clock)
    snapshot = Snapshot(time=T0, samples=(gpu_sample(0),))
    row = partial(csv_row, fields=LIVE_FIELDS)
    table = Table(clock)
    taken, late = csv_file._sample(lambda: snapshot, row, table, hz=hz, seconds=30)
    assert (taken, late) == (len(table.delays), 0)
    assert taken == math.ceil(30 * hz)
    assert max(table.delays) <= csv_file.FLUSH_S + 0.01


def test_the_first_sample_of_a_low_rate_is_there_long_before_the_second(driver, tmp_path):
    path = tmp_path / "x.csv"
    process = subprocess.Popen(command(str(path), "--hz", "0.001"), cwd=ROOT, env=driver, stdout=subprocess.DEVNULL)
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) == 2, "the first sample is written")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert len(rows(path)) == 2


@pytest.mark.parametrize("text", ["something else\n", HEADER, "timestamp"])
def test_another_file_is_refused_and_stays_as_it_is(driver, tmp_path, text):
    path = tmp_path / "x.csv"
    path.write_text(text)
    done = program(driver, str(path), "--seconds", "0.1")
    assert done.returncode == 2
    assert "exists and is not a table of these GPUs" in done.stderr
    assert path.read_text() == text


def test_a_full_disk_is_one_error_and_leaves_whole_lines(tmp_path):
    table = CsvFile(str(tmp_path / "x.csv"), [0])
    table.append(["a"] * 7)
    table.flush()

    class Full:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            self._file.write(data[:5])
            raise OSError(28, "No space left on device")

        def __getattr__(self, name):
            return getattr(self._file, name)

    table._file = Full(table._file)
    table.append(["b"] * 7)
    with pytest.raises(RecordError, match="cannot write"):
        table.flush()
    assert (tmp_path / "x.csv").read_text() == HEADER + "a,a,a,a,a,a,a\n"


def test_a_disk_that_takes_a_part_of_the_lines_is_an_error_and_the_table_is_continued(driver, tmp_path):
    """A limit of the size of files answers as a nearly full disk: first a short write, then an error."""
    path = tmp_path / "x.csv"
    limited = [sys.executable, "-c", LIMITED, *command(str(path), "--hz", "100", "--seconds", "0.8")]
    done = subprocess.run(limited, cwd=ROOT, env=driver, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot write {path}")
    assert path.read_text().endswith("\n")
    assert {len(row) for row in rows(path)} == {13}
    assert program(driver, str(path), "--hz", "10", "--seconds", "0.3").returncode == 0
    assert {len(row) for row in rows(path)} == {13}


@pytest.mark.parametrize("words", [["--hz", "0"], ["--hz", "5000"], ["--hz", "x"]])
def test_a_wrong_rate_exits_with_status_2(driver, tmp_path, words):
    assert program(driver, str(tmp_path / "x.csv"), *words).returncode == 2
    assert not (tmp_path / "x.csv").exists()


def test_a_recording_is_exported_and_not_sampled_again(driver, tmp_path):
    done = program(driver, str(tmp_path / "x.csv"), "--replay", str(tmp_path))
    assert done.returncode == 2
    assert "--csv samples the driver" in done.stderr


def test_the_page_has_the_columns_and_a_row():
    page = (ROOT / "docs" / "formats.md").read_text()
    section = page.partition("\n## Tables of `gputop --csv`\n")[2].partition("\n## ")[0]
    columns = csv_header([0], LIVE_FIELDS)
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == [*columns, "simulated"]
    snapshot = Snapshot(time=T0, samples=(gpu_sample(0, power=150.5),))
    row = csv_row(snapshot, 0.25, LIVE_FIELDS)
    assert f"```csv\n{','.join(columns)}\n{','.join(row)}\n```" in section
