"""Make or open a matrix, choose runs, start them on its engine, and watch: test-matrix, train, add, continue, ..."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.cli.configure import defconfig
from kmatrix.cli.plan import plan_of
from kmatrix.cli.targets import chosen_runs, find_target, live_jobs, refuse_if_running, with_status
from kmatrix.cli.watch.status import watch
from kmatrix.engines.place import SSH, hosts_of
from kmatrix.errors import ConfigError, LaunchError, reason_of
from kmatrix.experiment.add import add_runs, plan_more
from kmatrix.experiment.cluster.resolve import find_gpus
from kmatrix.experiment.create import forget_reuse
from kmatrix.experiment.inputs.ask import need_torch
from kmatrix.experiment.make import make_matrix
from kmatrix.experiment.plan import Plan
from kmatrix.experiment.settings import change_settings
from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.axes import overrides
from kmatrix.records import matrix as records
from kmatrix.records.checkpoint_dir import check_own_files, original_of
from kmatrix.records.matrix import LOCAL, TITLES, read_plan, run_files
from kmatrix.records.paths import ROOT, MatrixDir
from kmatrix.records.runs import Status
from kmatrix.records.tracking import pending_messages, sync_status
from kmatrix.runner import background
from kmatrix.runner.controller import exit_status
from kmatrix.runner.requests import fit, go_on, release
from kmatrix.runner.rerun import rerun
from kmatrix.simulate.library import simulation
from kmatrix.status.cost import BUDGETS, spent
from kmatrix.status.fold import DAMAGED, EXIT, State
from kmatrix.status.look import Look, look
from kmatrix.status.wanted import wanted
from kmatrix.text import first_names, make_command, plural, printable, shown
from kmatrix.track.available import announced

QUICKSTART = "gpt2-cpu-quick"  # defconfig
FULL = 1 << 20  # bytes: a disk with less has no room for the files of a run
RESUMES = ("auto", "latest", "best", "none")  # values of RESUME= besides a path; those of the trainer's --resume
HERE_ONLY = ("GPUS", "HOSTS", "DETACH")  # arguments about this machine
SETTINGS = ("GPUS", "HOSTS", "SIMULATE", "CODE")  # arguments that the processes of a matrix need
LEFT = {Status.SKIPPED: "skipped", Status.FINISHED: "reused"}


def test_matrix(arguments: Arguments) -> int:
    """Make the matrix, and run it."""
    return _run(arguments, plan_of(arguments))


def train(arguments: Arguments) -> int:
    """Run one configuration: a matrix of one."""
    return _run(arguments, plan_of(arguments, one=True))


def quickstart(arguments: Arguments) -> int:
    """Run the quickstart configuration from .config.quickstart. The user's .config is not changed."""
    overrides(Tree.parse(), arguments.assignments, arguments.takes)  # before anything is written
    own = {**arguments.values, "KCONFIG_CONFIG": str(ROOT / ".config.quickstart")}
    defconfig(Arguments(f"defconfig-{QUICKSTART}", own))
    arguments = arguments._replace(values=own)
    plan = plan_of(arguments)
    if plan.config.engine != LOCAL:
        raise ConfigError(
            f"quickstart runs on this machine: ENGINE={plan.config.engine}",
            hint=f"{make_command(f'defconfig-{QUICKSTART}')} test-matrix ENGINE={plan.config.engine}",
        )
    status = _run(arguments, plan)
    if not status:  # otherwise another command is next
        print(f"\nNext: {make_command(f'defconfig-{QUICKSTART}')} menuconfig test-matrix")
    return status


def add(arguments: Arguments) -> int:
    """Add cells to a matrix, and run them: NAME=value[,value...] as further values of an axis."""
    matrix = find_target(arguments)
    refuse_if_running(matrix)
    _check_for(read_plan(matrix.path), arguments)
    plan = plan_more(matrix, arguments.assignments, gpus=arguments.get("GPUS"), options=arguments.takes)
    names = add_runs(matrix, plan, command=arguments.command, on_message=print)
    print(f"added {plural(len(names), 'run')} to {shown(matrix.path)}: {first_names(names)}")
    # A new configuration, or a higher maximum, may need further seeds of those that were there.
    only = () if plan.verdict.seeds_auto else names
    go_on(look(matrix.path), only=names, settings=_settings(arguments) | _only(only))
    return start(matrix, arguments)


def continue_(arguments: Arguments) -> int:
    """Continue a matrix: finished runs are kept, the others resume from their last valid checkpoint."""
    matrix, retry, resume = find_target(arguments), arguments.is_on("RETRY_FAILED"), resume_from(arguments)
    names = [run.name for run in chosen_runs(matrix, arguments)] if arguments.get("RUN") else []
    go_on(
        _open(matrix, arguments),
        retry_failed=retry,
        resume=resume,
        micro_batch=arguments.number("MICRO_BATCH"),
        only=names,
        settings=_settings(arguments) | _only(names),
    )
    seen = look(matrix.path, list(live_jobs(matrix)))
    due = [name for name in wanted(seen) if seen.states[name].is_due and (not names or name in names)]
    counts = Counter(state.status for name, state in seen.states.items() if name not in due)
    rest = "".join(f", {counts[status]} {status}" for status in Status if counts[status])
    print(f"{shown(matrix.path)}: {plural(len(due), 'run') if due else 'nothing'} to run{rest}")
    for name, state in seen.states.items():
        if state.kind == DAMAGED:
            print(f"  {name} stays: {state.reason}; restore the file from a copy")
    if not due and not retry and any(map(_is_failed, seen.states.values())):
        print(f"  failed runs stay: {make_command('continue', matrix.path, RETRY_FAILED='1')} tries them again")
    if not due and matrix.page.exists():
        print(f"Report: {shown(matrix.page)}")
        return exit_status(seen, wanted)
    return start(matrix, arguments)


