"""The commands that use what was trained: sample and serve. The model runs in the trainer's own program."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.execution import need_torch
from kmatrix.cli.session import ROOT, shown
from kmatrix.cli.targets import find_target
from kmatrix.errors import ConfigError, RecordError
from kmatrix.records import MatrixDir, RunDir
from kmatrix.records.checkpoints import Kind, Shelf, folder_of

SAMPLE = {"PROMPT": str, "TOKENS": int, "TEMPERATURE": float, "TOP_K": int, "TOP_P": float, "SEED": int, "DEVICE": str}
SERVE = {"PORT": int, "HOST": str, "DEVICE": str}
EXPORT = {"OUTPUT": str}
KINDS = {int: "a whole number", float: "a number"}


def sample(arguments: Arguments) -> int:
    """Write a text with a model. Does not return: the program of the trainer takes over."""
    return _become("gpt2.sample", arguments, SAMPLE)


def serve(arguments: Arguments) -> int:
    """Answer requests with a model. Does not return: the program of the trainer takes over."""
    return _become("gpt2.server", arguments, SERVE)


def export(arguments: Arguments) -> int:
    """Write a model in Hugging Face's layout. Does not return: the program of the trainer takes over."""
    if not arguments.get("OUTPUT"):
        raise ConfigError("export needs a folder to write", fix="pass OUTPUT=<a new folder>")
    _become("gpt2.export", arguments, EXPORT)


def import_model(arguments: Arguments) -> int:
    """Make a checkpoint of a folder in Hugging Face's layout. Does not return."""
    folder = Path(arguments.get("MODEL")).expanduser()
    if not arguments.get("MODEL") or not arguments.get("OUTPUT"):
        raise ConfigError("import-model needs both names", fix="pass MODEL=<folder> OUTPUT=<a new file>")
    _run("gpt2.export", [str(folder), f"--output={arguments.get('OUTPUT')}"])


def _become(module: str, arguments: Arguments, options: Mapping[str, type]) -> NoReturn:
    _run(module, command_line(arguments, options))


def _run(module: str, words: Sequence[str]) -> NoReturn:
    need_torch()
    sys.stdout.flush()
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "lib"), os.environ.get("PYTHONPATH", "")]))
    os.execve(sys.executable, [sys.executable, "-m", module, *words], {**os.environ, "PYTHONPATH": path})


def command_line(arguments: Arguments, options: Mapping[str, type]) -> list[str]:
    """Return the words for the trainer's program: the checkpoint, then an option for each argument that was given."""
    words = []
    for name, kind in options.items():
        text = arguments.values.get(name)
        if text is None or (text == "" and name != "PROMPT"):
            continue
        try:
            kind(text)
        except ValueError:
            raise ConfigError(f"{name}={text} is not {KINDS[kind]}") from None
        words.append(f"--{name.lower().replace('_', '-')}={text}")
    return [str(find_checkpoint(arguments)), *words]


def find_checkpoint(arguments: Arguments) -> Path:
    """Return the checkpoint that CHECKPOINT= names: a file, or the best of a run or of a matrix.

    Without it the best of TARGET=, which is the newest matrix by default.
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
                f"{shown(path)} has no checkpoint", fix="make list-checkpoints lists those that there are"
            )
        return found
    if MatrixDir(path).matrix_json.is_file():
        return best_of_matrix(MatrixDir(path.resolve()))
    raise ConfigError(
        f"CHECKPOINT={asked} is neither a checkpoint nor the folder of a run or a matrix",
        fix="make list-checkpoints lists those that there are",
    )


def best_of_run(run: RunDir) -> Path | None:
    """Return the checkpoint of the lowest validation loss, else that of the end, else the newest."""
    shelf = Shelf(folder_of(run))
    entry = shelf.of_kind(Kind.BEST) or shelf.of_kind(Kind.FINAL) or next(reversed(shelf.present), None)
    return shelf.folder / entry.name if entry else None


def best_of_matrix(matrix: MatrixDir) -> Path:
    """Return the best checkpoint of the best run; runs on different data are compared by bits per byte."""
    from kmatrix.report import analyse

    runs = [run for run in analyse(matrix).runs if best_of_run(matrix.run(run.name))]
    judged = [run for run in runs if run.best_val_loss is not None]
    if not judged:
        raise RecordError(
            f"{shown(matrix.path)} has no checkpoint of a run that was judged",
            fix="pass CHECKPOINT=<file or run directory>; make list-checkpoints lists those that there are",
        )
    scores = {run.name: run.best_val_loss for run in judged}
    if len({run.data_sha256 for run in judged}) > 1:
        scores = {run.name: run.best_bits_per_byte for run in judged}
    if None in scores.values():
        raise ConfigError(
            f"the runs of {shown(matrix.path)} read different data, and none is the best",
            fix=f"pass CHECKPOINT=<run directory>: {_listed(scores)}",
        )
    best = min(scores, key=lambda name: (scores[name] or 0.0, name))
    found = best_of_run(matrix.run(best))
    assert found
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
