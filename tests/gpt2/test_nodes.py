"""A run over several nodes: the same numbers as on one, the machines of all ranks, and folders that all nodes see."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch

from factories import make_run, train, train_config
from gpt2 import dist
from gpt2.checkpoint import shared
from gpt2.log import RunLog
from kmatrix.errors import LaunchError
from kmatrix.records.files import read_json, read_jsonl
from kmatrix.records.jobs.ranks import read_ranks
from kmatrix.records.paths import RunDir

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
    used = read_json(two.run_used)
    assert (used["attempt"], used["hosts"], len(used["devices"])) == (1, [socket.gethostname()] * 2, 2)
    assert [state.rank for state in read_ranks(two, 1)] == [0, 1]
    assert not list(two.path.glob(".shared*"))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, "the run asks for 1 ranks on each of 2 nodes"),
        ({"RANK": "0", "GROUP_RANK": "1"}, "the run asks for 1 ranks on each of 2 nodes"),
        ({"WORLD_SIZE": "4"}, "the run asks for 2 ranks and torchrun started 4"),
    ],
)
def test_other_nodes_than_planned_are_refused_with_the_options(monkeypatch, variables, message):
    for name, text in {**PRESENT, **variables}.items():
        monkeypatch.setenv(name, text)

    with pytest.raises(LaunchError, match=message) as error:
        dist.start(train_config(num_gpus=2, num_nodes=2))

    assert "--nnodes=2 --node-rank=<k> --nproc-per-node=1" in error.value.hint


# Shared storage


def world_of(node):
    return dist.World(rank=node, local_rank=0, size=2, device=torch.device("cpu"), node=node, nodes=2)


def check_on_two_nodes(monkeypatch, folders, wait_s):
    """Check a folder from two nodes, here threads, that see it at these paths; return the error of each."""
    barrier, values, errors = threading.Barrier(2), {}, {}

    def gather(world, value):
        values[world.rank] = value
        barrier.wait(20)
        found = [values[0], values[1]]
        barrier.wait(20)
        return found

    def check(node):
        try:
            shared.check_shared([("RESULTS_DIR", folders[node])], world_of(node), wait_s=wait_s)
        except LaunchError as error:
            errors[node] = error

    monkeypatch.setattr(shared, "gather", gather)
    monkeypatch.setattr(shared, "POLL_S", 0.01)
    threads = [threading.Thread(target=check, args=(node,)) for node in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return errors


@pytest.mark.process
def test_a_folder_that_all_nodes_share_is_accepted_and_left_as_it_was(monkeypatch, tmp_path):
    asked, has = [], shared._has

    def late(folder, name):  # new files appear late
        asked.append(name)
        return len(asked) > 3 and has(folder, name)

    monkeypatch.setattr(shared, "_has", late)
    assert check_on_two_nodes(monkeypatch, [tmp_path, tmp_path], 20) == {}
    assert len(asked) > 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_a_folder_on_a_disk_of_one_node_is_refused_on_every_rank(monkeypatch, tmp_path):
    (tmp_path / "own").mkdir()

    errors = check_on_two_nodes(monkeypatch, [tmp_path / "shared", tmp_path / "own"], 0.05)

    assert sorted(errors) == [0, 1]
    assert "does not see the files that the other nodes write" in errors[0].what
    assert "set RESULTS_DIR" in errors[1].hint
    assert list((tmp_path / "shared").iterdir()) == []


def test_one_node_needs_no_shared_storage(tmp_path):
    world = dist.World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
    shared.check_shared([("RESULTS_DIR", tmp_path / "missing")], world)
    assert not (tmp_path / "missing").exists()


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

    log.end_phase("set-up", (time.time() - 20.0, time.monotonic() - 20.0))

    written = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("phases.jsonl")]
    assert written == ([expected] if expected else [])
