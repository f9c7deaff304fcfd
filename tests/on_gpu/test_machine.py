"""The machine: its memory, several runs on its GPUs, their recording, and models that were trained there."""

from __future__ import annotations

import itertools
import re
import shutil
import signal
import statistics
import subprocess
import sys

import pytest
import torch

from factories import ROOT, make_data
from gpt2.inference.restore import restore
from kmatrix.gpu.formats.binary import read_samples
from kmatrix.plan.memory import memory
from kmatrix.records.attempts import read_all
from kmatrix.records.files import read_json
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import TrainConfig
from on_gpu_runs import FAULTS, losses

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
MODELS = {"124m": (12, 12, 768), "350m": (24, 16, 1024)}
QUERY = {"memory_used": "memory.used", "power": "power.draw", "sm_clock": "clocks.sm", "utilization": "utilization.gpu"}


def shape_of(model):
    layers, heads, width = MODELS[model]
    sizes = {"n_layer": layers, "n_head": heads, "n_embd": width, "block_size": 1024, "vocab_multiple": 64}
    return {"model": model, **sizes, "dtype": "bf16", "max_iters": 4, "eval_interval": 4, "eval_samples": 2}


def planned(run, **changes):
    """Return the planned peak of a run in bytes."""
    train = TrainConfig.from_json(read_json(run.run_json)["train"] | changes)
    return memory(train).total


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("model", "batch"), [("124m", 4), ("124m", 16), ("350m", 4)])
@pytest.mark.usefixtures("on_gpu")
def test_the_planned_peak_is_within_10_percent_of_the_measured_one(device, *, tmp_path, model, batch, compiled):
    mode = {"compile": True, "compile_mode": "default"} if compiled else {}
    data = {"data_path": tmp_path / "data", "data_sha256": make_data(tmp_path / "data", train=400_000)}
    run = device.made(tmp_path, **data, **shape_of(model), **mode, batch_size=batch)
    device.train(run)
    assert planned(run) == pytest.approx(read_json(run.result)["peak_memory_mib"] * 2**20, rel=0.10)


def test_a_micro_batch_that_does_not_fit_fails_for_memory_and_a_smaller_one_finishes(device, small, tmp_path):
    """On a GPU it is too large by the plan, so that this also tests the plan. The runner halves it as often."""
    run, fault = {**small, "max_iters": 2, "eval_interval": 2, "eval_samples": 2}, {}
    too_many, fits = 8, 2
    if device.is_gpu:
        total = torch.cuda.get_device_properties(0).total_memory
        run = shape_of("124m") | {"loss_chunk": -1, "max_iters": 2}
        probe = device.made(tmp_path, "probe", **run)
        powers = [2**power for power in range(16)]
        needs = {batch: planned(probe, batch_size=batch, global_batch=batch) for batch in powers}
        too_many = min(batch for batch in powers if needs[batch] > 1.3 * total)
        fits = max(batch for batch in powers if needs[batch] < 0.6 * total)
        run["data_sha256"] = make_data(tmp_path / "data", train=3 * too_many * 1024)
    else:
        fault = {"program": FAULTS, "FAULT": "oom:0:0", "FAULT_FITS": fits}
    made = device.made(tmp_path, **{**run, "batch_size": too_many})
    _, output = device.train(made, ok=False, **fault)
    result = read_json(made.result)
    assert (result["status"], result["kind"]) == ("failed", "oom"), output[-6000:]
    device.train(made, "--resume", "auto", "--micro-batch", str(fits), attempt=2, **fault)
    used = read_json(made.result)["used"]
    assert (used["batch_size"], used["global_batch"]) == (fits, too_many)


