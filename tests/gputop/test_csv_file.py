"""The table of samples: its rows, its continuation, and what ends it."""

from __future__ import annotations

import csv
import math
import os
import signal
import subprocess
import sys
from datetime import datetime
from functools import partial

import pytest

import kmatrix.simulate.library as simulate
from gputop_values import ROOT, SCRIPT, T0, gpu_sample
from kmatrix.errors import RecordError
from kmatrix.gpu.formats.samples import LIVE_FIELDS, Snapshot, csv_row
from kmatrix.gputop import csv_file
from kmatrix.gputop.csv_file import CsvFile
from once import session_folder
from skips import require_program
from waiting import wait_until

pytestmark = pytest.mark.process

HEADER = "timestamp,elapsed_sec,gpu0_power_w,gpu0_temp_c,gpu0_util_pct,gpu0_mem_used_mb,gpu0_sm_clock_mhz\n"


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    require_program("gcc")
    folder = tmp_path_factory.mktemp("nvml")
    path = folder / "x.scn"
    path.write_text("gpus 2\n0 * power 150..250\n0 * temp 60\n0 * util 95\n0 * mem 9000\n0 1 fan !not_supported\n")
    return {**os.environ, **simulate.environment(simulate.build(session_folder(tmp_path_factory)), path)}


def command(*arguments):
    return [sys.executable, str(SCRIPT), "--csv", *arguments]


def program(driver, *arguments):
    return subprocess.run(
        command(*arguments), cwd=ROOT, env=driver, capture_output=True, text=True, check=False, timeout=240
    )


def rows(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.mark.nightly
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


def test_a_table_has_one_writer(tmp_path):
    """The samples of a second one would replace those of the first."""
    path = str(tmp_path / "x.csv")
    first = CsvFile(path, [0])
    with pytest.raises(RecordError, match="another gputop writes"):
        CsvFile(path, [0])
    first.close()
    CsvFile(path, [0]).close()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)])
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


@pytest.mark.parametrize("hz", [0.1, 1.5, 100])
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


@pytest.mark.parametrize("text", [HEADER])
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
