"""The states of a run: any sequence of events, including crashes, gives a legal state and loses no finished run."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kmatrix.errors import SchemaError
from kmatrix.records.files import read_json, write_json
from kmatrix.records.lock import boot_id
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import LOST, Status
from kmatrix.records.states import Clock, read_run_status
from kmatrix.status.state import (
    DISK,
    OOM,
    Archived,
    Attempt,
    Ended,
    RecorderDied,
    Reused,
    RunnerDied,
    RunState,
    Skipped,
    Started,
    after,
    after_out_of_memory,
    next_attempt,
)
from kmatrix.status.status_file import current_result, recover_status, state_of, write_state
from state_rules import find_violation

ends = st.builds(
    Ended,
    status=st.sampled_from([Status.FINISHED, Status.FAILED, Status.STOPPED]),
    at=st.floats(0, 2e9),
    kind=st.sampled_from([None, OOM, "nan", "signal", "lost"]),
    reason=st.text(max_size=5),
)
events = st.one_of(
    st.builds(Skipped, st.text(max_size=5)),
    st.builds(Started, st.builds(Attempt, number=st.integers(-1, 9), micro_batch=st.none() | st.integers(1, 64))),
    ends,
    st.builds(RunnerDied, number=st.integers(0, 9), ended=st.none() | ends),
    st.builds(RecorderDied),
    st.builds(Archived),
    st.builds(Reused, st.text("ab", min_size=1, max_size=5)),
)


@given(st.lists(events, max_size=30))
def test_any_sequence_of_events_leads_to_a_legal_state(sequence):
    state = RunState()
    for event in sequence:
        state = after(state, event)
        assert find_violation(state) == ""


@given(st.lists(events, max_size=30))
def test_a_finished_run_stays_finished_until_its_result_is_archived(sequence):
    state = RunState()
    for event in sequence:
        before, state = state, after(state, event)
        if before.status is Status.FINISHED and not isinstance(event, Archived):
            assert state == before


@given(st.lists(events, max_size=30))
def test_the_death_of_a_recorder_has_no_effect(sequence):
    state = RunState()
    for event in sequence:
        assert after(state, RecorderDied()) == state
        state = after(state, event)


@given(st.lists(events, max_size=30))
def test_attempts_are_never_forgotten_and_their_numbers_never_reused(sequence):
    state, used = RunState(), []
    for event in sequence:
        before, state = state, after(state, event)
        assert state.number >= before.number
        if state.number > before.number:
            used.append(state.number)
    assert used == sorted(set(used))


@given(st.lists(events, max_size=30), st.integers(1, 512))
def test_every_unfinished_run_has_a_next_attempt_if_failed_runs_are_requested(sequence, batch_size):
    state = RunState()
    for event in sequence:
        state = after(state, event)
    attempt = next_attempt(state, batch_size=batch_size, retry_failed=True)
    assert (attempt is None) == (state.status in (Status.FINISHED, Status.RUNNING))
    if attempt is not None:
        assert after(state, Started(attempt)).status is Status.RUNNING


@given(st.lists(events, max_size=20))
def test_a_state_is_read_back_as_written(sequence):
    state = RunState()
    for event in sequence:
        state = after(state, event)
    with tempfile.TemporaryDirectory() as folder:
        write_state(RunDir(Path(folder)), state)
        assert state_of(read_run_status(RunDir(Path(folder)))) == state


# The next attempt


def failed(kind, micro_batch=None):
    state = after(RunState(), Started(Attempt(number=1, micro_batch=micro_batch)))
    return after(state, Ended(status=Status.FAILED, kind=kind, reason="why"))


@pytest.mark.parametrize(("used", "smaller"), [(12, 6), (6, 3), (3, 1), (7, 1), (9, 3), (64, 32), (1, None)])
def test_out_of_memory_selects_the_largest_divisor_up_to_half(used, smaller):
    assert after_out_of_memory(Attempt(number=1, kind=OOM), used) == smaller
    assert after_out_of_memory(Attempt(number=2, kind=OOM, micro_batch=used), 512) == smaller


@given(st.integers(2, 4096))
def test_a_smaller_micro_batch_keeps_the_global_batch_with_integer_accumulation(used):
    smaller = after_out_of_memory(Attempt(number=1, kind=OOM), used)
    assert 1 <= smaller <= used / 2
    assert used % smaller == 0


def test_out_of_memory_is_retried_until_one_sequence_does_not_fit():
    sizes, state = [], RunState()
    while (attempt := next_attempt(state, batch_size=12)) is not None:
        sizes.append((attempt.number, attempt.resume, attempt.micro_batch))
        state = after(after(state, Started(attempt)), Ended(status=Status.FAILED, kind=OOM))
    assert sizes == [(1, "none", None), (2, "auto", 6), (3, "auto", 3), (4, "auto", 1)]


def test_a_reused_run_without_its_result_is_trained_again_only_on_request():
    state = RunState(status=Status.FAILED, reason="result.json is missing")
    assert next_attempt(state, batch_size=12, retry_killed=True) is None
    assert next_attempt(state, batch_size=12, retry_failed=True).number == 1


def test_a_run_that_failed_on_a_full_disk_continues_with_its_matrix_but_not_automatically():
    assert next_attempt(failed(DISK), batch_size=12) is None
    assert next_attempt(failed(DISK), batch_size=12, retry_killed=True).resume == "auto"


def test_an_archived_run_starts_from_scratch_under_a_new_number():
    state = after(RunState(), Started(Attempt(number=2)))
    state = after(after(state, Ended(status=Status.FINISHED)), Archived())
    attempt = next_attempt(state, batch_size=12)
    assert (attempt.number, attempt.resume) == (3, "none")


# A runner that dies at any time, with real files


class Crashes(RuleBasedStateMachine):
    """A runner, a trainer and their files. A crash loses what the runner knows, but not what is on the disk."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.run = RunDir(Path(self.folder.name))
        write_json(self.run.run_json, {"run_id": "id", "train": {"batch_size": 4}})
        write_json(self.run.run_used, {"train": {"batch_size": 4}, "adjusted": []})
        self.state: RunState | None = RunState()  # the state in the memory of a live runner
        self.training: int | None = None  # the attempt with processes
        self.finished: int | None = None  # the attempt that wrote the result

    def teardown(self) -> None:
        self.folder.cleanup()

    @precondition(lambda self: self.state is None)
    @rule()
    def runner_begins(self) -> None:
        self.training = None  # no process outlives its runner, because the next one waits for the lock of the run
        self.state = recover_status(self.run, has_runner=False)
        write_state(self.run, self.state)

    @precondition(lambda self: self.state is not None and self.training is None)
    @rule(dies=st.booleans())
    def attempt_begins(self, dies: bool) -> None:
        assert self.state
        attempt = next_attempt(self.state, batch_size=4, retry_failed=True)
        if attempt is None:
            return
        self.training = attempt.number
        if dies:  # between the start of the processes and the write of the status
            self.state = None
            return
        self.state = after(self.state, Started(attempt))
        write_state(self.run, self.state)

    @precondition(lambda self: self.training is not None)
    @rule()
    def trainer_logs_a_step(self) -> None:
        with self.run.metrics.open("a") as file:
            file.write(json.dumps({"step": 1, "attempt": self.training}) + "\n")

    @precondition(lambda self: self.training is not None)
    @rule(status=st.sampled_from(["finished", "failed", "stopped"]))
    def trainer_ends(self, status: str) -> None:
        write_json(self.run.result, {"run_id": "id", "attempt": self.training, "status": status, "kind": "error"})
        if status == "finished":
            self.finished = self.training
        self.training = None

    @precondition(lambda self: self.training is not None)
    @rule()
    def trainer_is_killed(self) -> None:
        self.training = None

    @precondition(lambda self: self.state is not None and self.training is None)
    @rule()
    def runner_notices(self) -> None:
        """The runner handles a run whose processes have exited, with or without a result."""
        assert self.state
        result = read_json(self.run.result) if self.run.result.exists() else {}
        is_current = result.get("attempt") == self.state.number
        status = Status(result["status"]) if is_current else Status.FAILED
        self.state = after(self.state, Ended(status=status, kind="error" if status is Status.FAILED else None))
        write_state(self.run, self.state)

    @precondition(lambda self: self.state is not None)
    @rule()
    def runner_dies(self) -> None:
        self.state = None

    @precondition(lambda self: self.state is not None and self.training is None)
    @rule()
    def recorder_dies(self) -> None:
        assert self.state
        self.state = after(self.state, RecorderDied())

    @invariant()
    def every_state_is_legal(self) -> None:
        assert find_violation(recover_status(self.run, has_runner=False)) == ""
        if self.state is not None:
            assert find_violation(self.state) == ""

    @invariant()
    def a_finished_run_is_never_lost(self) -> None:
        if self.finished is not None:
            assert recover_status(self.run, has_runner=False).status is Status.FINISHED
            assert recover_status(self.run, has_runner=False).number == self.finished


