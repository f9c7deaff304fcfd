"""Variables of network and runtime: checked when they are set, recorded in run.json, and given to the trainer alone."""

from __future__ import annotations

import pytest

from kmatrix.config import environment, environment_warnings
from kmatrix.records.files import write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import COLLECTIVE_TIMEOUT, NETWORK_VARIABLES, read_run_file
from programs import Program

DRY = "test-matrix-dry-run"
VALID = [
    *("NCCL_SOCKET_IFNAME=eth0", "NCCL_SOCKET_IFNAME==eth0,ib0", "NCCL_SOCKET_IFNAME=^docker,lo"),
    *("GLOO_SOCKET_IFNAME=enp3s0f0.100", "NCCL_IB_DISABLE=1", "NCCL_BUFFSIZE=8388608", "NCCL_MIN_NCHANNELS=4"),
    *("NCCL_NSOCKS_PERTHREAD=4", "NCCL_SOCKET_NTHREADS=2", "NCCL_DEBUG=INFO", "CUDA_DEVICE_MAX_CONNECTIONS=8"),
    *("PYTORCH_ALLOC_CONF=expandable_segments:True,max_split_size_mb:512", "NCCL_P2P_DISABLE=0"),
    "COLLECTIVE_TIMEOUT=3600",
]
INVALID = [
    ("NCCL_SOCKET_IFNAME=eth 0", "expected network interfaces"),
    ("NCCL_SOCKET_IFNAME=$(reboot)", "expected network interfaces"),
    ("GLOO_SOCKET_IFNAME=^eth0", "expected names of network interfaces, such as eth0"),
    ("GLOO_SOCKET_IFNAME=averyveryverylongname", "expected names of network interfaces"),
    ("NCCL_BUFFSIZE=4M", "expected an integer in [4096, 1073741824], or nothing"),
    ("NCCL_SOCKET_NTHREADS=17", "expected an integer in [1, 16], or nothing"),
    ("NCCL_NSOCKS_PERTHREAD=02", "expected an integer"),
    ("NCCL_DEBUG=LOUD", "expected one of nothing, VERSION, WARN, INFO, TRACE"),
    ("NCCL_IB_DISABLE=yes", "expected one of nothing, 0, 1"),
    ("PYTORCH_ALLOC_CONF=expandable_segments", "expected options such as expandable_segments:True"),
    ("COLLECTIVE_TIMEOUT=5", "out of range: [120, 86400]"),
]


@pytest.fixture
def program(tmp_path):
    found = Program(tmp_path)
    found.check("defconfig-gpt2-cpu-quick", "OPTIMIZER=adamw", "NUM_GPUS=1")
    return found


@pytest.mark.parametrize("argument", VALID)
def test_a_valid_value_is_accepted_and_does_not_change_the_id(program, argument):
    name, _, text = argument.partition("=")
    (planned,) = program.plan(argument).runs

    assert planned.run.run_id == "d4a921593f"
    name = COLLECTIVE_TIMEOUT if name == "COLLECTIVE_TIMEOUT" else name
    assert environment(planned.values.texts) == {name: text}


@pytest.mark.parametrize(("argument", "message"), INVALID)
def test_an_invalid_value_is_refused(program, argument, message):
    assert message in program.refused(DRY, argument)


def test_nothing_is_set_by_default(program):
    (planned,) = program.plan().runs
    assert environment(planned.values.texts) == {}


def test_every_variable_is_a_symbol_that_cannot_change_a_result(program):
    tree = program.plan().tree
    assert set(NETWORK_VARIABLES) <= tree.neutral
    assert set(NETWORK_VARIABLES) <= tree.machine


def test_settings_that_slow_a_run_down_give_a_warning(program):
    assert environment_warnings({"NCCL_P2P_DISABLE": "0"}) == []
    (warning,) = environment_warnings({"NCCL_SOCKET_NTHREADS": "16", "NCCL_NSOCKS_PERTHREAD": "5"})
    assert "16" in warning
    out = program.check(DRY, "NCCL_P2P_DISABLE=1")
    assert "NCCL_P2P_DISABLE=1 slows down the GPUs of each node" in out.out + out.err


def test_only_known_variables_with_plain_values_are_taken_from_a_foreign_run(tmp_path):
    run = RunDir(tmp_path)
    foreign = {"LD_PRELOAD": "/tmp/evil.so", "NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "a\nPATH=b", "PATH": "x"}
    write_json(run.run_json, {"run_id": "0123456789", "environment": foreign})

    assert read_run_file(run).environment == {"NCCL_DEBUG": "INFO"}
