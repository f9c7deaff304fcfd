"""The commands that train: test-matrix, train, quickstart, continue, test-rerun, reproduce."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kmatrix.cli.commands import PLACES, Arguments, yes
from kmatrix.cli.configure import defconfig
from kmatrix.cli.progress import ProgressDisplay, outlived
from kmatrix.cli.results import report_in_short
from kmatrix.cli.targets import asked_statuses, chosen_runs, find_target, refuse_if_running, warn_interrupted
from kmatrix.cli.trackers import asked_trackers, wait_for_sync
from kmatrix.engines.local.recorder import RecorderLauncher
from kmatrix.errors import ConfigError, KmatrixError, LaunchError, RecordError
from kmatrix.experiment.add import add_runs, plan_more
from kmatrix.experiment.data import Key, known_shards
from kmatrix.experiment.make import make_matrix
from kmatrix.experiment.plan import Plan, find_gpus, make_plan
from kmatrix.gpu.nvml.detect import Gpu
from kmatrix.kconfig.tree import open_tree
from kmatrix.matrix.axes import overrides
from kmatrix.paste import make_command
from kmatrix.records.checkpoint_dir import check_own_files, checkpoint_dir, original_of, take_folder
from kmatrix.records.checkpoints import CheckpointIndex, CheckpointKind
from kmatrix.records.disk import SpaceWait, waiting_for_space
from kmatrix.records.lock import held
from kmatrix.records.paths import ROOT, MatrixDir, RunDir, below_root, program_environment
from kmatrix.records.runs import Status, read_run_file, read_run_file_or_empty, read_train_values_or_empty
from kmatrix.records.states import change_requests, read_matrix_status, read_requests
from kmatrix.records.tracking import pending_messages, sync_status
from kmatrix.records.train_config import dollars_per_hour
from kmatrix.report.reproduction import Changes, changes, describe_repetition, repetition
from kmatrix.runner.archive import archive_results, finish_rerun
from kmatrix.runner.execute import (
    detach,
    disk_wait_s,
    execute,
    finish,
    first_record,
    foreign_command,
    matrix_trackers,
    need_torch,
    recorder_launcher,
    recording,
    symbols,
)
from kmatrix.runner.loop import EXIT_FAILED, EXIT_STOPPED, Outcome
from kmatrix.runner.resume import (
    RestoredRuns,
    ResumePlan,
    describe_plan,
    is_up_to_date,
    reopen,
    restore_runs,
    too_few_gpus,
)
from kmatrix.status.cost import MatrixBudget
from kmatrix.status.disk_space import disks, how_full, what_to_do
from kmatrix.status.state import is_left_out
from kmatrix.status.status_file import recover_status
from kmatrix.text import first_names, plural, shown
from kmatrix.track.available import announced

QUICKSTART = "gpt2-cpu-quick"  # defconfig
RESUMES = ("auto", "latest", "best", "none")  # values of RESUME= besides a path; those of the trainer's --resume
EXIT_DIFFERS = 1  # of `reproduce`: the runs must be equal and are not
EXAMPLE = "pass RUN=test_matrix_results_.../gpt2_..."
BUDGETS = ("BUDGET_HOURS", "BUDGET_DOLLARS")
MOST_DIGITS = 7  # of a budget or a time
MOST_DISK_WAIT_S = 86400  # upper limit of the symbol
WORKTREE = "../kmatrix-then"  # suggested directory for a checkout of the old code


def test_matrix(arguments: Arguments) -> int:
    """Make the matrix, run it, and print the report."""
    return _run_matrix(arguments, _plan(arguments))


def quickstart(arguments: Arguments) -> int:
    """Run the quickstart configuration from .config.quickstart. The user's .config is not changed."""
    tree = open_tree(arguments.kconfig)
    overrides(tree, arguments.assignments, arguments.takes)  # refuses an unknown name before anything is written
    own = {**arguments.values, "KCONFIG_CONFIG": str(ROOT / ".config.quickstart")}
    defconfig(Arguments(f"defconfig-{QUICKSTART}", own))
    arguments = dataclasses.replace(arguments, values=own)
    status = _run_matrix(arguments, _plan(arguments))
    print(f"\nNext: {make_command(f'defconfig-{QUICKSTART}')} menuconfig test-matrix")
    return status


