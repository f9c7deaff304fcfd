"""Expensive metrics and processes of simulated GPUs: counters, traffic, XID errors, long lists, older drivers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from factories import ROOT
from kmatrix.simulate.library import build, environment
from once import session_folder

pytestmark = pytest.mark.process

PROLOGUE = """
import json, time
from dataclasses import asdict
now = [10.0]
time.monotonic = lambda: now[0]
from kmatrix.gpu.nvml.source import open_source
source = open_source()
def extra(gpu=0):
    return {name: value for name, value in asdict(source.extra_metrics(gpu)).items() if value is not None}
def extra_at(second):
    now[0] = second
    return extra()
def answer(value):
    print(json.dumps(value))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(session_folder(tmp_path_factory))


@pytest.fixture
def ask(library, tmp_path):
    """Return a function that runs a program on simulated GPUs and returns its answer."""

    def run(scenario, program, gpus=1):
        path = tmp_path / "test.scn"
        path.write_text(scenario)
        variables = {**os.environ, **environment(library, path, gpus), "PYTHONPATH": str(ROOT / "lib")}
        command = [sys.executable, "-c", PROLOGUE + program]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_metrics_that_a_gpu_does_not_have_are_unknown(ask):
    found = ask("freeze 1\n0 0 fan !not_supported\n", "answer(extra())")
    missing = {"fan", "memory_temperature", "nvlink_tx", "nvlink_rx", "sm_active", "tensor_active"}
    assert not missing & found.keys()


TWICE = """
extra()
now[0] += 2
answer(extra())
"""


def test_traffic_over_nvlink_is_the_rate_of_its_counter(ask):
    """Between two reads, by the clock of the reader."""
    program = """
from kmatrix.gpu.nvml import extras
counters = [{138: 1024, 139: 2048}, {138: 205824, 139: 2048}, {138: 5, 139: 4096}]
extras.ExtraMetricsReader._fields = lambda self: counters.pop(0)
found = map(extra_at, (10, 12, 14))
answer([{name: one.get(name) for name in ("nvlink_tx", "nvlink_rx")} for one in found])
"""
    assert ask("freeze 1\n", program) == [
        {"nvlink_tx": None, "nvlink_rx": None},
        {"nvlink_tx": 100, "nvlink_rx": 0},
        {"nvlink_tx": None, "nvlink_rx": 1},
    ]


def test_a_gpu_with_performance_monitoring_needs_no_slow_call_for_its_traffic(ask):
    """The two older calls would block for 20 ms each on a real GPU; here they fail."""
    scenario = "0 0 smact 90\n0 0 nvlink_tx 1024\n0 0 nvlink_rx 2048\n0 0 pcie_tx 4096\n0 0 pcie_rx 8192\n"
    program = "import pynvml\npynvml.nvmlLib.nvmlDeviceGetPcieThroughput = lambda *_: 999\n" + TWICE
    found = ask(scenario, program)
    assert {name: found[name] for name in ("nvlink_tx", "nvlink_rx", "pcie_tx", "pcie_rx")} == pytest.approx(
        {"nvlink_tx": 1, "nvlink_rx": 2, "pcie_tx": 4, "pcie_rx": 8}
    )


@pytest.mark.nightly
def test_xid_errors_count_from_the_first_read_on_each_gpu(ask):
    program = """
before = [extra(gpu)["xids"] for gpu in (0, 1)]
deadline = time.time() + 30
while extra(1)["xids"] < 2 and time.time() < deadline:
    time.sleep(0.02)
answer([before, extra(0), extra(1)])
"""
    before, first, second = ask("speed 20\n0 1 xid 13\n60 1 xid 79\n61 1 xid 0\n62 1 xid 48\n", program, gpus=2)
    assert before == [0, 0], "an error from before is in the log of the kernel only"
    assert (first["xid"], first["xids"]) == (0, 0)
    assert (second["xid"], second["xids"]) == (48, 2)


# -- processes


def test_a_process_that_computes_and_draws_is_listed_once():
    import ctypes
    import struct

    from kmatrix.gpu.nvml.processes import processes_on

    class Both:
        def _list(self, pids, count, buffer):
            data = b"".join(struct.pack("<I4xQII", pid, 2**64 - 1, 3, 0) for pid in pids)
            ctypes.memmove(buffer, data, len(data))
            count._obj.value = len(pids)
            return 0

        def nvmlDeviceGetComputeRunningProcesses_v3(self, _handle, count, buffer):  # noqa: N802
            return self._list([5, 6], count, buffer)

        def nvmlDeviceGetGraphicsRunningProcesses_v3(self, _handle, count, buffer):  # noqa: N802
            return self._list([6, 7], count, buffer)

    found = processes_on(Both(), None)
    assert [(p.pid, p.kind, p.memory_mib) for p in found] == [(5, "C", None), (6, "X", None), (7, "G", None)]


def test_the_share_of_each_process_is_the_newest(ask):
    program = "answer([[pid, s.sm, s.memory] for pid, s in source.process_shares(0).items()])"
    found = ask("freeze 1\n0 0 util 80\n0 0 memutil 40\n0 0 process 11 100\n0 0 process 12 100\n", program)
    assert found == [[11, 40, 20], [12, 40, 20]]
    assert ask("freeze 1\n", program) == []


def test_a_lost_gpu_has_neither_processes_nor_metrics(ask):
    program = "source.read([0.0] * 100)\nanswer([len(source.processes(0)), source.process_shares(0), extra(0)])"
    assert ask("0 0 process 11 100\n0 0 all !lost\n", program) == [0, {}, {"xid_counts": {}}]
