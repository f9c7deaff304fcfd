"""Automatic retries: lost GPUs are avoided, network failures and preempted runs are retried; each has a limit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.engines.local.pool import Pool
from kmatrix.packing import Limits
from kmatrix.records.files import append_jsonl, read_json, read_jsonl, write_json
from kmatrix.records.runs import Status
from kmatrix.runner.loop import drive
from kmatrix.status.classify import Evidence, classify, failure_cause, was_preempted
from kmatrix.status.state import (
    GPU_LOST,
    KILLED,
    MOST_RETRIES,
    NCCL,
    OOM,
    PREEMPTED,
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
from kmatrix.status.view.overview import Overview
from running import engine, status_of

UUIDS = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
KINDS = [GPU_LOST, NCCL, PREEMPTED, OOM, KILLED, "nan", "error"]


def failed_state(*kinds, batch=None):
    """Return the state of a run whose attempts ended like this."""
    state = RunState()
    for number, kind in enumerate(kinds, 1):
        state = after(state, Started(Attempt(number=number, micro_batch=batch)))
        status = Status.STOPPED if kind == PREEMPTED else Status.FAILED
        state = after(state, Ended(status=status, kind=kind))
    return state


# The rule


@pytest.mark.parametrize("kind", MOST_RETRIES)
def test_external_failures_are_retried_twice_in_a_row(kind):
    assert [retry(failed_state(*[kind] * count), batch_size=8) is not None for count in (1, 2, 3)] == [
        True,
        True,
        False,
    ]


def test_a_retry_resumes_from_the_last_checkpoint_with_the_same_micro_batch():
    attempt = retry(failed_state(NCCL, batch=4), batch_size=8)
    assert (attempt.number, attempt.resume, attempt.micro_batch) == (2, "auto", 4)


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=60), st.integers(1, 64))
def test_no_run_is_retried_forever(kinds, batch_size):
    """However attempts end, consecutive automatic retries are limited."""
    limit = sum(MOST_RETRIES.values()) + batch_size.bit_length()
    state, row, batch = RunState(), 0, batch_size
    for number, kind in enumerate(kinds, 1):
        state = after(state, Started(Attempt(number=number, micro_batch=batch)))
        status = Status.STOPPED if kind == PREEMPTED else Status.FAILED
        state = after(state, Ended(status=status, kind=kind))
        next_plan = retry(state, batch_size=batch_size)
        row = 0 if next_plan is None else row + 1
        if next_plan is None or next_plan.micro_batch is None:
            batch = batch_size
            row = row if kind in MOST_RETRIES else 0
        else:
            batch = next_plan.micro_batch
        if kind == OOM and row:
            limit += 1
        assert row <= limit


@pytest.mark.parametrize("kind", [KILLED, GPU_LOST, NCCL])
def test_make_continue_retries_external_failures_however_often_they_were_retried(kind):
    state = failed_state(*[kind] * 9)
    assert next_attempt(state, batch_size=8) is None
    assert next_attempt(state, batch_size=8, retry_killed=True).number == 10


# Failure patterns


def write_evidence(run, *, log="", gpus=("GPU-a", "GPU-b"), started=0.0, **job):
    """Write the evidence about attempt 1 of a run. log: the end of its output.log."""
    run.output_log.write_text(log)
    job = JobState(phase=JobPhase.ENDED, started=started, gpus=gpus, **job)
    return Evidence(run=run, attempt=Attempt(number=1, started=started, gpus=gpus), job=job)


def classified(plan, reason, *, kind="error", **options):
    return failure_cause(write_evidence(plan.dir, exit_code=1, **options), kind, reason)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("RuntimeError: CUDA error: unspecified launch failure", GPU_LOST),
        ("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered", GPU_LOST),
        ("NVMLError_GpuIsLost: GPU is lost", GPU_LOST),
        ("DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled system error", NCCL),
        ("ncclRemoteError: A call failed possibly due to a network error", NCCL),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)", NCCL),
        ("RuntimeError: CUDA error: device-side assert triggered", "error"),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", "error"),
        ("ValueError: heads do not divide the width", "error"),
    ],
)
def test_cuda_and_nccl_messages_identify_the_failure(plan, reason, kind):
    assert classified(plan("a"), reason).kind == kind


def test_the_gpu_of_the_rank_that_lost_it_is_excluded(plan):
    run = plan("a", ranks=2)
    assert classified(run, "CUDA error: unspecified launch failure").gpus == ("GPU-a",)  # rank 0 writes without a rank
    assert classified(run, "rank 1: CUDA error: unspecified launch failure").gpus == ("GPU-b",)


def test_a_rank_that_lost_its_gpu_explains_the_network_errors_of_the_others(plan):
    run = plan("a", ranks=2)
    error = {"rank": 1, "attempt": 1, "time": 2.0, "kind": "error", "reason": "CUDA error: unspecified launch failure"}
    run.dir.rank(1).mkdir(parents=True)
    write_json(run.dir.rank_state(1), error)
    answer = classified(run, "NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited")
    assert (answer.kind, answer.gpus) == (GPU_LOST, ("GPU-b",))


def test_a_rank_that_failed_first_is_not_retried_because_of_later_network_errors(plan):
    assert classified(plan("a"), "rank 1: ValueError: why", log="NCCL error in: ProcessGroupNCCL.cpp").kind == "error"


def test_a_loss_seen_by_the_recorder_counts_for_this_attempt_until_it_is_recovered(plan):
    run = plan("a")
    text = "NVIDIA A10G (GPU-b): no response (values are null)"
    append_jsonl(run.dir.gpu_events, {"time": 5.0, "event": "lost", "gpu_index": 1, "text": text})
    assert classified(run, "NCCL error", started=1.0).gpus == ("GPU-b",)
    assert classified(run, "ValueError", started=6.0).kind == "error"
    append_jsonl(run.dir.gpu_events, {"time": 6.0, "event": "found", "gpu_index": 1, "text": text})
    assert classified(run, "ValueError", started=1.0).kind == "error"


# The whole path


def run_all(matrix, plans, uuids=UUIDS, **options):
    pool, messages = Pool.of(uuids), []
    outcome = drive(
        matrix, plans, engine(gpus=pool, limits=Limits()), pool=pool, on_note=messages.append, poll_s=0.02, **options
    )
    return outcome, messages


def kinds(plan):
    return [attempt["kind"] for attempt in status_of(plan)["attempts"]]


@pytest.mark.process
def test_a_run_that_lost_its_gpu_moves_and_the_gpu_is_excluded_for_all_runs(matrix, plan):
    plans = [plan("a", "lost:GPU-a", cuda=True), *(plan(name, cuda=True) for name in "bcd")]
    outcome, messages = run_all(matrix, plans)
    assert (outcome.counts, outcome.exit_code) == ({"finished": 4}, 0)
    first, second = status_of(plans[0])["attempts"]
    assert (first["kind"], first["gpus"], second["resume"]) == (GPU_LOST, ["GPU-a"], "auto")
    assert second["gpus"] != ["GPU-a"]
    (left_out,) = [gpu for gpu in read_json(matrix.status)["gpus"] if gpu["out"]]
    assert left_out["uuid"] == "GPU-a"
    assert left_out["out"].startswith("quarantined: RuntimeError: CUDA error")
    assert [line["gpu"] for line in read_jsonl(matrix.journal) if line["event"] == "gpu left out"] == ["GPU-a"]
    assert messages == [f"GPU 0 is {left_out['out']}"]
    assert Overview(matrix).poll().gpus[0].out == left_out["out"]


@pytest.mark.process
def test_runs_that_need_more_gpus_than_remain_are_not_waited_for(matrix, plan):
    plans = [plan("a", "lost:GPU-a", cuda=True, expected_s=9.0), plan("b", ranks=2, cuda=True, expected_s=1.0)]
    outcome, _ = run_all(matrix, plans, UUIDS[:2])
    assert outcome.exit_code == 1
    assert status_of(plans[0])["status"] == "finished"
    assert status_of(plans[1])["status"] == "skipped"
    assert "needs 2 GPUs, 1 available: GPU 0 is quarantined" in status_of(plans[1])["reason"]


@pytest.mark.process
def test_a_preempted_run_resumes_automatically(matrix, plan):
    run = plan("a", "preempted2")
    outcome, _ = run_all(matrix, [run])
    assert (outcome.exit_code, kinds(run)) == (0, [PREEMPTED, PREEMPTED, None])
    retried = [line["after"] for line in read_jsonl(matrix.journal) if line["event"] == "run retried"]
    assert retried == [PREEMPTED, PREEMPTED]


@pytest.mark.parametrize(
    ("attempt", "why"), [(1, "it was killed before it could save"), (0, "its trainer had not begun")]
)
def test_a_stop_before_the_trainer_has_begun_has_lost_nothing(plan, attempt, why):
    run = plan("a").dir
    run.rank(0).mkdir(parents=True)
    write_json(run.rank_state(0), {"rank": 0, "attempt": attempt, "pid": 7})  # of this attempt, or of an earlier one
    seen = write_evidence(run, started=1.0, cancelled=True, exit_code=143)
    assert classify(run, seen.attempt, seen.job).reason.endswith(why)


def test_a_run_that_was_stopped_by_its_pid_stays_stopped(plan):
    run = plan("a").dir
    death = "W1120 Received Signals.SIGTERM death signal, shutting down workers"
    signalled = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15"
    assert was_preempted(write_evidence(run, started=1.0, log="Iter 5 | ..."))
    assert not was_preempted(write_evidence(run, started=1.0, log=death))
    assert not was_preempted(write_evidence(run, started=1.0, log=signalled))
    assert not was_preempted(write_evidence(run, started=1.0, cancelled=True))
    assert not was_preempted(write_evidence(run, started=None))  # it never ran
    assert not was_preempted(Evidence(run=run, attempt=Attempt(number=1, started=1.0), job=None))  # its runner died


@pytest.mark.process
def test_a_killed_run_waits_for_make_continue(matrix, plan):
    run = plan("a", "killed")
    outcome, _ = run_all(matrix, [run])
    assert (outcome.exit_code, kinds(run)) == (1, [KILLED])


# GPUs used by other processes


class FakeOtherProcesses:
    """A fake of the query for other processes. held: UUID -> reason."""

    def __init__(self, **held):
        self.held, self.asked = held, []

    def __call__(self, uuids):
        self.asked.append(tuple(uuids))
        return {uuid: reason for uuid, reason in self.held.items() if uuid in uuids}


def pool_of(others, uuids=("a", "b", "c")):
    made = Pool.of(uuids)
    made._query = others
    return made


def test_a_gpu_used_by_other_processes_is_not_assigned():
    pool = pool_of(FakeOtherProcesses(b="17.0 GiB used by python (pid 42)"))
    pool.poll(())
    assert pool.usable(()) == ("a", "c")
    assert set(pool.place(2, ())) == {"a", "c"}
    assert pool.excluded == {"b": "in use by others: 17.0 GiB used by python (pid 42)"}