def test_rerun(arguments: Arguments) -> int:
    """Rerun runs of a matrix. Their old results are archived, and the report reads the new ones."""
    if not arguments.get("TARGET"):
        raise ConfigError("test-rerun needs a matrix", hint="pass TARGET=<matrix>: its results are replaced")
    matrix = find_target(arguments)
    refuse_if_running(matrix)
    if not (names := with_status(look(matrix.path), chosen_runs(matrix, arguments), arguments)):
        return 0
    seen = _open(matrix, arguments, names)
    _refuse_if_spent(seen)
    release(seen, names)  # a rerun is a wish to train them
    forget_reuse(matrix, names)
    for name in names:
        into = rerun(matrix.path / name)
        print(f"{name}: " + (f"archived its result in {shown(into)}" if into else "no result yet"))
    go_on(look(matrix.path), only=names, settings=_settings(arguments) | _only(names))
    return start(matrix, arguments)


def make(
    arguments: Arguments,
    plan: Plan,
    *,
    reuse: bool = True,
    shards: int = 0,
    code: Path = ROOT,
) -> MatrixDir:
    """Make the directory of a matrix, with the settings of a command. reuse, shards, code: as for `make_matrix`."""
    nodes = max(config.train.num_nodes for config in plan.configs.values())
    _check(arguments, plan.config.engine, nodes, monitored=bool(plan.config.monitor_hz))
    trials: Callable[[MatrixDir], object] | None = None
    if plan.config.engine != LOCAL:
        from kmatrix.cli.cluster import check_plan, run_trials

        check_plan(plan)
        trials = run_trials
    matrix = make_matrix(
        plan,
        command=arguments.command,
        reuse=reuse and not arguments.get("SIMULATE"),  # a reused run would have no simulated recording
        shards=shards,
        code=code,
        on_message=print,
        run_trials=trials,
    )
    go_on(look(matrix.path), settings=_settings(arguments))
    return matrix


def _run(arguments: Arguments, plan: Plan) -> int:
    """Make a matrix and run it."""
    matrix = make(arguments, plan, reuse=arguments.target != "quickstart")
    seen = look(matrix.path)
    counts = Counter(state.status for state in seen.states.values())
    parts = [plural(len(wanted(seen)), "run") + f" in {shown(matrix.path)}"]
    parts += [f"{len(seen.states) - len(wanted(seen))} in reserve"] if len(wanted(seen)) < len(seen.states) else []
    parts += [f"{counts[status]} {word}" for status, word in LEFT.items() if counts[status]]
    print(", ".join(parts))
    return start(matrix, arguments)


def _open(matrix: MatrixDir, arguments: Arguments, again: Collection[str] = ()) -> Look:
    """Change what the arguments change in a matrix that exists, and return it. again: runs to rerun.

    Raises LaunchError if somebody runs it, or its files belong to another matrix.
    """
    need_torch()
    plan = read_plan(matrix.path)
    if plan.engine == LOCAL:
        refuse_if_running(matrix)
    _check_for(plan, arguments)
    gpus, notes = find_gpus(arguments.get("GPUS")) if plan.engine == LOCAL else ((), ())
    for note in notes:
        print(f"note: {note}")
    states = look(matrix.path).states
    staying = [run for run, state in states.items() if state.status is Status.FINISHED and run not in again]
    change_settings(matrix, arguments.assignments, staying, arguments.takes, print)
    check_own_files(matrix)
    if plan.engine == LOCAL:
        fit(look(matrix.path), len(gpus))
    return look(matrix.path)


def start(matrix: MatrixDir, arguments: Arguments) -> int:
    """Start what is due in a matrix, and watch it on this machine; return the exit status.

    A cluster gets jobs, which need nobody to watch: `make status` does.
    """
    _refuse_if_spent(look(matrix.path))
    if line := announced(next(iter(run_files(matrix.path).values()))):
        print(line)
        if made := original_of(matrix):
            print(f"note: this matrix is a copy: it tracks into new runs, not into those of {made}")
    commands = {"watch": "status", "logs": "logs", "stop": "stop", "continue": "continue"}
    later = "\n".join(f"  {title + ':':9} {make_command(target, matrix.path)}" for title, target in commands.items())
    if read_plan(matrix.path).engine != LOCAL:
        from kmatrix.cli.cluster import submit

        try:
            if not submit(matrix.path).submitted:
                print("nothing was submitted: what is left has jobs that wait or run, or waits for you")
        finally:  # also after a refusal: the matrix is there
            print(later)
        return 0
    began = background.start(matrix.path)
    if arguments.is_on("DETACH"):
        print(f"running in the background, output in {shown(matrix.runner_log)}\n{later}")
        return 0
    seen = watch(matrix.path, is_ours=True)
    print(background.said(matrix.path, began))
    status = exit_status(seen, wanted)
    print_next_steps(seen, status)
    return status


