"""Expensive metrics and processes of simulated GPUs: counters, traffic, XID errors, long lists, older drivers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from factories import ROOT
from kmatrix.simulate.library import build, environment

PROLOGUE = """
import json, time
from dataclasses import asdict
from kmatrix.gpu.nvml.source import open_source
source = open_source()
def extra(gpu=0):
    return {name: value for name, value in asdict(source.extra_metrics(gpu)).items() if value is not None}
def answer(value):
    print(json.dumps(value))
"""
HEALTH = """
freeze 10
0 0 memclk 2619
0 0 memutil 41
0 0 memtemp 71
0 0 reserved 512
0 0 pstate 2
0 0 replays 3
0 0 nvlink_err 4
0 0 remap_c 5
0 0 remap_u 6
0 0 remap_f 1
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("library"))


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


def test_the_health_of_a_gpu_is_read(ask):
    found = ask(HEALTH, "answer(extra())")
    assert found["memory_clock"] == 2619
    assert found["memory_utilization"] == 41
    assert found["memory_temperature"] == 71
    assert found["memory_reserved"] == 512
    assert found["pstate"] == 2
    assert (found["pcie_replays"], found["nvlink_errors"]) == (3, 4)
    assert (found["remapped_corrected"], found["remapped_uncorrected"], found["remap_failure"]) == (5, 6, 1)
    assert (found["xid"], found["xids"]) == (0, 0)


def test_metrics_that_a_gpu_does_not_have_are_unknown(ask):
    found = ask("freeze 1\n0 0 fan !not_supported\n", "answer(extra())")
    missing = {"fan", "memory_temperature", "nvlink_tx", "nvlink_rx", "nvlink_errors", "sm_active", "tensor_active"}
    assert not missing & found.keys()


TWICE = """
extra()
time.sleep(0.05)
answer(extra())
"""


def test_traffic_over_nvlink_is_the_rate_of_its_counter(ask):
    program = """
times = [time.monotonic()]
extra()
times.append(time.monotonic())
time.sleep(0.05)
times.append(time.monotonic())
found = extra()
answer([*times, time.monotonic(), found])
"""
    begin, after, before, end, found = ask("0 0 nvlink_tx 204800\n0 0 nvlink_rx 102400\n", program)
    # Counter and clock are read one after the other: each interval is between these two, however busy the machine is.
    least = (before - after) / (end - begin)
    assert 200 * least <= found["nvlink_tx"] <= 200 / least
    assert found["nvlink_rx"] == pytest.approx(found["nvlink_tx"] / 2, rel=0.01)


def test_a_gpu_with_performance_monitoring_needs_no_slow_call_for_its_traffic(ask):
    """The two older calls would block for 20 ms each on a real GPU; here they fail."""
    scenario = "0 0 smact 90\n0 0 nvlink_tx 1024\n0 0 nvlink_rx 2048\n0 0 pcie_tx 4096\n0 0 pcie_rx 8192\n"
    program = "import pynvml\npynvml.nvmlLib.nvmlDeviceGetPcieThroughput = lambda *_: 999\n" + TWICE
    found = ask(scenario, program)
    assert {name: found[name] for name in ("nvlink_tx", "nvlink_rx", "pcie_tx", "pcie_rx")} == pytest.approx(
        {"nvlink_tx": 1, "nvlink_rx": 2, "pcie_tx": 4, "pcie_rx": 8}
    )


def test_xid_errors_count_from_the_first_read_on_each_gpu(ask):
    program = """
before = [extra(gpu)["xids"] for gpu in (0, 1)]
deadline = time.monotonic() + 30
while extra(1)["xids"] < 2 and time.monotonic() < deadline:
    time.sleep(0.02)
answer([before, extra(0), extra(1)])
"""
    before, first, second = ask("speed 20\n0 1 xid 13\n60 1 xid 79\n61 1 xid 0\n62 1 xid 48\n", program, gpus=2)
    assert before == [0, 0], "an error from before is in the log of the kernel only"
    assert (first["xid"], first["xids"]) == (0, 0)
    assert (second["xid"], second["xids"]) == (48, 2)


def test_a_driver_without_events_leaves_xid_errors_unknown(ask):
    program = """
import pynvml
def refuse():
    raise pynvml.NVMLError_NotSupported()
pynvml.nvmlEventSetCreate = refuse
answer(extra())
"""
    assert "xid" not in ask("freeze 1\n", program)


# -- processes

MANY = "freeze 1\n0 0 util 80\n" + "".join(f"0 0 process {pid} {pid / 100}\n" for pid in range(1000, 1400))
LIST = "answer([[p.pid, p.memory_mib, p.kind] for p in source.processes(0)])"


