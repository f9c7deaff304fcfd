"""A run over several nodes: the same numbers as on one, the machines of all ranks, and folders that all nodes see."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from factories import ROOT, environment, make_data, make_run, train, train_config, train_fields
from gpt2 import dist
from gpt2.log import RunLog
from kmatrix.errors import LaunchError
from kmatrix.records.attempts import read
from kmatrix.records.files import read_json, write_json
from kmatrix.records.matrix import make_files
from kmatrix.records.paths import RunDir
from kmatrix.records.ranks import read_ranks
from recordings import read_jsonl

PRESENT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}


@pytest.mark.process
def test_two_nodes_train_as_two_ranks_on_one_node_do_bit_for_bit(tmp_path):
    common = {"num_gpus": 2, "batch_size": 2, "max_iters": 8, "data_path": tmp_path / "data"}
    one = make_run(tmp_path, "one", **common)
    two = make_run(tmp_path, "two", num_nodes=2, **common)
    for run, program in ((one, ("-m", "gpt2.train")), (two, ("tests/support/rank_per_node.py",))):
        done = train(run, program=program)
        assert done.returncode == 0, done.stdout + done.stderr
    losses = [[line["train/loss"] for line in read_jsonl(run.metrics) if "train/loss" in line] for run in (one, two)]
    assert len(losses[0]) == 8
    assert losses[0] == losses[1]
    results = [read_json(run.result) for run in (one, two)]
    assert results[0]["final_val_loss"] == results[1]["final_val_loss"]
    assert (results[1]["hosts"], len(results[1]["devices"])) == ([socket.gethostname()] * 2, 2)
    assert [state.rank for state in read_ranks(two, 1)] == [0, 1]


SSH = """#!/bin/sh
for last in "$@"; do :; done
exec sh -c "$last"
"""


@pytest.mark.nightly
def test_two_nodes_by_ssh_train_as_two_ranks_on_one_node_and_as_torchrun_does_bit_for_bit(tmp_path):
    matrix = tmp_path / "m"
    common = train_fields(tmp_path / "data", make_data(tmp_path / "data"), num_gpus=2, batch_size=2, max_iters=8)
    plan = [{"name": name, "run_id": "0123456789", "train": {}} for name in ("one", "two", "hand")]
    plan[1]["train"] = {"num_nodes": 2}
    write_json(matrix / "matrix.json", {"name": "m", "common": {"train": common}, "runs": plan})
    (matrix / "config.txt").touch()
    make_files(matrix, "hand")
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    on_two = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KMATRIX_HOSTS": "localhost,b"}
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "gpt2.train"]

    for name, words, variables in (
        ("one", ["kmatrix", "run"], {}),
        ("two", ["kmatrix", "run"], on_two),
        ("hand", torchrun, {}),
    ):
        command = [sys.executable, "-m", *words, str(matrix / name)]
        done = subprocess.run(command, env=environment() | variables, cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, done

    runs = [RunDir(matrix / name) for name in ("one", "two", "hand")]
    lines = [[line["train/loss"] for line in read_jsonl(run.metrics) if "train/loss" in line] for run in runs]
    assert len(lines[0]) == 8
    assert lines[0] == lines[1] == lines[2]
    results = [read_json(run.result) for run in runs]
    assert len({result["final_val_loss"] for result in results}) == 1
    assert [len(result["hosts"]) for result in results] == [2, 2, 2]
    ended = read(matrix / "two", 1)
    assert (ended.nodes, sorted(one.rank for one in ended.end.exits), ended.end.kind) == (2, [0, 1], "finished")
    assert [state.rank for state in read_ranks(runs[1], 1)] == [0, 1]


@pytest.mark.parametrize(
    "variables", [{"LOCAL_WORLD_SIZE": "2"}, {"RANK": "0", "GROUP_RANK": "1"}, {"WORLD_SIZE": "4"}]
)
def test_other_nodes_than_planned_are_refused(monkeypatch, variables):
    for name, text in {**PRESENT, **variables}.items():
        monkeypatch.setenv(name, text)

    with pytest.raises(LaunchError, match="the run asks for 2 ranks, 1 on each of 2 nodes"):
        dist.start(train_config(num_gpus=2, num_nodes=2))


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, "phases.jsonl"), (1, None), (2, "nodes/1/phases.jsonl"), (3, None), (4, None)]
)
def test_the_first_rank_of_each_node_writes_the_phases_of_its_node(tmp_path, monkeypatch, rank, expected):
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name, value in zip(names, (rank, rank % 2, rank // 2, 6, 2), strict=True):
        monkeypatch.setenv(name, str(value))
    run = RunDir(tmp_path)
    (tmp_path / "nodes" / "1").mkdir(parents=True)
    log = RunLog(run, "id", 1, main=rank == 0)

    with log.phase("set-up"):
        pass

    written = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("phases.jsonl")]
    assert written == ([expected] if expected else [])
