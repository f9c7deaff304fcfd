"""Recorder, gputop and the choice of GPUs against nvidia-smi; on the CPU, against a scenario of simulated GPUs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from factories import ROOT, make_data, make_run
from kmatrix.errors import RecordError
from kmatrix.gpu.formats.binary import Recording, read_samples
from kmatrix.records.files import read_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import merged_metrics
from on_gpu_matrices import simulated_driver
from on_gpu_runs import output_of, script
from waiting import wait_until

pytestmark = pytest.mark.gpu
SCENARIO = """
gpus 2
0 * util 90
0 * power 200
0 * mem 9000
0 * smclk 1395
0 0 process {pid} 1000
"""
QUERY = "index,uuid,memory.used,power.draw,clocks.sm,utilization.gpu"
NAMES = ("memory_used", "power", "sm_clock", "utilization")
# What nvidia-smi prints, from the simulated driver: it has no nvidia-smi of its own.
READ = """
import sys, time
import pynvml as n
n.nvmlInit()
gpus = [n.nvmlDeviceGetHandleByIndex(index) for index in range(n.nvmlDeviceGetCount())]
deadline = time.monotonic() + float(sys.argv[1])
while True:
    for index, gpu in enumerate(gpus):
        used, watts = n.nvmlDeviceGetMemoryInfo(gpu).used // 2**20, n.nvmlDeviceGetPowerUsage(gpu) / 1000
        clock, busy = n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_SM), n.nvmlDeviceGetUtilizationRates(gpu).gpu
        print(index, n.nvmlDeviceGetUUID(gpu), used, watts, clock, busy, sep=", ")
    if time.monotonic() > deadline:
        break
"""
COUNTER = """
import time
import pynvml as n
n.nvmlInit()
for index in range(n.nvmlDeviceGetCount()):
    gpu = n.nvmlDeviceGetHandleByIndex(index)
    before = time.monotonic()
    joules = n.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000
    print(n.nvmlDeviceGetUUID(gpu), joules, before, time.monotonic())