def train(arguments: Arguments) -> int:
    """Run one configuration: a matrix of one."""
    return _run_matrix(arguments, _plan(arguments, one=True))


def _run_matrix(arguments: Arguments, plan: Plan) -> int:
    """Make a matrix and run it, here or in the background."""
    background = yes(arguments, "DETACH")
    matrix, recorders = _make(arguments, plan, reuse=arguments.target != "quickstart")
    pending = reopen(matrix, plan.gpus)  # as `continue` does: there is only one path from a matrix to its attempts
    number, skipped = len(pending.plans), len(pending.skipped)
    print(f"{plural(number, 'run')} in {shown(matrix.path)}" + (f", {skipped} skipped" if skipped else ""))
    if background:
        return _run_detached(matrix, arguments, "GPUS", "SIMULATE")
    return _run_and_report(matrix, pending, gpus=plan.gpus, recorders=recorders, own=True)


def _plan(arguments: Arguments, *, one: bool = False) -> Plan:
    """Return the plan of .config and the command line."""
    return make_plan(
        arguments.config,
        arguments.assignments,
        kconfig=arguments.kconfig,
        gpus=arguments.get("GPUS"),
        one=one,
        options=arguments.takes,
    )


def _make(
    arguments: Arguments, plan: Plan, *, reuse: bool, shards: Mapping[Key, int] | None = None
) -> tuple[MatrixDir, RecorderLauncher | None]:
    """Make the directories of a matrix; return it and what starts the GPU recorders, None for no recording."""
    recorders = recorder_launcher(arguments.get("SIMULATE"), plan.config.monitor_hz, plan.config.prometheus_port)
    with ProgressDisplay() as display:
        matrix = make_matrix(
            plan,
            command=" ".join(["kmatrix", arguments.target, *arguments.all_words]),
            preflight=yes(arguments, "PREFLIGHT") if arguments.get("PREFLIGHT") else None,
            reuse=reuse and not arguments.get("SIMULATE"),  # a reused run would have no simulated recording
            shards=shards,
            on_message=print,
            on_progress=display,
            on_note=display.note,
        )
    return matrix, recorders


