"""Make a matrix or extend one, run it, and print the report: test-matrix, train, quickstart, add."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kmatrix.cli.commands import PLACES, Arguments, yes
from kmatrix.cli.configure import defconfig
from kmatrix.cli.progress import ProgressDisplay, outlived
from kmatrix.cli.results import report_in_short
from kmatrix.cli.running.limits import asked_budget, refuse_if_spent
from kmatrix.cli.running.make import make_dirs, plan_of
from kmatrix.cli.targets import find_target, refuse_if_running
from kmatrix.cli.trackers import wait_for_sync
from kmatrix.engines.local.recorder import RecorderLauncher
from kmatrix.errors import ConfigError, KmatrixError, RecordError
from kmatrix.experiment.add import add_runs, plan_more
from kmatrix.experiment.plan import Plan
from kmatrix.gpu.nvml.detect import Gpu
from kmatrix.kconfig.tree import open_tree
from kmatrix.matrix.axes import overrides
from kmatrix.records.jobs.files import LOCAL, read_engine
from kmatrix.records.paths import ROOT, MatrixDir
from kmatrix.records.place import original_of
from kmatrix.records.runs import Status
from kmatrix.records.states import read_requests
from kmatrix.records.tracking import pending_messages, sync_status
from kmatrix.runner.execute import (
    check_simulation,
    detach,
    execute,
    finish,
    first_record,
    matrix_trackers,
    recorder_launcher,
    recording_hz,
    symbols,
)
from kmatrix.runner.loop import EXIT_STOPPED, Outcome
from kmatrix.runner.resume import (
    ResumePlan,
    reopen,
)
from kmatrix.status.cost import MatrixBudget
from kmatrix.status.disk_space import disks, how_full, what_to_do
from kmatrix.status.outcomes import has_adaptive_seeds
from kmatrix.status.state import is_left_out
from kmatrix.status.status_file import recover_status
from kmatrix.text import first_names, make_command, plural, shown
from kmatrix.track.available import announced

QUICKSTART = "gpt2-cpu-quick"  # defconfig


def test_matrix(arguments: Arguments) -> int:
    """Make the matrix, run it, and print the report."""
    return _run_matrix(arguments, plan_of(arguments))


def quickstart(arguments: Arguments) -> int:
    """Run the quickstart configuration from .config.quickstart. The user's .config is not changed."""
    tree = open_tree(arguments.kconfig)
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
    status = _run_matrix(arguments, plan)
    print(f"\nNext: {make_command(f'defconfig-{QUICKSTART}')} menuconfig test-matrix")
    return status


def train(arguments: Arguments) -> int:
    """Run one configuration: a matrix of one."""
    return _run_matrix(arguments, plan_of(arguments, one=True))


def add(arguments: Arguments) -> int:
    """Add cells to a matrix, and run them: NAME=value[,value...] as further values of an axis."""
    matrix = find_target(arguments)
    refuse_if_running(matrix)
    plan = plan_more(
        matrix,
        arguments.assignments,
        kconfig=arguments.kconfig,
        gpus=arguments.get("GPUS"),
        options=arguments.takes,
    )
    budget = asked_budget(matrix, arguments)
    refuse_if_spent(matrix, budget)
    recorders = recorder_launcher(arguments.get("SIMULATE"), recording_hz(symbols(matrix)))
    check_simulation(arguments.get("SIMULATE"), (config.train.num_nodes for config in plan.configs.values()))
    names = add_runs(
        matrix, plan, command=" ".join(["kmatrix", arguments.target, *arguments.all_words]), on_message=print
    )
    print(f"added {plural(len(names), 'run')} to {shown(matrix.path)}: {first_names(names)}")
    # A new configuration, or a higher maximum, may need further seeds of those that were there.
    chosen = None if has_adaptive_seeds(plan.verdict) else set(names)
    if read_engine(matrix) is not None:
        from kmatrix.cli.running.cluster import submit_runs

        return submit_runs(matrix, arguments, chosen)
    pending = reopen(matrix, plan.gpus, names=chosen)
    return run_and_report(matrix, pending, gpus=plan.gpus, recorders=recorders, budget=budget)


def _run_matrix(arguments: Arguments, plan: Plan) -> int:
    """Make a matrix and run it: here, in the background, or on a cluster."""
    if plan.config.engine != LOCAL:
        from kmatrix.cli.running.cluster import submit_matrix
        from kmatrix.cli.running.follow import follow

        matrix = submit_matrix(arguments, plan)
        return follow(matrix) if yes(arguments, "WAIT") else 0
    background = yes(arguments, "DETACH")
    matrix, recorders = make_dirs(arguments, plan, reuse=arguments.target != "quickstart")
    pending = reopen(matrix, plan.gpus)  # as `continue` does: there is only one path from a matrix to its attempts
    number, skipped = len(pending.plans), len(pending.skipped)
    more = f", {len(pending.reserve)} in reserve" if pending.reserve else ""
    print(f"{plural(number, 'run')} in {shown(matrix.path)}{more}" + (f", {skipped} skipped" if skipped else ""))
    if background:
        return run_detached(matrix, arguments, "GPUS", "SIMULATE")
    return run_and_report(matrix, pending, gpus=plan.gpus, recorders=recorders)