"""
CHOOSE = """
import os, sys
from kmatrix.gpu.nvml.detect import detect, usable
chosen = usable(detect(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"), asked=sys.argv[1] or None)
print(",".join(gpu.uuid for gpu in chosen))
"""
PROCESSES = """
from kmatrix.gpu.nvml.source import open_source
source = open_source()
print(*(process.pid for position in range(len(source.devices)) for process in source.processes(position)))
"""
SEEN_BY_PYTORCH = """
import torch
print(",".join(f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())))
"""


@pytest.fixture(scope="module")
def driver(device, tmp_path_factory):
    """Return the environment of a process that sees the GPUs: those of this machine, or two simulated ones."""
    variables = device.environment
    if device.is_gpu:
        return variables
    return simulated_driver(variables, tmp_path_factory.mktemp("simulated"), SCENARIO.format(pid=os.getpid()))


def smi(device, driver, seconds=0.0):
    """Return the GPUs as nvidia-smi prints them, by UUID: the mean of each value over some seconds."""
    if not device.is_gpu:
        text = script(READ, driver, str(seconds))
    else:
        if (program := shutil.which("nvidia-smi")) is None:  # part of the driver: no package of a distribution has it
            pytest.skip("no nvidia-smi: a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility")
        command = [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
        try:
            loop = ["--loop-ms=100"] if seconds else []
            text = subprocess.run(
                [*command, *loop], capture_output=True, text=True, check=True, timeout=seconds or 60
            ).stdout
        except subprocess.TimeoutExpired as end:  # the end of the time in which it was to print
            text = (end.stdout or b"").decode()
    found = {}
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 2 + len(NAMES):  # the last line may be cut off
            found.setdefault(words[1], []).append([float(word) for word in words[2:]])
    means = {uuid: map(statistics.fmean, zip(*rows, strict=True)) for uuid, rows in found.items()}
    return {uuid: dict(zip(NAMES, values, strict=True)) for uuid, values in means.items()}


@contextmanager
def busy(device, large, folder):
    """Keep the first GPU busy with a training run in the block; yield its process. On the CPU nothing is needed."""
    if not device.is_gpu:
        yield None
        return
    data = {"data_path": folder / "data", "data_sha256": make_data(folder / "data", train=400_000)}
    run = {**large, **data, "batch_size": 16, "dtype": "bf16", "max_iters": 1_000_000, "eval_interval": 1_000_000}
    run_dir = make_run(folder, "busy", **device.fields(**run))
    process = device.start(run_dir)
    try:
        wait_until(lambda: len(merged_metrics(run_dir.metrics)) > 30, "the run has a steady speed", 300)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        output_of(process, 120)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A minute of busy GPUs, by the recorder and by what is next to it."""

    summary: dict[str, Any]  # gpu_summary.json
    samples: Recording
    by_smi: dict[str, dict[str, float]]  # UUID -> means
    begin: dict[str, Counter]  # UUID -> the energy counter
    end: dict[str, Counter]


@dataclass(frozen=True, slots=True)
class Counter:
    """The energy counter of a GPU, read at some time between two."""

    joules: float
    before: float  # monotonic seconds
    after: float


def counters(driver):
    """Return the energy counter of each GPU by UUID."""
    lines = [line.split() for line in script(COUNTER, driver).splitlines()]
    return {uuid: Counter(*map(float, numbers)) for uuid, *numbers in lines}


def recorded_at(path):
    """Return the monotonic times of the samples in a file that grows; [] before the first one."""
    with suppress(RecordError, OSError):
        return read_samples(path).monotonic
    return []


@pytest.fixture(scope="module")
def recorded(device, driver, large, tmp_path_factory):
    """Record the GPUs for a minute, on the CPU for two seconds, while the first one trains."""
    folder = tmp_path_factory.mktemp("recorded")
    recording = RunDir(folder / "recording")
    command = [sys.executable, "-m", "kmatrix.gpu.recorder", str(recording.path), "--device", "nvidia"]
    path = recording.gpu_samples
    with busy(device, large, folder):
        recorder = subprocess.Popen(command, cwd=ROOT, env=driver)
        try:
            wait_until(lambda: len(recorded_at(path)), "the recorder has begun", 60)
            begin = counters(driver)
            by_smi = smi(device, driver, 60.0 if device.is_gpu else 2.0)
            end = counters(driver)
            last = max(counter.after for counter in end.values())
            after = lambda: sum(time >= last for time in recorded_at(path))  # noqa: E731
            wait_until(lambda: after() >= 2, "two samples follow the last reading", 60)
        finally:
            recorder.send_signal(signal.SIGTERM)
            assert recorder.wait(60) == 0
    return Recorded(read_json(recording.gpu_summary), read_samples(path), by_smi, begin, end)


def test_the_recorder_and_nvidia_smi_agree_on_a_busy_gpu(recorded):
    found = {gpu["uuid"]: gpu for gpu in recorded.summary["gpus"]}
    assert found.keys() == recorded.by_smi.keys()
    for uuid, values in recorded.by_smi.items():
        means = {name: found[uuid][name]["mean"] for name in NAMES}
        assert means["memory_used"] == pytest.approx(values["memory_used"], abs=100)  # MiB
        assert means["power"] == pytest.approx(values["power"], rel=0.05)
        assert means["sm_clock"] == pytest.approx(values["sm_clock"], rel=0.05)
        assert means["utilization"] == pytest.approx(values["utilization"], abs=10)


def test_the_recorded_energy_is_that_of_the_counter_of_the_driver(device, recorded):
    """Within 2 % over a minute; on the CPU within what is counted between two samples, however long that takes."""
    assert recorded.summary["energy_source"] == "counter"
    times = recorded.samples.monotonic
    for at, gpu in enumerate(recorded.summary["gpus"]):
        joules = recorded.samples.columns[at]["energy_j"]
        begin, end = recorded.begin[gpu["uuid"]], recorded.end[gpu["uuid"]]

        def limits(counter, joules=joules):
            # The counter of a sample is read before the time of that sample is taken, and after that of the one before.
            lower = max(at for at, time in enumerate(times) if time <= counter.before)
            upper = min(at for at, time in enumerate(times) if time >= counter.after) + 1
            return joules[lower], joules[upper]

        (least_before, most_before), (least, most) = limits(begin), limits(end)
        counted = end.joules - begin.joules
        assert counted > 0
        if device.is_gpu:  # whose driver may update the two readings of its counter at different times
            assert (least + most - least_before - most_before) / 2 == pytest.approx(counted, rel=0.02)
        else:
            assert least - most_before - 0.01 <= counted <= most - least_before + 0.01
        assert gpu["joules"] == pytest.approx(joules[-1], abs=0.01)


def test_gputop_shows_the_gpus_and_the_memory_of_nvidia_smi(device, driver, large, tmp_path):
    with busy(device, large, tmp_path):
        command = [sys.executable, "-m", "kmatrix.gputop", "--json"]
        done = subprocess.run(command, cwd=ROOT, env=driver, capture_output=True, text=True, check=False, timeout=120)
        expected = smi(device, driver)
    assert done.returncode == 0, done.stderr
    found = {gpu["uuid"]: gpu for gpu in json.loads(done.stdout)["multi_gpu_data"]}
    assert found.keys() == expected.keys()
    for uuid, values in expected.items():
        assert found[uuid]["memory_used"] == pytest.approx(values["memory_used"], abs=100)


def test_the_process_of_a_run_is_among_those_of_its_gpu(device, driver, large, tmp_path):
    """Not in a container with process numbers of its own: the driver reports those of the host."""
    with busy(device, large, tmp_path) as process:
        found = script(PROCESSES, driver).split()
    assert str(process.pid if process else os.getpid()) in found


@pytest.mark.parametrize("form", ["index", "uuid", "prefix"])
@pytest.mark.parametrize("which", ["CUDA_VISIBLE_DEVICES", "GPUS"])
def test_a_gpu_is_chosen_by_its_index_its_uuid_or_the_start_of_that(device, driver, form, which):
    uuids = list(smi(device, driver))
    wanted = len(uuids) - 1
    starts = (uuids[wanted][:length] for length in range(len("GPU-1"), len(uuids[wanted]) + 1))
    prefix = next(start for start in starts if sum(uuid.startswith(start) for uuid in uuids) == 1)
    text = {"index": str(wanted), "uuid": uuids[wanted], "prefix": prefix}[form]
    visible = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": text}
    free = {name: value for name, value in driver.items() if name != "CUDA_VISIBLE_DEVICES"}
    if which == "GPUS":
        assert script(CHOOSE, free, text).strip() == uuids[wanted]
        return
    assert script(CHOOSE, {**free, **visible}, "").strip() == uuids[wanted]
    if device.is_gpu:  # simulated GPUs have no CUDA that could be asked
        assert script(SEEN_BY_PYTORCH, {**free, **visible}).strip() == uuids[wanted]


def test_the_record_of_a_run_has_its_gpu(device, driver, sizes, tmp_path, only_on_gpu):
    run_dir = device.trained(tmp_path, "run", **{**sizes, "max_iters": 2})
    used = read_json(run_dir.run_used)
    if not device.is_gpu:
        assert used["gpus"] == []
    only_on_gpu("a run on the CPU has no GPU")
    assert used["gpus"][0]["uuid"] in smi(device, driver)
