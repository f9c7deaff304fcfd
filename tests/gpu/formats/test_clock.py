"""The time base of a recording never goes back, whatever the clock of the machine does."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kmatrix.gpu.formats.binary import COLUMNS, SampleFile, read_samples
from kmatrix.gpu.formats.clock import RecordingClock
from kmatrix.gpu.recorder.files import export
from kmatrix.records.paths import RunDir

GPUS = [{"gpu_index": 0, "gpu_name": "A", "uuid": "GPU-a", "memory_total": 1.0}]
DAY = 86_400.0
T0 = 1_790_000_000.0  # Unix s


def recorded(path, clocks, energy=0.0):
    """Write a recording with these wall and monotonic times."""
    file = SampleFile(path, {"gpus": GPUS, "device_type": "nvidia", "simulated": False})
    for wall, monotonic in clocks:
        file.append(wall, monotonic, [1.0] * (len(COLUMNS) - 1) + [energy])
    file.close()
    return read_samples(path)


def times_of(clock):
    return [clock.of(index) for index in range(len(clock))]


def test_a_wall_clock_that_is_set_back_by_a_day_does_not_change_the_recording_time(tmp_path):
    recording = recorded(
        tmp_path / "s.bin", [(T0 + 1000.0, 5.0), (T0 + 1001.0, 6.0), (T0 + 1002.0 - DAY, 7.0), (T0 + 1003.0 - DAY, 8.0)]
    )
    clock = RecordingClock(recording)
    assert times_of(clock) == [0.0, 1.0, 2.0, 3.0]
    assert clock.index_after(1.5) == 2
    assert clock.at(T0 + 1002.5 - DAY, 7.5) == 2.5
    assert clock.at(T0 + 1002.5 - DAY) == 2.5  # a record without a monotonic time
    assert [recording.snapshot(index).monotonic for index in (0, 3)] == [5.0, 8.0]


def test_after_a_reboot_the_recording_time_continues_with_the_gap_of_the_wall_clock(tmp_path):
    clocks = [(T0 + 1000.0, 500.0), (T0 + 1001.0, 501.0), (T0 + 1100.0, 30.0), (T0 + 1101.0, 31.0)]
    clock = RecordingClock(recorded(tmp_path / "s.bin", clocks))
    assert times_of(clock) == [0.0, 1.0, 100.0, 101.0]
    assert clock.at(T0 + 1100.5, 30.5) == 100.5
    assert clock.at(T0 + 1000.5, 500.5) == 0.5
    assert clock.at(T0 + 5000.0, 30.5) is None  # neither boot


@pytest.mark.parametrize("uptime", [90 * DAY, 560.0])  # of the other host, when the job starts again there
def test_after_a_requeue_to_a_host_that_is_up_for_longer_the_gap_is_that_of_the_wall_clock(tmp_path, uptime):
    clocks = [(T0 + 1000.0, 500.0), (T0 + 1001.0, 501.0), (T0 + 1130.0, uptime), (T0 + 1131.0, uptime + 1)]
    clock = RecordingClock(recorded(tmp_path / "s.bin", clocks))
    assert times_of(clock) == [0.0, 1.0, 130.0, 131.0]
    assert clock.at(T0 + 1130.5, uptime + 0.5) == 130.5


@given(st.lists(st.tuples(st.floats(T0 - 1e6, T0 + 1e6), st.floats(0, 1e6)), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_the_recording_time_starts_at_0_and_never_goes_back(tmp_path_factory, clocks):
    clock = RecordingClock(recorded(tmp_path_factory.mktemp("s") / "s.bin", clocks))
    times = times_of(clock)
    assert times[0] == pytest.approx(0, abs=1e-6)
    assert all(before <= after + 1e-6 for before, after in pairwise(times))
    assert clock.length >= 0


def test_an_exported_table_has_no_negative_time(tmp_path):
    recorded(tmp_path / "gpu_samples.bin", [(1_790_000_000.0, 5.0), (1_790_000_001.0 - DAY, 6.0)])
    rows = export(RunDir(tmp_path)).read_text().splitlines()
    assert [row.split(",")[1] for row in rows[1:]] == ["0.000", "1.000"]


def test_energy_is_stored_without_rounding(tmp_path):
    joules = 123_456_789.125  # float32 has 8 J between two numbers here
    assert recorded(tmp_path / "s.bin", [(T0, 1.0)], joules).columns[0]["energy_j"][0] == joules
