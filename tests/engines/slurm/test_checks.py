"""`make doctor` on a cluster: what it has, how it ends jobs, and the storage that its nodes share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kmatrix.doctor import Level
from kmatrix.engines.slurm import checks
from kmatrix.engines.slurm.checks import probe_checks, slurm_checks
from kmatrix.records.paths import ROOT, program_path
from slurm_answers import answer


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(checks, "is_installed", lambda: True)


def found(symbols=None, *, selected=True):
    return {check.name: check for check in slurm_checks(symbols or {}, selected=selected)}


def test_partitions_are_listed_with_their_nodes_and_limits(monkeypatch, installed):
    answer(monkeypatch)

    assert found()["partition main (default)"].message == (
        "2 nodes, 4 x a10g, 16 CPUs, 3.9 GiB; 1 node, 2 x a10g, 16 CPUs, 3.9 GiB; at most 2d00h; jobs may be preempted"
    )


def test_a_short_kill_wait_is_a_warning_with_the_time_to_save(monkeypatch, installed):
    answer(monkeypatch)

    check = found()["KillWait"]

    assert (check.level, check.message) == (Level.WARNING, "30 s: a cancelled run has 25 s to save a checkpoint")


def test_nodes_that_are_down_are_a_warning(monkeypatch, installed):
    answers = answer(monkeypatch)
    nodes = answers.texts["scontrol --oneliner show node"][1].replace("State=IDLE", "State=DOWN*", 1)
    answers.say("scontrol --oneliner show node", nodes)

    assert "1 node down" in found()["partition main (default)"].message


def test_an_unknown_partition_and_a_missing_setup_file_are_broken(monkeypatch, installed, tmp_path):
    answer(monkeypatch)

    checked = found({"SLURM_PARTITION": "gpu", "SLURM_SETUP": str(tmp_path / "gone")})

    assert checked["Slurm"].level is checked["SLURM_SETUP"].level is Level.BROKEN


@pytest.mark.parametrize(("selected", "level"), [(True, Level.BROKEN), (False, Level.OK)])
def test_a_silent_controller_is_broken_only_if_it_is_needed(monkeypatch, installed, selected, level):
    answer(monkeypatch).stop_controller()

    assert found(selected=selected)["Slurm"].level is level


def test_nothing_is_wrong_with_a_cluster_that_is_not_used(monkeypatch, installed):
    answer(monkeypatch)

    assert {check.level for check in found(selected=False).values()} == {Level.OK}
    assert found(selected=False)["KillWait"].message.startswith("30 s: ")


def test_a_machine_without_slurm_has_no_such_checks_unless_it_is_selected(monkeypatch):
    monkeypatch.setattr(checks, "is_installed", lambda: False)

    assert found(selected=False) == {}
    assert found(selected=True)["Slurm"].level is Level.BROKEN


@pytest.mark.process
def test_two_tasks_of_the_probe_find_locks_caches_and_clocks(tmp_path):
    environment = {**os.environ, "PYTHONPATH": program_path(ROOT)}
    command = [sys.executable, "-m", "kmatrix.engines.slurm.probe", str(tmp_path)]
    tasks = [
        subprocess.Popen(command, env={**environment, "SLURM_PROCID": str(task)}, stdout=subprocess.PIPE, text=True)
        for task in (0, 1)
    ]

    lines = [json.loads(task.communicate(timeout=120)[0]) for task in tasks]

    assert [task.returncode for task in tasks] == [0, 0]
    assert lines[1]["excluded"] is True
    assert {check.level for check in probe_checks(lines, tmp_path)} == {Level.OK}


def test_storage_without_locks_and_with_caches_is_described():
    lines = [{"host": "n1", "clock": 0.0}, {"host": "n2", "clock": 9.0, "excluded": False, "lag_s": 30.0}]

    checked = {check.name: check for check in probe_checks(lines, Path("/r"))}

    assert "after 30 s: status may be late" in checked["storage"].message
    assert "do not exclude" in checked["locks"].message
    assert (checked["clocks"].level, checked["clocks"].message) == (Level.WARNING, "n1 and n2 are 9.0 s apart")


def test_a_folder_that_a_node_does_not_see_is_broken():
    (check,) = probe_checks([{"host": "n1"}, {"host": "n2", "error": "locked of the other node"}], Path("/tmp/r"))

    assert check.level is Level.BROKEN
