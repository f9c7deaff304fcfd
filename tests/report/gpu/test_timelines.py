"""Recordings are thinned to columns that keep every extreme, whatever was lost, restarted or cut short."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace

import pytest

from gpu_factory import FakeGpus, record, write_phases, write_samples
from kmatrix.records import attempts
from kmatrix.records.files import write_json
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.read_gpu import TrainingTotals, read_gpu
from kmatrix.report.gpu.timelines import read_timeline


@dataclass(frozen=True, kw_only=True)
class SpikyGpus(FakeGpus):
    """A recording in which every value differs from the one before."""

    def _sample(self, number, index, wave):
        sample = super()._sample(number, index, wave)
        if sample.power is None:
            return sample
        power = 150 + 40 * math.sin(number * 7.7 + index) + (500 if number == 777 else 0)
        return replace(sample, utilization=float(number * 37 % 101), power=power)


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "gpt2_adamw_4gpu")


def timeline_of(run_dir, columns=180):
    gpu = read_gpu(run_dir, TrainingTotals(device="gpu"))
    assert gpu is not None
    return read_timeline(run_dir, gpu, columns)


def test_each_column_has_mean_minimum_and_maximum_of_its_samples(run_dir):
    gpus = SpikyGpus(samples=1000)
    record(run_dir, gpus)

    found = timeline_of(run_dir)

    assert (found.columns, found.samples, found.seconds) == (180, 1000, 999.0)
    by_column: dict[int, list[float]] = {}
    for number, snapshot in enumerate(gpus.snapshots()):
        by_column.setdefault(min(179, int(number / (999 / 180))), []).append(snapshot.samples[2].power)
    lane = found.devices[2].lanes["power"]
    for column, values in by_column.items():
        assert lane.mean[column] == pytest.approx(statistics.fmean(values), rel=1e-6)
        assert lane.low[column] == pytest.approx(min(values), rel=1e-6)
        assert lane.high[column] == pytest.approx(max(values), rel=1e-6)
    assert max(value for value in lane.high if value is not None) > 600  # one sample in 1,000
    assert [device.name for device in found.devices] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]


def test_a_lost_device_ends_where_it_was_lost(run_dir):
    record(run_dir, FakeGpus(samples=600, lost={2: 300}))

    found = timeline_of(run_dir)

    assert [value is None for value in found.devices[2].lanes["power"].mean] == [False] * 90 + [True] * 90
    assert None not in found.devices[1].lanes["power"].mean


def test_a_pause_between_two_attempts_is_a_gap(run_dir):
    gpus = FakeGpus(samples=100)
    snapshots = [
        replace(one, time=one.time + pause, monotonic=one.monotonic + pause)
        for one in gpus.snapshots()
        for pause in [900.0 if one.monotonic >= 50 else 0.0]
    ]
    run_dir.path.mkdir()
    write_samples(run_dir.gpu_samples, gpus, snapshots)

    found = timeline_of(run_dir, 50)

    unknown = [at for at, value in enumerate(found.devices[0].lanes["power"].mean) if value is None]
    assert unknown == list(range(unknown[0], unknown[-1] + 1))
    assert len(unknown) * found.seconds / found.columns == pytest.approx(900, abs=45)


def test_nodes_are_placed_by_the_end_of_their_set_up(run_dir):
    for node, (samples, set_up) in enumerate([(100, 20), (120, 40)]):
        folder = RunDir(run_dir.path / "nodes" / str(node)) if node else run_dir
        folder.path.mkdir(parents=True, exist_ok=True)
        path = attempts.path_of(run_dir.path, 1) if node == 0 else run_dir.path / "nodes" / "1.json"
        write_json(path, {"host": f"n{node + 1}"})
        record(folder, FakeGpus(samples=samples, utilization=tuple([100.0 * node] * 4)))
        write_phases(folder, ("set-up", 0, set_up))

    found = timeline_of(run_dir, 50)

    assert [device.name for device in found.devices][3:5] == ["GPU 3 on n1", "GPU 0 on n2"]
    assert found.seconds == 99.0  # of the first node
    # Node 2 began 20 s before node 1, and has a value at every time of it.
    assert None not in found.devices[4].lanes["utilization"].mean
    assert [phase.name for phase in found.phases][:1] == ["set-up"]
    assert found.left_out == 0

    run_dir.later_nodes()[1].phases.unlink()

    found = timeline_of(run_dir, 50)
    assert len(found.devices) == 4  # nothing says where the time of node 2 begins
    assert found.left_out == 1


@pytest.mark.parametrize("content", [b"", b"KMXGPU3\n" + bytes(300)])
def test_a_damaged_recording_has_no_timeline(run_dir, content):
    record(run_dir, FakeGpus(samples=20))
    run_dir.gpu_samples.write_bytes(content)

    assert timeline_of(run_dir) is None


def write_earlier(run_dir, gpus, *, ago, uuid=""):
    """Write the recording of an earlier attempt that began `ago` seconds before the last one."""
    snapshots = [
        replace(
            one,
            time=one.time - ago,
            samples=tuple(replace(sample, uuid=f"{sample.uuid}{uuid}") for sample in one.samples),
        )
        for one in gpus.snapshots()
    ]
    write_samples(run_dir.path / "gpu_samples.1.bin", gpus, snapshots)


def test_an_attempt_on_other_gpus_comes_first_with_its_own_devices(run_dir):
    record(run_dir, FakeGpus(samples=60))
    write_phases(run_dir, ("set-up", 0, 10))
    write_earlier(run_dir, FakeGpus(samples=60, power=(70.0,) * 4), ago=120, uuid="-old")

    found = timeline_of(run_dir, 179)

    assert (found.seconds, found.samples, found.columns) == (179.0, 120, 120)
    names = [device.name for device in found.devices]
    assert names[:5] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3", "GPU 0, earlier attempt"]
    now, before = found.devices[0].lanes["power"].mean, found.devices[4].lanes["power"].mean
    width = found.seconds / found.columns
    assert (now[int(50 / width)], now[-1]) == (None, 150.0)
    assert (before[0], before[int(100 / width)], before[-1]) == (70.0, None, None)
    # The earlier attempt logged nothing: it was killed in its set-up.
    phases = [(phase.name, phase.begin, phase.end) for phase in found.phases]
    assert phases == [("set-up", 0.0, 59.0), ("set-up", 120.0, 130.0)]
