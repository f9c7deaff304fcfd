"""The section of the page on where its numbers come from, and the commands that make them again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kmatrix.report.formats import facts
from kmatrix.report.numbers import MatrixNumbers, RunNumbers
from kmatrix.report.page.parts.groups import PageGroup
from kmatrix.report.page.parts.text import date_time
from kmatrix.text import first_names

MOST_DATA = 4  # datasets that are listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A line about the matrix."""

    label: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenanceSection:
    """Where the numbers come from. Commands are for a shell in the checkout."""

    facts: tuple[Fact, ...]
    links: tuple[str, ...]  # addresses of the runs of this matrix at W&B
    command: str  # that made the matrix; "" if it was not recorded
    reproduce: str  # the command that repeats a run of the leader, and compares the two
    any_run: str  # the same command for any run, which it calls NAME
    reused: tuple[Fact, ...]  # runs that were trained in another matrix, and where


def provenance(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> ProvenanceSection | None:
    """Return the section."""
    first = next((run for group in groups for run in (*group.counted, *group.runs)), numbers.runs[0])
    return ProvenanceSection(
        facts=tuple(Fact(label=label, text=text) for label, text in _facts(numbers) if text),
        links=tuple(facts.wandb_groups(numbers)),
        command=_as_make(numbers.command),
        reproduce=_reproduce(numbers, first.name),
        any_run=_reproduce(numbers, "NAME"),
        reused=tuple(Fact(label=run.name, text=run.reused_from) for run in numbers.runs if run.reused_from),
    )


def _reproduce(numbers: MatrixNumbers, run: str) -> str:
    return f"make reproduce RUN={shlex.quote(f'{numbers.name}/{run}')}"


def _as_make(command: str) -> str:
    """Return the command of a matrix as a user types it: make, not the program that make called."""
    program, _, rest = command.partition(" ")
    return f"make {rest}" if program == "kmatrix" else command


def _facts(numbers: MatrixNumbers) -> Iterator[tuple[str, str]]:
    recorded = numbers.provenance
    driver = recorded.get("driver") or {}
    yield "Matrix", numbers.name
    yield "Created", date_time(numbers.created)
    yield "Ended", "" if numbers.ended is None else date_time(numbers.ended)
    yield "Overrides", " ".join(numbers.overrides)
    yield "Equal", numbers.equal
    yield "Axes", "; ".join(f"{label}: {', '.join(values)}" for label, values in numbers.axes.items())
    yield "Model", facts.models(numbers)
    yield "Data", _data(numbers.runs)
    yield "Code", facts.code(numbers)
    yield "Software", facts.software(numbers)
    yield "Machine", ", ".join(filter(None, [facts.machines(numbers), facts.devices(numbers)]))
    yield "Driver", ", ".join(f"{name} {value}" for name, value in driver.items() if value)
    yield "Kernel", recorded.get("kernel") or ""
    yield "Environment", " ".join(f"{name}={value}" for name, value in (recorded.get("environment") or {}).items())


def _data(runs: Sequence[RunNumbers]) -> str:
    """Return the datasets of the runs with the start of their hash and their tokenizer."""
    found: dict[str, str] = {}
    for run in runs:
        if run.data_sha256 and run.data_sha256 not in found:
            parts = [str(run.configuration.get("dataset") or ""), f"{run.tokenizer} tokens" if run.tokenizer else ""]
            found[run.data_sha256] = ", ".join(filter(None, [*parts, f"SHA-256 {run.data_sha256[:12]}"]))
    return first_names(found.values(), MOST_DATA)
