"""What runs were judged by beside their loss -> a section of the report: bits per byte and HellaSwag."""

from __future__ import annotations

from collections.abc import Sequence

from kmatrix.report.layout import table
from kmatrix.report.values import RunNumbers

UNKNOWN = "-"
Section = tuple[str, Sequence[str]]


def judging_section(runs: Sequence[RunNumbers]) -> list[Section]:
    """Return the section; none where no run has such numbers. Runs that have none of them are left out."""
    bits = [run for run in runs if run.bits_per_byte is not None]
    judged = [run for run in runs if run.hellaswag_accuracy is not None]
    titles = ["run", "tokenizer"]
    titles += ["bits/byte", "bytes/token"] if bits else []
    titles += ["HellaSwag", "normalised"] if judged else []
    rows = [
        _row(run, with_bits=bool(bits), with_hellaswag=bool(judged)) for run in runs if run in bits or run in judged
    ]
    return [("Judged by more than the loss", table(titles, rows, left=(0, 1)))] if rows else []


def _row(run: RunNumbers, *, with_bits: bool, with_hellaswag: bool) -> list[str]:
    row = [run.name, run.tokenizer or UNKNOWN]
    if with_bits:
        row += [_figures(run.bits_per_byte, 4) + ("" if run.counts else "*"), _figures(run.bytes_per_token, 2)]
    if with_hellaswag:
        row += [_figures(run.hellaswag_accuracy, 4), _figures(run.hellaswag_accuracy_norm, 4)]
    return row


def _figures(value: float | None, places: int) -> str:
    return UNKNOWN if value is None else f"{value:.{places}f}"