def print_next_steps(seen: Look, status: int) -> None:
    """Print the commands that finish what is left: pending uploads, held, stopped or failed runs."""
    path = seen.path
    folders = [MatrixDir(path).run(name) for name in seen.states if (path / name).is_dir()]
    if pending_messages(((run.name, sent) for run in folders for sent in sync_status(run)), path):
        print(f"\nUpload pending steps: {make_command('track-sync', path)}")
    if held := [name for name, files in seen.files.items() if files.request is not None and not files.request.skip]:
        print(f"\nHeld: {first_names(held)}\nRelease: {make_command('release', path, RUN=held[0])}")
    again = make_command("continue", path)
    if status and shutil.disk_usage(path).free < FULL:  # then no end of an attempt could be written
        print(f"\nThe disk of {path} is full: free some space, then {again}")
    if status == EXIT[Status.STOPPED] and (why := spent(seen)):
        limit = next(name for name in BUDGETS if name in why)
        print(f"\n{why}\nContinue: {make_command('continue', path, **{limit: '0'})}, or with a larger one")
    elif status == EXIT[Status.STOPPED]:
        print(f"\nContinue: {again}")
    elif any(map(_is_failed, seen.states.values())):
        print(f"\nRetry failed runs: {make_command('continue', path, RETRY_FAILED='1')}")


def _is_failed(state: State) -> bool:
    """Return whether RETRY_FAILED=1 would try a run again."""
    return state.status is Status.FAILED and state.kind != DAMAGED


def _refuse_if_spent(seen: Look) -> None:
    """Raise LaunchError if the runs of a matrix have taken its budget."""
    if why := spent(seen):
        hint = f"pass a larger {' or '.join(f'{name}=' for name in BUDGETS)} to make continue, 0 for no limit"
        raise LaunchError(f"{seen.path.name} cannot go on", why=why, hint=hint)


def _only(names: Collection[str]) -> dict[str, str]:
    """Return the setting that lets only these runs start, none if there are no names."""
    return {"RUN": ",".join(names)} if names else {}


def _settings(arguments: Arguments) -> dict[str, str]:
    """Return the settings that a command gives to all processes of a matrix."""
    return {name: text for name in SETTINGS if (text := arguments.get(name))}


def _check_for(plan: records.Plan, arguments: Arguments) -> None:
    """Raise as `_check` for an argument that a planned matrix cannot have."""
    nodes = max((int(plan.train_of(run).get("num_nodes") or 1) for run in plan.runs), default=1)
    _check(arguments, plan.engine, nodes, monitored=plan.common.symbols.get("GPU_MONITOR") == "y")


def _check(arguments: Arguments, engine: str, nodes: int, *, monitored: bool) -> None:
    """Raise ConfigError for an argument that the engine, or runs on this many nodes, cannot have.

    Raises LaunchError for a host that ssh does not reach.
    """
    hosts, simulated = hosts_of(arguments.get("HOSTS")), arguments.get("SIMULATE")
    if engine != LOCAL and (given := [name for name in HERE_ONLY if arguments.get(name)]):
        raise ConfigError(
            f"{given[0]}= is about this machine, and {TITLES[engine]} executes the runs", hint=f"omit {given[0]}="
        )
    if engine == LOCAL and nodes > max(1, len(hosts)):
        raise ConfigError(
            f"a run needs {nodes} nodes, ENGINE=local has {max(1, len(hosts))}",
            hint="pass HOSTS=a,b with names that ssh reaches (docs/clusters.md), ENGINE=slurm or kubernetes",
        )
    if simulated and not monitored:
        raise ConfigError("SIMULATE= needs GPU_MONITOR=y", why="only the recording is simulated")
    if simulated and nodes > 1:
        raise ConfigError(
            f"SIMULATE={simulated} needs runs on one node",
            why="the simulated driver has the GPUs of one machine",
            hint="omit SIMULATE, or pass NUM_NODES=1",
        )
    if simulated:
        simulation(simulated)
    for host in hosts[1:]:
        _reach(host)


def _reach(host: str) -> None:
    """Raise LaunchError if ssh does not reach a host of HOSTS=."""
    command = [*SSH, host, "true"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
        why = (done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else ""
    except OSError as error:
        why = reason_of(error)
    if why:
        hint = f"`ssh {host} true` has to work without a password"
        raise LaunchError(f"ssh does not reach {host} of HOSTS=", why=" ".join(printable(why).split()), hint=hint)


def resume_from(arguments: Arguments) -> str:
    """Return RESUME= as the trainer expects it: auto, latest, best, none, or the path of a checkpoint."""
    text = arguments.get("RESUME", "auto")
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
