"""Run what a matrix has left, or again: continue, test-rerun."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from kmatrix.cli.commands import Arguments, yes
from kmatrix.cli.running.limits import asked_micro_batch, asked_settings, refuse_if_spent, resume_from
from kmatrix.cli.running.start import execute, is_failed
from kmatrix.cli.targets import asked_statuses, chosen_runs, find_target, live_jobs, refuse_if_running
from kmatrix.errors import ConfigError
from kmatrix.experiment.cluster.resolve import find_gpus
from kmatrix.experiment.doctor import need_torch
from kmatrix.records.checkpoint_dir import check_own_files, recorded
from kmatrix.records.files import read_json, write_json
from kmatrix.records.matrix import LOCAL
from kmatrix.records.paths import MatrixDir, below_root
from kmatrix.records.runs import Status
from kmatrix.runner.controller import exit_status
from kmatrix.runner.requests import fit, go_on, release
from kmatrix.runner.rerun import rerun
from kmatrix.status.fold import DAMAGED
from kmatrix.status.look import Look, look
from kmatrix.status.wanted import wanted
from kmatrix.text import make_command, plural, shown


def continue_(arguments: Arguments) -> int:
    """Continue a matrix: finished runs are kept, the others resume from their last valid checkpoint."""
    matrix = find_target(arguments)
    # Refuse what can be refused before anything is written.
    retry, micro_batch = yes(arguments, "RETRY_FAILED"), asked_micro_batch(arguments)
    resume = resume_from(arguments.get("RESUME", "auto"))
    seen = _open(matrix, arguments)
    names = [run.name for run in chosen_runs(matrix, arguments)] if arguments.get("RUN") else []
    settings = asked_settings(arguments, seen.plan) | ({"RUN": ",".join(names)} if names else {})
    go_on(seen, retry_failed=retry, resume=resume, micro_batch=micro_batch, only=names, settings=settings)
    seen = look(matrix.path, list(live_jobs(matrix)))
    refuse_if_spent(seen)
    due = [name for name in wanted(seen) if seen.states[name].is_due and (not names or name in names)]
    print(f"{shown(matrix.path)}: {plural(len(due), 'run') if due else 'nothing'} to run{_rest(seen, due)}")
    for name, state in seen.states.items():
        if state.kind == DAMAGED:
            print(f"  {name} stays: {state.reason}; restore the file from a copy")
    if not due and not retry and any(is_failed(state) for state in seen.states.values()):
        print(f"  failed runs stay: {make_command('continue', matrix.path, RETRY_FAILED='1')} tries them again")
    if not due and MatrixDir(matrix.path).page.exists():
        print(f"Report: {shown(matrix.page)}")
        return exit_status(seen, wanted)
    return execute(matrix, arguments)


def _open(matrix: MatrixDir, arguments: Arguments) -> Look:
    """Return a matrix that may be run again. Raises LaunchError if somebody runs it, or its files are of another."""
    need_torch()
    seen = look(matrix.path)
    if seen.plan.engine == LOCAL:
        refuse_if_running(matrix)
    if base := arguments.get("CHECKPOINT_DIR"):
        take_folder(matrix, below_root(base))
    check_own_files(matrix)
    if seen.plan.engine == LOCAL:
        gpus, notes = find_gpus(arguments.get("GPUS"))
        for note in notes:
            print(f"note: {note}")
        fit(seen, len(gpus))
    return look(matrix.path)


def take_folder(matrix: MatrixDir, base: Path) -> None:
    """Make a folder below `base`, which the user named, the one for the checkpoints of a matrix.

    Raises ConfigError if its checkpoints are in the run directories, LaunchError if it belongs to another matrix.
    """
    current = recorded(matrix).checkpoints
    if current is None:
        raise ConfigError(
            f"CHECKPOINT_DIR={base}: the checkpoints of {matrix.name} are in its run directories",
            hint="leave CHECKPOINT_DIR= out; it is set when a matrix is made",
        )
    if (folder := base.expanduser().resolve() / Path(current).name) == Path(current):
        check_own_files(matrix)
    folder.mkdir(parents=True, exist_ok=True)
    owner = str(matrix.path.resolve())
    write_json(matrix.matrix_json, {**read_json(matrix.matrix_json), "checkpoints": str(folder), "owner": owner})


def _rest(seen: Look, due: Iterable[str]) -> str:
    """Return `, 3 finished, 1 failed` of the runs that are not started."""
    started = set(due)
    counts = Counter(state.status for name, state in seen.states.items() if name not in started)
    return "".join(f", {counts[status]} {status}" for status in Status if counts[status])


def test_rerun(arguments: Arguments) -> int:
    """Rerun runs of a matrix. Their old results are archived, and the report reads the new ones."""
    if not arguments.get("TARGET"):
        raise ConfigError("test-rerun needs a matrix", hint="pass TARGET=<matrix>: its results are replaced")
    matrix = find_target(arguments)
    refuse_if_running(matrix)
    seen = _open(matrix, arguments)
    settings, statuses = asked_settings(arguments, seen.plan), asked_statuses(arguments)
    names = _of_optimizers(seen, [run.name for run in chosen_runs(matrix, arguments)], arguments.get("OPTIMIZER"))
    names = [name for name in names if not statuses or seen.states[name].status in statuses]
    if not names:
        print(f"no run of {shown(matrix.path)} is {arguments.get('STATUS').replace(',', ' or ')}")
        return 0
    refuse_if_spent(seen)
    release(seen, names)  # a rerun is a wish to train them
    for name in names:
        into = rerun(matrix.path / name)
        print(f"{name}: " + (f"archived its result in {shown(into)}" if into else "no result yet"))
    go_on(look(matrix.path), only=names, settings=settings | {"RUN": ",".join(names)})
    return execute(matrix, arguments)


def _of_optimizers(seen: Look, names: list[str], asked: str) -> list[str]:
    """Return the runs with these optimizers. asked: a comma-separated list, "" for all."""
    if not asked:
        return names
    optimizers = {name: str(seen.files[name].train.get("optimizer")) for name in names}
    if missing := set(asked.split(",")) - set(optimizers.values()):
        there = ", ".join(sorted(set(optimizers.values())))
        raise ConfigError(f"OPTIMIZER={asked}: no run has {', '.join(sorted(missing))}", why=f"the runs have {there}")
    return [name for name in names if optimizers[name] in asked.split(",")]
