"""The script of a submission: what it says is what is asked for, and no text of a user reaches a shell."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from kmatrix.engines.slurm.script import JobPlace, render_script, time_text
from kmatrix.engines.slurm.settings import read_settings
from kmatrix.errors import LaunchError
from kmatrix.records.jobs.files import Shape, ShareEntry, SubmissionFile
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.paths import MatrixDir

MATRIX = Path("/shared/results/test_matrix_results_20261123_050000")
PLACE = JobPlace(root=Path("/shared/kmatrix"), python=Path("/shared/kmatrix/.venv/bin/python"))
GPUS = Shape(nodes=2, gpus_per_node=4, ranks_per_node=4, cpus_per_node=16, memory_mib=65536, seconds=5000)


def rendered(shape=GPUS, shares=1, matrix=MATRIX, kind="runs", place=PLACE, **symbols):
    entries = tuple(ShareEntry(task=task, runs=(f"gpt2_{task}",)) for task in range(shares))
    submission = SubmissionFile(kind=kind, label="kmatrix:4f1c:3", shape=shape, shares=entries)
    return render_script(JobsDir(MatrixDir(matrix)).submission(3), submission, read_settings(symbols), place)


def directives(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_a_script_of_an_array_on_two_nodes(golden):
    golden(
        "slurm_array.sbatch",
        rendered(
            shares=3,
            SLURM_PARTITION="gpu",
            SLURM_ACCOUNT="lab",
            SLURM_GPU_TYPE="a100",
            SLURM_SETUP="/shared/setup.sh",
            SLURM_EXTRA_FLAGS="--mail-type=END -x 'n7,n8'",
            PARALLEL_JOBS="2",
        ),
    )


def test_a_script_of_one_run_on_the_cpu(golden):
    golden("slurm_cpu.sbatch", rendered(Shape(ranks_per_node=2, cpus_per_node=8)))


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("gres", "--gres=gpu:a100:4"),
        ("gpus-per-node", "--gpus-per-node=a100:4"),
        ("gpus-per-task", "--gpus-per-task=a100:4"),
    ],
)
def test_gpus_are_asked_for_as_the_cluster_wants_it(flag, line):
    assert line in directives(rendered(SLURM_GPU_FLAG=flag, SLURM_GPU_TYPE="a100"))


def test_gpus_of_any_type():
    assert "--gres=gpu:4" in directives(rendered())


def test_a_run_on_the_cpu_asks_for_no_gpus():
    assert not [line for line in directives(rendered(Shape())) if "gpu" in line]


def test_without_a_time_or_a_memory_the_cluster_decides():
    lines = directives(rendered(Shape()))

    assert not [line for line in lines if line.startswith(("--time", "--mem"))]


def test_all_memory_of_a_node():
    assert "--mem=0" in directives(rendered(Shape(memory_mib=0)))


def test_jobs_are_not_requeued_without_restarts():
    lines = directives(rendered(SLURM_RESTARTS="0"))

    assert "--no-requeue" in lines
    assert "--requeue" not in lines


def test_the_report_does_not_need_whole_nodes():
    assert "--exclusive" not in directives(rendered())
    assert "--exclusive" in directives(rendered(SLURM_EXCLUSIVE="y"))
    assert "--exclusive" in directives(rendered(PACK_NODES="y"))
    assert "--exclusive" not in directives(rendered(Shape(), kind="report", SLURM_EXCLUSIVE="y"))


def test_the_report_is_not_signalled_because_it_would_die_from_it():
    assert "--signal=B:USR1@120" in directives(rendered())
    assert not any("--signal" in line for line in directives(rendered(Shape(), kind="report")))


def test_the_report_has_one_node_whatever_the_user_names_for_the_runs():
    flags = "--nodelist=n1,n2 -w n1 --mail-type=END"
    assert "--mail-type=END" in directives(rendered(Shape(), kind="report", SLURM_EXTRA_FLAGS=flags))
    assert not any("n1" in line for line in directives(rendered(Shape(), kind="report", SLURM_EXTRA_FLAGS=flags)))
    assert "--nodelist=n1,n2" in directives(rendered(SLURM_EXTRA_FLAGS=flags))


def test_the_log_of_each_task_is_in_its_own_folder():
    assert f"--output={MATRIX}/jobs/0003/%a/slurm.log" in directives(rendered(shares=2))
    assert f"--output={MATRIX}/jobs/0003/0/slurm.log" in directives(rendered())


def test_a_percent_sign_in_a_path_is_not_a_pattern():
    text = rendered(shares=2, matrix=Path("/shared/100%/m"))

    assert "--output=/shared/100%%/m/jobs/0003/%a/slurm.log" in directives(text)


@pytest.mark.process
def test_paths_with_blanks_and_quotes_stay_one_word(tmp_path):
    folder = tmp_path / 'it\'s a "test" $(touch pwned) `x`'
    folder.mkdir()
    setup = folder / "set up.sh"
    setup.write_text("export FROM_SETUP=1\n")
    root = folder / "check out"
    (root / "bin").mkdir(parents=True)
    python = root / "bin" / "py thon"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$FROM_SETUP" "$PWD" "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    text = rendered(matrix=folder / "m", place=JobPlace(root=root, python=python), SLURM_SETUP=str(setup))

    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, cwd=tmp_path, check=True, env={})

    assert done.stdout.splitlines() == [
        *("1", str(root), f"{root}:{root}/lib", "-m", "kmatrix.runner.share", "--"),
        *(str(folder / "m"), "3"),
    ]
    assert not (tmp_path / "pwned").exists()
    output = next(line for line in directives(text) if line.startswith("--output="))
    assert shlex.split(output) == [f"--output={folder}/m/jobs/0003/0/slurm.log"]


@pytest.mark.process
def test_a_missing_setup_file_ends_the_job_with_its_name(tmp_path):
    text = rendered(SLURM_SETUP=str(tmp_path / "gone.sh"))

    done = subprocess.run(["bash"], input=text, text=True, capture_output=True, check=False)

    assert done.returncode == 1
    assert f"cannot read {tmp_path}/gone.sh" in done.stderr


@pytest.mark.process
def test_a_setup_file_that_fails_ends_the_job_and_says_so(tmp_path):
    setup = tmp_path / "setup.sh"
    setup.write_text("set -eu\necho loading\nexit 3\n", encoding="utf-8")

    done = subprocess.run(["bash"], input=rendered(SLURM_SETUP=str(setup)), text=True, capture_output=True, check=False)

    assert (done.returncode, done.stdout) == (3, "loading\n")
    assert re.search(r"^kmatrix: the file of SLURM_SETUP ended this job with exit status 3 on ", done.stderr, re.M)


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\x1bb"])
def test_a_path_with_a_line_break_cannot_end_a_comment(name):
    with pytest.raises(LaunchError, match="control characters"):
        rendered(matrix=Path("/shared") / name)


def test_a_path_with_a_backslash_is_refused_because_slurm_would_read_the_log_pattern_differently():
    with pytest.raises(LaunchError, match="backslash"):
        rendered(matrix=Path("/shared/a\\b"))


@pytest.mark.parametrize(
    ("seconds", "text"), [(1, "00:01:00"), (61, "00:02:00"), (86400, "1-00:00:00"), (5000, "01:24:00")]
)
def test_times_are_rounded_up_to_minutes(seconds, text):
    assert time_text(seconds) == text
