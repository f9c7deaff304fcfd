"""Make a matrix or extend one, and run it: test-matrix, train, quickstart, add."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from kmatrix.cli.commands import Arguments, yes
from kmatrix.cli.configure import defconfig
from kmatrix.cli.progress import Display
from kmatrix.cli.running.limits import asked_settings, check_simulation, refuse_here_only, refuse_if_spent, refuse_nodes
from kmatrix.cli.targets import find_target, refuse_if_running
from kmatrix.errors import ConfigError
from kmatrix.experiment.add import add_runs, plan_more
from kmatrix.experiment.inputs.data import Key
from kmatrix.experiment.make import make_matrix
from kmatrix.experiment.plan import Plan, make_plan
from kmatrix.kconfig.assignments import parse_trackers
from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.axes import overrides
from kmatrix.records.checkpoint_dir import original_of
from kmatrix.records.control import requests_of
from kmatrix.records.matrix import LOCAL, read_plan, run_files
from kmatrix.records.paths import ROOT, MatrixDir
from kmatrix.records.runs import Status
from kmatrix.records.tracking import pending_messages, sync_status
from kmatrix.runner import background
from kmatrix.runner.requests import go_on
from kmatrix.status.cost import BUDGETS, spent
from kmatrix.status.fold import DAMAGED, EXIT, State
from kmatrix.status.look import Look, look
from kmatrix.status.wanted import wanted
from kmatrix.text import first_names, make_command, plural, shown
from kmatrix.track.available import announced

QUICKSTART = "gpt2-cpu-quick"  # defconfig
FULL = 1 << 20  # bytes: a disk with less has no room for the files of a run


def test_matrix(arguments: Arguments) -> int:
    """Make the matrix, run it, and print the report."""
    return _run(arguments, plan_of(arguments))


def quickstart(arguments: Arguments) -> int:
    """Run the quickstart configuration from .config.quickstart. The user's .config is not changed."""
    tree = Tree.parse()
    overrides(tree, arguments.assignments, arguments.takes)  # refuses an unknown name before anything is written
    own = {**arguments.values, "KCONFIG_CONFIG": str(ROOT / ".config.quickstart")}
    defconfig(Arguments(f"defconfig-{QUICKSTART}", own))
    arguments = dataclasses.replace(arguments, values=own)
    plan = plan_of(arguments)
    if plan.config.engine != LOCAL:
        raise ConfigError(
            f"quickstart runs on this machine: ENGINE={plan.config.engine}",
            hint=f"{make_command(f'defconfig-{QUICKSTART}')} test-matrix ENGINE={plan.config.engine}",
        )
    status = _run(arguments, plan)
    print(f"\nNext: {make_command(f'defconfig-{QUICKSTART}')} menuconfig test-matrix")
    return status


def train(arguments: Arguments) -> int:
    """Run one configuration: a matrix of one."""
    return _run(arguments, plan_of(arguments, one=True))


def add(arguments: Arguments) -> int:
    """Add cells to a matrix, and run them: NAME=value[,value...] as further values of an axis."""
    matrix = find_target(arguments)
    refuse_if_running(matrix)
    settings = asked_settings(arguments, read_plan(matrix.path))
    plan = plan_more(matrix, arguments.assignments, gpus=arguments.get("GPUS"), options=arguments.takes)
    names = add_runs(matrix, plan, command=_command(arguments), on_message=print)
    print(f"added {plural(len(names), 'run')} to {shown(matrix.path)}: {first_names(names)}")
    # A new configuration, or a higher maximum, may need further seeds of those that were there.
    only = {} if plan.verdict.seeds_auto else {"RUN": ",".join(names)}
    go_on(look(matrix.path), only=names, settings=settings | only)
    refuse_if_spent(look(matrix.path))
    return execute(matrix, arguments)


def plan_of(arguments: Arguments, *, one: bool = False) -> Plan:
    """Return the plan of .config and the command line."""
    return make_plan(
        arguments.config,
        arguments.assignments,
        gpus=arguments.get("GPUS"),
        one=one,
        options=arguments.takes,
    )


def make(
    arguments: Arguments,
    plan: Plan,
    *,
    reuse: bool = True,
    shards: Mapping[Key, int] | None = None,
    code: Path = ROOT,
) -> MatrixDir:
    """Make the directory of a matrix, with the settings of a command. reuse, shards, code: as for `make_matrix`."""
    nodes = max(config.train.num_nodes for config in plan.configs.values())
    refuse_nodes(arguments, plan.config.engine, nodes)
    check_simulation(arguments.get("SIMULATE"), nodes, monitored=bool(plan.config.monitor_hz))
    refuse_here_only(arguments, plan.config.engine)
    trials: Callable[[MatrixDir], object] | None = None
    if plan.config.engine != LOCAL:
        from kmatrix.cli.running.cluster import check_plan, run_trials

        check_plan(plan)
        trials = run_trials
    matrix = make_matrix(
        plan,
        command=_command(arguments),
        preflight=yes(arguments, "PREFLIGHT") if arguments.get("PREFLIGHT") else None,
        reuse=reuse and not arguments.get("SIMULATE"),  # a reused run would have no simulated recording
        shards=shards,
        code=code,
        on_message=print,
        run_trials=trials,
    )
    go_on(look(matrix.path), settings=asked_settings(arguments, read_plan(matrix.path)))
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
    return execute(matrix, arguments)


LEFT = {Status.SKIPPED: "skipped", Status.FINISHED: "reused"}


def execute(matrix: MatrixDir, arguments: Arguments) -> int:
    """Run what is due in a matrix, here or on its cluster; return the exit status."""
    if read_plan(matrix.path).engine != LOCAL:
        from kmatrix.cli.running.cluster import submit

        return submit(matrix, arguments)
    _announce(matrix)
    began = background.start(matrix.path)
    if yes(arguments, "DETACH"):
        print(f"running in the background, output in {shown(matrix.runner_log)}")
        print(f"  watch: {make_command('status', matrix.path)}   or: {make_command('logs', matrix.path)}")
        print(f"  stop:  {make_command('stop', matrix.path)}")
        return 0
    with Display() as display:
        status = background.watch(matrix.path, display)
    print(background.said(matrix.path, began))
    print_next_steps(look(matrix.path), status)
    return status


def _announce(matrix: MatrixDir) -> None:
    """Print to which trackers the runs go."""
    asked = requests_of(matrix.path).settings.get("TRACKER")
    record = next(iter(run_files(matrix.path).values()))
    if line := announced(record, parse_trackers(asked) if asked else None):
        print(line)
        if made := original_of(matrix):
            print(f"note: this matrix is a copy: it tracks into new runs, not into those of {made}")


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
    elif any(is_failed(state) for state in seen.states.values()):
        print(f"\nRetry failed runs: {make_command('continue', path, RETRY_FAILED='1')}")


def is_failed(state: State) -> bool:
    """Return whether RETRY_FAILED=1 would try a run again."""
    return state.status is Status.FAILED and state.kind != DAMAGED


def _command(arguments: Arguments) -> str:
    return " ".join(["kmatrix", arguments.target, *arguments.all_words])
