"""Scripts that start a run on several nodes without a scheduler."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from kmatrix.cli.running.by_hand import script_of
from kmatrix.records.paths import ROOT, RunDir
from kmatrix.status.state import RunPlan

ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "eth0"}
LAUNCHER = """#!/usr/bin/env bash
echo "$OMP_NUM_THREADS $GLOO_SOCKET_IFNAME [$CUDA_VISIBLE_DEVICES] $PWD"
printf '<%s>' "$@"
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a function that runs the script of a run with two ranks on each of two nodes; it returns the process."""
    launcher = tmp_path / "python of $HOME"
    launcher.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    run = RunDir(tmp_path / "a run; of $HOME")
    run.path.mkdir()

    def start(*arguments, cuda=False, launched=LAUNCHER):
        launcher.write_text(launched)
        size = {"ranks": 4, "nodes": 2, "cpu_threads": 3, "cuda": cuda}
        plan = RunPlan(name=run.name, run_id="x", dir=run, environment=ENVIRONMENT, **size)
        file = tmp_path / "run.sh"
        file.write_text(script_of(plan, file.name))
        command = ["bash", str(file), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True)

    start.run = run
    return start


def test_a_script_starts_the_ranks_of_its_node(script):
    done = script("1", "hostA", "--attempt", "2", "--resume", "auto")
    first, words = done.stdout.split("\n")
    assert (done.returncode, first) == (0, f"3 eth0 [] {ROOT}")
    assert words.strip("<>").split("><") == [
        *("-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--node-rank=1"),
        *("--master-addr=hostA", "--master-port=29500", "--rdzv-conf=timeout=900", "-m", "gpt2.train"),
        *(str(script.run.path), "--attempt", "1", "--attempt", "2", "--resume", "auto"),
    ]
    assert not script.run.output_log.exists()


def test_the_script_of_node_0_writes_the_log_and_leaves_the_choice_of_gpus_to_the_user(script):
    done = script("0", "hostA", cuda=True)
    assert "3 eth0 [3]" in done.stdout
    assert script.run.output_log.read_text() == done.stdout


def test_the_log_outlives_an_interrupt_of_the_terminal(script):
    log = shlex.quote(str(script.run.output_log))
    ready = f"until [ -e {log} ]; do sleep 0.01; done"
    done = script("0", "hostA", launched=f"#!/usr/bin/env bash\ntrap 'echo saved; exit' INT\n{ready}\nkill -INT 0\n")
    assert (done.stdout, script.run.output_log.read_text()) == ("saved\n", "saved\n")


@pytest.mark.parametrize("node", ["2", "-1", "x", "01"])
def test_a_script_refuses_a_node_that_the_run_does_not_have(script, node):
    result = script(node, "host-0")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"error: NODE is {node}, expected 0 to 1\n"


@pytest.mark.parametrize(("arguments", "message"), [((), "NODE, from 0 to 1"), (("0",), "HOST, the name or address")])
def test_a_script_without_its_arguments_says_what_is_missing(script, arguments, message):
    done = script(*arguments)
    assert done.returncode
    assert message in done.stderr
