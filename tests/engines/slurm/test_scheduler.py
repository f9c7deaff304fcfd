"""Slurm as the scheduler of a matrix: what never starts is refused with the fix, and jobs are found again."""

from __future__ import annotations

from pathlib import Path

import pytest

from kmatrix.engines.base import UnreachableError
from kmatrix.engines.slurm.scheduler import SlurmScheduler, wait_text
from kmatrix.engines.slurm.script import JobPlace
from kmatrix.records.jobs.files import SchedulerPhase, Shape, ShareEntry, SubmissionFile
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.paths import MatrixDir
from slurm_answers import answer

PLACE = JobPlace(root=Path("/shared/kmatrix"), python=Path("/usr/bin/python3"))


def scheduler(**symbols):
    return SlurmScheduler(symbols, PLACE)


def submission(shares=1, **shape):
    entries = tuple(ShareEntry(task=task, runs=(f"run{task}",)) for task in range(shares))
    return SubmissionFile(label="kmatrix:abc:1", shape=Shape(**shape), shares=entries)


def problem(made=None, **shape):
    found = (made or scheduler()).check([submission(**shape)])
    assert len(found) == 1, found
    return found[0]


def test_a_shape_that_fits_is_accepted(monkeypatch):
    answer(monkeypatch)

    assert scheduler().check([submission(nodes=2, gpus_per_node=4, cpus_per_node=16, seconds=172800)]) == []


def test_nine_gpus_on_nodes_of_four_are_refused_with_the_number_of_nodes(monkeypatch):
    answer(monkeypatch)

    text = problem(gpus_per_node=9)

    assert text == "9 GPUs on one node: nodes of the partition main have 4; pass NUM_NODES=3"


def test_a_time_above_the_limit_is_refused_with_the_limit(monkeypatch):
    answer(monkeypatch)

    text = problem(seconds=5 * 86400)

    assert text.startswith("SLURM_TIME=5-00:00:00 is above the limit of the partition main: pass SLURM_TIME=2-00:00:00")


def test_the_limit_is_that_of_the_chosen_partition(monkeypatch):
    answer(monkeypatch)

    assert "SLURM_TIME=00:05:00" in problem(scheduler(SLURM_PARTITION="short"), seconds=600)


@pytest.mark.parametrize(
    ("shape", "fix"),
    [
        ({"nodes": 9}, "pass NUM_NODES=3"),
        ({"nodes": 3, "gpus_per_node": 4, "ranks_per_node": 4}, "pass NUM_GPUS=8 NUM_NODES=2"),  # 12 do not fit on two
        ({"nodes": 6, "gpus_per_node": 1}, "; pass NUM_NODES=3"),  # two GPUs of each
        ({"seconds": 120}, "SLURM_NOTICE=120 is not less than the time limit of a job, 2m00s: "),
        ({"cpus_per_node": 99}, "pass a smaller CPU_THREADS="),
        ({"cpus_per_node": 99, "gpus_per_node": 4}, "pass SLURM_CPUS_PER_GPU=4"),
        ({"memory_mib": 999999}, "pass SLURM_MEMORY=4000M, or 0 for all"),
    ],
)
def test_a_job_that_slurm_accepts_but_never_starts_is_refused_with_the_fix(monkeypatch, shape, fix):
    answer(monkeypatch)

    assert fix in problem(**shape)


def test_a_partition_without_gpus(monkeypatch):
    answers = answer(monkeypatch)
    nodes = answers.texts["scontrol --oneliner show node"][1].replace("Gres=gpu:a10g:", "Gres=disk:")
    answers.say("scontrol --oneliner show node", nodes)

    assert "has no GPUs: pass SLURM_PARTITION=" in problem(gpus_per_node=1)


def test_an_unknown_type_of_gpu(monkeypatch):
    answer(monkeypatch)

    assert "has no GPUs of the type h100" in problem(scheduler(SLURM_GPU_TYPE="h100"), gpus_per_node=1)


def test_an_unknown_partition_is_answered_with_the_known_ones(monkeypatch):
    answer(monkeypatch)

    assert problem(scheduler(SLURM_PARTITION="gpu")) == (
        "SLURM_PARTITION=gpu: the cluster has no such partition; known are main, short, urgent"
    )


