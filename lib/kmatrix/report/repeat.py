"""A run and its repetition: what both logged, held together bit for bit, and what may make them differ."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kmatrix.records import MatrixDir, RunDir, Status, merged_metrics
from kmatrix.report.reading import readable

OF_TIME = frozenset({"schema", "time", "elapsed_s", "attempt", "resumed"})  # no result: they differ in every run
SPEEDS = "throughput/"
PLACES = frozenset({"data_path", "checkpoint_dir"})
MOST_NAMES = 6
Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One number that is not the same. None: that run did not log it, or it was not finite."""

    step: int
    key: str
    was: float | None
    now: float | None

    @property
    def by(self) -> float:
        """How far they are apart; infinite where one of them is missing."""
        return abs(self.now - self.was) if self.was is not None and self.now is not None else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """What two runs logged. numbers: of how many steps there are in one or the other.  differences: by step."""

    steps: int
    numbers: int
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def largest(self) -> Difference:
        return max(self.differences, key=lambda one: one.by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What is not as it was. code: files of the trainer.  others: everything else that may change a number, in words.

    configuration: fields of the run, in words.  gpu: whether either of them ran on GPUs.
    """

    code: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    configuration: tuple[str, ...] = ()
    gpu: bool = False

    @property
    def promised(self) -> bool:
        """Whether the numbers must be the same: the same code, torch and processor, and no GPU."""
        return not (self.code or self.others or self.gpu)


def repetition(was: RunDir, now: RunDir) -> Repetition:
    """Hold every number that both runs logged together, step by step. Times and speeds are none.

    Of a run that did not finish only what it logged counts: its repetition goes on.
    """
    before, after = (_numbers(run) for run in (was, now))
    finished = readable(was.result).get("status") == Status.FINISHED
    names = sorted(before.keys() | after.keys() if finished else before.keys())
    apart = [
        Difference(step=step, key=key, was=before.get((step, key)), now=after.get((step, key)))
        for step, key in names
        if before.get((step, key)) != after.get((step, key))
    ]
    return Repetition(steps=len({step for step, _ in names}), numbers=len(names), differences=tuple(apart))


def changes(was: RunDir, now: RunDir, neutral: Collection[str] = ()) -> Changes:
    """Return what is not as it was. neutral: fields of the trainer that cannot change a result."""
    then, here = readable(was.run_json), readable(now.run_json)
    before, after = (record.get("provenance") or {} for record in (then, here))
    trained = [{**(one.get("train") or {}), **_used(run)} for one, run in ((then, was), (here, now))]
    gpu = any(fields.get("device") == "cuda" for fields in trained)
    return Changes(
        code=_changed_code(was, now, before, after),
        others=tuple(_others(before, after)),
        configuration=tuple(_fields(trained[0], trained[1], {*PLACES, *neutral})),
        gpu=gpu,
    )


def _numbers(run: RunDir) -> dict[tuple[int, str], float | None]:
    """Return every number of a run by step and name."""
    return {
        (int(line["step"]), key): value if isinstance(value, int | float) else None
        for line in merged_metrics(run.metrics)
        for key, value in line.items()
        if key not in OF_TIME and key != "step" and not key.startswith(SPEEDS)
    }


def _used(run: RunDir) -> Mapping[str, Any]:
    """Return what the trainer used, where it got so far; a smaller micro-batch stands here alone."""
    fields = readable(run.run_used).get("train")
    return fields if isinstance(fields, dict) else {}


def _changed_code(was: RunDir, now: RunDir, before: Line, after: Line) -> tuple[str, ...]:
    """Return the trainer's files that are not the same; one sentence where only that is known."""
    if before.get("code") == after.get("code"):
        return ()
    then, here = (_files(run) for run in (was, now))
    if not then or not here:
        return ("the trainer's sources (which of them was not recorded)",)
    gone = [f"{name} (gone)" for name in then.keys() - here.keys()]
    new = [f"{name} (new)" for name in here.keys() - then.keys()]
    return tuple(sorted([*(name for name in then.keys() & here.keys() if then[name] != here[name]), *gone, *new]))


def _files(run: RunDir) -> Mapping[str, str]:
    return (readable(MatrixDir(run.path.parent).matrix_json).get("provenance") or {}).get("files") or {}


def _others(before: Line, after: Line) -> Iterator[str]:
    """Say what else is not the same and may change a number: torch and what it computes with."""
    for name, text in (("cpu", "the processor"), ("python", "Python")):
        if before.get(name) != after.get(name):
            yield f"{text} was {before.get(name)}, is {after.get(name)}"
    packages = [record.get("versions") or {} for record in (before, after)]
    for name in ("torch", "numpy", "pytorch_optimizer"):
        if packages[0].get(name) != packages[1].get(name):
            yield f"{name} was {packages[0].get(name)}, is {packages[1].get(name)}"
    variables = [record.get("environment") or {} for record in (before, after)]
    for name in sorted(variables[0].keys() | variables[1].keys()):
        if variables[0].get(name) != variables[1].get(name) and "environment" in before:
            yield f"{name} was {variables[0].get(name, 'not set')}, is {variables[1].get(name, 'not set')}"


def _fields(before: Line, after: Line, neutral: Collection[str]) -> Iterator[str]:
    for name in sorted((before.keys() | after.keys()) - {*neutral}):
        if before.get(name) != after.get(name):
            yield f"{name} was {_shown(before.get(name))}, is {_shown(after.get(name))}"


def in_words(found: Repetition) -> list[str]:
    """Return the lines that tell of a repetition: equal, or where it first parts, and by how much."""
    if not found.numbers:
        return ["nothing to compare: no number was logged"]
    counted = f"{found.numbers} numbers of {found.steps} steps"
    if found.equal:
        return [f"equal bit for bit: {counted}"]
    first, most = found.differences[0], found.largest
    lines = [
        f"not equal: {len(found.differences)} of {counted} differ",
        f"first at step {first.step}: {_difference(first)}",
    ]
    return [*lines, f"most at step {most.step}: {_difference(most)}"] if most != first else lines


def _difference(one: Difference) -> str:
    apart = f", {one.by:.3g} apart" if math.isfinite(one.by) else ""
    return f"{one.key} was {_shown(one.was)}, is {_shown(one.now)}{apart}"


def named(names: Collection[str]) -> str:
    """Return a few names of many."""
    listed = list(names)
    more = len(listed) - MOST_NAMES
    return ", ".join(listed[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value) if isinstance(value, float) else str(value)
