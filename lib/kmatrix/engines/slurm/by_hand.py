"""Scripts that the user submits by hand: `sbatch d/*.sbatch` starts all of them, and the report comes last.

sbatch takes one script, and gives further words to it as arguments. So the job of the first script submits the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kmatrix.engines.base import UnreachableError
from kmatrix.engines.slurm.commands import sbatch, squeue
from kmatrix.engines.slurm.scheduler import is_live
from kmatrix.errors import KmatrixError
from kmatrix.records.jobs.files import REPORT, EngineFile, SubmissionFile, job_label, read_submission
from kmatrix.records.jobs.paths import JobsDir, SubmissionDir
from kmatrix.text import first_names

MOST_BYTES = 2**20  # of a script that is looked into
COMMENT = re.compile(r"^#SBATCH --comment=(kmatrix-[0-9a-z]+-([0-9]+))\s*$", re.MULTILINE)
Say = Callable[[str], object]


def is_first_start(environment: Mapping[str, str]) -> bool:
    """Return whether this is the first start of a job, and of an array the first task."""
    first_task = environment.get("SLURM_ARRAY_TASK_ID") == environment.get("SLURM_ARRAY_TASK_MIN")
    return environment.get("SLURM_RESTART_COUNT", "0") in ("", "0") and first_task


def submit_others(
    jobs: JobsDir, engine: EngineFile, scripts: Sequence[str], environment: Mapping[str, str], say: Say
) -> None:
    """Submit further scripts of the same matrix, each once, the report after all jobs. Errors are only reported.

    scripts: paths, relative to the folder of the sbatch command.  environment: of the job.
    """
    found: dict[int, Path] = {}
    for text in scripts:
        path = Path(environment.get("SLURM_SUBMIT_DIR", ""), text)
        number = _submission_in(path, engine)
        if number is None or read_submission(jobs.submission(number)) is None:
            say(f"not submitted: {text} is not a script of this matrix")
        else:
            found[number] = path
    for number, path in sorted(found.items()):
        submission = read_submission(jobs.submission(number)) or SubmissionFile()
        try:
            if known := live_jobs([submission.label]):
                say(f"{path.name} has a job: {first_names(known)}")
                continue
            after = jobs_before(engine, submission) if submission.kind == REPORT else []
            say(f"submitted {path.name}: job {_submit(path, after)}" + (", after all others" if after else ""))
        except KmatrixError as error:
            say(f"cannot submit {path}: {error.why or error.what}; submit it on a login node: sbatch {path}")
            if isinstance(error, UnreachableError):
                return


def submit_report_later(folder: SubmissionDir, script: Path | None, engine: EngineFile, say: Say) -> bool:
    """Submit the report again after the jobs that are pending or running; return whether there were any.

    Submitted by hand, it does not know their ids before they exist.  script: of this job, None for that of the folder.
    """
    submission = read_submission(folder) or SubmissionFile()
    try:
        before = jobs_before(engine, submission)
        if not before:
            return False
        job = _submit(script or folder.sbatch, before)
    except KmatrixError as error:
        say(f"cannot ask Slurm for the other jobs: {error.why or error.what}; the report shows what there is now")
        return False
    what = f"{'jobs' if len(before) > 1 else 'job'} {first_names(before)}"
    say(f"this matrix has not ended: {what}; the report is job {job}, after that")
    return True


def jobs_before(engine: EngineFile, submission: SubmissionFile) -> list[str]:
    """Return the pending and running jobs that a submission comes after. Raises UnreachableError without an answer."""
    return live_jobs([job_label(engine.id, number) for number in submission.after])


def live_jobs(labels: Sequence[str]) -> list[str]:
    """Return the pending and running jobs with these labels. Raises UnreachableError without an answer."""
    lines = [line for line in squeue() if line.comment in labels and is_live(line.state)] if labels else []
    return list(dict.fromkeys(line.job.partition("_")[0] for line in lines))


def _submit(script: Path, after: Sequence[str]) -> str:
    return sbatch(script, [f"--dependency=afterany:{':'.join(after)}"] if after else [])


def _submission_in(path: Path, engine: EngineFile) -> int | None:
    """Return the submission of a matrix that a script is of, None for every other file."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return None
    match = COMMENT.search(text)
    return int(match[2]) if match and match[1] == job_label(engine.id, int(match[2])) else None
