"""Values polled once per second in addition to samples: fan, PCIe, memory errors and utilization of the units."""

import threading
import time

import pytest

from kmatrix.gpu.devices import ExtraMetrics
from kmatrix.gpu.poller import BackgroundPoller
from kmatrix.gpu.recorder.summary import RunTotals
from kmatrix.records.files import read_json
from kmatrix.report.gpu.measure import gpu_of
from recordings import DEVICES, events_of, stop_recorder, summary_file
from waiting import wait_until


@pytest.mark.nightly
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
    assert (first["ecc_uncorrected"], second["ecc_uncorrected"]) == (0, 3)
    assert "sm_active" not in first, "this GPU is older than Hopper"
    gpu = gpu_of(run_dir)
    assert [note for note in gpu.notes if "memory errors" in note] == [
        "GPU 1 had 3 uncorrected memory errors: do not trust its results"
    ]


@pytest.mark.process
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


class SlowSource:
    """A source of two devices whose first extra value takes long."""

    devices = DEVICES

    def __init__(self):
        self.asked, self.go_on = [], threading.Event()

    def extra_metrics(self, device):
        self.asked.append(device)
        self.go_on.wait(60)
        return ExtraMetrics(fan=50.0 + device)


@pytest.mark.process
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


def test_means_and_error_counts_continue_over_a_resume():
    first, second = RunTotals(DEVICES), RunTotals(DEVICES)
    first.totals[0].ingest(ExtraMetrics(fan=40.0, ecc_uncorrected=7))
    assert first.totals[0].ingest(ExtraMetrics(fan=60.0, ecc_uncorrected=9)) == 2
    second.restore(summary_file(first, final=True), None)
    assert second.totals[0].ingest(ExtraMetrics(fan=80.0, ecc_uncorrected=1)) == 0, "the driver was loaded again"
    summary = second.totals[0].summary()
    assert (summary["fan"]["mean"], summary["fan"]["count"], summary["ecc_uncorrected"]) == (60, 3, 2)
    assert second.totals[1].summary()["ecc_uncorrected"] is None