def test_an_attempt_that_finished_without_its_runner_keeps_its_number():
    """Found by random crashes: the runner stopped attempt 1, and died between the start of attempt 2 and its entry."""
    crashes = Crashes()
    crashes.attempt_begins(dies=False)
    crashes.runner_dies()
    crashes.runner_begins()
    crashes.attempt_begins(dies=True)
    crashes.trainer_ends(status="finished")
    crashes.a_finished_run_is_never_lost()
    crashes.teardown()


Crashes.TestCase.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
TestCrashes = Crashes.TestCase


# Files


@pytest.fixture
def run(tmp_path):
    folder = RunDir(tmp_path / "gpt2_adamw_1cpu")
    write_json(folder.run_json, {"run_id": "id", "train": {"batch_size": 4}})
    write_json(folder.run_used, {"train": {"batch_size": 4}, "adjusted": []})
    return folder


def write_status(run, status, attempt):
    write_json(run.status, {"status": status, "attempts": [{"attempt": attempt, "status": status}]})


def test_a_running_status_without_a_runner_is_stopped(run):
    write_status(run, "running", 2)
    state = recover_status(run, has_runner=False)
    assert (state.status, state.reason, state.number) == (Status.STOPPED, LOST, 2)


def test_the_result_of_that_attempt_decides_if_there_is_one(run):
    write_status(run, "running", 2)
    write_json(run.result, {"run_id": "id", "attempt": 1, "status": "finished"})
    assert recover_status(run, has_runner=False).status is Status.STOPPED
    write_json(run.result, {"run_id": "another", "attempt": 2, "status": "finished"})
    assert recover_status(run, has_runner=False).status is Status.STOPPED
    write_json(run.result, {"run_id": "id", "attempt": 2, "status": "finished"})
    assert recover_status(run, has_runner=False).status is Status.FINISHED