def run_and_report(
    matrix: MatrixDir,
    plan: ResumePlan,
    *,
    gpus: Sequence[Gpu] = (),
    recorders: RecorderLauncher | None = None,
    chosen: Sequence[str] | None = None,
    budget: MatrixBudget | None = None,
) -> int:
    """Run the pending attempts with a live display, print the report, and return the exit status.

    chosen: replaces the trackers of the matrix, None to keep them.  budget: the same for the budget of the matrix.
    """
    # Run the attempts, and wait for the uploads. Both continue if the terminal is closed.
    with outlived(matrix.runner_log) as terminal:
        with ProgressDisplay(terminal=terminal) as display:
            trackers = matrix_trackers(matrix, chosen)
            if trackers is not None and plan.plans and (line := announced(first_record(matrix), chosen)):
                print(line)
                if made := original_of(matrix):
                    print(f"note: this matrix is a copy: it tracks into new runs, not into those of {made}")
            outcome = execute(
                matrix,
                plan,
                gpus=gpus,
                recorders=recorders,
                trackers=trackers,
                on_progress=display,
                on_note=display.note,
                budget=budget,
            )
        if trackers is not None:
            terminal.outlive(lambda: wait_for_sync(trackers))
        # Report. The user's command comes last, so that it finds the report in the results.
        values = symbols(matrix)
        command = str(values.get("ON_FINISH") or "")
        try:
            draw = values.get("AUTO_GENERATE_GRAPHS") == "y"
            terminal.outlive(lambda: _report(matrix, outcome, draw=draw))
        finally:  # also if the report cannot be written: the matrix has ended
            if why := finish(matrix, command):
                terminal.outlive(lambda: print(f"note: {why}"))
        terminal.outlive(lambda: print_next_steps(matrix, outcome))
    return outcome.exit_code


def _report(matrix: MatrixDir, outcome: Outcome, *, draw: bool) -> None:
    """Write and print the report."""
    try:
        report_in_short(matrix, draw=draw)
    except KmatrixError as error:
        if outcome.exit_code != EXIT_STOPPED:
            raise
        print(f"note: {error}")  # the status is that of the stop


def print_next_steps(matrix: MatrixDir, outcome: Outcome) -> None:
    """Print the commands that finish what is left: pending uploads, stopped or failed runs."""
    again = make_command("continue", matrix.path)
    if pending_messages(((run.name, sent) for run in matrix.runs() for sent in sync_status(run)), matrix.path):
        print(f"\nUpload pending steps: {make_command('track-sync', matrix.path)}")
    requests = read_requests(matrix)
    asked = [run for run in matrix.runs() if run.name in requests]
    left_out = [run.name for run in asked if is_left_out(recover_status(run, has_runner=False))]
    if left_out:
        print(f"\nHeld: {first_names(left_out)}")
        print(f"Release: {make_command('release', matrix.path, RUN=left_out[0])}")
    if outcome.spent is not None:
        # Without a larger budget, `continue` is refused.
        larger = make_command("continue", matrix.path, **{outcome.spent.symbol: str(outcome.spent.more)})
        print(f"\nThe budget of the matrix is spent: {outcome.spent.text}\nContinue with a larger one: {larger}")
    elif outcome.exit_code == EXIT_STOPPED:
        print(f"\nContinue: {again}")
    elif outcome.disk_full:
        paths: Sequence[Path] = (matrix.path,)
        with suppress(RecordError):  # a damaged matrix.json: the folder of checkpoints is unknown
            paths = disks(matrix, matrix.runs())
        # Each disk: a checkpoint may not fit although some space is left.
        states = dict.fromkeys(how_full(path) for path in paths)
        print(f"\nThe disk is full: {'; '.join(states)}\nContinue: {what_to_do(matrix.path)}")
    elif outcome.counts.get(Status.FAILED):
        if _has_retries(matrix):
            print(f"\nRetry killed runs: {again}\nRetry failed runs too: add RETRY_FAILED=1")
        else:
            print(f"\nRetry failed runs: {make_command('continue', matrix.path, RETRY_FAILED='1')}")


def _has_retries(matrix: MatrixDir) -> bool:
    """Return whether `make continue` has an attempt, such as of a run that was killed and that the verdict wants."""
    with suppress(RecordError):  # damaged or lost rules: `continue` says so
        return bool(reopen(matrix, None).plans)
    return True


def run_detached(matrix: MatrixDir, arguments: Arguments, *names: str) -> int:
    """Run the matrix in a background process. names: arguments of this command that are passed on."""
    pid = detach(matrix, [f"{name}={arguments.get(name)}" for name in (*sorted(PLACES), *names) if arguments.get(name)])
    print(f"running in the background: process {pid}, output in {shown(matrix.runner_log)}")
    print(f"  watch: {make_command('status', matrix.path)}   or: {make_command('logs', matrix.path)}")
    print(f"  stop:  {make_command('stop', matrix.path)}")
    return 0
