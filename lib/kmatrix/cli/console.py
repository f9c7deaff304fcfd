"""The command that prints a matrix's metrics.jsonl as a plain table: no tracker and no browser is needed for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.progress import clock, short
from kmatrix.cli.targets import chosen_runs, find_target, running_target
from kmatrix.records import RunRecord, read_run

LAST_STEPS = 20
UNKNOWN = "-"
FORMS = {
    "train/loss": ("loss", "{:.4f}"),
    "val/loss": ("val", "{:.4f}"),
    "train/lr": ("lr", "{:.2e}"),
    "grad/norm": ("norm", "{:.2f}"),
}
TITLES = ("step", "tokens", "time", *(title for title, _ in FORMS.values()), "tok/s", "MFU")


def console(arguments: Arguments) -> int:
    """Print the newest values of each run of the matrix; RUN=<pattern> prints the last steps of each that fits."""
    matrix = running_target(arguments) or find_target(arguments)
    records = [read_run(run) for run in chosen_runs(matrix, arguments)]
    print(matrix.name)
    if not arguments.get("RUN"):
        rows = [(one.dir.name, str(one.status), *cells(newest(one))) for one in records]
        print("\n".join(aligned([("run", "status", *TITLES), *rows], words=2)))
        return 0
    for one in records:
        rows = [cells(line) for line in one.metrics[-LAST_STEPS:]]
        print(f"\n{one.dir.name}: {one.status}")
        print("\n".join(aligned([TITLES, *rows])) if rows else "no step has been logged yet")
    return 0


def newest(run: RunRecord) -> Mapping[str, Any]:
    """Return the last value that is known under each name."""
    found: dict[str, Any] = {}
    for line in run.metrics:
        found |= {name: value for name, value in line.items() if value is not None}
    return found


def cells(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the values of a step as the cells of a row."""
    speed, used = line.get("throughput/tokens_per_s"), line.get("throughput/mfu")
    return (
        str(line.get("step", UNKNOWN)),
        UNKNOWN if line.get("tokens") is None else short(line["tokens"]),
        UNKNOWN if line.get("elapsed_s") is None else clock(line["elapsed_s"]),
        *(UNKNOWN if line.get(name) is None else form.format(line[name]) for name, (_, form) in FORMS.items()),
        UNKNOWN if speed is None else short(speed),
        UNKNOWN if used is None else f"{used:.1%}",
    )


def aligned(rows: Sequence[Sequence[str]], words: int = 0) -> list[str]:
    """Return rows as lines in columns: the first `words` to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        fitted = [text.ljust(width) if place < words else text.rjust(width) for place, (text, width) in pairs]
        lines.append("  ".join(fitted).rstrip())
    return lines