def test_an_attempt_that_finished_after_it_was_recorded_as_stopped_is_finished(run):
    write_status(run, "stopped", 2)
    write_json(run.result, {"run_id": "id", "attempt": 2, "status": "finished"})
    assert recover_status(run, has_runner=False).status is Status.FINISHED


def test_an_unrecorded_result_counts_only_if_the_run_used_its_requested_values(run):
    write_status(run, "running", 1)
    write_json(run.result, {"run_id": "id", "attempt": 1, "status": "finished"})
    write_json(run.run_used, {"train": {"batch_size": 2}, "adjusted": []})
    state = recover_status(run, has_runner=False)
    assert (state.status, state.last.kind) == (
        Status.FAILED,
        "mismatch",
    )


def test_an_attempt_known_only_from_its_metrics_is_counted(run):
    write_state(run, RunState())
    run.metrics.write_text(json.dumps({"step": 0, "attempt": 3}) + "\n")
    state = recover_status(run, has_runner=False)
    assert (state.status, state.number) == (Status.STOPPED, 3)


def test_a_damaged_status_counts_as_missing(run):
    run.status.write_text('{"status": "fini')
    assert recover_status(run, has_runner=False).status is Status.PLANNED
    run.metrics.write_text('{"step": 0}\n')
    state = recover_status(run, has_runner=False)
    assert (state.status, find_violation(state)) == (Status.STOPPED, "")
    write_json(run.result, {"run_id": "id", "attempt": 1, "status": "finished"})
    assert recover_status(run, has_runner=False).status is Status.FINISHED


def test_a_status_of_a_newer_kmatrix_is_refused(run):
    write_json(run.status, {"status": "finished"})
    run.status.write_text(run.status.read_text().replace('"schema": 1', '"schema": 99'))
    with pytest.raises(SchemaError):
        recover_status(run, has_runner=False)


# The clock


def test_the_duration_of_an_attempt_ignores_a_wall_clock_that_was_set():
    ended = Attempt(number=1, status=Status.FINISHED, started=90_000.0, ended=90_000.0 - 86_400, seconds=12.5)
    assert ended.duration_s() == 12.5
    begun = Attempt(number=1, started=90_000.0, clock=Clock(monotonic=time.monotonic() - 5.0, boot_id=boot_id()))
    assert 5.0 <= begun.duration_s(now=90_000.0 - 86_400) < 60.0


def test_an_attempt_whose_runner_died_lasted_until_its_last_sign(run):
    write_state(run, after(RunState(), Started(Attempt(number=1, started=1000.0))))
    run.metrics.write_text('{"step": 1, "attempt": 1}\n')
    os.utime(run.metrics, (1060.0, 1060.0))
    (attempt,) = recover_status(run, has_runner=False).attempts
    assert (attempt.status, attempt.ended, attempt.duration_s()) == (Status.STOPPED, 1060.0, 60.0)


@pytest.mark.parametrize(("written", "counts"), [({"step": 4}, True), ({}, False)], ids=["trainer", "runner"])
def test_a_result_without_numbers_leaves_them_to_the_metrics(tmp_path, written, counts):
    """The runner writes why a run failed whose rank 0 was killed, and nothing else."""
    run, state = RunDir(tmp_path), RunState(status=Status.FAILED, attempts=(Attempt(number=1),))
    write_json(run.result, {"run_id": "a", "attempt": 1, "status": "failed", "kind": "killed", "reason": "x"} | written)
    assert (current_result(run, state) is not None) == counts
