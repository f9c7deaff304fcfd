"""The numbers of a recording: energy, means and losses from samples at known times."""

import math
import os
from array import array

import pytest

from kmatrix.gpu.devices import COLUMN_INDEX, UNKNOWN, WIDTH, DeviceProcess
from kmatrix.gpu.formats.binary import COLUMNS, Recording
from kmatrix.gpu.formats.summary import SummaryFile
from kmatrix.gpu.processes import RunProcesses
from kmatrix.gpu.recorder.loop import Calibration, rate_warning
from kmatrix.gpu.recorder.summary import RunTotals
from kmatrix.records.decode import convert
from recordings import DEVICES, summary_file


def values(*, power=UNKNOWN, energy=UNKNOWN, memory=UNKNOWN):
    row = [UNKNOWN] * WIDTH
    row[COLUMN_INDEX["power"]], row[COLUMN_INDEX["energy_j"]], row[COLUMN_INDEX["memory_used"]] = power, energy, memory
    return row


def test_a_summary_continues_an_earlier_one_as_if_uninterrupted():
    uninterrupted, first, second = (RunTotals(DEVICES) for _ in range(3))
    rows = [values(power=100 + index, energy=10.0 * index, memory=500 + index % 7) * 2 for index in range(60)]
    for index, row in enumerate(rows):
        uninterrupted.add(index * 0.1, 1000 + index * 0.1, list(row))
        if index < 30:
            first.add(index * 0.1, 1000 + index * 0.1, list(row))
    second.restore(summary_file(first, final=True), None)
    for index, row in enumerate(rows[30:], 30):
        second.add(index * 0.1, 1000 + index * 0.1, list(row))
    left, right = uninterrupted.summary({}, final=True), second.summary({}, final=True)
    assert right["gpus"][0]["power"] == pytest.approx(left["gpus"][0]["power"], abs=1e-4)
    assert right["totals"]["memory_used_max"] == left["totals"]["memory_used_max"]
    assert right["gpus"][0]["joules"] == left["gpus"][0]["joules"] - 10  # nothing is known about the time in between


def recording_of(*samples):
    """Return a recording of one device: samples of (monotonic s, energy total)."""
    columns = {name: array("d", [math.nan] * len(samples)) for name in COLUMNS}
    columns |= {"energy_j": array("d", [joules for _, joules in samples]), "power": array("d", [100.0] * len(samples))}
    times = array("d", [now for now, _ in samples])
    return Recording({"gpus": []}, array("d", [1000 + now for now in times]), times, (columns,))


@pytest.mark.parametrize(
    ("attempt", "counter", "joules"),
    [(1, 800.0, 300), (1, 20.0, 110), (2, 800.0, 110), (None, 800.0, 110)],
    ids=["same attempt", "the counter fell", "next attempt", "unknown attempt"],
)
def test_a_restarted_recorder_continues_the_energy_of_its_attempt(attempt, counter, joules):
    """Kill a recorder after its summary at 1 s and a sample at 2 s; the next one starts at 5 s."""
    first = RunTotals(DEVICES[:1], hz=1)
    for now in (0.0, 1.0):
        first.add(now, 1000 + now, values(power=100.0, energy=500.0 + 100 * now))
        first.seconds += 1
    summary = convert(first.summary({"attempt": 1}, final=False), SummaryFile, "")
    second = RunTotals(DEVICES[:1], hz=1)
    second.restore(summary, recording_of((0.0, 0.0), (1.0, 100.0), (2.0, 110.0)), attempt=attempt)
    assert second.seconds_since_last(5.0) == (2.0 if attempt == 1 else 0.0)
    second.add(5.0, 1005.0, values(power=100.0, energy=counter))
    assert second.summary({}, final=True)["gpus"][0]["joules"] == joules


def test_a_restarted_recorder_integrates_power_over_a_short_gap_only():
    for now, joules in ((3.0, 250), (60.0, 100)):
        first = RunTotals(DEVICES[:1], hz=20)
        for earlier in (0.0, 1.0):
            first.add(earlier, 1000 + earlier, values(power=100.0))
        first.seconds = 1.0
        summary = convert(first.summary({"attempt": 1}, final=False), SummaryFile, "")
        second = RunTotals(DEVICES[:1], hz=20)
        second.restore(summary, recording_of((0.0, 0.0), (1.0, 100.0)), attempt=1)
        second.add(now, 1000 + now, values(power=50.0))
        assert second.summary({}, final=True)["gpus"][0]["joules"] == joules


def test_energy_that_became_unknown_stays_so_after_a_restart():
    first = RunTotals(DEVICES[:1], hz=1)
    first.add(0.0, 1000.0, values(power=100.0, energy=500.0))
    first.seconds = 1.0
    summary = convert(first.summary({"attempt": 1}, final=False), SummaryFile, "")
    second = RunTotals(DEVICES[:1], hz=1)
    second.restore(summary, recording_of((0.0, 0.0), (1.0, 100.0), (2.0, math.nan)), attempt=1)
    second.add(3.0, 1003.0, values(power=100.0, energy=900.0))
    assert second.summary({}, final=True)["gpus"][0]["joules"] is None


def test_power_is_not_integrated_over_a_gap():
    aggregate = RunTotals(DEVICES[:1])
    for now in (0.0, 1.0, 20.0, 21.0):
        aggregate.add(now, now, values(power=100.0))
    assert aggregate.summary({}, final=True)["totals"]["joules"] == 200


