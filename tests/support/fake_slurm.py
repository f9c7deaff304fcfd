"""A quick imitation of Slurm's programs: sbatch, squeue, scancel, scontrol, sinfo and sacct.

    slurm = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", slurm.path)
    slurm.fail("sbatch", "answer lost")     # the next sbatch submits the job, and then reports a timeout

What the programs print is what Slurm 22.05.8 prints for the options that are known here; an option that is not known
ends the program with status 64 and a line that says so. tests/project/test_fake_slurm.py compares both.
Jobs wait until a test runs them (`run_next`) or says how they ended (`start`, `end`).
This module has only imports of the standard library that load quickly: each call of a program starts a Python.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "sacct")
VERSION = "22.05.8"
CPUS, MEMORY_MIB = 16, 4000  # of each node, as in slurm_stage
DOWN = "Unable to contact slurm controller (connect failure)"
TIMED_OUT = "Socket timed out on send/recv operation"
# What can go wrong with a call: the message, and whether the work is done nevertheless. None: the call hangs.
FAULTS: dict[str, tuple[str | None, bool]] = {
    "down": (DOWN, False),
    "timed out": (TIMED_OUT, False),
    "answer lost": (TIMED_OUT, True),
    "hang": (None, False),
    "hang after": (None, True),
}
SHORT = {"PENDING": "PD", "RUNNING": "R", "COMPLETED": "CD", "FAILED": "F", "CANCELLED": "CA", "TIMEOUT": "TO"}
LIVE = ("PENDING", "RUNNING", "COMPLETING")
UNKNOWN_OPTION = 64  # exit status, which no program of Slurm uses


class FakeSlurm:
    """The state of a fake Slurm, as a test sees it.

    nodes, gpus: of the cluster, whose partitions are those of `slurm_stage`.
    """

    def __init__(self, folder: Path, *, nodes: int = 3, gpus: int = 2) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for program in PROGRAMS:
            path = folder / "bin" / program
            text = f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {folder} {program} "$@"\n'
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)
        cluster = {"nodes": nodes, "gpus": gpus, "accounting": False, "max_array_size": 1001, "kill_wait": 30}
        _write(folder, {"next": 1, "jobs": [], "faults": {}, "cluster": cluster})

    @property
    def path(self) -> str:
        """PATH with the programs first."""
        return f"{self.folder / 'bin'}:{os.environ['PATH']}"

    def set(self, **cluster: Any) -> None:
        """Change the cluster: accounting, max_array_size, kill_wait, nodes, gpus."""
        with _state(self.folder) as state:
            state["cluster"].update(cluster)

    def fail(self, program: str, fault: str, *, times: int = 1) -> None:
        """Let the next calls of a program go wrong: a key of FAULTS, or the message with which it refuses."""
        with _state(self.folder) as state:
            state["faults"].setdefault(program, []).extend([fault] * times)

    def calls(self, program: str = "") -> list[list[str]]:
        """Return the command lines of all calls so far, or of those of a program."""
        log = self.folder / "calls.jsonl"
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return [words for line in lines if (words := json.loads(line))[0] == program or not program]

    def jobs(self) -> list[dict[str, Any]]:
        """Return one entry per job or task of an array: id ("3", "4_2"), state, comment, script, options ..."""
        with _state(self.folder) as state:
            return [{**job, **task, "id": _id(job, task)} for job in state["jobs"] for task in job["tasks"]]

    def start(self, job: str, *, nodes: str = "n1") -> None:
        """Let a waiting job run, without running anything."""
        self._set(job, state="RUNNING", nodes=nodes, start=time.time(), reason="None")

    def end(self, job: str, state: str = "COMPLETED", *, reason: str = "None") -> None:
        """Let a job end with a state of Slurm: COMPLETED, FAILED, TIMEOUT, NODE_FAIL, CANCELLED ..."""
        self._set(job, state=state, reason=reason)

    def forget(self, job: str) -> None:
        """Remove a job from the memory of Slurm, as MinJobAge seconds after its end."""
        with _state(self.folder) as state:
            for one in state["jobs"]:
                one["tasks"] = [task for task in one["tasks"] if _id(one, task) != job]

    def run_next(self, *, timeout: float = 120.0) -> str | None:
        """Run the script of the first waiting job to its end, and return its id; None if none waits.

        A job that calls `scontrol requeue` or is cancelled gets SIGTERM, and SIGKILL after KillWait; a requeued one
        waits again.
        """
        with _state(self.folder) as state:
            waiting = ((job, task) for job in state["jobs"] for task in job["tasks"] if _may_start(state, job, task))
            found = next(waiting, None)
            if found is None:
                return None
            job, task = found
            number = _id(job, task)
            start_task(state, job, task)
            process = self._start_script(job, task)
            task["pid"] = process.pid
            kill_wait = state["cluster"]["kill_wait"]
        self._watch(process, number, kill_wait, timeout)
        return number

    def _start_script(self, job: dict[str, Any], task: dict[str, Any]) -> subprocess.Popen[bytes]:
        script = self.folder / f"job{task['id']}.sh"
        script.write_text(job["script"], encoding="utf-8")
        script.chmod(0o755)
        default = "slurm-%A_%a.out" if job["array"] else "slurm-%j.out"
        names = {"A": job["id"], "a": task["task"], "j": task["id"], "x": job["name"], "%": "%"}
        output = re.sub(r"%([AajxN%])", lambda m: str(names.get(m[1], "n1")), job["options"].get("output", default))
        variables = {
            "SLURM_JOB_ID": task["id"],
            "SLURM_JOBID": task["id"],
            "SLURM_JOB_NAME": job["name"],
            "SLURM_JOB_NODELIST": task["nodes"],
            "SLURM_JOB_NUM_NODES": job["nodes"],
            "SLURM_NNODES": job["nodes"],
            "SLURM_NODEID": 0,
            "SLURM_SUBMIT_DIR": job["cwd"],
            "SLURM_JOB_PARTITION": job["partition"],
        }
        if job["array"]:
            variables |= {"SLURM_ARRAY_JOB_ID": job["id"], "SLURM_ARRAY_TASK_ID": task["task"]}
        if task["restarts"]:
            variables["SLURM_RESTART_COUNT"] = task["restarts"]
        append = job["options"].get("open-mode") == "append"
        with Path(job["cwd"], output).open("ab" if append else "wb") as log:
            return subprocess.Popen(
                [str(script), *job["arguments"]],
                cwd=job["cwd"],
                env={**job["environment"], **{name: str(value) for name, value in variables.items()}},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _watch(self, process: subprocess.Popen[bytes], job: str, kill_wait: float, timeout: float) -> None:
        deadline, killed = time.monotonic() + timeout, None
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
            asked = next(one["asked"] for one in self.jobs() if one["id"] == job)
            now = time.monotonic()
            with contextlib.suppress(ProcessLookupError):  # it ends just now
                if asked and killed is None:
                    killed = now + kill_wait
                    os.killpg(process.pid, signal.SIGTERM)
                if now > (killed or deadline):
                    os.killpg(process.pid, signal.SIGKILL)
        with _state(self.folder) as state:
            _, task = _find(state, job)
            asked, task["asked"], task["pid"] = task["asked"], "", None
            if asked == "requeue":
                task.update(state="PENDING", reason="BeginTime", nodes="", start=None, restarts=task["restarts"] + 1)
            elif asked:
                task.update(state="CANCELLED", reason="None")
            else:
                code = process.returncode
                task.update(state="FAILED" if code else "COMPLETED", reason="NonZeroExitCode" if code else "None")

    def _set(self, job: str, **values: Any) -> None:
        with _state(self.folder) as state:
            one, task = _find(state, job)
            if values.get("state") == "RUNNING":
                start_task(state, one, task)
            task.update(values)


def start_task(state: dict[str, Any], job: dict[str, Any], task: dict[str, Any]) -> None:
    """Note that a job runs. A task of an array gets an id of its own when it starts; the last one has the array's."""
    others = [other for other in job["tasks"] if other["id"] is None and other is not task]
    if task["id"] is None:
        task["id"] = state["next"] if others else job["id"]
        state["next"] += bool(others)
    nodes = "n1" if job["nodes"] == 1 else f"n[1-{job['nodes']}]"
    task.update(state="RUNNING", reason="None", nodes=nodes, start=time.time())


