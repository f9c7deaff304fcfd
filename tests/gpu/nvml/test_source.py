"""Values polled once per second in addition to samples: fan, PCIe, memory errors and utilization of the units."""

import threading
import time

import pytest

from gpu_factory import FakeGpus, record
from kmatrix.gpu.devices import EXTRA_METRICS, ExtraMetrics
from kmatrix.gpu.poller import BackgroundPoller
from kmatrix.gpu.recorder.summary import RunTotals
from kmatrix.records.files import read_json
from kmatrix.report.gpu.read_gpu import TrainingTotals, read_gpu
from kmatrix.report.gpu.text import busy_lines
from recordings import DEVICES, events_of, stop_recorder, summary_file
from stats_reader import read_stats
from waiting import wait_until

BUSY = "0 * smact 92\n0 * smocc 41\n0 * tensor 60..40\n0 * dram 33\n"


def was_polled(run_dir):
    """Return whether the last line of the recording has the values polled in the background."""
    if not run_dir.gpu_stats_multi.exists():
        return False
    return any('"fan"' in line for line in run_dir.gpu_stats_multi.read_text().splitlines()[-3:])


def test_fan_pcie_and_memory_errors_are_recorded(start_recorder, run_dir):
    process = start_recorder("--hz", 20, lines="0 * fan 40..60\n0 * pcie_tx 204800\n0 1 ecc_u 2\n3 1 ecc_u 5\n", gpus=2)
    wait_until(lambda: events_of(run_dir, "ecc"), "a memory error is recorded")
    stop_recorder(process)
    assert [(event["gpu_index"], event["text"].partition(": ")[2]) for event in events_of(run_dir, "ecc")] == [
        (1, "3 uncorrected memory errors")
    ], "those before the recording are not of this run"
    first, second = read_json(run_dir.gpu_summary)["gpus"]
    assert (first["fan"]["mean"], second["fan"]["mean"]) == (40, 60)
    assert first["pcie_tx"]["mean"] == 200
    assert (first["ecc"], second["ecc"]) == (
        {"corrected": 0, "uncorrected": 0},
        {"corrected": 0, "uncorrected": 3},
    )
    assert "sm_active" not in first, "this GPU is older than Hopper"
    gpu = read_gpu(run_dir, TrainingTotals())
    assert [device.ecc_uncorrected for device in gpu.devices] == [0, 3]


def test_an_xid_error_is_an_event_of_its_gpu(start_recorder, run_dir):
    # Each second, because the recorder listens from its first poll on, whenever that is.
    lines = "".join(f"{second} 1 xid 79\n" for second in range(1, 120))
    process = start_recorder("--hz", 20, lines=lines, gpus=2)
    wait_until(lambda: events_of(run_dir, "xid"), "an XID error is recorded")
    stop_recorder(process)
    found = events_of(run_dir, "xid")
    assert {event["gpu_index"] for event in found} == {1}
    assert all("XID 79: the GPU has fallen off the bus" in event["text"] for event in found)
    assert {(event["xid"], event["xid_count"] > 0) for event in found} == {(79, True)}


def test_each_xid_error_counts_also_that_of_a_lost_gpu(start_recorder, run_dir):
    # Several within a second, and one of a GPU that no longer answers: it says why.
    lines = "".join(f"{second} 0 xid 31\n{second + 0.1} 0 xid 48\n{second + 0.2} 0 xid 31\n" for second in range(120))
    process = start_recorder("--hz", 20, lines=f"{lines}6 1 all !lost\n6.5 1 xid 79\n", gpus=2)
    wait_until(lambda: any(event["xid"] == 79 for event in events_of(run_dir, "xid")), "the last error is recorded")
    assert events_of(run_dir, "lost")
    stop_recorder(process)
    first, second = read_gpu(run_dir, TrainingTotals()).devices
    counts = {one.code: one.count for one in first.xids}
    assert counts.keys() == {31, 48}
    assert abs(counts[31] - 2 * counts[48]) <= 1, "none is missing"
    assert [(one.code, one.count, one.first == one.last) for one in second.xids] == [(79, 1, True)]