def test_unknown_values_are_null_everywhere():
    aggregate = RunTotals(DEVICES)
    aggregate.add(0.0, 0.0, values() * 2)
    summary = aggregate.summary({}, final=True)
    assert summary["totals"]["joules"] is None
    assert summary["totals"]["memory_used_max"] is None
    assert summary["balance"] == {"memory": None, "utilization": None, "power": None}
    assert {summary["gpus"][0][name] for name in ("memory_used", "utilization", "power", "joules")} == {None}


def test_a_period_is_the_median_time_between_changes():
    calibration = Calibration()
    for tick in range(400):
        calibration.add(tick * 0.005, {"power": (float(tick // 20), 3e-6), "utilization": (95.0, 1e-6)})
    assert calibration.result() == {
        "power": {"period_ms": 100.0, "call_us": 3.0},
        "utilization": {"period_ms": None, "call_us": 1.0},
    }


def test_polling_at_more_than_twice_the_hardware_rate_gives_a_warning():
    assert [rate_warning({"power": {"period_ms": 100.0}}, hz) is not None for hz in (22, 23)] == [False, True]
    assert rate_warning({"power": {"period_ms": None}}, 1000) is None


def test_pids_of_another_container_are_not_reported_as_foreign_without_evidence():
    dead_pid = 2**22 + 5  # above every pid of the kernel
    run_processes = RunProcesses(os.getpid())
    assert run_processes.others([DeviceProcess(pid=dead_pid, memory_mib=100.0)]) == []
    assert [
        each.pid
        for each in run_processes.others(
            [DeviceProcess(pid=dead_pid, memory_mib=1.0), DeviceProcess(pid=dead_pid + 1, memory_mib=1.0)]
        )
    ] == [dead_pid]
    assert RunProcesses(None).others([DeviceProcess(pid=1, memory_mib=1.0)]) == []


def silence(totals, seconds, begin, step=0.1, **known):
    """Add samples for some seconds in which the second device has no value."""
    for tick in range(round(seconds / step)):
        totals.add(begin + tick * step, 1000.0 + begin + tick * step, [*values(**known), *values()])


def test_a_lost_gpu_that_returns_leaves_energy_and_mean_power_unknown():
    totals = RunTotals(DEVICES)
    totals.add(0.0, 1000.0, values(power=100.0, energy=500.0, memory=10.0) * 2)
    silence(totals, 40, 0.1, power=100.0, energy=600.0, memory=10.0)
    totals.add(40.1, 1040.1, values(power=100.0, energy=2.0, memory=30.0) * 2)
    summary = totals.summary({}, final=True)
    healthy, returned = summary["gpus"]
    assert healthy["joules"] == 100
    assert (returned["joules"], returned["energy_gap"], returned["lost_s"]) == (
        None,
        True,
        pytest.approx(40.1, abs=0.2),
    )
    assert (summary["totals"]["joules"], summary["totals"]["mean_power"]) == (None, None)
    assert summary["warnings"] == [
        f"GPU 1 did not respond for {returned['lost_s']:.1f} s: its energy and mean power are unknown, "
        "its other means are of the rest"
    ]
    means = [gpu["memory_used"]["mean"] for gpu in summary["gpus"]]
    assert summary["totals"]["memory_used_mean"] == pytest.approx(sum(means))


def test_a_counter_that_continued_during_a_timeout_gives_the_energy_and_no_mean_power():
    totals = RunTotals(DEVICES)
    totals.add(0.0, 1000.0, values(power=100.0, energy=500.0) * 2)
    silence(totals, 10, 0.1, power=100.0, energy=600.0)
    totals.add(10.1, 1010.1, values(power=100.0, energy=1500.0) * 2)
    summary = totals.summary({}, final=True)
    assert [gpu["joules"] for gpu in summary["gpus"]] == [1000, 1000]
    assert summary["totals"]["joules"] == 2000
    assert summary["totals"]["mean_power"] is None


def test_a_few_failed_queries_do_not_count_as_a_loss():
    totals = RunTotals(DEVICES)
    totals.add(0.0, 1000.0, values(power=100.0, energy=0.0) * 2)
    silence(totals, 0.5, 0.1, power=100.0, energy=5.0)
    totals.add(0.6, 1000.6, values(power=100.0, energy=60.0) * 2)
    summary = totals.summary({}, final=True)
    assert summary["gpus"][1]["lost_s"] == 0
    assert (summary["totals"]["mean_power"], summary["totals"]["joules"]) == (200, 120)
    assert summary["warnings"] == []


def test_a_rank_that_has_not_started_is_not_lost():
    totals = RunTotals(DEVICES, ranks=True)
    silence(totals, 10, 0.0, memory=1.0)
    summary = totals.summary({}, final=True)
    assert [gpu["lost_s"] for gpu in summary["gpus"]] == [0, 0]
    assert summary["warnings"] == []


def test_samples_after_the_summary_are_found_by_their_time_after_the_clock_was_set_back():
    totals = RunTotals(DEVICES[:1])
    for number, wall in enumerate((1000.0, 1001.0, 500.0)):
        totals.add(float(number), wall, values(memory=1.0))
    clocks = array("d", [1000.0, 1001.0, 500.0, 501.0])
    columns = ({name: array("d", [1.0] * 4) for name in COLUMNS},)
    recording = Recording({"gpus": []}, clocks, array("d", [0.0, 1.0, 2.0, 3.0]), columns)
    resumed = RunTotals(DEVICES[:1])
    resumed.restore(summary_file(totals, final=False), recording)
    assert resumed.samples == 4