def _may_start(state: dict[str, Any], job: dict[str, Any], task: dict[str, Any]) -> bool:
    after = job["options"].get("dependency", "").partition(":")[2]
    needed = [other for other in state["jobs"] if str(other["id"]) in after.split(":")]
    ended = all(other_task["state"] not in LIVE for other in needed for other_task in other["tasks"])
    return task["state"] == "PENDING" and task["reason"] != "JobHeldUser" and ended


def _id(job: dict[str, Any], task: dict[str, Any]) -> str:
    return f"{job['id']}_{task['task']}" if job["array"] else str(job["id"])


def _find(state: dict[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the job and the task with this id. Raises KeyError without it."""
    for job in state["jobs"]:
        for task in job["tasks"]:
            if _id(job, task) == name or str(task["id"]) == name:
                return job, task
    raise KeyError(name)


@contextlib.contextmanager
def _state(folder: Path) -> Iterator[dict[str, Any]]:
    """Read the state, and write it after the block, if it has changed. One process at a time."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text = (folder / "state.json").read_text(encoding="utf-8")
        state = json.loads(text)
        yield state
        if json.dumps(state) != text:
            _write(folder, state)


def _write(folder: Path, state: dict[str, Any]) -> None:
    new = folder / "state.json.new"
    new.write_text(json.dumps(state), encoding="utf-8")
    new.replace(folder / "state.json")


# The programs. Each gets its words, and returns its exit status.


class UnknownOptionError(Exception):
    """An option that this imitation does not have."""


def main(folder: Path, program: str, words: Sequence[str]) -> int:
    """Run one of the programs, with the fault that a test has asked for."""
    with (folder / "calls.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps([program, *words]) + "\n")
    with _state(folder) as state:
        faults = state["faults"].get(program) or [""]
        fault = faults.pop(0)
    message, is_done = FAULTS.get(fault, (fault, False)) if fault else ("", True)
    answer = 0
    if is_done:
        out = os.dup(1)
        if fault:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            answer = PROGRAM[program](folder, list(words))
        except UnknownOptionError as error:
            print(f"fake {program}: {error} is not imitated", file=sys.stderr)
            return UNKNOWN_OPTION
        sys.stdout.flush()
        os.dup2(out, 1)
    if message is None:
        signal.pause()
    if message:
        print(_failure(program, message), file=sys.stderr)
        return 1
    return answer


def _failure(program: str, message: str) -> str:
    """Return how a program words a failure of a call."""
    loads = {"squeue": "slurm_load_jobs error", "scontrol": "slurm_load_jobs error", "sinfo": "slurm_load_partitions"}
    if program in loads:
        return f"{loads[program]}: {message}"
    return f"{program}: error: {'Batch job submission failed: ' if program == 'sbatch' else ''}{message}"


def options_of(words: Sequence[str], known: dict[str, str], flags: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the options and the other words. known, flags: short form -> long form, with and without a value."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            name, value, equals = word[1], word[2:], "=" if word[2:] else ""
            if name in flags and value:
                rest.insert(0, f"-{value}")
                value = equals = ""
            name = known.get(name) or flags.get(name) or name
        if name in flags.values():
            found[name] = value
        elif name in known.values():
            found[name] = value if equals else rest.pop(0)
        else:
            raise UnknownOptionError(word)
    return found, rest


LONG_VALUES = ["comment", "gres", "gpus", "gpus-per-node", "gpus-per-task", "cpus-per-gpu", "mem", "ntasks-per-node"]
LONG_VALUES += ["signal", "open-mode", "qos", "wrap", "reservation", "export", "exclude", "begin"]
LONG_VALUES += ["container-image", "container-mounts"]
LONG_FLAGS = ["parsable", "requeue", "no-requeue", "test-only", "exclusive", "hold", "quiet", "version"]
SBATCH_VALUES = {f"-{name}": name for name in LONG_VALUES} | {
    "J": "job-name",
    "N": "nodes",
    "n": "ntasks",
    "t": "time",
    "o": "output",
    "e": "error",
    "p": "partition",
    "A": "account",
    "D": "chdir",
    "C": "constraint",
    "d": "dependency",
    "a": "array",
    "c": "cpus-per-task",
    "w": "nodelist",
    "x": "exclude",
}
SBATCH_FLAGS = {f"-{name}": name for name in LONG_FLAGS}


def sbatch(folder: Path, words: list[str]) -> int:
    """Submit a script: its file, the standard input, or --wrap."""
    own, rest = options_of(words, SBATCH_VALUES, SBATCH_FLAGS)
    if "version" in own:
        print(f"slurm-wlm {VERSION}")
        return 0
    if "wrap" in own:
        script, name = f"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n{own['wrap']}\n", "wrap"
    elif rest:
        try:
            script, name = Path(rest[0]).read_text(encoding="utf-8"), Path(rest[0]).name
        except OSError:
            print(f"sbatch: error: Unable to open file {rest[0]}", file=sys.stderr)
            return 1
    else:
        script, name = sys.stdin.read(), "sbatch"
    if not script.startswith("#!"):
        print("sbatch: error: This does not look like a batch script.  The first", file=sys.stderr)
        print("sbatch: error: line must start with #! followed by the path to an interpreter.", file=sys.stderr)
        print("sbatch: error: For instance: #!/bin/sh", file=sys.stderr)
        return 1
    options, _ = options_of(_directives(script), SBATCH_VALUES, SBATCH_FLAGS)
    options |= own
    with _state(folder) as state:
        if why := _refusal(state["cluster"], options):
            print(f"sbatch: error: Batch job submission failed: {why}", file=sys.stderr)
            return 1
        if "test-only" in options:
            when = time.strftime("%Y-%m-%dT%H:%M:%S")
            print(f"sbatch: Job {state['next']} to start at {when} using 1 processors on nodes n1", file=sys.stderr)
            return 0
        number = state["next"]
        state["next"] += 1
        tasks = _tasks(options["array"]) if "array" in options else [None]
        reason = "JobHeldUser" if "hold" in options else "None"
        blank = {
            "state": "PENDING",
            "reason": reason,
            "nodes": "",
            "start": None,
            "restarts": 0,
            "pid": None,
            "asked": "",
        }
        state["jobs"].append(
            {
                "id": number,
                "array": "array" in options,
                "limit": options.get("array", "").partition("%")[2],
                "name": options.get("job-name", name),
                "comment": options.get("comment", "(null)"),
                "partition": options.get("partition", "main"),
                "nodes": int(options.get("nodes", "1").partition("-")[0]),
                "script": script,
                "options": options,
                "arguments": rest[1:],
                "cwd": options.get("chdir", str(Path.cwd())),
                "environment": dict(os.environ),
                "tasks": [{"task": task, "id": number if task is None else None, **blank} for task in tasks],
            }
        )
    print(number if "parsable" in options else f"Submitted batch job {number}")
    return 0


def _directives(script: str) -> list[str]:
    """Return the words of the #SBATCH lines before the first command."""
    import shlex

    words: list[str] = []
    for line in script.splitlines()[1:]:
        if line.startswith("#SBATCH"):
            words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
        elif line.strip() and not line.startswith("#"):
            break
    return words


def _tasks(text: str) -> list[int]:
    found: list[int] = []
    for part in text.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _refusal(cluster: dict[str, Any], options: dict[str, str]) -> str:
    """Return why Slurm refuses a job at once. It accepts a time or a number of nodes above the partition's limits."""
    if options.get("partition", "main") not in ("main", "urgent", "short"):
        print(f"sbatch: error: invalid partition specified: {options['partition']}", file=sys.stderr)
        return "Invalid partition name specified"
    try:
        tasks = _tasks(options.get("array", "0"))
    except ValueError:
        return "Invalid job array specification"
    if tasks[-1] >= cluster["max_array_size"]:
        return "Invalid job array specification"
    *_, kind, count = ["", "", *re.split("[:=]", options.get("gres") or options.get("gpus-per-node", "0"))]
    if int(count) > cluster["gpus"] or (kind and kind not in ("gpu", "a10g")):
        return "Requested node configuration is not available"
    return ""


def squeue(folder: Path, words: list[str]) -> int:
    """List jobs with --format; only those that wait or run without --states=all."""
    values = {"o": "format", "t": "states", "u": "user", "j": "jobs", "n": "name", "p": "partition"}
    flags = {"h": "noheader", "r": "array", "a": "all", "": "me", "-v": "version"}
    options, _ = options_of(words, values, flags)
    with _state(folder) as state:
        jobs, known = state["jobs"], {str(job["id"]) for job in state["jobs"] if job["tasks"]}
    if "version" in options:
        print(f"slurm-wlm {VERSION}")
        return 0
    if "format" not in options or "noheader" not in options:
        raise UnknownOptionError("squeue without --noheader and --format")
    wanted = options["jobs"].split(",") if "jobs" in options else None
    if wanted is not None and len(wanted) == 1 and wanted[0].partition("_")[0] not in known:
        print("slurm_load_jobs error: Invalid job id specified", file=sys.stderr)
        return 1
    states = options.get("states", "PENDING,RUNNING,COMPLETING")
    for job in jobs:
        if wanted is not None and str(job["id"]) not in wanted:
            continue
        if "name" in options and job["name"] not in options["name"].split(","):
            continue
        for task in _lines(job, split="array" in options):
            if states == "all" or task["state"] in states.split(",") or SHORT.get(task["state"]) in states.split(","):
                print(re.sub(r"%\.?\d*([A-Za-z])", lambda m, j=job, t=task: _field(m[1], j, t), options["format"]))
    return 0


def _lines(job: dict[str, Any], *, split: bool) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a job; those of an array that have never started as one, 3_[2-9%4], unless `split`."""
    together = [task for task in job["tasks"] if job["array"] and task["id"] is None and not split]
    if together:
        numbers = _ranges([task["task"] for task in together]) + (f"%{job['limit']}" if job["limit"] else "")
        yield {**together[0], "task": f"[{numbers}]"}
    yield from (task for task in job["tasks"] if task not in together)


def _ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def _field(letter: str, job: dict[str, Any], task: dict[str, Any]) -> str:
    values: dict[str, Callable[[], Any]] = {
        "i": lambda: _id(job, task),
        "A": lambda: task["id"] or job["id"],
        "F": lambda: job["id"],
        "K": lambda: str(task["task"]).strip("[]") if job["array"] else "N/A",
        "T": lambda: task["state"],
        "t": lambda: SHORT.get(task["state"], task["state"]),
        "r": lambda: task["reason"],
        "N": lambda: task["nodes"],
        "S": lambda: _time(task["start"]),
        "k": lambda: job["comment"],
        "j": lambda: job["name"],
        "P": lambda: job["partition"],
        "D": lambda: job["nodes"],
        "Z": lambda: job["cwd"],
    }
    if letter not in values:
        raise UnknownOptionError(f"--format=%{letter}")
    return str(values[letter]())


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "N/A"
    form = os.environ.get("SLURM_TIME_FORMAT", "standard")
    return time.strftime("%Y-%m-%dT%H:%M:%S" if form == "standard" else form, time.localtime(seconds))


def scancel(folder: Path, words: list[str]) -> int:
    """Cancel jobs, or send them a signal. A task that waits, of an array, is forgotten at once."""
    values = {"s": "signal", "n": "name", "u": "user", "t": "state"}
    flags = {"b": "batch", "f": "full", "Q": "quiet", "": "me", "-v": "verbose"}
    options, names = options_of(words, values, flags)
    if not names and not {"me", "name", "user"} & set(options):
        print("scancel: error: No job identification provided", file=sys.stderr)
        return 1
    with _state(folder) as state:
        for job in state["jobs"]:
            chosen = [task for task in job["tasks"] if not names or _is_named(job, task, names)]
            for task in chosen if options.get("name", job["name"]) == job["name"] else []:
                if task["pid"] and "signal" in options:
                    number = signal.Signals[f"SIG{options['signal'].removeprefix('SIG')}"]
                    send = os.killpg if "full" in options else os.kill
                    with contextlib.suppress(ProcessLookupError):  # it has ended, and slurmctld does not know yet
                        send(task["pid"], number)
                elif task["pid"]:
                    task["asked"] = "cancel"
                elif task["state"] == "PENDING" and task["id"] is None and len(chosen) < len(job["tasks"]):
                    job["tasks"].remove(task)
                elif task["state"] in LIVE and "signal" not in options:
                    task.update(state="CANCELLED", start=task["start"] or time.time())
    return 0


def _is_named(job: dict[str, Any], task: dict[str, Any], names: Sequence[str]) -> bool:
    whole = {str(job["id"]), str(task["id"]), _id(job, task)} & set(names)
    lists = (name.partition("_")[2].strip("[]") for name in names if name.startswith(f"{job['id']}_["))
    return bool(whole) or any(task["task"] in _tasks(text) for text in lists)


def scontrol(folder: Path, words: list[str]) -> int:
    """Answer `show config|partition|node|hostnames`, `requeue JOB`, `ping`, `hold`, `release` and `update`."""
    options, rest = options_of(words, {}, {"o": "oneliner"})
    command, *rest = rest or [""]
    with _state(folder) as state:
        if command == "ping":
            print("Slurmctld(primary) at ctl is UP")
        elif command == "show" and rest[0] == "hostnames":
            first, _, last = rest[1].strip("n[]").partition("-")
            print("\n".join(f"n{i}" for i in range(int(first), int(last or first) + 1)))
        elif command == "show" and rest[0] in SHOWN and ("oneliner" in options or rest[0] == "config"):
            print("\n".join(SHOWN[rest[0]](state["cluster"])))
        elif command in ("requeue", "hold", "release", "update"):
            return _change(state, command, rest[0])
        else:
            raise UnknownOptionError(" ".join(["scontrol", *words]))
    return 0


def _change(state: dict[str, Any], command: str, name: str) -> int:
    try:
        _, task = _find(state, name.removeprefix("JobId="))
    except KeyError:
        print(f"Invalid job id specified for job {name.removeprefix('JobId=')}", file=sys.stderr)
        return 1
    if command == "requeue" and task["state"] == "PENDING":
        print(f"{name}: Job is pending execution", file=sys.stderr)
        return 1
    if command == "requeue" and task["pid"]:
        task["asked"] = "requeue"
    elif command == "requeue":
        task.update(state="PENDING", reason="BeginTime", nodes="", start=None, restarts=task["restarts"] + 1)
    elif command in ("hold", "release"):
        task["reason"] = "JobHeldUser" if command == "hold" else "None"
    return 0


def _show_config(cluster: dict[str, Any]) -> Iterator[str]:
    accounting = "accounting_storage/slurmdbd" if cluster["accounting"] else "accounting_storage/none"
    values = {
        "AccountingStorageType": accounting,
        "ClusterName": "stage",
        "KillWait": f"{cluster['kill_wait']} sec",
        "MaxArraySize": cluster["max_array_size"],
        "MaxJobCount": 10000,
        "MinJobAge": "3600 sec",
        "PreemptMode": "REQUEUE",
        "SlurmdTimeout": "20 sec",
        "SLURM_VERSION": VERSION,
    }
    yield from (f"{name:<23} = {value}" for name, value in values.items())


def _show_partition(cluster: dict[str, Any]) -> Iterator[str]:
    count = cluster["nodes"]
    cpus, nodes = CPUS * count, f"n[1-{count}]" if count > 1 else "n1"
    for name, default, grace, limit, tier, preempt in (
        ("main", "YES", 60, "2-00:00:00", 1, "REQUEUE"),
        ("urgent", "NO", 0, "01:00:00", 10, "OFF"),
        ("short", "NO", 0, "00:05:00", 1, "OFF"),
    ):
        yield (
            f"PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default={default}"
            f" QoS=N/A DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime={grace} Hidden=NO"
            f" MaxNodes=UNLIMITED MaxTime={limit} MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes={nodes}"
            f" PriorityJobFactor=1 PriorityTier={tier} RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE"
            f" PreemptMode={preempt} State=UP TotalCPUs={cpus} TotalNodes={count} SelectTypeParameters=NONE"
            f" JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED"
            f" TRES=cpu={cpus},mem={MEMORY_MIB * count}M,node={count},billing={cpus}"
        )


def _show_node(cluster: dict[str, Any]) -> Iterator[str]:
    gres = f"gpu:a10g:{cluster['gpus']}" if cluster["gpus"] else "(null)"
    for number in range(1, cluster["nodes"] + 1):
        yield (
            f"NodeName=n{number} Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv={CPUS} CPUTot={CPUS} CPULoad=0.50"
            f" AvailableFeatures=(null) ActiveFeatures=(null) Gres={gres} NodeAddr=10.98.66.{number}"
            f" NodeHostName=n{number} Version={VERSION} OS=Linux 6.1.0 #1 SMP  RealMemory={MEMORY_MIB} AllocMem=0"
            f" FreeMem=2000 Sockets={CPUS} Boards=1 State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A"
            f" MCS_label=N/A Partitions=main,urgent,short  CfgTRES=cpu={CPUS},mem={MEMORY_MIB}M,billing={CPUS}"
            " AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0"
            " ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s"
        )


SHOWN: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "config": _show_config,
    "partition": _show_partition,
    "node": _show_node,
}


def sinfo(folder: Path, words: list[str]) -> int:
    """List the partitions with --format."""
    options, _ = options_of(words, {"o": "format", "p": "partition"}, {"h": "noheader", "-v": "version"})
    if "version" in options:
        print(f"slurm-wlm {VERSION}")
        return 0
    if "format" not in options or "noheader" not in options:
        raise UnknownOptionError("sinfo without --noheader and --format")
    with _state(folder) as state:
        cluster = state["cluster"]
    nodes = f"n[1-{cluster['nodes']}]" if cluster["nodes"] > 1 else "n1"
    for name, limit in (("main*", "2-00:00:00"), ("urgent", "1:00:00"), ("short", "5:00")):
        values = {
            "P": name,
            "R": name.strip("*"),
            "a": "up",
            "l": limit,
            "D": cluster["nodes"],
            "t": "idle",
            "N": nodes,
        }
        values |= {"T": "idle", "G": f"gpu:a10g:{cluster['gpus']}", "c": CPUS, "m": MEMORY_MIB}
        print(re.sub(r"%\.?\d*([A-Za-z])", lambda m, v=values: str(v[m[1]]), options["format"]))
    return 0


def sacct(folder: Path, words: list[str]) -> int:
    """List jobs as JobID|State, if the cluster has accounting."""
    values = {"o": "format", "j": "jobs", "S": "starttime", "u": "user"}
    flags = {"n": "noheader", "P": "parsable2", "X": "allocations"}
    options, _ = options_of(words, values, flags)
    with _state(folder) as state:
        if not state["cluster"]["accounting"]:
            print("Slurm accounting storage is disabled", file=sys.stderr)
            return 1
        if not {"noheader", "parsable2", "allocations"} <= set(options):
            raise UnknownOptionError("sacct without --noheader --parsable2 --allocations")
        names = options["jobs"].split(",") if "jobs" in options else []
        for job in state["jobs"]:
            for task in job["tasks"]:
                fields = {"JobID": _id(job, task), "State": task["state"], "Comment": job["comment"]}
                if not names or _is_named(job, task, names):
                    print("|".join(fields[name] for name in options.get("format", "JobID,State").split(",")))
    return 0


PROGRAM = {"sbatch": sbatch, "squeue": squeue, "scancel": scancel, "scontrol": scontrol, "sinfo": sinfo, "sacct": sacct}

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