def test_a_cluster_without_a_default_partition(monkeypatch):
    answers = answer(monkeypatch)
    text = answers.texts["scontrol --oneliner show partition"][1].replace("Default=YES", "Default=NO")
    answers.say("scontrol --oneliner show partition", text)

    assert "no default partition: pass SLURM_PARTITION=<one of main, short, urgent>" in problem()


def test_slurm_has_the_last_word(monkeypatch):
    answer(monkeypatch).say("sbatch --test-only", err="allocation failure: Invalid feature specification", status=1)

    assert problem() == "sbatch refuses the job: Invalid feature specification; see --constraint in SLURM_EXTRA_FLAGS"


def test_a_refusal_because_nodes_do_not_answer_says_so(monkeypatch):
    why = "allocation failure: Requested node configuration is not available"
    answer(monkeypatch).say("sbatch --test-only", err=why, status=1)

    assert "too few of its nodes answer now; `sinfo -R` lists the others" in problem()


def test_slurm_is_asked_once_per_shape(monkeypatch):
    answers = answer(monkeypatch)

    scheduler().check([submission(), submission(), submission(nodes=2)])

    assert sum(call[:2] == ("sbatch", "--test-only") for call in answers.calls) == 2


def test_an_array_may_not_be_longer_than_the_cluster_allows(monkeypatch):
    answer(monkeypatch)

    assert "an array of 1,001 jobs: the cluster allows 1,000" in problem(shares=1001)


def test_a_missing_setup_file_is_refused(monkeypatch, tmp_path):
    answer(monkeypatch)

    assert problem(scheduler(SLURM_SETUP=str(tmp_path / "gone.sh"))) == f"SLURM_SETUP={tmp_path}/gone.sh: no such file"


def test_a_setup_file_that_is_a_directory_is_refused(monkeypatch, tmp_path):
    answer(monkeypatch)

    assert problem(scheduler(SLURM_SETUP=str(tmp_path))) == f"SLURM_SETUP={tmp_path}: not a file"


def test_nodes_that_are_not_shown_are_left_to_slurm(monkeypatch):
    answers = answer(monkeypatch)
    answers.say("scontrol --oneliner show partition", "\n")

    assert scheduler().check([submission(nodes=99)]) == []


def test_a_job_is_submitted_after_others_and_inherits_the_lock_of_the_submitter(monkeypatch, tmp_path):
    answers = answer(monkeypatch)
    folder = JobsDir(MatrixDir(tmp_path)).submission(2)

    job = scheduler().submit(folder, submission(), ["31", "32"])

    assert job == "33"
    assert answers.calls[-1] == (
        *("sbatch", "--parsable", "--dependency=afterany:31:32"),
        str(tmp_path / "jobs" / "0002" / "job.sbatch"),
    )
    assert answers.options[-1]["close_fds"] is False


def test_jobs_are_found_by_their_labels_also_after_their_end(monkeypatch):
    answer(monkeypatch)

    found = scheduler().find({"kmatrix:abc:1", "kmatrix:abc:8", "kmatrix:abc:77"})

    assert found == {"kmatrix:abc:1": "33", "kmatrix:abc:8": "4"}


def test_the_live_one_of_two_jobs_with_one_label_is_found(monkeypatch):
    """A script that was submitted twice by hand."""
    lines = "12|RUNNING|None|n1|1795400000|l-1\n13|CANCELLED|None||N/A|l-1\n"
    answer(monkeypatch).say("squeue", lines)
    assert scheduler().find(["l-1"]) == {"l-1": "12"}


def test_a_view_has_the_comment_of_its_job(monkeypatch):
    answer(monkeypatch).say("squeue", "12|RUNNING|None|n1|1795400000|theirs\n13|PENDING|None||N/A|\n")
    views = scheduler().poll({"1.0": "12", "2.0": "13"})
    assert (views["1.0"].label, views["2.0"].label) == ("theirs", "no comment")


