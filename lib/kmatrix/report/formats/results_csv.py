"""Write the runs of a matrix as results.csv: a row per run, for spreadsheets and data frames."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from kmatrix.records.files import write_text
from kmatrix.report.numbers import MatrixNumbers, RunNumbers
from kmatrix.text import printable

# Spreadsheets evaluate a cell that begins like this (OWASP, CSV injection).
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")
MOST_CELL = 32_767  # characters, the limit of Excel

FIELDS = (  # of RunNumbers, with the names and the units of results.json
    *("run_id", "status", "kind", "reason", "diverged", "optimizer", "model", "device", "device_name"),
    *("world_size", "num_nodes", "seed", "attempt", "data_sha256", "tokenizer", "steps", "max_iters", "global_batch"),
    *("block_size", "initial_val_loss", "final_val_loss", "best_val_loss", "best_val_step", "perplexity"),
    *("bits_per_byte", "final_train_loss", "hellaswag_accuracy", "hellaswag_accuracy_norm"),
    *("core_metric", "core_standard_error", "tokens"),
    *("tokens_per_second", "mfu", "step_ms", "seconds", "wall_s", "gpu_hours", "dollars", "peak_memory_mib", "params"),
    *("pruning", "target_sparsity", "sparsity", "ended_by", "ended", "reused_from", "evidence", "log"),
)
ENERGY = ("joules", "joules_per_token", "simulated")


def write_csv(path: Path, numbers: MatrixNumbers) -> None:
    """Write results.csv."""
    write_text(path, results_csv(numbers))


def results_csv(numbers: MatrixNumbers) -> str:
    """Return the content of results.csv (RFC 4180): unknown values are empty cells."""
    configuration = {run.name: group.name for group in numbers.groups for run in group.runs}
    file = io.StringIO()
    writer = csv.writer(file)
    axes = [f"axis {label}" for label in numbers.axes]
    writer.writerow([_cell(title) for title in ("run", "configuration", *axes, *FIELDS, *ENERGY)])
    for run in numbers.runs:
        on_axes = [run.axes.get(label, "") for label in numbers.axes]
        values = [run.name, configuration.get(run.name, ""), *on_axes, *(getattr(run, name) for name in FIELDS)]
        writer.writerow([_cell(value) for value in (*values, *_energy(run))])
    return file.getvalue()


def _energy(run: RunNumbers) -> tuple[object, ...]:
    if run.gpu is None:
        return (None,) * len(ENERGY)
    return run.gpu.joules, run.gpu.main.joules_per_token, run.gpu.simulated


def _cell(value: object) -> str:
    """Return a value as a cell. Text that a spreadsheet would evaluate gets an apostrophe; numbers stay as they are."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = printable(str(value))[:MOST_CELL]
    return f"'{text}" if text.startswith(FORMULA) else text
