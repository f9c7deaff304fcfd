"""Slurm as a scheduler: sbatch, squeue, scancel, sinfo and scontrol, with formats that versions of ten years have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kmatrix.engines.jobs import content_of, template
from kmatrix.engines.ports import Batch, Phase, Seen, Shape, UnreachableError
from kmatrix.engines.slurm_nodes import SINFO, Cluster, SlurmSettings, read_nodes
from kmatrix.errors import LaunchError
from kmatrix.records.paths import ROOT, program_path
from kmatrix.text import printable

ASK_S, SUBMIT_S = 60.0, 180.0  # without a controller, the programs give up after about 10 s; a busy one takes long
MOST = 1000  # tasks of an array, if the cluster allows them: MaxArraySize is 1001 by default
# States of squeue(1), "JOB STATE CODES". Others, and those of later versions, are of a job that has its nodes: a second
# job for its runs would be worse than none.
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
}
WAITS = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
NO_ANSWER = re.compile(  # texts of programs that did not reach the controller, or got no answer (slurm_errno.c)
    r"unable to contact|connect failure|connection refused|timed out|zero bytes were|standby mode|configuration source"
    r"|communication (connection )?failure|unable to resolve|no route|temporarily unavailable|munge",
    re.IGNORECASE,
)
# Variables that replace lines of a script, or its devices: of another job in whose shell a command runs, or of a site.
PREFIXES = (
    *("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SCONTROL_", "SINFO_", "PMIX_", "PMI_"),
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
)
KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT"}  # which cluster, and who asks
PLAIN = re.compile(r"[\w./:=,@%+&|()\[\]*-]+", re.ASCII)  # of an #SBATCH line without quotes: # starts a comment
NODE_FLAGS = ("-w", "-F", "--nodel", "--nodef")  # they name the nodes of runs; the last job has one


@dataclass(slots=True)
class Slurm:
    """The Slurm of this machine. It fulfils `ports.Scheduler`, and its reasons are Slurm's own words."""

    settings: SlurmSettings
    root: Path = ROOT  # of the checkout
    python: Path = Path(sys.executable)
    run: Callable[..., subprocess.CompletedProcess[str]] = field(default=subprocess.run, repr=False)
    name: str = "Slurm"
    most: int = MOST
    most_wide: int = MOST
    _cluster: Cluster | None = None

    def cluster(self) -> Cluster:
        """Return what the cluster has, with the settings of the matrix. Asked once. Raises UnreachableError."""
        if self._cluster is None:
            lines = self._ask("sinfo", "--all", "--noheader", "--exact", f"--format={SINFO}")
            self._cluster = Cluster(self.settings, read_nodes(lines, self.settings.gpu_type))
        return self._cluster

    def fit(self, planned: Shape) -> Shape:
        """Return what the job of a run asks for. See the port."""
        return self.cluster().fit(planned)

    @property
    def last(self) -> Shape:
        return self.cluster().last

    @property
    def whole_node(self) -> Shape | None:
        return self.cluster().whole_node

    def check(self, shapes: Sequence[Shape]) -> Iterator[LaunchError]:
        """Yield why jobs of these shapes would never start; learn how long an array may be. See the port."""
        config = "\n".join(self._ask("scontrol", "show", "config"))
        if found := re.search(r"^MaxArraySize\s*=\s*(\d+)", config, re.MULTILINE):
            self.most = self.most_wide = max(1, min(MOST, int(found[1]) - 1))  # 0: no arrays
        yield from self.cluster().problems(shapes)

    def script(self, batch: Batch) -> tuple[str, str]:
        """Return the name and the text of a script. Raises LaunchError for a path that it cannot have."""
        settings, tasks = self.settings, len(batch.runs)
        for path in (batch.folder, self.root, self.python, settings.setup or self.root):
            quoted(str(path))  # a line break would end a comment of the script
        known = {"--partition": settings.partition, "--account": settings.account}
        flags = [[f"{name}={value}"] for name, value in known.items() if value]
        flags += [list(flag) for flag in settings.flags if not (batch.is_last and flag[0].startswith(NODE_FLAGS))]
        log = str(batch.folder).replace("%", "%%") + f"/{'%a' if tasks > 1 else '0'}.log"
        text: str = template("job.sbatch.j2").render(
            batch=batch,
            settings=settings,
            content=content_of(batch),
            log=quoted(log),
            tasks=tasks,
            minutes=-(-(batch.shape.seconds or 0) // 60),
            flags=[" ".join(map(quoted, flag)) for flag in flags],
            path=program_path(self.root),
            root=self.root,
            python=self.python,
        )
        return "job.sbatch", text

    def submit(self, batch: Batch, after: Sequence[str] = ()) -> str:
        """Submit the script of a batch, as it is; return the id of the job. See the port."""
        ids = dict.fromkeys(job.partition("_")[0] for job in after)
        options = [f"--dependency=afterany:{':'.join(ids)}"] if ids else []
        script = batch.folder / "job.sbatch"
        done = self._run(["sbatch", "--parsable", *options, str(script)], SUBMIT_S)
        if done.returncode:
            raise _refusal(done, f"change the SLURM_ settings that are in {script}")
        found = re.findall(r"^\s*(\d+)(?:;\S+)?\s*$", done.stdout, re.MULTILINE)  # a cluster may follow
        if len(found) != 1:  # the site prints lines of its own: the name tells
            found = [job.id.partition("_")[0] for job in self.poll(batch.label) if job.number == batch.folder.name]
        if not found:
            raise _silence(f"sbatch printed no job id: {printable(done.stdout).strip()!a}")
        return str(found[0])

    def poll(self, label: str) -> list[Seen]:
        """Return the jobs of a matrix, one per task of an array. See the port."""
        # Not --json: its keys change with versions. Not -j: with one id that has aged, the whole question fails.
        lines = self._ask("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%i|%j|%T|%r|%N|%S")
        # Lines of other jobs, and messages of plugins, have another form.
        return [_seen(line.split("|")) for line in lines if re.fullmatch(rf"[^|]+\|{label}-\d+(\|[^|]*){{4}}", line)]

    def cancel(self, jobs: Sequence[str]) -> None:
        """Ask jobs to save and end; those that have ended are ignored. Raises UnreachableError."""
        arrays: dict[str, list[str]] = {}
        for job, _, task in (job.partition("_") for job in jobs):
            arrays.setdefault(job, []).append(task)
        ids = [f"{job}_[{','.join(tasks)}]" if tasks[0] else job for job, tasks in arrays.items()]
        done = self._run(["scancel", "--quiet", *ids], ASK_S) if ids else None
        if done and done.returncode and isinstance(error := _refusal(done), UnreachableError):
            raise error

    def _ask(self, *words: str) -> list[str]:
        # Times in Unix seconds. Not for sbatch, whose variables a job gets.
        done = self._run(words, ASK_S, SLURM_TIME_FORMAT="%s", LC_ALL="C")
        if done.returncode:
            raise _silence(_words_of(done))
        return printable(done.stdout).splitlines()

    def _run(self, words: Sequence[str], limit_s: float, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(PREFIXES)}
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "encoding": "utf-8"}
        options |= {"errors": "replace", "check": False, "timeout": limit_s, "env": kept | variables}
        try:
            return self.run(list(words), **options)
        except FileNotFoundError:
            hint = "run this on a login node of the cluster, or pass ENGINE=local"
            raise LaunchError(f"{words[0]} not found", why="ENGINE=slurm needs it", hint=hint) from None
        except subprocess.TimeoutExpired:
            raise _silence(f"{words[0]} has not ended after {limit_s:.0f} s") from None


