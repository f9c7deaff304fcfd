"""The programs of Slurm: their output is read, and a refusal differs from no answer."""

from __future__ import annotations

import subprocess

import pytest

from kmatrix.engines.base import UnreachableError
from kmatrix.engines.slurm import commands
from kmatrix.errors import LaunchError
from slurm_answers import UNREACHABLE, answer


def test_jobs_are_read_and_other_lines_ignored(monkeypatch):
    answer(monkeypatch)

    lines = commands.squeue()

    assert [line.job for line in lines] == ["2", "4", "33_[2-6,8-9%2]", "34_[0-3]", "36", "33_0", "33_1"]
    assert lines[4].start == 1795413376
    assert lines[2].start is None
    assert lines[5].nodes == "n[1-2]"


def test_a_comment_may_have_a_separator_and_no_escape_reaches_a_terminal(monkeypatch):
    answers = answer(monkeypatch)
    answers.say("squeue", "7|RUNNING|None|n1|N/A|a|b \x1b]0;title\x07c\n")

    assert commands.squeue()[0].comment == "a|b c"


def test_jobs_are_asked_for_without_ids_because_an_aged_one_fails_the_question(monkeypatch):
    answers = answer(monkeypatch)

    commands.squeue()

    assert not [word for word in answers.calls[0] if word.startswith(("-j", "--job"))]


@pytest.mark.parametrize("call", [commands.squeue, commands.show_config, lambda: commands.show("node")])
def test_without_a_controller_a_question_has_no_answer_and_says_it_in_slurms_words(monkeypatch, call):
    answer(monkeypatch).stop_controller()

    with pytest.raises(UnreachableError, match="Slurm does not answer") as caught:
        call()

    assert caught.value.why == "Unable to contact slurm controller (connect failure)"


def test_a_program_that_never_ends_counts_as_unreachable(monkeypatch):
    def hang(words, **_):
        raise subprocess.TimeoutExpired(words, 1)

    monkeypatch.setattr(commands.subprocess, "run", hang)

    with pytest.raises(UnreachableError, match="has not ended after 60 s"):
        commands.squeue()


def test_a_machine_without_slurm_gets_a_hint(monkeypatch):
    answer(monkeypatch).texts.clear()

    with pytest.raises(LaunchError, match="pass ENGINE=local") as caught:
        commands.show("node")

    assert not isinstance(caught.value, UnreachableError)


def test_the_id_of_a_job_may_be_followed_by_a_cluster(monkeypatch, tmp_path):
    answer(monkeypatch).say("sbatch --parsable", "sbatch: lua: welcome\n4711;alpha\n")

    assert commands.sbatch(tmp_path / "job.sbatch") == "4711"


def test_a_refused_job_differs_from_one_that_may_have_been_submitted(monkeypatch, tmp_path):
    answers = answer(monkeypatch)
    refused = "sbatch: error: Batch job submission failed: Invalid feature specification\n"
    lost = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"

    answers.say("sbatch --parsable", err=refused, status=1)
    with pytest.raises(LaunchError) as caught:
        commands.sbatch(tmp_path / "job.sbatch")
    assert not isinstance(caught.value, UnreachableError)
    assert caught.value.why == "Batch job submission failed: Invalid feature specification"

    answers.say("sbatch --parsable", err=lost, status=1)
    with pytest.raises(UnreachableError, match="Socket timed out"):
        commands.sbatch(tmp_path / "job.sbatch")


def test_an_answer_without_an_id_is_unknown_too(monkeypatch, tmp_path):
    answer(monkeypatch).say("sbatch --parsable", "Submitted\n")

    with pytest.raises(UnreachableError, match="no job id"):
        commands.sbatch(tmp_path / "job.sbatch")


def test_variables_of_another_job_or_with_options_are_not_passed_on(monkeypatch):
    monkeypatch.setenv("SBATCH_TIMELIMIT", "1")
    monkeypatch.setenv("SQUEUE_PARTITION", "none")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/other.conf")
    monkeypatch.setenv("WANDB_PROJECT", "mine")

    environment = commands.environment()

    assert not {"SBATCH_TIMELIMIT", "SQUEUE_PARTITION", "SLURM_MEM_PER_CPU"} & environment.keys()
    assert environment["SLURM_CONF"] == "/etc/slurm/other.conf"
    assert environment["WANDB_PROJECT"] == "mine"


def test_a_job_does_not_inherit_the_form_of_our_questions(monkeypatch, tmp_path):
    answers = answer(monkeypatch)

    commands.squeue()
    commands.sbatch(tmp_path / "job.sbatch")

    assert answers.options[0]["env"]["SLURM_TIME_FORMAT"] == "%s"
    assert "SLURM_TIME_FORMAT" not in answers.options[1]["env"]


def test_jobs_that_have_ended_can_be_cancelled(monkeypatch):
    answer(monkeypatch).say("scancel", err="scancel: error: Kill job error: Invalid job id specified", status=1)

    commands.scancel(["12"])


def test_many_jobs_are_cancelled_in_several_calls(monkeypatch):
    answers = answer(monkeypatch)

    commands.scancel([str(number) for number in range(1200)])

    assert len(answers.calls) == 3


def test_the_reason_of_a_drained_node_cannot_replace_a_field():
    found = commands.fields("NodeName=n1 State=DOWN CPUTot=16 Reason=x State=IDLE CPUTot=99 [root@2026]")

    assert (found["State"], found["CPUTot"]) == ("DOWN", "16")


def test_the_text_for_no_controller_is_the_real_one():
    assert commands.NO_ANSWER.search(UNREACHABLE)
