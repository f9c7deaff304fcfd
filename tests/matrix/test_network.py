"""Variables of the trainer: checked when they are set, recorded in run.json, and given to the trainer alone."""

from __future__ import annotations

import pytest

from kmatrix.config import environment
from kmatrix.records.files import write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import read_run_file
from programs import Program


@pytest.fixture
def program(tmp_path):
    found = Program(tmp_path)
    found.check("defconfig-gpt2-cpu-quick", "OPTIMIZER=adamw", "NUM_GPUS=1")
    return found


def test_variables_are_given_to_the_trainer_and_do_not_change_the_id(program):
    (plain,) = program.plan().runs
    (planned,) = program.plan("TRAINER_ENV=NCCL_SOCKET_IFNAME==eth0,ib0 PYTORCH_ALLOC_CONF=max_split_size_mb:512").runs
    assert environment(plain.values) == {}
    assert environment(planned.values) == {
        "NCCL_SOCKET_IFNAME": "=eth0,ib0",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:512",
    }
    assert planned.run_id == plain.run_id


@pytest.mark.parametrize(
    "text", ["NCCL_SOCKET_IFNAME", "NCCL_DEBUG=$(reboot)", "LD_PRELOAD=evil.so", "CUDA_VISIBLE_DEVICES=0"]
)
def test_other_variables_are_refused(program, text):
    assert "expected NAME=value" in program.refused("test-matrix-dry-run", f"TRAINER_ENV={text}")


def test_only_known_variables_with_plain_values_are_taken_from_a_foreign_run(tmp_path):
    run = RunDir(tmp_path)
    foreign = {"LD_PRELOAD": "/tmp/evil.so", "NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "a\nPATH=b", "PATH": "x"}
    write_json(run.run_json, {"run_id": "0123456789", "environment": foreign})
    assert read_run_file(run).environment == {"NCCL_DEBUG": "INFO"}