def _run_and_report(
    matrix: MatrixDir,
    plan: ResumePlan,
    *,
    gpus: Sequence[Gpu] = (),
    recorders: RecorderLauncher | None = None,
    chosen: Sequence[str] | None = None,
    disk_wait: float | None = None,
    budget: MatrixBudget | None = None,
    own: bool = False,
) -> int:
    """Run the pending attempts with a live display, print the report, and return the exit status.

    chosen: replaces the trackers of the matrix, None to keep them.  disk_wait: the same for DISK_WAIT (s).
    budget: the same for the budget of the matrix.
    own: this process made the matrix, so its ON_FINISH is the user's.
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
                disk_wait=disk_wait,
                budget=budget,
            )
        if trackers is not None:
            terminal.outlive(lambda: wait_for_sync(trackers))
        # Report. The user's command comes last, so that it finds the report in the results.
        values = symbols(matrix)
        command = str(values.get("ON_FINISH") or "")
        try:
            draw = values.get("AUTO_GENERATE_GRAPHS") == "y"
            limit_s = disk_wait_s(values) if disk_wait is None else disk_wait
            terminal.outlive(lambda: _report(matrix, outcome, draw=draw, disk_s=limit_s))
        finally:  # also if the report cannot be written: the matrix has ended
            if why := ("" if own else foreign_command(matrix, command)) or finish(matrix, command):
                terminal.outlive(lambda: print(f"note: {why}"))
        terminal.outlive(lambda: _print_next_steps(matrix, outcome))
    return outcome.exit_code


def _report(matrix: MatrixDir, outcome: Outcome, *, draw: bool, disk_s: float) -> None:
    """Write and print the report; on a full disk wait for space, unless the user has stopped the matrix.

    disk_s: time (s) to wait.
    """
    stopped = outcome.exit_code == EXIT_STOPPED
    policy = SpaceWait(
        0.0 if stopped else disk_s,
        on_full=lambda path: print(f"note: the disk is full: {how_full(path)}; the report waits for space (DISK_WAIT)"),
    )
    try:
        with waiting_for_space(policy):
            report_in_short(matrix, draw=draw)
    except KmatrixError as error:
        if not stopped:
            raise
        print(f"note: {error}")  # the status is that of the stop


def _print_next_steps(matrix: MatrixDir, outcome: Outcome) -> None:
    """Print the commands that finish what is left: pending uploads, stopped or failed runs."""
    again = make_command("continue", matrix.path)
    if pending_messages(((run.name, sent) for run in matrix.runs() for sent in sync_status(run)), matrix.path):
        print(f"\nUpload pending steps: {make_command('track-sync', matrix.path)}")
    requests = read_requests(matrix)
    asked = [run for run in matrix.runs() if run.name in requests]
    left_out = [run.name for run in asked if is_left_out(recover_status(run, has_runner=False))]
    if left_out:
        print(f"\nSkipped or held: {first_names(left_out)}")
        print(f"Release: {make_command('release', matrix.path, RUN=left_out[0])}")
    if outcome.exit_code == EXIT_STOPPED:
        print(f"\nContinue: {again}")
    elif outcome.disk_full:
        paths: Sequence[Path] = (matrix.path,)
        with suppress(RecordError):  # a damaged matrix.json: the folder of checkpoints is unknown
            paths = disks(matrix, matrix.runs())
        # Each disk: a checkpoint may not fit although some space is left.
        states = dict.fromkeys(how_full(path) for path in paths)
        print(f"\nThe disk is full: {'; '.join(states)}\nContinue: {what_to_do(matrix.path)}")
    elif outcome.counts.get(Status.FAILED):
        print(f"\nRetry killed runs: {again}\nRetry failed runs too: add RETRY_FAILED=1")


def _run_detached(matrix: MatrixDir, arguments: Arguments, *names: str) -> int:
    """Run the matrix in a background process. names: arguments of this command that are passed on."""
    pid = detach(matrix, [f"{name}={arguments.get(name)}" for name in (*sorted(PLACES), *names) if arguments.get(name)])
    print(f"running in the background: process {pid}, output in {shown(matrix.runner_log)}")
    print(f"  watch: {make_command('status', matrix.path)}   or: {make_command('logs', matrix.path)}")
    print(f"  stop:  {make_command('stop', matrix.path)}")
    return 0


def continue_(arguments: Arguments) -> int:
    """Continue a matrix: finished runs are kept, the others resume from their last valid checkpoint."""
    matrix = find_target(arguments)
    warn_interrupted(arguments)
    background, retry = yes(arguments, "DETACH"), yes(arguments, "RETRY_FAILED")
    # Refuse what can be refused before anything is written.
    need_torch()
    chosen, disk_wait = asked_trackers(arguments), asked_disk_wait(arguments)
    check_budget(arguments)
    resume = resume_from(arguments.get("RESUME", "auto"))
    gpus, notes = find_gpus(arguments.get("GPUS"))
    lost = _open_matrix(matrix, arguments)
    names = {run.name for run in chosen_runs(matrix, arguments)}
    for note in notes:
        print(f"note: {note}")
    plan = reopen(matrix, gpus, names=names, resume=resume, retry_failed=retry)
    number = sum(one.name not in plan.requests for one in plan.plans)
    print(f"{shown(matrix.path)}: {number or 'nothing'} to run")
    for line in describe_plan(plan):
        print(f"  {line}")
    budget = asked_budget(matrix, arguments)
    if plan.plans:
        refuse_if_spent(matrix, budget)
    if background and plan.plans:
        return _run_detached(
            matrix, arguments, "RUN", "RESUME", "RETRY_FAILED", "GPUS", "SIMULATE", "TRACKER", "DISK_WAIT", *BUDGETS
        )
    # A run that failed before and was not retried counts as well: the matrix has not succeeded.
    failed = any(state.status is Status.FAILED and name not in plan.damaged for name, state in plan.stays.items())
    if not plan.plans and not plan.skipped and is_up_to_date(matrix):
        print(f"Report: {shown(matrix.summary)}")
        return _exit_code(matrix, EXIT_FAILED if failed else 0, lost, plan.damaged)
    recorders = recorder_launcher(arguments.get("SIMULATE"), *recording(symbols(matrix)))
    status = _run_and_report(
        matrix, plan, gpus=gpus, recorders=recorders, chosen=chosen, disk_wait=disk_wait, budget=budget
    )
    return _exit_code(matrix, status or (EXIT_FAILED if failed else 0), lost, plan.damaged)


def _exit_code(matrix: MatrixDir, status: int, lost: RestoredRuns, damaged: Sequence[str]) -> int:
    """Return the exit status of a matrix whose other runs have been run.

    Raises RecordError if it would be 0 although some runs could not be run: lost or with a damaged run.json.
    """
    if not status and damaged:
        raise RecordError(
            f"{matrix.name} is not complete: {first_names(damaged)} could not be run",
            why="run.json is damaged",
            hint=f"delete that run.json and continue: it is made again from {matrix.plan.name}"
            if matrix.plan.exists()
            else "restore that run.json from a copy, or make the run in a new matrix",
        )
    if not status and lost.lost:
        raise RecordError(
            f"{matrix.name} is not complete: {first_names(lost.lost)} could not be run",
            why=f"the run is missing, and {lost.why or f'{matrix.name} has no plan of it'}",
            hint="make it in a new matrix with make test-matrix",
        )
    return status


def _open_matrix(matrix: MatrixDir, arguments: Arguments) -> RestoredRuns:
    """Prepare a matrix to be run again: missing runs are made from its plan. Return those, and what cannot be made.

    Raises LaunchError if another process holds the matrix, or if its runs could change the files of another matrix.
    """
    refuse_if_running(matrix)
    with held(matrix):
        read_matrix_status(matrix)  # refuses the file of a newer version, before anything is written
        if base := arguments.get("CHECKPOINT_DIR"):
            take_folder(matrix, below_root(base))
        check_own_files(matrix)
        restored = restore_runs(matrix)
        archived = finish_rerun(matrix)
    for name in restored.made:
        print(f"{name}: its folder or run.json was missing, made again from {matrix.plan.name}")
    for name in archived:
        print(f"{name}: archived its result, which an interrupted test-rerun had left")
    why = restored.why or f"{matrix.name} has no plan of it"
    for name in restored.lost:
        again = make_command("test-matrix")
        print(f"{name}: missing, and {why}: make it in a new matrix with {again}")
    return restored


def test_rerun(arguments: Arguments) -> int:
    """Rerun runs of a matrix. Their old results are archived, and the report reads the new ones."""
    if not arguments.get("TARGET"):
        raise ConfigError("test-rerun needs a matrix", hint="pass TARGET=<matrix>: its results are replaced")
    matrix = find_target(arguments)
    # All checks come before the first result is archived.
    need_torch()
    chosen, disk_wait = asked_trackers(arguments), asked_disk_wait(arguments)
    check_budget(arguments)
    gpus, _ = find_gpus(arguments.get("GPUS"))
    lost = _open_matrix(matrix, arguments)
    runs = _of_optimizers(chosen_runs(matrix, arguments), arguments.get("OPTIMIZER"))
    wanted = asked_statuses(arguments)
    runs = [run for run in runs if not wanted or recover_status(run, has_runner=False).status in wanted]
    if not runs:
        print(f"no run of {shown(matrix.path)} is {arguments.get('STATUS').replace(',', ' or ')}")
        return 0
    for run in runs:
        if why := too_few_gpus(read_run_file(run).train, len(gpus)):
            raise LaunchError(
                f"{run.name} cannot run on this machine", why=why, hint="pass RUN=<pattern> for the others"
            )
    budget = asked_budget(matrix, arguments)
    refuse_if_spent(matrix, budget)
    recorders = recorder_launcher(arguments.get("SIMULATE"), *recording(symbols(matrix)))
    change_requests(matrix, [run.name for run in runs], None)  # a rerun is a wish to train them
    with held(matrix):  # no runner may start a run while its files are moved
        for name, archive in archive_results(matrix, runs).items():
            print(f"{name}: " + (f"archived its result in {shown(archive)}" if archive else "no result yet"))
    plan = reopen(matrix, gpus, names={run.name for run in runs})
    status = _run_and_report(
        matrix, plan, gpus=gpus, recorders=recorders, chosen=chosen, disk_wait=disk_wait, budget=budget
    )
    return _exit_code(matrix, status, lost, ())


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
        user=arguments.config,
    )
    _print_left_out(plan)
    recorders = recorder_launcher(arguments.get("SIMULATE"), *recording(symbols(matrix)))
    names = add_runs(
        matrix, plan, command=" ".join(["kmatrix", arguments.target, *arguments.all_words]), on_message=print
    )
    print(f"added {plural(len(names), 'run')} to {shown(matrix.path)}: {first_names(names)}")
    return _run_and_report(matrix, reopen(matrix, plan.gpus, names=set(names)), gpus=plan.gpus, recorders=recorders)


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


def asked_budget(matrix: MatrixDir, arguments: Arguments) -> MatrixBudget:
    """Return the budget of the matrix, replaced by BUDGET_HOURS= and BUDGET_DOLLARS=. Raises ConfigError."""
    return MatrixBudget.of(dict(symbols(matrix)) | check_budget(arguments))


def check_budget(arguments: Arguments) -> dict[str, str]:
    """Return BUDGET_HOURS= and BUDGET_DOLLARS=, those that were given. Raises ConfigError."""
    given = {name: text for name in BUDGETS if (text := arguments.get(name))}
    for name, text in given.items():
        if not _is_count(text):
            raise ConfigError(f"{name}={text}", why="expected a whole number, 0 for no limit")
    return given


def refuse_if_spent(matrix: MatrixDir, budget: MatrixBudget) -> None:
    """Raise LaunchError if the runs of the matrix have reached its budget, or have no price to compare it with."""
    runs = matrix.runs() if budget else []
    used = [(recover_status(run, has_runner=False), read_run_file_or_empty(run).train) for run in runs]
    if budget.dollars and not any(dollars_per_hour(train) for _, train in used):
        raise LaunchError(
            f"BUDGET_DOLLARS={budget.dollars:g} cannot be checked: the runs of {matrix.name} have no price",
            hint="pass BUDGET_DOLLARS=0 BUDGET_HOURS=<hours>",
        )
    if spent := budget.spent(used, time.time()):
        raise LaunchError(
            f"the budget of {matrix.name} is spent: {spent}",
            hint="pass a larger BUDGET_HOURS= or BUDGET_DOLLARS=, 0 for no limit",
        )


def _is_count(text: str) -> bool:
    """Return whether a text is a whole number in ASCII digits, short enough for every use."""
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS


def asked_disk_wait(arguments: Arguments) -> float | None:
    """Return DISK_WAIT= (s), None if it is not given. Raises ConfigError for another value than a number of seconds."""
    text = arguments.get("DISK_WAIT")
    if not text:
        return None
    if not _is_count(text) or int(text) > MOST_DISK_WAIT_S:
        raise ConfigError(f"DISK_WAIT={text}", why=f"expected seconds, 0 to {MOST_DISK_WAIT_S}")
    return float(text)


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


def reproduce(arguments: Arguments) -> int:
    """Repeat an earlier run and compare the results. They must be equal bit for bit if nothing relevant changed."""
    folder = Path(arguments.get("RUN"))
    if not arguments.get("RUN"):
        raise ConfigError("reproduce needs a run", hint=EXAMPLE)
    was = RunDir(folder.resolve())
    if not was.config.is_file():
        raise ConfigError(f"RUN={folder} is not a run directory", hint=EXAMPLE)
    need_torch()
    asked = {name: text for name, text in arguments.values.items() if name == "TRACKER"}
    asked |= _local_assignments(arguments) | former_settings(was)
    plan = make_plan(
        was.config, asked, kconfig=arguments.kconfig, gpus=arguments.get("GPUS"), one=True, user=arguments.config
    )
    _print_left_out(plan)
    shards = known_shards(was, [config.train for config in plan.configs.values()])
    matrix, recorders = _make(arguments, plan, reuse=False, shards=shards)
    now = matrix.runs()[0]
    for line in _how_to_restore_code(was, changes(was, now)):
        print(f"note: {line}")
    print(f"repeating {shown(was.path)} as {shown(now.path)}")
    status = _run_and_report(matrix, reopen(matrix, plan.gpus), gpus=plan.gpus, recorders=recorders, own=True)
    return status or _compare(was, now, plan.neutral)


def _print_left_out(plan: Plan) -> None:
    """Print the symbols that are not taken from a foreign run or matrix."""
    for name, value in sorted({(item.name, item.value) for item in plan.left_out}):
        print(f"note: not taken from the run: {name}={json.dumps(value)}")


def _local_assignments(arguments: Arguments) -> dict[str, str]:
    """Return the assignments of `reproduce`: symbols of this machine. Any other one would make it another run."""
    tree = open_tree(arguments.kconfig)
    for name, text in arguments.assignments.items():
        if not set(overrides(tree, {name: text}, arguments.takes)) <= set(tree.local):
            raise ConfigError(
                f"reproduce does not take {name}=",
                why="it would be another run",
                hint="pass paths and commands of this machine only, such as RESULTS_DIR= or DATA_DIR=",
            )
    return dict(arguments.assignments)


def former_settings(was: RunDir) -> dict[str, str]:
    """Return the settings of a run of version 0.1 that had no symbol then, and whose defaults have changed since."""
    fused = read_train_values_or_empty(was).get("muon_split_qkv") is False
    known = "GPT2_MUON_SPLIT_QKV" in was.config.read_text(encoding="utf-8")
    return {"GPT2_MUON_SPLIT_QKV": "n"} if fused and not known else {}


def _compare(was: RunDir, now: RunDir, neutral: Collection[str]) -> int:
    """Print the comparison, and return 1 if the runs must be equal and are not."""
    found, changed = repetition(was, now), changes(was, now, neutral)
    weights, text = _weights(was, now)
    equal = found.equal and weights is not False and not changed.configuration
    print(f"\n{shown(was.path)} and its repetition {shown(now.path)}:")
    for line in [*describe_repetition(found), text]:
        print(f"  {line}")
    if changed.configuration:
        print(f"  the configuration differs in {first_names(changed.configuration)}")
    # Equality is an error only if nothing changed that may change a result.
    if changed.promised:
        print("  the results must be equal: same code, torch and processor, no GPU")
        return 0 if equal else EXIT_DIFFERS
    for line in _why_different(changed):
        print(f"  the results may differ: {line}")
    return 0


def _why_different(changed: Changes) -> list[str]:
    """Return the reasons why the results may differ."""
    why = ["the order of additions on GPUs is not fixed"] if changed.gpu else []
    why += [f"the code of the trainer changed: {first_names(changed.code)}"] if changed.code else []
    return [*why, *changed.others]


def _how_to_restore_code(was: RunDir, changed: Changes) -> list[str]:
    """Return how to check out the code of an earlier run, if the trainer has changed since."""
    if not changed.code:
        return []
    about = read_run_file_or_empty(was).provenance
    lines = [f"the code of the trainer changed: {first_names(changed.code)}"]
    commit, patch = str(about.get("git_commit") or ""), MatrixDir(was.path.parent).patch
    # The line below is made to be pasted into a shell, and the run may be anybody's.
    if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        return [*lines, "the old code cannot be checked out: its commit is unknown"]
    command = f"git worktree add {WORKTREE} {commit[:10]}"
    if about.get("patch") and patch.is_file():
        command += f" && git -C {WORKTREE} apply {shlex.quote(str(patch))}"
    lines.append(f"check out the old code: {command}")
    if about.get("git_dirty") and not about.get("patch"):
        lines.append(f"its uncommitted changes were not recorded: {about.get('no_patch') or 'unknown reason'}")
    if about.get("untracked"):
        lines.append(f"untracked files that are in neither commit nor patch: {first_names(about['untracked'])}")
    return lines


def _weights(was: RunDir, now: RunDir) -> tuple[bool | None, str]:
    """Return whether the final weights are equal (None: not comparable), and a message."""
    paths = []
    for run in (was, now):
        index = CheckpointIndex(checkpoint_dir(run))
        entry = index.of_kind(CheckpointKind.FINAL)
        if entry is None:
            return None, f"weights not compared: {shown(run.path)} has no final checkpoint"
        paths.append(str(index.folder / entry.name))
    # In a process of its own: reading the weights needs torch, which kmatrix never imports.
    done = subprocess.run(
        [sys.executable, "-m", "gpt2.inference.weights", *paths],
        env=program_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        why = done.stderr.strip().splitlines()
        return None, f"weights not compared: {why[0] if why else 'the trainer printed no error'}"
    found = json.loads(done.stdout.strip().splitlines()[-1])  # the last line: libraries may print warnings before
    if found["equal"]:
        return True, f"equal bit for bit: the final weights, SHA-256 {found['sha256'][:12]}"
    apart = "" if found["by"] is None else f" by {found['by']:.3g}"
    return False, f"not equal: {found['differing']} of {found['tensors']} final weights, most {found['most']}{apart}"