def test_runs_of_one_gpu_share_the_machine_and_never_a_gpu(device, tmp_path):
    """One more run than GPUs, by the command that users run. Equal runs have equal losses on each of them."""
    make_data(tmp_path / "data")
    samples = ",".join(str(2 + at) for at in range(device.gpus + 1))  # runs that differ in their evaluations alone
    words = f"""DEVICE={device.kind} NUM_GPUS=1 OPTIMIZER=adamw DATASET=shards TOKENIZER=byte WARMUP_STEPS=1
        CPU_THREADS=1 REUSE=n MODEL=custom N_LAYER=2 N_HEAD=2 N_EMBD=64 BLOCK_SIZE=64 BATCH_SIZE=4 MAX_ITERS=6
        EVAL_INTERVAL=6 LOG_INTERVAL=1 DETERMINISTIC=y GPU_BUSY_MEMORY=0 EVAL_SAMPLES={samples}
        DATA_PATH={tmp_path}/data RESULTS_DIR={tmp_path}/results O={tmp_path}""".split()
    if not device.is_gpu:
        words.remove("GPU_BUSY_MEMORY=0")
    for command in (["olddefconfig", f"O={tmp_path}"], ["test-matrix", *words]):
        program = [sys.executable, "-m", "kmatrix", *command]
        done = subprocess.run(program, cwd=ROOT, env=device.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "results").glob("test_matrix_results_*")
    runs = [RunDir(one.parent) for one in path.glob("*/run.json")]
    assert len(runs) == device.gpus + 1
    assert len({tuple(losses(run)) for run in runs}) == 1
    last = [read_all(run.path)[-1] for run in runs]
    if device.is_gpu:
        used = [tuple(gpu["uuid"] for gpu in read_json(run.result)["gpus"]) for run in runs]
        assert [attempt.gpus for attempt in last] == used
        for uuid in {one for gpus in used for one in gpus}:
            spans = sorted((one.started, one.end.at) for one in last if one.gpus == (uuid,))
            assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.usefixtures("on_gpu")
def test_the_recorder_agrees_with_nvidia_smi_and_with_the_counter_of_energy(device, tmp_path):
    """While the first GPU trains."""
    if (program := shutil.which("nvidia-smi")) is None:  # part of the driver: no package of a distribution has it
        pytest.skip("no nvidia-smi: a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    data = {"data_path": tmp_path / "data", "data_sha256": make_data(tmp_path / "data", train=400_000)}
    busy = device.made(tmp_path, **data, **shape_of("124m") | {"max_iters": 600, "eval_interval": 600}, batch_size=16)
    recording = RunDir(tmp_path / "recording")
    command = [sys.executable, "-m", "kmatrix.gpu.recorder", str(recording.path), "--device", "nvidia"]
    smi = [program, f"--query-gpu=index,{','.join(QUERY.values())}", "--format=csv,noheader,nounits", "--loop-ms=100"]
    recorder = subprocess.Popen(command, cwd=ROOT, env=device.environment)
    watcher = subprocess.Popen(smi, stdout=subprocess.PIPE, text=True)
    device.train(busy)
    for process in (watcher, recorder):
        process.send_signal(signal.SIGTERM)
    printed, _ = watcher.communicate(timeout=60)
    assert recorder.wait(60) == 0
    rows = [
        [float(word) for word in line.split(",")] for line in printed.splitlines() if re.fullmatch(r"[\d., ]+", line)
    ]
    rows = [row for row in rows if len(row) == 1 + len(QUERY)]  # the last line may be cut off
    samples = read_samples(recording.gpu_samples)
    for at, columns in enumerate(samples.columns):
        means = [statistics.fmean(column) for column in list(zip(*(r for r in rows if r[0] == at), strict=True))[1:]]
        tolerances = ({"abs": 500}, {"rel": 0.05}, {"rel": 0.05}, {"abs": 10})  # MiB, W, MHz, percent
        for (name, mean), tolerance in zip(zip(QUERY, means, strict=True), tolerances, strict=True):
            assert statistics.fmean(columns[name]) == pytest.approx(mean, **tolerance), name
        joules = columns["energy_j"][-1] - columns["energy_j"][0]
        seconds = samples.monotonic[-1] - samples.monotonic[0]
        assert joules / seconds == pytest.approx(statistics.fmean(columns["power"]), rel=0.05)


def test_a_trained_model_has_the_logits_and_the_text_of_the_cpu(device, small, tmp_path):
    run = device.made(tmp_path, **{**small, "max_iters": 40, "eval_interval": 20})
    device.train(run)
    checkpoint = max(run.checkpoints.glob("step_*.pt"))
    environment = {**device.environment, "NVIDIA_TF32_OVERRIDE": "0"}  # a rounded product may change the text
    found = []
    for kind in ("cpu", device.kind):
        with torch.no_grad():
            logits, _ = restore(checkpoint, kind).model(torch.arange(32, device=kind)[None])  # (1, 32, V)
        words = ["--prompt", "abcdefgh", "--tokens", "24", "--temperature", "0", "--device", kind]
        command = [sys.executable, "-m", "gpt2.inference.generate", str(checkpoint), *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"on {kind}" in done.stderr
        found.append((logits.float().cpu(), done.stdout))
    assert torch.allclose(found[0][0], found[1][0], atol=2e-2)
    assert found[0][1] == found[1][1]
