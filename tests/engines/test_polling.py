"""The scheduler is asked at most once in ten seconds, by all processes together, and no answer is recorded as one."""

from __future__ import annotations

import errno
import os

import pytest

from cluster_factory import ScriptedScheduler, age, make_empty, make_engine, make_submission
from kmatrix.engines.polling import EVERY_S, Asking, refresh
from kmatrix.errors import LaunchError, RecordError
from kmatrix.records.jobs.files import PollFile, read_poll
from kmatrix.records.jobs.paths import JobsDir
from waiting import wait_until


@pytest.fixture
def matrix(tmp_path):
    found = make_empty(tmp_path)
    make_engine(found)
    return found


def test_an_answer_serves_all_commands_for_ten_seconds(matrix):
    make_submission(matrix, [["a"], ["b"]])
    scheduler = ScriptedScheduler(phases={"12_0": "running", "12_1": "pending"})
    first = refresh(matrix, scheduler=scheduler)
    assert {share: one.phase for share, one in first.jobs.items()} == {"1.0": "running", "1.1": "pending"}
    assert refresh(matrix, scheduler=scheduler) == first
    assert scheduler.questions == 1
    refresh(matrix, scheduler=scheduler, now=True)
    assert scheduler.questions == 2
    age(JobsDir(matrix).poll, EVERY_S + 1)
    refresh(matrix, scheduler=scheduler)
    assert scheduler.questions == 3


def test_nothing_is_written_through_a_link_in_place_of_the_folder(matrix, tmp_path):
    """The matrix may be somebody else's, and name a folder of this user."""
    outside = tmp_path / "outside"
    outside.mkdir()
    JobsDir(matrix).path.symlink_to(outside)
    with pytest.raises(RecordError, match=f"is a link to {outside}"):
        refresh(matrix, scheduler=ScriptedScheduler())
    assert not list(outside.iterdir())


def test_without_an_answer_the_older_one_stays_with_the_reason(matrix):
    make_submission(matrix, [["a"]])
    scheduler = ScriptedScheduler(phases={"12": "running"})
    refresh(matrix, scheduler=scheduler)
    scheduler.why_not = "Unable to contact slurm controller (connect failure)"
    found = refresh(matrix, scheduler=scheduler, now=True)
    assert found.why_not == "Unable to contact slurm controller (connect failure)"
    assert found.jobs["1.0"].phase == "running"
    assert read_poll(JobsDir(matrix)) == found
    assert refresh(matrix, scheduler=scheduler) == found  # nor is it asked again at once
    assert scheduler.questions == 2


def test_a_refusal_of_the_scheduler_comes_with_what_to_do(matrix, monkeypatch):
    make_submission(matrix, [["a"]])
    scheduler = ScriptedScheduler(phases={"12": "running"})

    def refuse(*_: object) -> None:
        raise LaunchError("Kubernetes refuses Jobs", why="Unauthorized", hint="log in to the cluster again")

    monkeypatch.setattr(scheduler, "poll", refuse)
    why = "Kubernetes refuses Jobs: Unauthorized (log in to the cluster again)"
    assert refresh(matrix, scheduler=scheduler).why_not == why


def test_jobs_that_have_all_ended_are_not_asked_for_until_there_are_others(matrix):
    make_submission(matrix, [["a"]])
    scheduler = ScriptedScheduler(phases={"12": "ended"})
    refresh(matrix, scheduler=scheduler)
    age(JobsDir(matrix).poll, 3600)
    refresh(matrix, scheduler=scheduler)
    assert scheduler.questions == 1
    make_submission(matrix, [["a"]], number=2, job="13")
    assert set(refresh(matrix, scheduler=scheduler).jobs) == {"1.0", "2.0"}


def test_a_job_that_nobody_noted_is_found_by_its_label(matrix):
    make_submission(matrix, [["a"], ["b"]], events=["intent"])  # the submitter was killed after sbatch
    make_submission(matrix, [["c"]], number=2, events=[])  # submitted by hand
    scheduler = ScriptedScheduler(phases={"77_1": "running"}, labels={"kmatrix-k7-1": "77", "kmatrix-k7-2": "78"})
    found = refresh(matrix, scheduler=scheduler).jobs
    assert {share: one.job for share, one in found.items()} == {"1.0": "77_0", "1.1": "77_1", "2.0": "78"}
    assert found["1.1"].phase == "running"


