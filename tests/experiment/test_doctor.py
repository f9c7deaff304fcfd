"""`make doctor` describes this machine correctly, and others from faked values."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from kmatrix.experiment import doctor
from kmatrix.gpu.nvml.detect import Detected, DriverState, Gpu
from programs import ROOT, Program, answer_for_pytorch

GPUS = tuple(Gpu(index=i, name="NVIDIA A10G", uuid=f"GPU-{i}", memory_total=23028) for i in range(3))
SECRET = "hf_thisIsNoKey0123456789"
PROBE_RESULT = {"torch": "2.13.0", "cuda": "12.6", "available": True, "why": "", "bf16": True, "nccl": "2.27.3"}


@pytest.fixture(autouse=True)
def no_probe(monkeypatch):
    answer_for_pytorch(monkeypatch)


def levels(checks):
    return {check.name: check.level for check in checks}


@pytest.mark.process
def test_this_machine_is_described_correctly(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    result = Program(tmp_path).check("doctor")
    assert sys.executable in result.out
    (line,) = (line for line in result.out.splitlines() if line.split()[1] == "cores")
    assert line.split()[2] == str(len(os.sched_getaffinity(0)))
    assert "PyTorch" in result.out
    assert "0 broken" in result.out.splitlines()[-1]
    assert SECRET not in result.out + result.err
    value = json.loads(Program(tmp_path).check("doctor", "JSON=1").out)
    assert value["schema"] == 1
    assert {"name", "level", "message", "hint"} == set(value["checks"][0])
    assert {check["level"] for check in value["checks"]} <= {"OK", "warning"}


def test_an_invalid_configuration_is_reported_with_its_line(tmp_path):
    program = Program(tmp_path)
    program.write("CONFIG_GPT2_SED=1")
    result = program("doctor")
    assert result.status == 1
    assert re.search(r"^broken +configuration ", result.out, re.MULTILINE), result.out
    assert ".config:1" in result.out


def test_a_directory_that_cannot_be_written_is_an_error_and_a_missing_one_is_not_created(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    (check,) = doctor.places({"DATA_DIR": tmp_path / "file" / "data"})
    assert check.level == "broken"
    assert "DATA_DIR=" in check.hint
    (check,) = doctor.places({"DATA_DIR": tmp_path / "a" / "b"})
    assert check.level in ("OK", "warning")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_gpus_used_by_other_processes_give_a_warning(monkeypatch):
    driver = DriverState(version="550.54", cuda="12.4", free_mib={"GPU-0": 22900, "GPU-1": 9000})
    monkeypatch.setattr(doctor, "driver_state", lambda _: driver)
    found = levels(doctor.gpus(Detected(gpus=GPUS)))
    assert found == {"NVIDIA driver": "OK", "GPU 0": "OK", "GPU 1": "warning", "GPU 2": "OK"}  # of the last, unknown


def test_a_machine_without_gpus_is_fine_but_a_driver_that_does_not_respond_gives_a_warning():
    assert levels(doctor.gpus(Detected())) == {"GPUs": "OK"}
    assert levels(doctor.gpus(Detected(notes=("it does not answer",))))["NVIDIA driver"] == "warning"


def test_the_report_of_pytorch_is_compared_with_the_driver():
    for changes, count, name, level in (
        ({}, 2, "PyTorch", "OK"),
        ({}, 2, "NCCL", "OK"),
        ({"nccl": None}, 2, "NCCL", "warning"),
        ({"bf16": False}, 2, "bfloat16", "warning"),
        ({"cuda": None, "available": False}, 2, "PyTorch", "broken"),
        ({"available": False, "why": "driver too old"}, 2, "PyTorch", "broken"),
        ({"cuda": None, "available": False}, 0, "PyTorch", "OK"),
    ):
        assert levels(doctor.torch_checks({**PROBE_RESULT, **changes}, count))[name] == level


@pytest.mark.process
def test_the_probe_prints_one_line_of_json():
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(ROOT / "lib")]))
    completed = subprocess.run(
        [sys.executable, "-m", "gpt2.machine"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert set(json.loads(completed.stdout)) == set(PROBE_RESULT)


def test_a_container_with_less_cpu_time_than_cores_gives_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "QUOTA", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text("50000 100000\n", encoding="ascii")
    assert "limited to 0.5" in doctor.cores().message
    (tmp_path / "cpu.max").write_text("max 100000\n", encoding="ascii")
    assert doctor.cores().level == "OK"


def test_a_machine_without_a_compiler_and_with_little_memory_gives_warnings(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "LEAST_MEMORY", 1 << 60)
    monkeypatch.setattr(doctor, "SHARED", tmp_path / "none")
    found = levels(doctor.machine_checks())
    assert (found["C compiler"], found["memory"], len(found)) == ("warning", "warning", 4)
