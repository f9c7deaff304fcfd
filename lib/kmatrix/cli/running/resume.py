"""Run what a matrix has left, or again: continue, test-rerun."""

from __future__ import annotations

from kmatrix.cli.commands import Arguments, yes
from kmatrix.cli.running.limits import (
    asked_budget,
    asked_micro_batch,
    check_budget,
    refuse_if_spent,
    resume_from,
)
from kmatrix.cli.running.restore import exit_code, open_matrix
from kmatrix.cli.running.start import run_and_report, run_detached
from kmatrix.cli.targets import asked_statuses, chosen_runs, find_target, warn_interrupted
from kmatrix.cli.trackers import asked_trackers
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.experiment.cluster.resolve import find_gpus
from kmatrix.records.jobs.files import read_engine, refuse_lost_engine
from kmatrix.records.lock import held
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.runs import Status, read_run_file
from kmatrix.records.states import change_requests
from kmatrix.runner.archive import archive_results
from kmatrix.runner.execute import (
    check_simulation,
    need_torch,
    nodes_of_runs,
    recorder_launcher,
    recording_hz,
    symbols,
)
from kmatrix.runner.loop import EXIT_FAILED
from kmatrix.runner.resume import (
    describe_plan,
    is_up_to_date,
    reopen,
    too_few_gpus,
)
from kmatrix.status.cost import BUDGETS
from kmatrix.status.status_file import recover_status
from kmatrix.text import shown


def continue_(arguments: Arguments) -> int:
    """Continue a matrix: finished runs are kept, the others resume from their last valid checkpoint."""
    matrix = find_target(arguments)
    if engine := read_engine(matrix):
        from kmatrix.cli.running.cluster import continue_matrix

        return continue_matrix(matrix, engine, arguments)
    refuse_lost_engine(matrix)
    _refuse_settings(matrix, arguments)
    warn_interrupted(arguments)
    background, retry = yes(arguments, "DETACH"), yes(arguments, "RETRY_FAILED")
    # Refuse what can be refused before anything is written.
    need_torch()
    chosen = asked_trackers(arguments)
    check_budget(arguments)
    micro_batch = asked_micro_batch(arguments)
    resume = resume_from(arguments.get("RESUME", "auto"))
    gpus, notes = find_gpus(arguments.get("GPUS"))
    lost = open_matrix(matrix, arguments)
    names = {run.name for run in chosen_runs(matrix, arguments)}
    for note in notes:
        print(f"note: {note}")
    plan = reopen(matrix, gpus, names=names, resume=resume, retry_failed=retry, micro_batch=micro_batch)
    number = sum(one.name not in plan.requests for one in plan.plans)
    print(f"{shown(matrix.path)}: {number or 'nothing'} to run")
    for line in describe_plan(plan):
        print(f"  {line}")
    budget = asked_budget(matrix, arguments)
    if plan.plans:
        refuse_if_spent(matrix, budget)
    if background and plan.plans:
        return run_detached(
            matrix,
            arguments,
            "RUN",
            "RESUME",
            "RETRY_FAILED",
            "MICRO_BATCH",
            "GPUS",
            "SIMULATE",
            "TRACKER",
            *BUDGETS,
        )
    # A run that failed before and was not retried counts as well: the matrix has not succeeded.
    failed = any(state.status is Status.FAILED and name not in plan.damaged for name, state in plan.stays.items())
    if not plan.plans and not plan.skipped and is_up_to_date(matrix):
        print(f"Report: {shown(matrix.summary)}")
        return exit_code(matrix, EXIT_FAILED if failed else 0, lost, plan.damaged)
    recorders = recorder_launcher(arguments.get("SIMULATE"), recording_hz(symbols(matrix)))
    status = run_and_report(matrix, plan, gpus=gpus, recorders=recorders, chosen=chosen, budget=budget)
    return exit_code(matrix, status or (EXIT_FAILED if failed else 0), lost, plan.damaged)


def _refuse_settings(matrix: MatrixDir, arguments: Arguments) -> None:
    """Raise ConfigError for settings of a scheduler: the matrix has none."""
    if arguments.assignments:
        raise ConfigError(
            f"{arguments.target} does not take {next(iter(arguments.assignments))} for {matrix.name}",
            why="its runs are executed on this machine, without a scheduler",
            hint="omit it, or start a new matrix with make test-matrix ENGINE=slurm",
        )


def test_rerun(arguments: Arguments) -> int:
    """Rerun runs of a matrix. Their old results are archived, and the report reads the new ones."""
    if not arguments.get("TARGET"):
        raise ConfigError("test-rerun needs a matrix", hint="pass TARGET=<matrix>: its results are replaced")
    matrix = find_target(arguments)
    # All checks come before the first result is archived.
    need_torch()
    chosen = asked_trackers(arguments)
    check_budget(arguments)
    on_cluster = read_engine(matrix) is not None
    if not on_cluster:
        refuse_lost_engine(matrix)
        _refuse_settings(matrix, arguments)
    gpus = () if on_cluster else find_gpus(arguments.get("GPUS"))[0]
    lost = open_matrix(matrix, arguments, on_cluster=on_cluster)
    runs = _of_optimizers(chosen_runs(matrix, arguments), arguments.get("OPTIMIZER"))
    wanted = asked_statuses(arguments)
    runs = [run for run in runs if not wanted or recover_status(run, has_runner=False).status in wanted]
    if not runs:
        print(f"no run of {shown(matrix.path)} is {arguments.get('STATUS').replace(',', ' or ')}")
        return 0
    if on_cluster:
        from kmatrix.cli.running.cluster import refuse_if_busy

        refuse_if_busy(matrix, arguments, {run.name for run in runs})
    for run in () if on_cluster else runs:
        if why := too_few_gpus(read_run_file(run).train, len(gpus)):
            raise LaunchError(
                f"{run.name} cannot run on this machine", why=why, hint="pass RUN=<pattern> for the others"
            )
    budget = asked_budget(matrix, arguments)
    refuse_if_spent(matrix, budget)
    recorders = recorder_launcher(arguments.get("SIMULATE"), recording_hz(symbols(matrix)))
    check_simulation(arguments.get("SIMULATE"), nodes_of_runs(matrix))
    change_requests(matrix, [run.name for run in runs], hold=False)  # a rerun is a wish to train them
    with held(matrix):  # no runner may start a run while its files are moved
        for name, archive in archive_results(matrix, runs).items():
            print(f"{name}: " + (f"archived its result in {shown(archive)}" if archive else "no result yet"))
    if on_cluster:
        from kmatrix.cli.running.cluster import submit_runs

        return submit_runs(matrix, arguments, {run.name for run in runs}, unasked=True)
    plan = reopen(matrix, gpus, names={run.name for run in runs}, unasked=True)
    status = run_and_report(matrix, plan, gpus=gpus, recorders=recorders, chosen=chosen, budget=budget)
    return exit_code(matrix, status, lost, ())


def _of_optimizers(runs: list[RunDir], asked: str) -> list[RunDir]:
    """Return the runs with these optimizers. asked: a comma-separated list, "" for all."""
    if not asked:
        return runs
    wanted = set(asked.split(","))
    known = {run.name: str(read_run_file(run).train.optimizer) for run in runs}
    if missing := wanted - set(known.values()):
        there = ", ".join(sorted(set(known.values())))
        raise ConfigError(f"OPTIMIZER={asked}: no run has {', '.join(sorted(missing))}", why=f"the runs have {there}")
    return [run for run in runs if known[run.name] in wanted]