def test_performance_metrics_are_recorded_if_the_gpu_has_them(start_recorder, run_dir):
    process = start_recorder("--hz", 20, lines=BUSY, gpus=3)
    wait_until(lambda: was_polled(run_dir) and len(list(read_stats(run_dir.gpu_stats_multi))) > 4, "some seconds")
    stop_recorder(process)
    gpus = read_json(run_dir.gpu_summary)["gpus"]
    assert [gpu["tensor_active"]["mean"] for gpu in gpus] == [60, 50, 40]
    assert {gpu["sm_active"]["mean"] for gpu in gpus} == {92}
    assert {gpu["dram_active"]["mean"] for gpu in gpus} == {33}
    (line,) = busy_lines(read_gpu(run_dir, TrainingTotals(mfu=0.4)))
    assert line.endswith("MFU 40.0% of peak, tensor cores active 50.0% of the time")


def test_a_performance_metric_is_the_mean_between_two_polls(start_recorder, run_dir):
    process = start_recorder("--hz", 20, lines="loop 0.2\n0 0 tensor 100\n0.05 0 tensor 0\n", gpus=1)
    wait_until(lambda: was_polled(run_dir) and len(list(read_stats(run_dir.gpu_stats_multi))) > 4, "some seconds")
    stop_recorder(process)
    (gpu,) = read_json(run_dir.gpu_summary)["gpus"]
    assert gpu["tensor_active"]["mean"] == pytest.approx(25, abs=4)


def test_a_lost_gpu_has_no_values_and_a_recovered_one_continues(start_recorder, run_dir):
    process = start_recorder("--hz", 20, lines=f"{BUSY}1 0 all !lost\n3 0 all ok\n", gpus=1)
    wait_until(lambda: events_of(run_dir, "found"), "the GPU is found")
    wait_until(lambda: was_polled(run_dir), "it continues")
    stop_recorder(process)


class SlowSource:
    """A source of two devices whose first extra value takes long."""

    devices = DEVICES

    def __init__(self):
        self.asked, self.go_on = [], threading.Event()

    def extra_metrics(self, device):
        self.asked.append(device)
        self.go_on.wait(60)
        return ExtraMetrics(fan=50.0 + device)


def test_a_slow_driver_does_not_block_the_caller():
    source = SlowSource()
    poller = BackgroundPoller(source, every_s=0.01)
    started = time.monotonic()
    poller.start()
    wait_until(lambda: source.asked, "the driver is queried")
    assert poller.latest == [ExtraMetrics(), ExtraMetrics()]
    assert not poller.stop(), "it is not waited for for ever"
    assert time.monotonic() - started < 30
    source.go_on.set()


def test_the_devices_are_polled_in_turn():
    source = SlowSource()
    source.go_on.set()
    poller = BackgroundPoller(source, every_s=0.01)
    poller.start()
    wait_until(lambda: poller.polls >= 3, "three polls")
    assert poller.stop()
    assert source.asked[:4] == [0, 1, 0, 1]
    assert [extra.fan for extra in poller.latest] == [50, 51]


def test_means_and_error_counts_continue_over_a_resume():
    first, second = RunTotals(DEVICES), RunTotals(DEVICES)
    first.totals[0].ingest(ExtraMetrics(fan=40.0, ecc_uncorrected=7))
    assert first.totals[0].ingest(ExtraMetrics(fan=60.0, ecc_uncorrected=9)) == 2
    second.restore(summary_file(first, final=True), None)
    assert second.totals[0].ingest(ExtraMetrics(fan=80.0, ecc_uncorrected=1)) == 0, "the driver was loaded again"
    summary = second.totals[0].summary()
    assert (summary["fan"]["mean"], summary["fan"]["count"], summary["ecc"]) == (60, 3, {"uncorrected": 2})
    assert second.totals[1].summary()["ecc"] is None


def test_a_value_that_a_device_does_not_have_is_not_a_key():
    assert ExtraMetrics().known() == ()
    assert dict(ExtraMetrics(fan=0.0, ecc_corrected=0).known()) == {"fan": 0.0, "ecc_corrected": 0}
    assert "ecc_corrected" not in EXTRA_METRICS


def test_a_report_without_extra_metrics_does_not_mention_them(tmp_path, run_dir):
    record(run_dir, FakeGpus())
    gpu = read_gpu(run_dir, TrainingTotals(mfu=0.4))
    assert gpu.extra("tensor_active") is None
    assert "tensor" not in next(busy_lines(gpu))