def test_a_list_of_400_processes_is_complete(ask):
    found = ask(MANY, LIST)
    assert [pid for pid, _, _ in found] == list(range(1000, 1400))
    assert {kind for *_, kind in found} == {"C"}
    assert found[7][1] == pytest.approx(10.07, abs=1e-3)


@pytest.mark.parametrize("missing", [["_v3"], ["_v3", "_v2"]])
def test_older_drivers_list_the_same_processes(ask, missing):
    hide = f"""
class Older:
    def __init__(self, library):
        self._library = library
    def __getattr__(self, name):
        if any(name == "nvmlDeviceGetComputeRunningProcesses" + version for version in {missing}):
            raise AttributeError(name)
        return getattr(self._library, name)
source._pynvml.nvmlLib = Older(source._pynvml.nvmlLib)
"""
    assert ask(MANY, hide + LIST) == ask(MANY, LIST)


def test_a_process_that_starts_between_two_calls_is_in_the_list():
    """The driver asks for more room at each try."""
    from kmatrix.gpu.nvml.processes import processes_on

    class Growing:
        def __init__(self):
            self.pids = list(range(1, 70))

        def nvmlDeviceGetComputeRunningProcesses_v3(self, _handle, count, buffer):  # noqa: N802 (a name of NVML)
            import ctypes
            import struct

            room, self.pids = count._obj.value, [*self.pids, len(self.pids) + 1]
            count._obj.value = len(self.pids)
            if room < len(self.pids):
                return 7
            data = b"".join(struct.pack("<I4xQII", pid, 2**20, 2**32 - 1, 2**32 - 1) for pid in self.pids)
            ctypes.memmove(buffer, data, len(data))
            return 0

    assert len(processes_on(Growing(), None)) == 71


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
    assert [(p.pid, p.kind, p.memory_mib, p.instance) for p in found] == [
        (5, "C", None, 3),
        (6, "X", None, 3),
        (7, "G", None, 3),
    ]


def test_the_share_of_each_process_is_the_newest(ask):
    program = "answer([[pid, s.sm, s.memory] for pid, s in source.process_shares(0).items()])"
    found = ask("freeze 1\n0 0 util 80\n0 0 memutil 40\n0 0 process 11 100\n0 0 process 12 100\n", program)
    assert found == [[11, 40, 20], [12, 40, 20]]
    assert ask("freeze 1\n", program) == []


def test_a_lost_gpu_has_neither_processes_nor_metrics(ask):
    program = "source.read([0.0] * 100)\nanswer([len(source.processes(0)), source.process_shares(0), extra(0)])"
    assert ask("0 0 process 11 100\n0 0 all !lost\n", program) == [0, {}, {"xid_counts": {}}]


# -- MIG

SLICED = "freeze 1\ngpus 2\n0 * mem 11514\nmig 0 1g.10gb:9728 2g.20gb:19968\n"


def test_the_instances_of_a_divided_gpu_have_names_memory_and_uuids(ask):
    program = """
from kmatrix.gpu.nvml.facts import device_facts
facts = [device_facts(source, gpu) for gpu in (0, 1)]
answer([[asdict(part) for part in one.instances] for one in facts]
       + [one.mig for one in facts] + [[device.slices for device in source.devices]])
"""
    first, second, divided, whole, uuids = ask(SLICED, program, gpus=2)
    assert (divided, whole, second) == (True, False, [])
    assert [part["name"] for part in first] == [
        "NVIDIA A10G (simulated) MIG 1g.10gb",
        "NVIDIA A10G (simulated) MIG 2g.20gb",
    ]
    assert [(part["instance"], part["memory_used"], part["memory_total"]) for part in first] == [
        (1, 4864, 9728),
        (2, 9984, 19968),
    ]
    assert uuids == [[part["uuid"] for part in first], []]
    assert all(uuid.startswith("MIG-") for uuid in uuids[0])


def test_the_screen_shows_the_instances_below_their_gpu_and_only_visible_ones_by_name(ask):
    program = """
from kmatrix.gputop.feeds import LiveFeed
from kmatrix.gputop.loop import Session
from kmatrix.gputop.terminal.screen import plain, render
feed = LiveFeed()
session = Session(feed=feed, visible=source.devices[0].slices[1])
session.poll()
text = plain(render(session.view(), width=120, height=40))
session.press("v")
only = plain(render(session.view(), width=120, height=40))
answer([text, only])
"""
    text, only = ask(SLICED, program, gpus=2)
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("0 "))
    assert lines[at + 1].split()[:4] == ["MIG", "1g.10gb", "instance", "1"]
    assert "mem 9.8 of 19.5 GiB" in lines[at + 2]
    assert lines[at + 3].startswith("1 ")
    assert not any(line.startswith("1 ") for line in only.splitlines())
    assert "only the GPUs of CUDA_VISIBLE_DEVICES=MIG-" in only
