"""Compare a run with its repetition bit for bit, and list the changes that may make them differ."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from kmatrix.records import attempts
from kmatrix.records.decode import Scalar, decode_optional
from kmatrix.records.matrix import CODE
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import (
    Provenance,
    RunResult,
    Status,
    merged_metrics,
    read_run_file_or_empty,
)
from kmatrix.sources import trainer_files
from kmatrix.text import first_names

# Keys of metrics.jsonl that are not results: they differ in every run.
NOT_COMPARED_KEYS = frozenset({"elapsed_s", "attempt"})
NOT_COMPARED_PREFIX = "throughput/"
PATH_FIELDS = frozenset({"data_path", "init_from"})  # of run.json's "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One logged value that differs. None: not logged, or not finite."""

    step: int
    key: str
    was: float | None
    now: float | None

    @property
    def by(self) -> float:
        """Absolute difference; infinite if a value is missing."""
        return abs(self.now - self.was) if self.was is not None and self.now is not None else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """The result of comparing all logged values of two runs."""

    steps: int  # steps with a compared value
    numbers: int  # compared values
    differences: tuple[Difference, ...]  # sorted by step

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def largest(self) -> Difference:
        return max(self.differences, key=lambda one: one.by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes between two runs that may change their results."""

    code: tuple[str, ...] = ()  # files of the trainer
    others: tuple[str, ...] = ()  # packages, processor, environment: one sentence each
    configuration: tuple[str, ...] = ()  # fields of run.json's "train": one sentence each
    gpu: bool = False  # True if either run used GPUs, and its order of additions was not fixed (DETERMINISTIC=y)
    hosts: str = ""  # `n1,n2 -> n3,n4` of runs on a cluster that differ: no reason for other results

    @property
    def promised(self) -> bool:
        """True if the results must be equal: same code, packages and devices, and a fixed order of additions."""
        return not (self.code or self.others or self.gpu)


def repetition(was: RunDir, now: RunDir) -> Repetition:
    """Compare all values that both runs logged, step by step, except times and throughput.

    If the first run did not finish, only the values that it logged are compared: its repetition trains longer.
    """
    before, after = (_logged_values(run) for run in (was, now))
    result = decode_optional(was.result, RunResult)
    finished = result is not None and result.status == Status.FINISHED
    names = sorted(before.keys() | after.keys() if finished else before.keys())
    differences = [
        Difference(step=step, key=key, was=before.get((step, key)), now=after.get((step, key)))
        for step, key in names
        if before.get((step, key)) != after.get((step, key))
    ]
    return Repetition(steps=len({step for step, _ in names}), numbers=len(names), differences=tuple(differences))


def changes(was: RunDir, now: RunDir, neutral: Collection[str] = ()) -> Changes:
    """Return the changes between two runs. neutral: fields of the trainer that cannot change a result."""
    records = read_run_file_or_empty(was), read_run_file_or_empty(now)
    before, after = (record.provenance for record in records)
    # Only result.json has a micro-batch that was reduced for lack of memory.
    used = decode_optional(was.result, RunResult) or RunResult(), decode_optional(now.result, RunResult) or RunResult()
    hosts = [first_names(dict.fromkeys(each.hosts), 3) for each in used]
    elsewhere = any({*ran.hosts} != {about.get("host")} for ran, about in zip(used, (before, after), strict=True))
    on_cluster = all(hosts) and elsewhere
    if on_cluster:
        # The processor of the host that submitted a matrix computed nothing. Other hosts with equal devices are equal.
        before, after = _on_devices(before, used[0]), _on_devices(after, used[1])
    trained = [{**record.train.to_json(), **ran.used} for record, ran in zip(records, used, strict=True)]
    return Changes(
        code=_changed_code(was, now, before, after),
        others=(*_changed_environment(before, after), *([] if on_cluster else _changed_gpus(*used))),
        configuration=tuple(_changed_fields(trained[0], trained[1], {*PATH_FIELDS, *neutral})),
        gpu=any(record.train.device == "cuda" and not record.train.deterministic for record in records),
        hosts=f"{hosts[0]} -> {hosts[1]}" if on_cluster and used[0].hosts != used[1].hosts else "",
    )


def _on_devices(about: Provenance, used: RunResult) -> Provenance:
    """Return where a run comes from, with the devices that trained as its processor."""
    return {**about, "cpu": ", ".join(dict.fromkeys(used.devices))}


def describe_repetition(found: Repetition) -> list[str]:
    """Return the result as lines: equal, or the first and the largest difference."""
    if not found.numbers:
        return ["nothing to compare: no values were logged"]
    counted = f"{found.numbers} values in {found.steps} steps"
    if found.equal:
        return [f"equal bit for bit: {counted}"]
    first, largest = found.differences[0], found.largest
    lines = [
        f"not equal: {len(found.differences)} of {counted} differ",
        f"first at step {first.step}: {_difference(first)}",
    ]
    return [*lines, f"largest at step {largest.step}: {_difference(largest)}"] if largest != first else lines


def describe_distance(found: Repetition) -> str:
    """Return how far the losses of two runs with the same configuration are apart; "" if one is missing."""
    losses = [one.by for one in found.differences if one.key.endswith("/loss")]
    largest = max(losses, default=0.0)
    return f"the losses are equal within {largest:.2g} nats/token" if math.isfinite(largest) else ""


def _logged_values(run: RunDir) -> dict[tuple[int, str], float | None]:
    """Return every compared value of a run, by step and key."""
    return {
        (line.step, key): value
        for line in merged_metrics(run.metrics)
        for key, value in line.values.items()
        if key not in NOT_COMPARED_KEYS and not key.startswith(NOT_COMPARED_PREFIX)
    }


def _changed_code(was: RunDir, now: RunDir, before: Provenance, after: Provenance) -> tuple[str, ...]:
    """Return the changed files of the trainer in `code/` of the matrices."""
    if _code(was, before) == _code(now, after):
        return ()
    old, new = (trainer_files(run.path.parent / CODE) for run in (was, now))
    changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return tuple(changed) or ("an attempt with CODE=checkout",)


def _code(run: RunDir, about: Provenance) -> str | None:
    """Return the SHA-256 of the sources that the last attempt of a run ran, else of those that were planned."""
    last = attempts.read(run.path, max(attempts.numbers(run.path), default=0))
    return (last.code if last else "") or about.get("code")


def _changed_environment(before: Provenance, after: Provenance) -> Iterator[str]:
    """Yield the changes of processor, Python, packages and environment variables."""
    if before.get("cpu") != after.get("cpu"):
        yield _change("processor", before.get("cpu"), after.get("cpu"))
    if before.get("python") != after.get("python"):
        yield _change("Python", before.get("python"), after.get("python"))
    packages = [record.get("versions") or {} for record in (before, after)]
    # The packages that compute; a tokenizer acts through the data, which have their own hash.
    for name in ("torch", "numpy", "pytorch_optimizer"):
        if packages[0].get(name) != packages[1].get(name):
            yield _change(name, packages[0].get(name), packages[1].get(name))
    variables = [record.get("environment") or {} for record in (before, after)]
    for name in sorted(variables[0].keys() | variables[1].keys()):
        if variables[0].get(name) != variables[1].get(name) and "environment" in before:
            yield _change(name, variables[0].get(name, "(not set)"), variables[1].get(name, "(not set)"))


def _changed_gpus(was: RunResult, now: RunResult) -> Iterator[str]:
    """Yield the change of the GPUs' names, if both runs recorded them and trained on GPUs."""
    before, after = (", ".join(dict.fromkeys(used.devices)) if used.gpus else "" for used in (was, now))
    if before and after and before != after:
        yield _change("GPU", before, after)


def _changed_fields(
    before: Mapping[str, Scalar], after: Mapping[str, Scalar], neutral: Collection[str]
) -> Iterator[str]:
    for name in sorted((before.keys() | after.keys()) - {*neutral}):
        if before.get(name) != after.get(name):
            yield _change(name, before.get(name), after.get(name))


def _difference(one: Difference) -> str:
    size = f" (difference {one.by:.3g})" if math.isfinite(one.by) else ""
    return f"{_change(one.key, one.was, one.now)}{size}"


def _change(name: str, was: object, now: object) -> str:
    """Return "name old -> new"."""
    return f"{name} {_text(was)} -> {_text(now)}"


def _text(value: object) -> str:
    return "(none)" if value is None else repr(value) if isinstance(value, float) else str(value)
