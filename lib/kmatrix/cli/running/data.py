"""Prepare large data in a job of Slurm, and follow its output: `make prepare-data ENGINE=slurm`."""

from __future__ import annotations

import codecs
import hashlib
import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kmatrix.engines.base import UnreachableError
from kmatrix.engines.schedulers import settings_of
from kmatrix.engines.slurm.script import JobPlace, Task
from kmatrix.engines.slurm.settings import read_settings
from kmatrix.engines.slurm.task import exit_status, submit_task, task_shape, view_task
from kmatrix.errors import LaunchError
from kmatrix.experiment.cluster.data import LargeData, commands
from kmatrix.experiment.inputs.data import Key
from kmatrix.experiment.plan import Plan
from kmatrix.output import check_interrupt
from kmatrix.own_file import open_to_read
from kmatrix.paste import make_command
from kmatrix.records.jobs.claim import is_listed
from kmatrix.records.paths import ROOT
from kmatrix.runner.loop import EXIT_STOPPED
from kmatrix.text import duration, plural

FOLDER = ".kmatrix_prepare"  # below DATA_DIR
READ_S = 0.5  # between two reads of the log
ASK_S = 10.0  # between two questions to Slurm
FIRST_S = 2.0  # until the first one: a new job has no reason yet
MISSING_S = 60.0  # a job that Slurm does not know, until it counts as ended: caches of storage may hide its last file
NETWORK = re.compile(
    r"network|name resolution|resolve host|getaddrinfo|connection (error|refused|reset|timed out)"
    r"|timed out|unreachable|max retries|urlopen|LocalEntryNotFound|proxy",
    re.IGNORECASE,
)


def prepare_in_job(plan: Plan, large: dict[Key, LargeData]) -> int:
    """Submit a job that prepares these data, or find the one that does, and follow it. Return its exit status.

    Ctrl+C stops following, not the job.  Raises LaunchError if the cluster has no place for it.
    """
    settings = read_settings(settings_of(plan.config.engine, plan.runs[0].values.texts), os.environ)
    place = JobPlace(root=ROOT, python=Path(sys.executable))
    data_dir = plan.data_dir.absolute()
    runs = [config.train for config in plan.configs.values()]
    words = commands(place.python, data_dir, runs, list(large))
    # The same data are the same job, whatever else was typed.
    digest = hashlib.sha256(repr([str(data_dir), words]).encode()).hexdigest()[:12]
    cpus, seconds = task_shape(settings)
    task = Task(
        folder=data_dir / FOLDER / digest,
        name="kmatrix-data",
        title=f"Prepare the data of {', '.join(dict.fromkeys(one.dataset for one in large.values()))}",
        label=f"kmatrix-data-{digest}",
        commands=tuple(tuple(command) for command in words),
        cpus=cpus,
        seconds=seconds,
    )
    job, is_new = submit_task(task, settings, place)
    if is_new:
        limit = f", at most {duration(seconds)}" if seconds is not None else ""
        print(f"job {job}: {', '.join(one.describe() for one in large.values())}; {plural(cpus, 'CPU')}{limit}")
    else:
        print(f"job {job} prepares these data already")
    print("following its output; Ctrl+C stops following, and the job goes on", flush=True)
    try:
        return _follow(task, job, _local_words(plan))
    except KeyboardInterrupt:
        print(f"\nstopped following; job {job} goes on")
        print(f"  follow: {make_command('prepare-data', ENGINE='slurm')}\n  stop:   scancel {job}")
        return EXIT_STOPPED


def _local_words(plan: Plan) -> dict[str, str]:
    """Return the arguments with which this machine, one node, plans the same data."""
    words = {"ENGINE": "local"}
    if any(kind.config.train.num_nodes > 1 for kind in plan.kinds):
        words["NUM_NODES"] = "1"
        words |= {"GPUS_PER_NODE": "0"} if plan.runs[0].values.texts.get("GPUS_PER_NODE", "0") != "0" else {}
    return words


def _follow(task: Task, job: str, local: Mapping[str, str]) -> int:
    """Print the log of a job until it has ended; return its exit status. local: arguments for this machine."""
    reader, said, missing = _LogReader(task.log), "", 0.0
    asked = time.monotonic() - ASK_S + FIRST_S
    while (code := exit_status(task)) is None:
        reader.print_new()
        if time.monotonic() - asked >= ASK_S:
            asked = time.monotonic()
            message, is_live = _state(task)
            if message != said:
                print(f"job {job}: {message}", flush=True)
                said = message
            missing = 0.0 if is_live else missing or asked
        if missing and time.monotonic() - missing > MISSING_S:
            reader.print_new()
            raise LaunchError(
                f"job {job} has ended without a result" + (f": {said}" if said else ""),
                why=f"its output is in {task.log}",
                hint=f"what is prepared is kept; go on with {make_command('prepare-data', ENGINE='slurm')}",
            )
        time.sleep(READ_S)
        check_interrupt()
    reader.print_new()
    if code:
        hint = f"the job goes on where it stopped: {make_command('prepare-data', ENGINE='slurm')}"
        if NETWORK.search(reader.last):
            here = make_command("prepare-data", **local)
            hint = f"if nodes cannot reach the network, prepare the data here: {here}"
        raise LaunchError(f"job {job} has ended with status {code}", why=f"its output is in {task.log}", hint=hint)
    return 0


def _state(task: Task) -> tuple[str, bool]:
    """Return what Slurm says about a job, and whether it may go on."""
    try:
        view = view_task(task)
    except UnreachableError as error:
        return f"Slurm does not answer: {error.why or error.what}", True
    return view.message, view.is_live


class _LogReader:
    """The output of a job, printed as it grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.position, self.last = path, 0, ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end inside a character

    def print_new(self) -> None:
        """Print what was written since the last call."""
        with suppress(OSError):
            if not is_listed(self.path):
                return
            with open_to_read(self.path) as file:  # opened again: a file of network storage shows new text then
                file.seek(self.position)
                data = file.read()
            self.position += len(data)
            text = self._decoder.decode(data)
            self.last = (self.last + text)[-20_000:]
            sys.stdout.write(text)
            sys.stdout.flush()
