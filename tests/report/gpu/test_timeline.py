"""Recordings are thinned to columns that keep every extreme, whatever was lost, restarted or cut short."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

import numpy as np
import pytest

from gpu_factory import FakeGpus, record, write_phases, write_samples
from kmatrix.records import attempts
from kmatrix.records.files import write_json
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.recordings import recordings_of
from kmatrix.report.gpu.timeline import COLUMNS, MOST_LINES, timeline_of


@dataclass(frozen=True, kw_only=True)
class SpikyGpus(FakeGpus):
    """A recording in which every value differs from the one before."""

    def _sample(self, number, index, wave):
        sample = super()._sample(number, index, wave)
        power = 150 + 40 * math.sin(number * 7.7 + index) + (500 if number == 777 else 0)
        return sample if sample.power is None else replace(sample, power=power)


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "gpt2_adamw_4gpu")


def of(run_dir):
    return timeline_of(recordings_of(run_dir))


def test_each_column_has_mean_lowest_and_highest_of_its_samples(run_dir):
    gpus = SpikyGpus(samples=1000)
    record(run_dir, gpus)
    found = of(run_dir)
    assert found.seconds == 999.0
    assert [lane.label for lane in found.lanes["power"]] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    lane = found.lanes["power"][2]
    assert len(lane.time) == COLUMNS
    by_column: dict[int, list[float]] = {}
    for number, snapshot in enumerate(gpus.snapshots()):
        by_column.setdefault(min(COLUMNS - 1, int(number / (999 / COLUMNS))), []).append(snapshot.samples[2].power)
    for column, values in by_column.items():
        expected = (statistics.fmean(values), min(values), max(values))
        assert (lane.mean[column], lane.low[column], lane.high[column]) == pytest.approx(expected, rel=1e-6)
    assert lane.high.max() > 600  # one sample in 1,000


def test_a_lost_device_ends_where_it_was_lost(run_dir):
    record(run_dir, FakeGpus(samples=600, lost={2: 300}))
    lanes = of(run_dir).lanes["power"]
    assert np.isnan(lanes[2].mean).tolist() == [False] * (COLUMNS // 2) + [True] * (COLUMNS // 2)
    assert not np.isnan(lanes[1].mean).any()


def test_a_pause_is_a_gap(run_dir):
    gpus = FakeGpus(samples=100)
    snapshots = [
        replace(one, time=one.time + pause, monotonic=one.monotonic + pause)
        for one in gpus.snapshots()
        for pause in [900.0 if one.monotonic >= 50 else 0.0]
    ]
    run_dir.path.mkdir()
    write_samples(run_dir.gpu_samples, gpus, snapshots)
    found = of(run_dir)
    unknown = np.flatnonzero(np.isnan(found.lanes["power"][0].mean))
    assert unknown.tolist() == list(range(unknown[0], unknown[-1] + 1))
    assert len(unknown) * found.seconds / 100 == pytest.approx(900, abs=25)


def test_an_attempt_on_other_gpus_is_before_it_with_its_phases(run_dir):
    record(run_dir, FakeGpus(samples=60))
    write_phases(run_dir, ("set-up", 0, 10), end=59)
    earlier = FakeGpus(samples=60, power=(70.0,) * 4, name="NVIDIA L4")
    snapshots = [replace(one, time=one.time - 120) for one in earlier.snapshots()]
    write_samples(run_dir.path / "gpu_samples.1.bin", earlier, snapshots)
    found = of(run_dir)
    assert found.seconds == 179.0
    now, before = found.lanes["power"][0], found.lanes["power"][4]
    assert (now.label, before.label) == ("GPU 0", "GPU 0, earlier attempt")
    assert (before.mean[0], now.mean[-1]) == (70.0, 150.0)
    between = np.searchsorted(now.time, 80)
    assert np.isnan([now.mean[0], now.mean[between], before.mean[between], before.mean[-1]]).all()
    # The earlier attempt logged nothing: it was killed in its set-up.
    assert [(one.phase, one.begin, one.end) for one in found.spans] == [("set-up", 0, 120), ("set-up", 120, 130)]


def test_nodes_are_placed_by_the_wall_clock(run_dir):
    for node in (0, 1):
        folder = RunDir(run_dir.path / "nodes" / "1") if node else run_dir
        path = run_dir.path / "nodes" / "1.json" if node else attempts.path_of(run_dir.path, 1)
        folder.path.mkdir(parents=True, exist_ok=True)
        write_json(path, {"host": f"n{node + 1}"})
        gpus = FakeGpus(samples=60)
        snapshots = [replace(one, time=one.time + 30 * node) for one in gpus.snapshots()]
        write_samples(folder.gpu_samples, gpus, snapshots)
    found = of(run_dir)
    lanes = found.lanes["power"]
    assert [one.label for one in lanes][3:5] == ["GPU 3 on n1", "GPU 0 on n2"]
    assert found.seconds == 89.0
    first = np.flatnonzero(~np.isnan(lanes[4].mean))[0]
    assert first * found.seconds / 60 == pytest.approx(30, abs=2)


def test_many_devices_are_their_range_and_the_worst_one(run_dir):
    power = [150.0] * MOST_LINES + [90.0]
    count = len(power)
    record(run_dir, FakeGpus(memory=(1000.0,) * count, power=power, utilization=(95.0,) * count))
    (lane, _), worst = of(run_dir).lines("power")
    assert (lane.low[5], lane.high[5], worst) == (90.0, 150.0, f"GPU {MOST_LINES}")
    assert lane.mean[5] == pytest.approx(statistics.fmean(power))


def test_a_single_sample_has_no_course(run_dir):
    record(run_dir, FakeGpus(samples=1))
    assert of(run_dir) is None
