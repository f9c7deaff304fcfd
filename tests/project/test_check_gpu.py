"""`make check-gpu` without a GPU: one line about what is missing, or all its tests with the CPU in the GPU's place."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest

import check_gpu
from check_gpu import CPU, REFUSED, arguments, missing
from factories import ROOT
from kmatrix.gpu.nvml.detect import Detected, Gpu

H100 = Gpu(index=0, name="NVIDIA H100 80GB HBM3", uuid="GPU-1", memory_total=81_559)
MIG = "GPU 0 (NVIDIA A100) is ignored: MIG mode is not supported"


def refusal(capsys, monkeypatch, detected):
    monkeypatch.setattr(check_gpu, "detect", lambda: detected)
    assert check_gpu.main([]) == REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("check-gpu: no GPU: ")
    return line


def test_without_a_driver_one_line_says_what_is_missing_and_what_to_do(capsys, monkeypatch):
    line = refusal(capsys, monkeypatch, Detected())
    assert "no NVIDIA driver, or no GPU" in line
    assert "make check-gpu ON=cpu" in line


def test_a_gpu_in_mig_mode_is_named(capsys, monkeypatch):
    assert MIG in refusal(capsys, monkeypatch, Detected(notes=(MIG,)))


def test_a_build_of_pytorch_without_cuda_is_named(capsys, monkeypatch):
    monkeypatch.setattr("torch.version.cuda", None)
    line = refusal(capsys, monkeypatch, Detected(gpus=(H100,)))
    assert "is a build without CUDA" in line
    assert H100.name in line


def test_a_build_with_cuda_that_cannot_use_the_gpu_points_to_the_doctor(monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "make doctor" in missing(Detected(gpus=(H100,)))


def test_a_usable_gpu_lacks_nothing(monkeypatch):
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert missing(Detected(gpus=(H100,))) == ""


def test_another_device_is_refused(capsys):
    assert check_gpu.main(["tpu"]) == REFUSED
    assert "unknown ON=tpu" in capsys.readouterr().err


def test_all_tests_run_whatever_fails():
    assert "-x" not in arguments(CPU, [])
    assert "--maxfail=0" in arguments(CPU, [])


def started(*more):
    path = os.pathsep.join([str(ROOT / "lib"), str(ROOT)])
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.Popen(
        [sys.executable, "tests/support/check_gpu.py", CPU, *more],
        cwd=ROOT,
        env=environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.nightly
def test_ctrl_c_ends_with_what_has_run():
    process = started("-k", "test_a_run_ends_with_its_reason")
    try:
        before = ""
        while not re.search(r"PASSED.*\n.*::", before):  # one test has ended, and the next one has begun
            before += (letter := process.stdout.read(1))
            assert letter, before
        os.killpg(process.pid, signal.SIGINT)
        after, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode not in (0, None), before + after
    assert "1 passed" in after
    assert "Traceback" not in before + after
