"""Arguments of the commands that train, and what they leave in the settings of a matrix."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.cli.trackers import asked_trackers
from kmatrix.engines.place import SSH, hosts_of
from kmatrix.errors import ConfigError, LaunchError, reason_of
from kmatrix.records.matrix import LOCAL, TITLES, Plan
from kmatrix.simulate.library import simulation
from kmatrix.status.cost import BUDGETS, spent
from kmatrix.status.look import Look
from kmatrix.text import printable

RESUMES = ("auto", "latest", "best", "none")  # values of RESUME= besides a path; those of the trainer's --resume
MOST_DIGITS = 7  # of a budget
HERE_ONLY = ("GPUS", "HOSTS", "DETACH")  # arguments about this machine
CHECKOUT = "checkout"  # value of CODE=
SETTINGS = ("GPUS", "HOSTS", "SIMULATE", "TRACKER", "CODE", *BUDGETS)


def asked_settings(arguments: Arguments, plan: Plan) -> dict[str, str]:
    """Return the settings that a command gives to all processes of a matrix. Raises ConfigError for an invalid one."""
    if plan.engine == LOCAL and arguments.assignments and arguments.target in ("continue", "test-rerun"):
        raise ConfigError(
            f"{arguments.target} does not take {next(iter(arguments.assignments))} for {plan.name}",
            why="its runs are executed on this machine, without a scheduler",
            hint="omit it, or start a new matrix with make test-matrix ENGINE=slurm",
        )
    refuse_here_only(arguments, plan.engine)
    check_budget(arguments)
    asked_trackers(arguments)
    if (code := arguments.get("CODE")) not in ("", CHECKOUT):
        raise ConfigError(f"CODE={code}", why=f"expected {CHECKOUT}, or nothing for the code of the matrix")
    nodes = max((int(plan.train_of(run).get("num_nodes") or 1) for run in plan.runs), default=1)
    check_simulation(arguments.get("SIMULATE"), nodes, monitored=plan.common.symbols.get("GPU_MONITOR") == "y")
    known = {name: text for name in SETTINGS if (text := arguments.get(name))}
    return known | (dict(arguments.assignments) if arguments.target in ("continue", "test-rerun") else {})


def refuse_here_only(arguments: Arguments, engine: str) -> None:
    """Raise ConfigError for an argument about this machine if a cluster executes the runs, LaunchError for HOSTS=."""
    if engine != LOCAL and (given := [name for name in HERE_ONLY if arguments.get(name)]):
        raise ConfigError(
            f"{given[0]}= is about this machine, and {TITLES[engine]} executes the runs", hint=f"omit {given[0]}="
        )
    check_hosts(arguments.get("HOSTS"))


def refuse_nodes(arguments: Arguments, engine: str, nodes: int) -> None:
    """Raise ConfigError if a run needs more nodes than there are. nodes: of the widest run."""
    hosts = max(1, len([host for host in arguments.get("HOSTS").split(",") if host]))
    if engine == LOCAL and nodes > hosts:
        raise ConfigError(
            f"a run needs {nodes} nodes, ENGINE=local has {hosts}",
            hint="pass HOSTS=a,b with names that ssh reaches (docs/clusters.md), ENGINE=slurm or kubernetes",
        )


def check_simulation(simulated: str, nodes: int, *, monitored: bool) -> None:
    """Raise ConfigError for simulated GPUs that cannot be recorded. simulated: SIMULATE=.  nodes: of a run."""
    if not simulated:
        return
    if not monitored:
        raise ConfigError("SIMULATE= needs GPU_MONITOR=y", why="only the recording is simulated")
    if nodes > 1:
        raise ConfigError(
            f"SIMULATE={simulated} needs runs on one node",
            why="the simulated driver has the GPUs of one machine",
            hint="omit SIMULATE, or pass NUM_NODES=1",
        )
    simulation(simulated)


@cache
def check_hosts(text: str) -> None:
    """Raise LaunchError for a host of HOSTS=, after the first, that ssh does not reach."""
    for host in hosts_of(text)[1:]:
        try:
            done = subprocess.run(
                [*SSH, host, "true"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
            why = (done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else ""
        except OSError as error:
            why = reason_of(error)
        if why:
            hint = f"`ssh {host} true` has to work without a password"
            raise LaunchError(f"ssh does not reach {host} of HOSTS=", why=" ".join(printable(why).split()), hint=hint)


def check_budget(arguments: Arguments) -> None:
    """Raise ConfigError for a budget that is no number."""
    for name in BUDGETS:
        text = arguments.get(name) or arguments.assignments.get(name, "")
        if text and not _is_count(text):
            raise ConfigError(f"{name}={text}", why="expected a whole number, 0 for no limit")


def refuse_if_spent(seen: Look) -> None:
    """Raise LaunchError if the runs of a matrix have taken its budget."""
    if why := spent(seen):
        hint = "pass a larger BUDGET_HOURS= or BUDGET_DOLLARS=, 0 for no limit"
        raise LaunchError(f"{seen.path.name} cannot go on", why=why, hint=hint)


def _is_count(text: str) -> bool:
    """Return whether a text is a whole number in ASCII digits, short enough for every use."""
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS


def asked_micro_batch(arguments: Arguments) -> int | None:
    """Return MICRO_BATCH= (sequences), None if it is not given. Raises ConfigError for another value than a number."""
    text = arguments.get("MICRO_BATCH")
    if not text:
        return None
    if not _is_count(text) or int(text) < 1:
        raise ConfigError(f"MICRO_BATCH={text}", why="expected a whole number of sequences, 1 or more")
    return int(text)


def resume_from(text: str) -> str:
    """Return RESUME= as the trainer expects it: auto, latest, best, none, or the path of a checkpoint."""
    if text in RESUMES:
        return text
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"RESUME={text}: no such checkpoint",
            why=f"expected a file, or one of {', '.join(RESUMES)}",
            hint="`make list-checkpoints` lists the files",
        )
    return str(path.resolve())
