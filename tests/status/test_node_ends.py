"""How a run over several nodes ended: every node's files count, and no two clocks are compared."""

from __future__ import annotations

import pytest

from kmatrix.records.decode import as_json
from kmatrix.records.files import write_json
from kmatrix.records.jobs.files import NodeFile, RankExit
from kmatrix.records.jobs.paths import NodeDir
from kmatrix.records.jobs.ranks import RankState
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status
from kmatrix.status.classify import classify
from kmatrix.status.node_ends import first_exit, node_end
from kmatrix.status.state import (
    KILLED,
    NODE_LOST,
    PREEMPTED,
    TIME_LIMIT,
    Attempt,
    Ended,
    JobPhase,
    JobState,
    RunState,
    Started,
    after,
    next_attempt,
    retry,
)
from kmatrix.status.status_file import recover_status

REPORT = """Iter 3 | loss 4.2
{error}
E1123 04:44:0{second} 4711 torch/distributed/elastic/multiprocessing/api.py:900] failed (exitcode: {code}) local_rank: 0
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_{hour}:44:0{second}
  host      : {host}
  rank      : {rank} (local_rank: 0)
  exitcode  : {code} (pid: 4711)
  error_file: <N/A>
"""
LOST_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"


@pytest.fixture
def run(tmp_path):
    found = RunDir(tmp_path / "gpt2_adamw_2nodes_2cpu")
    write_json(found.run_json, {"run_id": "0123456789", "name": found.name})
    return found


def write_node(run, number, *, code=1, rank=None, error="", hour="04", second=4, ended=True, start="", attempt=1):
    """Write the files of a node whose rank ended with this exit code, as torchrun on it reports."""
    node, host = NodeDir(run, number), f"n{number + 1}"
    rank = number if rank is None else rank
    text = REPORT.format(error=error, host=host, rank=rank, code=code, hour=hour, second=second)
    node.output_log.parent.mkdir(parents=True, exist_ok=True)
    node.output_log.write_text(start + text)
    about = NodeFile(node=number, host=host, attempt=attempt, started=100.0, log_start=len(start))
    write_json(node.node_json, as_json(about))
    if ended:
        write_json(node.end, as_json(node_end(node, about, 1)))
    return node


def end_of(run, *, gpus=(), **job):
    options = {"exit_code": 1, "started": 1.0, **job}
    return classify(run, Attempt(number=1, started=1.0, gpus=gpus), JobState(phase=JobPhase.ENDED, **options))


def write_result(run, **values):
    write_json(run.result, {"run_id": "0123456789", "attempt": 1, "status": "failed", "kind": "error", **values})


@pytest.mark.parametrize("ended", [True, False], ids=["the agent wrote its end", "the agent was killed"])
@pytest.mark.parametrize("hour", ["04", "01", "09"], ids=["same clocks", "three hours slow", "five hours fast"])
def test_a_killed_rank_is_named_with_its_host_and_signal_whatever_the_clocks_say(run, hour, ended):
    write_node(run, 0, error=LOST_PEER)
    write_node(run, 1, code=-9, hour=hour, ended=ended)
    write_result(run, reason=LOST_PEER)

    end = end_of(run)

    assert (end.status, end.kind) == (Status.FAILED, KILLED)
    assert end.reason == "rank 1 on n2 killed by signal 9 (out of memory killer?)"


def test_nodes_of_an_earlier_attempt_do_not_count(run):
    write_node(run, 1, code=-9, attempt=3)
    write_node(run, 0, code=1, error="ValueError: why")
    write_result(run, reason="ValueError: why")

    assert end_of(run).reason == "ValueError: why"


def test_a_rank_that_lost_its_peer_is_not_the_cause_however_early_its_clock_is(run):
    late = RankState(rank=2, attempt=1, time=900.0, kind="error", reason="ValueError: no data", host="n2")
    early = RankState(rank=1, attempt=1, time=100.0, kind="error", reason=LOST_PEER, host="n1")
    for error in (late, early):
        write_json(run.rank_state(error.rank), as_json(error))
    write_node(run, 0)
    write_node(run, 1, rank=2)

    assert end_of(run).reason == "rank 2 on n2: ValueError: no data"


@pytest.mark.parametrize(("later_s", "cause"), [(1.0, 1), (30.0, 0)])
def test_a_rank_that_torchrun_kills_after_its_grace_period_is_not_the_cause(later_s, cause):
    exits = (RankExit(rank=1, exit_code=-9, time=100.0 + later_s), RankExit(rank=0, exit_code=1, time=100.0))
    assert first_exit(exits).rank == cause


@pytest.mark.parametrize("kind", [TIME_LIMIT, NODE_LOST, PREEMPTED])
def test_the_end_of_a_job_stops_its_runs_and_they_continue_elsewhere(run, kind):
    end = end_of(run, kind=kind, reason="n2 does not answer", cancelled=True)
    assert (end.status, end.kind, end.reason) == (Status.STOPPED, kind, "n2 does not answer")

    state = after(RunState(), Started(Attempt(number=1)))
    state = after(state, Ended(status=end.status, kind=end.kind, reason=end.reason))
    assert next_attempt(state, batch_size=4) == Attempt(number=2, resume="auto")
    if kind != PREEMPTED:  # which also happens to a run on this machine
        assert retry(state, batch_size=4) is None


def test_the_runs_own_failure_counts_although_its_job_ended(run):
    write_result(run, kind="nan", reason="the loss is nan at step 3")

    end = end_of(run, kind=TIME_LIMIT, reason="the job reached its time limit")

    assert (end.status, end.kind, end.reason) == (Status.FAILED, "nan", "the loss is nan at step 3")


def test_the_last_sign_of_a_run_on_another_host_has_the_clock_of_its_rank_0(run):
    write_json(run.rank_state(0), {"attempt": 1, "host": "n1", "time": 1060.0})
    attempt = {"attempt": 1, "status": "running", "started": 1000.0}
    write_json(run.status, {"status": "running", "attempt": 1, "started": 1000.0, "attempts": [attempt]})

    state = recover_status(run, has_runner=False)

    assert (state.status, state.last.duration_s()) == (Status.STOPPED, 60.0)


def test_a_stop_by_a_signal_to_another_node_names_its_host(run):
    about = NodeFile(node=1, host="n2", attempt=1)
    folder = NodeDir(run, 1)
    folder.path.mkdir(parents=True)
    write_json(folder.node_json, as_json(about))
    write_json(folder.end, as_json(node_end(folder, about, 1, ["SIGTERM"])))
    write_result(run, status="stopped", kind="signal", reason="stopped by a signal to another rank at step 12")
    end = end_of(run)
    assert (end.kind, end.reason) == ("preempted", "stopped by a signal to another rank at step 12: n2 got SIGTERM")
