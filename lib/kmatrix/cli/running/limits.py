"""Arguments of the commands that train: budgets, the start of an attempt."""

from __future__ import annotations

import time
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.records.states import read_matrix_status
from kmatrix.records.train_config import dollars_per_hour
from kmatrix.runner.execute import (
    symbols,
)
from kmatrix.status.cost import BUDGETS, MatrixBudget
from kmatrix.status.status_file import recover_status

RESUMES = ("auto", "latest", "best", "none")  # values of RESUME= besides a path; those of the trainer's --resume
MOST_DIGITS = 7  # of a budget


def asked_budget(matrix: MatrixDir, arguments: Arguments) -> MatrixBudget:
    """Return the budget of the last execution, replaced by BUDGET_HOURS= and BUDGET_DOLLARS=. Raises ConfigError."""
    known = MatrixBudget.of_matrix(read_matrix_status(matrix), symbols(matrix))
    given = MatrixBudget.of(asked := check_budget(arguments))
    return MatrixBudget(
        hours=given.hours if "BUDGET_HOURS" in asked else known.hours,
        dollars=given.dollars if "BUDGET_DOLLARS" in asked else known.dollars,
    )


def check_budget(arguments: Arguments) -> dict[str, str]:
    """Return BUDGET_HOURS= and BUDGET_DOLLARS=, those that were given. Raises ConfigError."""
    # `make add` takes them as the assignments of symbols that they are.
    given = {name: text for name in BUDGETS if (text := arguments.get(name) or arguments.assignments.get(name, ""))}
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
            f"the budget of {matrix.name} is spent: {spent.text}",
            hint="pass a larger BUDGET_HOURS= or BUDGET_DOLLARS=, 0 for no limit",
        )


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
