"""Recorder, gputop and the choice of GPUs against nvidia-smi; on the CPU, against a scenario of simulated GPUs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from contextlib import contextmanager

import pytest

from factories import ROOT, make_data, make_run
from kmatrix.records.files import read_json
from kmatrix.records.runs import merged_metrics
from kmatrix.simulate.library import build
from kmatrix.simulate.library import environment as simulated
from on_gpu_runs import output_of, script
from skips import require_program
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
    require_program("gcc")
    folder = tmp_path_factory.mktemp("simulated")
    (folder / "test.scn").write_text(SCENARIO.format(pid=os.getpid()))
    del variables["CUDA_VISIBLE_DEVICES"]
    return variables | simulated(build(folder), folder / "test.scn")


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


def test_the_recorder_and_nvidia_smi_agree_on_a_busy_gpu_and_its_energy(device, driver, large, tmp_path):
    """Energy over a minute within 2 %, as mean power: the two do not begin and end in the same millisecond."""
    seconds = 60.0 if device.is_gpu else 2.0
    recording = tmp_path / "recording"
    command = [sys.executable, "-m", "kmatrix.gpu.recorder", str(recording), "--device", "nvidia"]
    with busy(device, large, tmp_path):
        recorder = subprocess.Popen(command, cwd=ROOT, env=driver)
        try:
            wait_until((recording / "gpu_samples.bin").exists, "the recorder has begun", 60)
            expected = smi(device, driver, seconds)
        finally:
            recorder.send_signal(signal.SIGTERM)
            assert recorder.wait(60) == 0
    summary = read_json(recording / "gpu_summary.json")
    found = {gpu["uuid"]: gpu for gpu in summary["gpus"]}
    assert found.keys() == expected.keys()
    for uuid, values in expected.items():
        means = {name: found[uuid][name]["mean"] for name in NAMES}
        assert means["memory_used"] == pytest.approx(values["memory_used"], abs=100)  # MiB
        assert means["power"] == pytest.approx(values["power"], rel=0.05)
        assert means["sm_clock"] == pytest.approx(values["sm_clock"], rel=0.05)
        assert means["utilization"] == pytest.approx(values["utilization"], abs=10)
        watts = found[uuid]["joules"] / (summary["ended"] - summary["started"])
        # The simulated recording is so short that a period of the counter, 0.1 s, is 5 %.
        assert watts == pytest.approx(values["power"], rel=0.02 if device.is_gpu else 0.1)


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


def test_the_record_of_a_run_has_its_gpu_and_the_processors_next_to_it(device, driver, sizes, tmp_path, only_on_gpu):
    run_dir = device.trained(tmp_path, "run", **{**sizes, "max_iters": 2})
    used = read_json(run_dir.run_used)
    if not device.is_gpu:
        assert (used["gpus"], used["numa"]) == ([], [])
    only_on_gpu("a run on the CPU has no GPU and is bound to no NUMA node")
    assert used["gpus"][0]["uuid"] in smi(device, driver)
    (numa,) = used["numa"]
    assert numa["cpus"] or numa["why"]