def test_each_task_of_an_array_has_its_view(monkeypatch):
    answers = answer(monkeypatch)

    views = scheduler().poll({"1.0": "33_0", "1.1": "33_1", "1.5": "33_5", "1.7": "33_7", "2.0": "36", "3.0": "4"})

    assert {share: view.phase for share, view in views.items()} == {
        "1.0": SchedulerPhase.RUNNING,
        "1.1": SchedulerPhase.RUNNING,  # completing: its processes may still write
        "1.5": SchedulerPhase.PENDING,
        "1.7": SchedulerPhase.UNKNOWN,
        "2.0": SchedulerPhase.PENDING,
        "3.0": SchedulerPhase.ENDED,
    }
    assert views["1.0"].nodes == ("n1", "n2")
    assert views["1.5"].reason == "as many jobs run as PARALLEL_JOBS allows (JobArrayTaskLimit)"
    assert views["2.0"].starts == 1795413376
    assert views["1.0"].starts is None
    assert views["3.0"].reason == "ended with an error"
    assert sum(call[0] == "squeue" for call in answers.calls) == 1


def test_accounting_is_asked_only_about_jobs_that_slurm_has_forgotten(monkeypatch):
    answers = answer(monkeypatch)
    config = answers.texts["scontrol show config"][1].replace("storage/none", "storage/slurmdbd")
    answers.say("scontrol show config", config)
    answers.say("sacct", "21_0|COMPLETED\n21_[1-2]|CANCELLED by 0\n21_3|RUNNING\n")

    views = scheduler().poll({"1.0": "21_0", "1.2": "21_2", "1.3": "21_3", "1.4": "21_4", "2.0": "36"})

    assert views["1.0"].state == "COMPLETED"
    assert views["1.2"].reason == "was cancelled"
    assert views["1.3"].phase is SchedulerPhase.UNKNOWN  # accounting is late
    assert views["1.4"].phase is SchedulerPhase.UNKNOWN
    assert [call[-1] for call in answers.calls if call[0] == "sacct"] == ["--jobs=21"]


def test_the_state_of_jobs_is_unknown_without_an_answer(monkeypatch):
    answer(monkeypatch).stop_controller()

    with pytest.raises(UnreachableError):
        scheduler().poll({"1.0": "33_0"})


def test_tasks_are_cancelled_together_and_no_others(monkeypatch):
    answers = answer(monkeypatch)

    scheduler().cancel(["33_0", "33_1", "33_5", "36"])

    # A filter by state would cancel all waiting tasks of the array (found with 22.05.8).
    assert [call[1:] for call in answers.calls] == [("--quiet", "33_[0-1,5]", "36")]


def test_no_jobs_need_no_call(monkeypatch):
    answers = answer(monkeypatch)

    scheduler().cancel([])

    assert answers.calls == []


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("AssocGrpGRES", "a limit of your account is reached (AssocGrpGRES)"),
        (
            "ReqNodeNotAvail, UnavailableNodes:n[1-2]",
            "nodes that it needs are down, drained or reserved (ReqNodeNotAvail",
        ),
        ("SomethingNew", "SomethingNew"),
    ],
)
def test_the_reason_of_a_waiting_job_is_a_sentence_with_slurms_word(reason, text):
    assert wait_text(reason).startswith(text)


@pytest.mark.parametrize(
    ("state", "text", "phase"),
    [
        ("SUSPENDED", "is suspended, with all of its processes: an administrator can resume it (SUSPENDED)", "running"),
        ("CONFIGURING", "its nodes are being started (CONFIGURING)", "pending"),
        ("PENDING", "waits for free nodes (Resources)", "pending"),
        ("EXPEDITING", "", "running"),  # one of a later version: not one that has ended
        ("RUNNING", "", "running"),
    ],
)
def test_a_job_that_is_suspended_or_held_tells_so_whatever_its_reason(monkeypatch, state, text, phase):
    answer(monkeypatch).say("squeue", f"1|{state}|Resources|n1|N/A|x\n")
    view = scheduler().poll({"1.0": "1"})["1.0"]
    assert (view.phase, view.reason) == (phase, text)


def test_tasks_that_were_cancelled_while_they_waited_have_ended(monkeypatch):
    """Slurm then lists the rest of the array as one job without a task."""
    answer(monkeypatch).say("squeue", "1|CANCELLED|JobArrayTaskLimit||N/A|x\n1_0|RUNNING|None|n1|N/A|x\n")

    views = scheduler().poll({"1.0": "1_0", "1.2": "1_2", "1.3": "1_3"})

    assert [views[share].phase for share in ("1.0", "1.2", "1.3")] == [
        *(SchedulerPhase.RUNNING, SchedulerPhase.ENDED, SchedulerPhase.ENDED)
    ]
