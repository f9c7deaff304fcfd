"""A run over several nodes: the same numbers as on one, the machines of all ranks, and folders that all nodes see."""

from __future__ import annotations

import itertools
import socket
import threading
import time

import pytest
import torch

from factories import make_run, train, train_config
from gpt2 import dist, failure
from gpt2.checkpoint import shared
from gpt2.log import RunLog
from gpt2.machine import check_alike, code_of_trainer
from gpt2.train import phases_of_node
from kmatrix.errors import LaunchError
from kmatrix.records.files import read_json, read_jsonl, write_json
from kmatrix.records.lock import this_process
from kmatrix.records.paths import RunDir
from waiting import wait_until

pytestmark = pytest.mark.process
PRESENT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}


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
    assert {read_json(two.rank_state(rank))["counter"] > 0 for rank in (0, 1)} == {True}
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


def test_a_folder_that_all_nodes_share_is_accepted_and_left_as_it_was(monkeypatch, tmp_path):
    assert check_on_two_nodes(monkeypatch, [tmp_path, tmp_path], 20) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_on_a_disk_of_one_node_is_refused_on_every_rank(monkeypatch, tmp_path):
    (tmp_path / "own").mkdir()

    errors = check_on_two_nodes(monkeypatch, [tmp_path / "shared", tmp_path / "own"], 0.05)

    assert sorted(errors) == [0, 1]
    assert "does not see the files that the other nodes write" in errors[0].what
    assert "set RESULTS_DIR" in errors[1].hint
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_folder_whose_new_files_appear_late_is_accepted(monkeypatch, tmp_path):
    asked = []

    def has(folder, name):
        asked.append(name)
        return len(asked) > 3

    monkeypatch.setattr(shared, "_has", has)
    assert check_on_two_nodes(monkeypatch, [tmp_path, tmp_path], 20) == {}
    assert len(asked) > 3


def test_one_node_needs_no_shared_storage(tmp_path):
    world = dist.World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
    shared.check_shared([("RESULTS_DIR", tmp_path / "missing")], world)
    assert not (tmp_path / "missing").exists()


# Hanging ranks on other hosts


def write_state(run, rank, counter, *, host="n2", at=0.0):
    process = this_process()
    about = {"attempt": 1, "pid": process.pid, "host": host, "pid_started": 1, "boot_id": "b", "time": at}
    write_json(run.rank_state(rank), {**about, "counter": counter, "step": 3, "work": "step", "place": "forward"})


@pytest.mark.parametrize("clock", [-86400.0, 0.0, 86400.0], ids=["a day slow", "equal", "a day fast"])
def test_a_rank_on_another_host_runs_if_its_counter_advances_whatever_its_clock_says(tmp_path, clock):
    run = RunDir(tmp_path)
    write_state(run, 1, 7, at=time.time() + clock)
    before = failure._state(run, 1, 1)
    assert failure._why_stuck(before, before) == "its process does not run"

    write_state(run, 1, 8, at=time.time() + clock)

    assert failure._why_stuck(failure._state(run, 1, 1), before) == ""


@pytest.mark.nightly
def test_a_silent_rank_on_another_host_is_reported_when_a_run_stalls(tmp_path, monkeypatch):
    for name in ("TICK_S", "WAIT_S"):
        monkeypatch.setattr(failure, name, 0.05)
    monkeypatch.setattr(failure, "SILENT_S", 0.3)
    run, reports, read, looks = RunDir(tmp_path), [], failure._state, itertools.count(1)
    write_state(run, 1, 1)

    def state_of(run, rank, attempt):
        if rank == 2:  # it writes a state between two looks, however busy this machine is
            write_state(run, 2, next(looks), at=1.0)
        return read(run, rank, attempt)

    monkeypatch.setattr(failure, "_state", state_of)
    log = RunLog(run, "id", 1, main=True)
    watchdog = failure.Watchdog(log, rank=0, size=3, stalled=reports.append)
    watchdog.begin(factor=0.001, floor_s=0)
    watchdog.work(failure.STEP, 3)
    watchdog.work(failure.STEP, 3)
    wait_until(lambda: reports)
    watchdog.end()

    assert "rank 1 is late, last seen in forward of step 3 (its process does not run)" in reports[0]
    assert reports[0].endswith("rank 2 is in forward of step 3")


def test_the_error_of_a_rank_on_another_host_is_named_with_the_host(tmp_path):
    run = RunDir(tmp_path)
    write_json(run.rank_error(1), {"rank": 1, "attempt": 1, "time": 5.0, "kind": "data", "reason": "why", "host": "n2"})
    log = RunLog(run, "id", 1, main=True)

    failure.record(log, 0, "error", "Connection closed by peer")

    assert read_json(run.result)["reason"] == "rank 1 on n2: why"
    assert run.events.exists()


@pytest.mark.parametrize(("rank", "expected"), [(0, "phases.jsonl"), (1, None), (2, "nodes/1/phases.jsonl"), (3, None)])
def test_the_first_rank_of_each_node_writes_the_phases_of_its_node(tmp_path, monkeypatch, rank, expected):
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    for name, value in zip(names, (rank, rank % 2, rank // 2, 4, 2), strict=True):
        monkeypatch.setenv(name, str(value))
    run = RunDir(tmp_path)
    (tmp_path / "nodes" / "1").mkdir(parents=True)
    log = RunLog(run, "id", 1, main=rank == 0, phases=phases_of_node(run))

    log.end_phase("set-up", (time.time() - 20.0, time.monotonic() - 20.0))

    written = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("phases.jsonl")]
    assert written == ([expected] if expected else [])


def test_a_node_without_a_folder_writes_no_phases(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUP_RANK", "1")  # torchrun was started by hand: nothing is recorded there
    assert phases_of_node(RunDir(tmp_path)) is None


def test_nodes_with_other_code_or_another_torch_are_refused_with_their_hosts(tmp_path):
    (tmp_path / "model.py").write_text("LAYERS = 2\n")
    before = code_of_trainer(tmp_path)
    assert before == code_of_trainer(tmp_path)
    (tmp_path / "model.py").write_text("LAYERS = 3\n")
    here = {"host": "n1", "code": before, "torch": "2.13.0"}
    check_alike([here, here, {**here, "host": "n2"}])
    check_alike([{"host": "n1"}])
    with pytest.raises(LaunchError, match="n1 and n2 have different trainers"):
        check_alike([here, here, {**here, "host": "n2", "code": code_of_trainer(tmp_path)}])
    with pytest.raises(LaunchError, match="n1 and n2 have different versions of PyTorch") as raised:
        check_alike([here, {**here, "host": "n2", "torch": "2.12.0"}])
    assert "2.13.0 and 2.12.0" in raised.value.why
