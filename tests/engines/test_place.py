"""Where a process is, by its environment, and what it may do there."""

from __future__ import annotations

import os
import sys
from subprocess import CompletedProcess

import pytest

from kmatrix.engines import place
from kmatrix.engines.place import Here, Hosts, SlurmTask, place_of
from kmatrix.errors import LaunchError
from waiting import wait_until
from world import WorldClock, replaced_kernel

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
SLURM = {"SLURM_JOB_ID": "17", "KMATRIX_JOB": "km-1-2", "SLURM_JOB_NUM_NODES": "3", "KMATRIX_NOTICE_S": "300"}
ARRAY = SLURM | {"SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "4", "SLURM_PROCID": "1"}
POD = {"KMATRIX_ADDRESS": "10.0.0.7", "KMATRIX_JOB": "km-1-2", "JOB_COMPLETION_INDEX": "5", "KMATRIX_GRACE": "120"}


@pytest.mark.parametrize(
    ("environment", "node", "kind", "expected"),
    [
        ({}, "", Here, {"job": "", "node": 0, "nodes": 1, "address": "", "pulse_s": 1, "replaces_nodes": False}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,MIG-b"}, "", Here, {"gpus": ("GPU-a", "MIG-b")}),
        ({"SLURM_JOB_ID": "17"}, "", Here, {"job": ""}),  # a shell of salloc
        (SLURM, "", SlurmTask, {"job": "17", "node": 0, "nodes": 3, "pulse_s": 10}),
        (ARRAY, "", SlurmTask, {"job": "12_4", "node": 0}),  # the number alone may be that of the array
        (ARRAY, "@", SlurmTask, {"job": "12_4", "node": 2}),
        (POD, "", Here, {"job": "km-1-2/5", "node": 0, "nodes": 1, "address": "", "replaces_nodes": True}),
        (POD | {"KMATRIX_NODES": "8"}, "", Here, {"job": "km-1-2", "node": 5, "nodes": 8, "address": "10.0.0.7"}),
        ({"KMATRIX_HOSTS": "me@a,b"}, "", Hosts, {"node": 0, "nodes": 2, "address": "a", "hosts": ("me@a", "b")}),
        ({"KMATRIX_HOSTS": "a"}, "", Here, {"nodes": 1, "address": ""}),
        ({}, "1", Here, {"node": 1, "by_ssh": True, "pulse_s": 10}),
    ],
)
def test_the_environment_tells_the_place(environment, node, kind, expected):
    found = place_of(NO_GPU | environment, node)
    assert (type(found), {name: getattr(found, name) for name in expected}) == (kind, expected)


@pytest.mark.parametrize(("environment", "after"), [({}, (30, 30)), (SLURM, (25, 280)), (POD, (110, 110))])
def test_a_run_has_the_time_to_save_that_its_user_has_asked_for(environment, after):
    found = place_of(NO_GPU | environment)
    assert [found.grace_of(name) for name in ("SIGTERM", "", "SIGUSR1")] == [after[0], *after]


@pytest.mark.parametrize("case", [(3600, 3240, "time limit"), (3600, 60, "preempted"), (0, 60, "time limit")])
def test_a_notice_near_the_time_limit_is_because_of_it(case):
    with replaced_kernel():
        now = WorldClock()
        found = place_of(NO_GPU | SLURM | {"KMATRIX_LIMIT_S": str(case[0])})
        found.began = now.monotonic()
        now.sleep(case[1])
        assert [found.kind_of(name) for name in ("SIGUSR1", "SIGTERM", "SIGINT")] == [case[2], "signal", "signal"]


@pytest.mark.parametrize("answer", [(0, "", 0), (1, "Job is pending execution", 0), (1, "Access denied", 143)])
def test_a_job_of_slurm_that_starts_again_ends_well(answer, monkeypatch, capsys):
    monkeypatch.setattr(place, "run", lambda words, **_: CompletedProcess(words, answer[0], "", answer[1]))
    assert place_of(NO_GPU | ARRAY).again() == answer[2]
    assert ("`scontrol requeue 12_4` failed" in capsys.readouterr().out) == (answer[2] == 143)


def test_srun_starts_the_other_nodes_once_and_too_few_are_refused(monkeypatch):
    monkeypatch.setattr(place, "Popen", lambda words, **_: words)
    (words,) = place_of(NO_GPU | SLURM).start_followers(["kmatrix", "run"], 3)
    assert (words[0], words[1], words[-3:]) == ("srun", "--nodes=2", ["kmatrix", "run", "@"])
    assert place_of(NO_GPU | SLURM).start_followers(["x"], 1) == []
    with pytest.raises(LaunchError, match=r"needs 2 nodes, there are 1"):
        place_of(NO_GPU).start_followers(["x"], 2)
    with pytest.raises(LaunchError, match=r"-oProxyCommand=x"):
        place_of(NO_GPU | {"KMATRIX_HOSTS": "a,-oProxyCommand=x"})


@pytest.mark.process
def test_ssh_starts_a_follower_that_ends_with_its_leader(tmp_path, monkeypatch):
    """What a user has typed reaches no shell of the other host as a command."""
    ssh, told = tmp_path / "ssh", tmp_path / "told"
    ssh.write_text('#!/bin/sh\nwhile [ "$1" = -o ]; do shift 2; done\nhost=$1; shift\nHOST=$host exec sh -c "$*"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    odd = "a b; touch $(echo x) 'q'"
    text = f"import os, sys, time; open({str(told)!r}, 'w').write(repr([os.environ['HOST'], *sys.argv[1:]])); "
    text += "from kmatrix.engines.place import place_of; p = place_of({'CUDA_VISIBLE_DEVICES': ''}, sys.argv[-1])\n"
    text += "while not p.is_orphan(): time.sleep(0.02)"
    (one,) = place_of(NO_GPU | {"KMATRIX_HOSTS": "a,me@b"}).start_followers([sys.executable, "-c", text, odd], 2)
    assert wait_until(told.read_text) == repr(["me@b", odd, "1"])
    assert one.poll() is None
    one.stdin.close()  # as the end of this process does
    assert one.wait(60) == 0