def quoted(word: str) -> str:
    """Return a word of an #SBATCH line. Raises LaunchError if no quotes would help."""
    if not word.isprintable() or "\\" in word:
        raise LaunchError(f"{word!a} cannot be in a job script", hint="use another path or flag")
    return word if PLAIN.fullmatch(word) else '"' + word.replace('"', '\\"') + '"'


def _seen(words: Sequence[str]) -> Seen:
    job, name, state, reason, nodes, start = words
    task = job.partition("_")[2]
    phase = Phase.ENDED if state in ENDED else Phase.WAITS if state in WAITS else Phase.RUNS
    return Seen(
        number=name.rpartition("-")[2],
        task=int(task) if task.isdecimal() else 0,
        id=job,
        phase=phase,
        state=state,
        reason="" if reason == "None" else reason,
        nodes=nodes,
        starts=float(start) if start.isdecimal() and phase is Phase.WAITS else None,
    )


def _refusal(done: subprocess.CompletedProcess[str], hint: str = "") -> LaunchError:
    why = _words_of(done)
    return _silence(why) if NO_ANSWER.search(why) else LaunchError("Slurm refuses the job", why=why, hint=hint)


def _silence(why: str) -> UnreachableError:
    return UnreachableError("Slurm does not answer", why=why, hint="jobs go on without an answer: try again later")


def _words_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last lines that a program wrote to stderr: a site's own reason comes before Slurm's."""
    lines = [line.strip() for line in printable(done.stderr or done.stdout).splitlines() if line.strip()]
    words = [re.sub(r"^(?:\w+: )?(?:error: |fatal: )?", "", line) for line in lines[-6:]]
    return "; ".join(words) or f"exit status {done.returncode}"
