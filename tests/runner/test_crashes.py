"""A kill before each change of a file: of a run from begin to end, of a rerun, of `make continue`. And two hosts."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from kmatrix.engines.ports import UnreachableError
from kmatrix.errors import RecordError
from kmatrix.records import attempts, control, files
from kmatrix.records.attempts import Attempt, End, Exit, TakenError
from kmatrix.records.decode import as_json
from kmatrix.records.files import create_json, names, write_json
from kmatrix.records.runs import RunResult, Status
from kmatrix.runner import requests
from kmatrix.runner.controller import Controller
from kmatrix.runner.rerun import rerun
from kmatrix.runner.supervisor import ASKED_TO_STOP, DONE, FAILED, Supervisor
from kmatrix.status.fold import State
from kmatrix.status.look import look
from tests.support.world import CrashError, SimPlace, WorldClock, replaced_kernel

STEPS = 4


@pytest.fixture(autouse=True)
def kernel() -> Iterator[None]:
    with replaced_kernel():
        yield


class Ranks:
    """A trainer that trains a step per poll; its files are written by the same functions."""

    def __init__(self, run: Path, mine: Attempt, polls: Callable[[], object] = lambda: None) -> None:
        self.run, self.mine, self.polls, self.exits = run, mine, polls, list[Exit]()
        steps = [int(name[5:-5]) for name in names(run / "checkpoints")] if mine.resume != "none" else []
        self.step = max(steps, default=0)
        self.killed = False

    def poll(self) -> bool:
        self.polls()
        if self.step < STEPS and not self.killed:
            self.step += 1
            write_json(self.run / f"checkpoints/step_{self.step}.json", {})
            return False
        if not self.killed:
            write_json(self.run / "result.json", as_json(finished(self.mine.number)))
        self.exits = [Exit(rank=0, code=-9 if self.killed else 0)]
        return True

    trouble = None

    def stop(self, grace_s: float) -> None:
        self.killed = True

    def kill(self) -> None:
        self.killed = True


def finished(number: int) -> RunResult:
    return RunResult(run_id="id", attempt=number, status="finished", step=STEPS, final_val_loss=3.0)


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    return make(tmp_path / "m")


def make(path: Path) -> Path:
    (path / "control").mkdir(parents=True)
    (path / "config.txt").touch()
    write_json(path / "matrix.json", {"name": "m", "runs": [{"name": "a", "run_id": "id"}]})
    return path


def supervisor(path: Path, host: str = "", polls: Callable[[], object] = lambda: None) -> Supervisor:
    def start(mine: Attempt, _: int) -> Ranks:
        return Ranks(path / "a", mine, polls)

    return Supervisor(run=path / "a", place=SimPlace(host=host, boot=host, pulse_s=0.0), start=start)


def train(path: Path, polls: Callable[[], object] = lambda: None) -> int:
    """Run `kmatrix run` to its end; return its exit status."""
    one = supervisor(path, polls=polls)
    lead = one.lead()
    try:
        while True:
            next(lead)
    except StopIteration as end:
        code: int = end.value
        return code
    finally:  # what the kernel does
        if one.handle is not None:
            os.close(one.handle)


def state_of(path: Path) -> State:
    return look(path).states["a"]


def killed_at(number: int, call: Callable[[], object]) -> bool:
    """Call; the process dies before change `number` of a file. Return whether it came so far."""
    left = itertools.count()

    def before(what: str, path: Path) -> None:
        if next(left) == number:
            raise CrashError(what)

    files.before = before  # type: ignore[assignment]
    try:
        call()
    except CrashError:
        return True
    finally:
        files.before = lambda what, path: None  # type: ignore[assignment]
    return False


def test_a_run_that_is_killed_anywhere_goes_on_and_finishes(tmp_path: Path) -> None:
    for number in itertools.count():
        path = make(tmp_path / str(number))
        was_killed = killed_at(number, partial(train, path))
        state = state_of(path)
        assert state.is_due or state.status is Status.FINISHED
        assert train(path) == DONE
        after = state_of(path)
        assert after.status is Status.FINISHED
        assert after.number == state.number + (state.status is not Status.FINISHED)
        if not was_killed:
            break
    assert number > 15


def test_a_rerun_that_is_killed_anywhere_loses_no_result_and_is_completed(tmp_path: Path) -> None:
    for number in itertools.count():
        path = make(tmp_path / str(number))
        train(path)
        (path / "a/metrics.jsonl").write_text("{}\n", encoding="utf-8")
        was_killed = killed_at(number, partial(rerun, path / "a"))
        (result,) = (path / "a").rglob("result.json")  # in its place, or in the archive
        state = state_of(path)
        if state.status is Status.FINISHED:
            assert result.parent == path / "a"
        else:
            assert state.status is Status.PLANNED
            assert train(path) == DONE  # make continue
            (archived,) = (path / "a/archive").glob("*/result.json")
            assert json.loads(archived.read_bytes())["attempt"] == 1
            assert {"checkpoints", "metrics.jsonl"} <= set(names(archived.parent))
            assert json.loads((path / "a/result.json").read_bytes())["attempt"] == state_of(path).number >= 3
        if not was_killed:
            break
    assert number > 4


def test_continue_that_is_killed_anywhere_can_be_typed_again(tmp_path: Path) -> None:
    for number in itertools.count():
        path = make(tmp_path / str(number))
        ended(path, "nan")
        control.stop(path)
        was_killed = killed_at(number, partial(requests.go_on, look(path), retry_failed=True))
        requests.go_on(look(path), retry_failed=True)
        assert (state_of(path).is_due, look(path).stop, state_of(path).number) == (True, None, 1)
        if not was_killed:
            break


def ended(path: Path, *kinds: str) -> None:
    """Make attempts that have ended so."""
    attempts.folder(path / "a").mkdir(parents=True)
    for number, kind in enumerate(kinds, 1):
        attempts.write(path / "a", Attempt(number=number, end=End(kind=kind, reason=kind)))


def test_of_two_that_create_one_file_one_succeeds_and_it_is_complete(tmp_path: Path) -> None:
    def faster(what: str, path: Path) -> None:
        if what == "link":
            files.before = lambda what, path: None  # type: ignore[assignment]
            create_json(path, {"number": 7})

    files.before = faster  # type: ignore[assignment]
    with pytest.raises(FileExistsError):
        create_json(tmp_path / "1.json", {"number": 8})
    assert json.loads((tmp_path / "1.json").read_bytes())["number"] == 7
    assert names(tmp_path) == ["1.json"]


def test_storage_without_hard_links(matrix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    assert train(matrix) == DONE
    with pytest.raises(TakenError):
        attempts.take(matrix / "a", Attempt(number=1))
    attempts.path_of(matrix / "a", 2).touch()  # killed between its creation and its content
    os.utime(attempts.path_of(matrix / "a", 2), (0, 0))
    (matrix / "a/result.json").unlink()
    assert (state_of(matrix).kind, state_of(matrix).number) == ("lost", 2)


def test_a_failed_a_held_and_a_stopped_run_train_nothing_if_their_job_starts_again(matrix: Path) -> None:
    ended(matrix, "nan")
    assert (train(matrix), state_of(matrix).number) == (FAILED, 1)
    requests.go_on(look(matrix), retry_failed=True)
    requests.hold(look(matrix), ["a"])
    assert (train(matrix), state_of(matrix).number) == (ASKED_TO_STOP, 1)
    requests.release(look(matrix), ["a"])
    control.stop(matrix, "enough")
    assert (train(matrix), state_of(matrix).number) == (ASKED_TO_STOP, 1)
    requests.go_on(look(matrix))  # the order for attempt 2 still stands
    assert (train(matrix), state_of(matrix).number) == (DONE, 2)


def test_a_run_that_is_released_while_it_saves_goes_on_by_itself(matrix: Path) -> None:
    lead = supervisor(matrix).lead()
    next(lead)
    requests.hold(look(matrix), ["a"])
    next(lead)  # it is asked to save and stop
    requests.release(look(matrix), ["a"])
    assert [*lead] == []
    assert (state_of(matrix).kind, state_of(matrix).is_due) == ("stopped", True)


def test_a_run_whose_ranks_are_gone_before_they_save_was_stopped_if_its_job_was_cancelled(matrix: Path) -> None:
    def start(mine: Attempt, _: int) -> Ranks:
        one.signals.append("SIGTERM")
        ranks = Ranks(matrix / "a", mine)
        ranks.kill()
        return ranks

    one = supervisor(matrix)
    one.start = start
    assert [*one.lead()] == []
    assert (state_of(matrix).status, state_of(matrix).kind) == (Status.STOPPED, "signal")


def test_a_run_that_takes_longer_than_its_limit_has_failed(tmp_path: Path) -> None:
    matrix, now = tmp_path / "m", WorldClock()
    (matrix / "control").mkdir(parents=True)
    plan = {"name": "m", "common": {"timeout_s": 60}, "runs": [{"name": "a", "run_id": "id"}]}
    (matrix / "config.txt").touch()
    write_json(matrix / "matrix.json", plan)
    assert train(matrix, polls=lambda: now.sleep(40)) == FAILED
    assert (state_of(matrix).status, state_of(matrix).kind) == (Status.FAILED, "timeout")
    assert "longer than 60 s (RUN_TIMEOUT)" in state_of(matrix).reason


def test_requests_that_an_editor_has_cut_end_no_training_and_start_none(matrix: Path) -> None:
    broken = matrix / "control/requests.json"

    def cut() -> None:
        broken.write_text('{"runs": {', encoding="utf-8")

    assert train(matrix, polls=cut) == DONE
    with pytest.raises(RecordError, match=r"requests\.json"):
        train(matrix)


@pytest.fixture
def other_host(matrix: Path) -> WorldClock:
    """An attempt without an end, of another host, that was written now."""
    now = WorldClock()
    files.before = lambda what, path: now.written.update({str(path): now.t})  # type: ignore[assignment]
    attempts.folder(matrix / "a").mkdir(parents=True)
    former = Attempt(number=1, job="12_3", host="n7", boot="n7", pulse=5)
    create_json(attempts.path_of(matrix / "a", 1), as_json(former))
    return now


def test_a_run_is_taken_from_another_host_after_100_s_without_a_pulse(matrix: Path, other_host: WorldClock) -> None:
    lead = supervisor(matrix).lead()
    for _ in range(9):
        other_host.t += 10
        next(lead)
    assert attempts.numbers(matrix / "a") == [1]
    other_host.t += 20
    next(lead)
    assert attempts.numbers(matrix / "a") == [1, 2]
    assert not (matrix / "a/checkpoints").exists()  # until a process that nobody sees has met the fence
    other_host.t += 2 * attempts.PULSE_S
    assert [*lead] != []
    assert state_of(matrix).status is Status.FINISHED


def test_a_run_that_another_host_trains_is_left_alone(matrix: Path, other_host: WorldClock) -> None:
    lead = supervisor(matrix).lead()
    other_host.t += 90
    next(lead)
    attempts.beat(matrix / "a", attempts.read_all(matrix / "a")[0], 90.0)
    with pytest.raises(TakenError, match="job 12_3 on n7 trains it"):
        next(lead)


def test_a_result_that_came_during_the_wait_counts(matrix: Path, other_host: WorldClock) -> None:
    lead = supervisor(matrix).lead()
    next(lead)
    write_json(matrix / "a/result.json", as_json(finished(1)))
    other_host.t += 200
    assert [*lead] == []
    assert (state_of(matrix).status, state_of(matrix).number) == (Status.FINISHED, 1)


def test_a_process_that_was_given_up_behind_the_fence_starts_nothing(matrix: Path, other_host: WorldClock) -> None:
    lead = supervisor(matrix).lead()
    other_host.t += 200
    next(lead)
    attempts.take(matrix / "a", Attempt(number=3))
    other_host.t += 200
    with pytest.raises(TakenError):
        next(lead)
    assert not (matrix / "a/checkpoints").exists()


def test_a_process_that_lost_its_run_kills_its_ranks_and_writes_nothing_more(matrix: Path) -> None:
    lead = supervisor(matrix).lead()
    next(lead)
    attempts.take(matrix / "a", Attempt(number=2))
    mine = attempts.path_of(matrix / "a", 1).read_bytes()
    with pytest.raises(TakenError):
        next(lead)
    assert attempts.path_of(matrix / "a", 1).read_bytes() == mine
    assert names(matrix / "a/checkpoints") == ["step_1.json", "step_2.json"]  # rank 0 looks by itself: tests/gpt2


def test_an_end_is_written_by_the_newest_attempt_alone(matrix: Path) -> None:
    one = supervisor(matrix)
    one.place = SimPlace(host="", boot="", pulse_s=1000.0)  # it was suspended before its last look
    lead = one.lead()
    next(lead)
    attempts.take(matrix / "a", Attempt(number=2))
    mine = attempts.path_of(matrix / "a", 1).read_bytes()
    with pytest.raises(TakenError):
        for _ in lead:
            pass
    assert attempts.path_of(matrix / "a", 1).read_bytes() == mine


def test_containers_of_one_kernel_wait_for_each_other(matrix: Path, other_host: WorldClock) -> None:
    one = supervisor(matrix)
    one.place = SimPlace(host="pod-2", boot="n7")
    next(one.lead())
    other_host.t += 50
    assert attempts.numbers(matrix / "a") == [1]


class Jobs:
    """A scheduler that has no jobs."""

    broken: frozenset[str] = frozenset()

    def __init__(self, *, answers: bool = True) -> None:
        self.answers, self.submitted = answers, list[str]()

    def poll(self) -> dict[str, bool]:
        if not self.answers:
            raise UnreachableError("no answer")
        return {}

    def submit(self, runs: Sequence[str]) -> None:
        self.submitted += runs

    def cancel(self, runs: Sequence[str]) -> None: ...


def test_a_last_job_submits_what_is_new_or_lost_and_nothing_that_was_cancelled(matrix: Path) -> None:
    cancelled, new = Jobs(), Jobs()
    assert not Controller(path=matrix, jobs=cancelled, known=frozenset("a")).step()
    assert Controller(path=matrix, jobs=new).step()
    assert (cancelled.submitted, new.submitted) == ([], ["a"])
    attempts.folder(matrix / "a").mkdir(parents=True)
    attempts.write(matrix / "a", Attempt(number=1, end=End(kind="time limit")))
    assert Controller(path=matrix, jobs=cancelled, known=frozenset("a")).step()
    assert cancelled.submitted == ["a"]


def test_without_an_answer_of_the_scheduler_nothing_is_submitted(matrix: Path) -> None:
    silent = Jobs(answers=False)
    assert Controller(path=matrix, jobs=silent).step()
    assert silent.submitted == []


def test_an_attempt_whose_former_one_ended_while_it_was_taken_is_void(matrix: Path, other_host: WorldClock) -> None:
    lead = supervisor(matrix).lead()
    other_host.t += 200
    next(lead)  # it has number 2, and waits
    write_json(matrix / "a/result.json", as_json(finished(1)))
    other_host.t += 200
    assert [*lead] == []
    assert [one.end and one.end.kind for one in attempts.read_all(matrix / "a")] == [None, "void"]
    assert state_of(matrix).status is Status.FINISHED


def test_a_silent_scheduler_stops_no_run_whose_attempt_is_written_and_starts_no_second_one(matrix: Path) -> None:
    attempts.folder(matrix / "a").mkdir(parents=True)
    attempts.write(matrix / "a", Attempt(number=1, job="12_3", host="n7", boot="n7", pulse=5))
    assert state_of(matrix).status is Status.RUNNING
    silent = Jobs()  # or of another user, whose jobs Slurm does not show
    assert Controller(path=matrix, jobs=silent).step()
    assert silent.submitted == []
    os.utime(attempts.path_of(matrix / "a", 1), (0, 0))
    assert (state_of(matrix).status, state_of(matrix).kind) == (Status.STOPPED, "lost")
    assert look(matrix, ["a"]).states["a"].status is Status.RUNNING  # its scheduler says so


def test_a_damaged_file_fails_its_run_alone_and_is_named_with_its_field(matrix: Path) -> None:
    runs = [{"name": name, "run_id": "id"} for name in ("a", "b")]
    (matrix / "config.txt").touch()
    write_json(matrix / "matrix.json", {"name": "m", "runs": runs})
    ended(matrix, "stopped")
    attempts.path_of(matrix / "a", 1).write_text('{"number": "one"}', encoding="utf-8")
    states = look(matrix).states
    assert states["a"].reason == "attempts/1.json is damaged: number: expected int, got str"
    assert (states["a"].kind, states["a"].is_due, states["b"].is_due) == ("damaged", False, True)