def test_a_scheduler_that_shows_only_ones_own_jobs_is_not_asked_for_those_of_others(matrix, monkeypatch):
    """Its answer would be that there is none: the last one, as jobs that were forgotten are not asked for again."""
    make_submission(matrix, [["a"]])
    owner, scheduler = os.geteuid(), ScriptedScheduler(phases={"12": "pending"})
    refresh(matrix, scheduler=scheduler)
    age(JobsDir(matrix).poll, 3600)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    found = refresh(matrix, scheduler=ScriptedScheduler(), now=True)
    assert found.jobs["1.0"].phase == "pending"
    assert "it shows you only your own jobs, and these are those of " in found.why_not
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert refresh(matrix, scheduler=scheduler).jobs["1.0"].phase == "pending"
    assert scheduler.questions == 2


def test_a_job_of_another_matrix_with_the_same_id_counts_as_forgotten(matrix):
    make_submission(matrix, [["a"]])
    scheduler = ScriptedScheduler(phases={"12": "running"}, comments={"12": "kmatrix-other-1"})
    found = refresh(matrix, scheduler=scheduler).jobs["1.0"]
    assert (found.phase, found.reason) == ("unknown", "Slurm has another job with this id")


@pytest.mark.process
def test_a_display_asks_again_after_its_storage_did_not_answer(monkeypatch):
    monkeypatch.setattr("kmatrix.engines.polling.EVERY_S", 0.01)
    answers = [PollFile(why_not="first"), OSError(errno.ESTALE, "stale"), RecordError("damaged"), PollFile()]

    def ask():
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    asking = Asking(ask)
    assert asking.newest().why_not == "first"
    wait_until(lambda: not asking.newest().why_not)
    asking.end()


def test_a_matrix_of_this_machine_and_a_copy_have_no_scheduler(matrix):
    make_submission(matrix, [["a"]])
    scheduler = ScriptedScheduler()
    JobsDir(matrix).engine_json.unlink()
    assert refresh(matrix, scheduler=scheduler) is None
    make_engine(matrix, path="/somewhere/else")
    assert refresh(matrix, scheduler=scheduler) is None
    assert scheduler.questions == 0


def test_a_matrix_that_cannot_be_written_is_asked_for_all_the_same(matrix, monkeypatch):
    make_submission(matrix, [["a"]])
    opened = os.open

    def refuse(path, flags, *rest, **more):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(30, "Read-only file system", str(path))
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    scheduler = ScriptedScheduler(phases={"12": "running"})
    assert refresh(matrix, scheduler=scheduler).jobs["1.0"].phase == "running"
    assert not JobsDir(matrix).poll.exists()


def test_no_key_in_the_words_of_a_scheduler_reaches_the_disk(matrix):
    make_submission(matrix, [["a"]])
    key = "hf_" + "a1B2" * 9
    refresh(matrix, scheduler=ScriptedScheduler(phases={"12": "pending"}, reasons={"12": f"cannot pull with {key}"}))
    assert key not in JobsDir(matrix).poll.read_text()


def test_the_reason_of_an_end_stays_when_the_scheduler_has_forgotten_the_job(matrix):
    make_submission(matrix, [["a"]])
    scheduler = ScriptedScheduler(phases={"12": "ended"}, reasons={"12": "its deadline is over"})
    refresh(matrix, scheduler=scheduler)
    scheduler.phases, scheduler.reasons = {}, {"12": "it is gone"}

    (found,) = refresh(matrix, scheduler=scheduler, now=True).jobs.values()

    assert (found.phase, found.reason) == ("unknown", "its deadline is over")


def test_a_job_that_goes_away_before_its_end_was_seen_has_no_older_reason(matrix):
    make_submission(matrix, [["a"]])
    scheduler = ScriptedScheduler(phases={"12": "pending"}, reasons={"12": "waits for a node"})
    refresh(matrix, scheduler=scheduler)
    scheduler.phases, scheduler.reasons = {}, {"12": "its Job was deleted"}

    (found,) = refresh(matrix, scheduler=scheduler, now=True).jobs.values()

    assert found.reason == "its Job was deleted"
