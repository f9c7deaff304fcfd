"""Call the programs of Slurm, and read their output: sbatch, squeue, scancel, scontrol and sacct.

Nothing here depends on the user's own variables: SQUEUE_PARTITION would hide jobs, SBATCH_TIMELIMIT would replace a
line of the script, and sbatch and srun also read the SLURM_* variables of a job in whose shell a command runs.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kmatrix.engines.base import UnreachableError
from kmatrix.errors import LaunchError
from kmatrix.text import printable

# Seconds. Without a controller, the programs give up after about 10 s (measured with 22.05.8); a busy one takes long.
ASK_S, SUBMIT_S = 60.0, 180.0
MOST_JOBS = 1000  # asked for in one command line
# Variables of a shell that say which cluster is meant, and nothing about a job.
KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"})
PREFIXES = ("SLURM_", "SBATCH_", "SQUEUE_", "SCANCEL_", "SCONTROL_", "SACCT_", "SINFO_", "SALLOC_", "SRUN_")
# Set by Slurm for the devices of the job in whose shell a command runs; another job gets its own.
DEVICES = frozenset({"CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"})
# Texts of programs that did not reach the controller, or got no answer (slurm_errno.c).
NO_ANSWER = re.compile(
    r"unable to contact slurm|connect failure|connection refused|timed out|zero bytes were transmitted"
    r"|standby mode|could not establish a configuration source|communication (connection )?failure"
    r"|unable to resolve|no route to host|resource temporarily unavailable|munge",
    re.IGNORECASE,
)
FIELDS = ("%i", "%T", "%r", "%N", "%S", "%k")  # the comment last: it may have a separator in it
SEPARATOR = "|"
# Times in Unix seconds; and arrays in full, which squeue else cuts off after 64 characters (squeue(1)).
OUTPUT = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0", "LC_ALL": "C"}
FIELD = re.compile(r"(?:^|(?<=\s))([A-Za-z][A-Za-z0-9_/:.-]*)=")


@dataclass(frozen=True, slots=True)
class QueueLine:
    """A line of squeue: a job, a task of an array, or the waiting tasks of an array together."""

    job: str  # 12, 12_3 or 12_[4-9%2]
    state: str  # PENDING, RUNNING, CANCELLED ...
    reason: str  # Resources, Priority, None ...
    nodes: str  # n[1-3], "" before it starts
    start: float | None  # Unix seconds: of the start, or the expected one; None: not known
    comment: str


def squeue() -> list[QueueLine]:
    """Return the jobs of this user that Slurm knows, also ended ones. Raises UnreachableError without an answer.

    Without -j: that fails for all jobs if one of them is no longer known.
    """
    output = _ask("squeue", "--noheader", "--me", "--states=all", f"--format={SEPARATOR.join(FIELDS)}")
    return list(_queue_lines(output))


def _queue_lines(output: str) -> Iterator[QueueLine]:
    for line in output.splitlines():
        words = line.split(SEPARATOR, len(FIELDS) - 1)
        if len(words) == len(FIELDS):  # others are messages of plugins
            job, state, reason, nodes, start, comment = (printable(word.strip()) for word in words)
            yield QueueLine(job, state, reason, nodes, float(start) if start.isdecimal() else None, comment)


def sacct(jobs: Sequence[str]) -> Mapping[str, str]:
    """Return job -> state, of these jobs that accounting knows; empty without accounting, or without an answer."""
    try:
        output = _ask(
            "sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State", f"--jobs={','.join(jobs)}"
        )
    except LaunchError:
        return {}
    lines = (line.split(SEPARATOR) for line in output.splitlines())
    return {words[0]: words[1].split()[0] for words in lines if len(words) == 2 and words[1].split()}


def sbatch(script: Path, options: Sequence[str] = ()) -> str:
    """Submit a script and return the id of the job.

    sbatch inherits the inheritable descriptors: the submitter's lock is held until it has ended, whatever ends us.
    Raises UnreachableError without an answer: the job may have been submitted. Raises LaunchError if it is refused.
    """
    words = ["sbatch", "--parsable", *options, str(script)]
    done = _run(words, SUBMIT_S)
    if done.returncode:
        raise _refusal("Slurm refuses the job", done)
    job = done.stdout.strip().splitlines()[-1:] or [""]
    found = job[0].partition(";")[0]  # a cluster may follow
    if not found.isdecimal():
        raise UnreachableError("Slurm gives no job id", why=f"sbatch printed {done.stdout.strip()!a}")
    return found


def refusal_of(script: str) -> str:
    """Return why sbatch would refuse a script, "" if it would take it. Slurm checks less than when it starts a job."""
    done = _run(["sbatch", "--test-only"], SUBMIT_S, text=script)
    if not done.returncode:
        return ""
    error = _refusal("", done)
    if isinstance(error, UnreachableError):
        raise error
    return error.why


def scancel(jobs: Sequence[str], *options: str) -> None:
    """Cancel jobs; those that have ended or are not known are ignored. Raises UnreachableError without an answer."""
    for first in range(0, len(jobs), 500):  # a command line has an end
        done = _run(["scancel", "--quiet", *options, *jobs[first : first + 500]], ASK_S)
        if done.returncode and isinstance(error := _refusal("", done), UnreachableError):
            raise error


def show(kind: str) -> list[Mapping[str, str]]:
    """Return the entities of a kind: node, partition. Raises UnreachableError without an answer."""
    output = _ask("scontrol", "--oneliner", "show", kind)
    return [found for line in output.splitlines() if (found := fields(line))]


def show_config() -> Mapping[str, str]:
    """Return the settings of the controller. Raises UnreachableError without an answer."""
    lines = (line.partition("=") for line in _ask("scontrol", "show", "config").splitlines())
    return {name.strip(): value.strip() for name, equals, value in lines if equals}


def fields(line: str) -> Mapping[str, str]:
    """Return the NAME=value pairs of a line of scontrol. A value may have blanks; the first of equal names counts."""
    found: dict[str, str] = {}
    starts = list(FIELD.finditer(line))
    ends = [*(match.start() for match in starts[1:]), len(line)]
    for match, end in zip(starts, ends, strict=False):
        found.setdefault(match[1], printable(line[match.end() : end].strip()))
    return found


def is_installed() -> bool:
    """Return whether this machine has the programs of Slurm."""
    return any(os.access(Path(folder, "sbatch"), os.X_OK) for folder in os.get_exec_path())


def _ask(*words: str) -> str:
    """Return the output of a question. Raises UnreachableError if the program fails."""
    done = _run(words, ASK_S, settings=OUTPUT)
    if done.returncode:
        raise UnreachableError("Slurm does not answer", why=_last_words(done), hint=_hint(words))
    return done.stdout


def _hint(words: Sequence[str]) -> str:
    return f"try `{' '.join(words[:1])}` here; jobs go on without an answer"


def _refusal(what: str, done: subprocess.CompletedProcess[str]) -> LaunchError:
    words = _last_words(done)
    if NO_ANSWER.search(words):
        return UnreachableError("Slurm does not answer", why=words, hint="jobs go on; repeat the command later")
    return LaunchError(what, why=words)


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a program wrote to stderr, without the program's name."""
    lines = [line for line in printable(done.stderr or done.stdout).splitlines() if line.strip()]
    wanted = [line for line in lines if "--help" not in line] or lines
    last = wanted[-1] if wanted else f"exit status {done.returncode}"
    return re.sub(r"^(?:\w+: )?(?:\w+ error: |error: |fatal: |allocation failure: )?", "", last.strip())


def _run(
    words: Sequence[str],
    limit_s: float,
    *,
    text: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program. Raises LaunchError if it is not installed, UnreachableError after the time limit."""
    try:
        return subprocess.run(
            words,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**environment(), **(settings or {})},
            check=False,
            timeout=limit_s,
            close_fds=False,  # only inheritable ones are passed on, and Python makes none of its own so
        )
    except FileNotFoundError:
        raise LaunchError(
            f"{words[0]} not found",
            why="ENGINE=slurm needs the programs of Slurm",
            hint="run this on a login node of the cluster, or pass ENGINE=local",
        ) from None
    except subprocess.TimeoutExpired:
        raise UnreachableError(
            "Slurm does not answer", why=f"{words[0]} has not ended after {limit_s:g} s", hint=_hint(words)
        ) from None


def environment() -> dict[str, str]:
    """Return this process's environment for a program of Slurm, and so for a job, without settings of other jobs."""
    ours = DEVICES if "SLURM_JOB_ID" in os.environ else frozenset[str]()
    return {
        name: value
        for name, value in os.environ.items()
        if name in KEPT or not (name in ours or name.startswith(PREFIXES))
    }
