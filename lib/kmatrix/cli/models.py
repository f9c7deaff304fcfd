"""The commands that use trained models: sample, serve, export, import, and list checkpoints."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from kmatrix.cli.commands import Arguments
from kmatrix.cli.targets import chosen_runs, find_target
from kmatrix.errors import ConfigError, RecordError
from kmatrix.experiment.inputs.ask import need_torch
from kmatrix.records.checkpoint_dir import checkpoint_dir
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.paths import MatrixDir, RunDir, program_environment
from kmatrix.report.analyse import analyse
from kmatrix.text import UNKNOWN, columns, disk_size, make_command, plural, shown, table, time_of_day

HEADS = ("step", "kinds", "val loss", "size", "attempt", "written", "file")


def sample(arguments: Arguments) -> int:
    """Generate text with a model. Replaces this process with the trainer's program."""
    return _become("gpt2.inference.generate", arguments, "PROMPT", "TOKENS")


def serve(arguments: Arguments) -> int:
    """Serve a model over HTTP. Replaces this process with the trainer's program."""
    return _become("gpt2.inference.server", arguments, "PORT")


def export(arguments: Arguments) -> int:
    """Export a model in Hugging Face's format. Replaces this process with the trainer's program."""
    if not arguments.get("OUTPUT"):
        raise ConfigError("export needs OUTPUT=", hint="pass OUTPUT=<new folder>")
    _become("gpt2.inference.export", arguments, "OUTPUT")


def import_model(arguments: Arguments) -> int:
    """Convert a model in Hugging Face's format to a checkpoint. Replaces this process with the trainer's program."""
    folder = Path(arguments.get("MODEL")).expanduser()
    if not arguments.get("MODEL") or not arguments.get("OUTPUT"):
        raise ConfigError("import-model needs MODEL= and OUTPUT=", hint="pass MODEL=<folder> OUTPUT=<new file>")
    _run("gpt2.inference.export", [str(folder), f"--output={arguments.get('OUTPUT')}"])


def _become(module: str, arguments: Arguments, *options: str) -> NoReturn:
    _run(module, command_line(arguments, options))


def _run(module: str, words: Sequence[str]) -> NoReturn:
    need_torch()
    sys.stdout.flush()  # execve discards buffers
    os.execve(sys.executable, [sys.executable, "-m", module, *words], program_environment())


def command_line(arguments: Arguments, options: Iterable[str]) -> list[str]:
    """Return the arguments of the trainer's program: the checkpoint, then an option per given argument."""
    given = {name: arguments.values[name] for name in options if name in arguments.values}
    # One word each, because a prompt may start with dashes. An empty prompt is a prompt.
    words = [f"--{name.lower()}={text}" for name, text in given.items() if text or name == "PROMPT"]
    return [str(find_checkpoint(arguments)), *words]


def find_checkpoint(arguments: Arguments) -> Path:
    """Return the checkpoint of CHECKPOINT=: a file, or the best one of a run or of a matrix.

    Without CHECKPOINT=, return the best one of TARGET=, which is the newest matrix by default.
    """
    asked = arguments.get("CHECKPOINT")
    if not asked:
        return best_of_matrix(find_target(arguments))
    path = Path(asked).expanduser()
    if path.is_file():
        return path.resolve()
    if RunDir(path).run_json.is_file():
        found = best_of_run(RunDir(path.resolve()))
        if found is None:
            raise RecordError(
                f"no checkpoint in {shown(path)}",
                hint=f"run `{make_command('list-checkpoints', path.resolve().parent)}` to see all checkpoints",
            )
        return found
    if MatrixDir(path).matrix_json.is_file():
        return best_of_matrix(MatrixDir(path.resolve()))
    raise ConfigError(
        f"CHECKPOINT={asked} is not a checkpoint, a run or a matrix",
        hint="run `make list-checkpoints` to see all checkpoints",
    )


def best_of_run(run: RunDir) -> Path | None:
    """Return the checkpoint with the lowest validation loss, else the final one, else the newest."""
    checkpoints = Checkpoints(checkpoint_dir(run))
    found = checkpoints.best() or checkpoints.final() or checkpoints.newest()
    return checkpoints.path(found) if found else None


def best_of_matrix(matrix: MatrixDir) -> Path:
    """Return the best checkpoint of the best run. Runs on different datasets are ranked by bits per byte."""
    runs = [run for run in analyse(matrix).runs if best_of_run(matrix.run(run.name))]
    evaluated = [run for run in runs if run.best_val_loss is not None]
    if not evaluated:
        raise RecordError(
            f"no checkpoint of an evaluated run in {shown(matrix.path)}",
            hint="pass CHECKPOINT=<file or run directory>; "
            f"`{make_command('list-checkpoints', matrix.path)}` lists all checkpoints",
        )
    # A loss per token depends on the tokenizer, so it cannot rank runs on different datasets.
    scores = {run.name: run.best_val_loss for run in evaluated}
    if len({run.data_sha256 for run in evaluated}) > 1:
        scores = {run.name: run.best_bits_per_byte for run in evaluated}
    if None in scores.values():
        raise ConfigError(
            f"cannot rank the runs of {shown(matrix.path)}: their datasets differ",
            hint=f"pass CHECKPOINT=<run directory>: {', '.join(scores)}",
        )
    best = min(scores, key=lambda name: (scores[name] or 0.0, name))
    found = best_of_run(matrix.run(best))
    assert found  # only runs with a checkpoint are candidates
    return found


def list_checkpoints(arguments: Arguments) -> int:
    """Print a table of checkpoints per run."""
    found = False
    for run in chosen_runs(find_target(arguments), arguments):
        checkpoints = Checkpoints(checkpoint_dir(run))
        if items := checkpoints.all():
            found = True
            total = disk_size(sum(item.bytes for item in items))
            print(f"{run.name}: {plural(len(items), 'checkpoint')}, {total} in {shown(checkpoints.folder)}")
            print("\n".join(table(columns(HEADS, (1, 6)), rows(checkpoints))))
    if not found:
        print("no checkpoints")
    return 0


def rows(checkpoints: Checkpoints) -> list[tuple[str, ...]]:
    """Return the table rows of checkpoints, oldest first."""
    kinds = {"newest": checkpoints.newest(), "best": checkpoints.best(), "final": checkpoints.final()}
    return [
        (
            str(item.step),
            ",".join(kind for kind, of_kind in kinds.items() if of_kind == item),
            UNKNOWN if item.val_loss is None else f"{item.val_loss:.4f}",
            disk_size(item.bytes),
            str(item.attempt),
            time_of_day(item.time),
            item.name,
        )
        for item in checkpoints.all()
    ]
