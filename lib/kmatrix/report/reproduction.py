"""Compare a run with its repetition bit for bit, and list the changes that may make them differ."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kmatrix.records import attempts
from kmatrix.records.decode import decode_optional
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


@dataclass(frozen=True, slots=True)
class Repetition:
    """The values that two runs logged, by step and key. None: not logged, or not finite."""

    values: Mapping[tuple[int, str], tuple[float | None, float | None]]

    @property
    def equal(self) -> bool:
        return all(was == now for was, now in self.values.values())

    def lines(self) -> list[str]:
        """Return the result as lines: equal, or the first and the largest difference."""
        if not self.values:
            return ["nothing to compare: no values were logged"]
        counted = f"{len(self.values)} values in {len({step for step, _ in self.values})} steps"
        if self.equal:
            return [f"equal bit for bit: {counted}"]
        differing = [key for key, (was, now) in self.values.items() if was != now]
        first, largest = differing[0], max(differing, key=self._distance)
        lines = [f"not equal: {len(differing)} of {counted} differ", f"first at {self._line(first)}"]
        return [*lines, f"largest at {self._line(largest)}"] if largest != first else lines

    def loss_distance(self) -> float:
        """Return how far the losses are apart, nats/token; infinite if one is missing."""
        return max((self._distance(key) for key in self.values if key[1].endswith("/loss")), default=0.0)

    def _distance(self, key: tuple[int, str]) -> float:
        was, now = self.values[key]
        return abs(now - was) if was is not None and now is not None else 0.0 if was is now else math.inf

    def _line(self, key: tuple[int, str]) -> str:
        by = self._distance(key)
        size = f" (difference {by:.3g})" if math.isfinite(by) else ""
        return f"step {key[0]}: {_change(key[1], *self.values[key])}{size}"


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
    return Repetition({key: (before.get(key), after.get(key)) for key in names})


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
        configuration=tuple(sorted(_changed_fields(trained[0], trained[1], {*PATH_FIELDS, *neutral}))),
        gpu=any(record.train.device == "cuda" and not record.train.deterministic for record in records),
        hosts=f"{hosts[0]} -> {hosts[1]}" if on_cluster and used[0].hosts != used[1].hosts else "",
    )


def _on_devices(about: Provenance, used: RunResult) -> Provenance:
    """Return where a run comes from, with the devices that trained as its processor."""
    return {**about, "cpu": ", ".join(dict.fromkeys(used.devices))}


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
    known = []
    for about in (before, after):
        versions, variables = about.get("versions") or {}, about.get("environment") or {}
        # The packages that compute; a tokenizer acts through the data, which have their own hash.
        packages = {name: versions.get(name) for name in ("torch", "numpy", "pytorch_optimizer")}
        known.append(({"processor": about.get("cpu"), "Python": about.get("python"), **packages}, variables))
    yield from _changed_fields(known[0][0], known[1][0])
    for name in sorted(known[0][1].keys() | known[1][1].keys()):
        pair = [variables.get(name, "(not set)") for _, variables in known]
        if pair[0] != pair[1] and "environment" in before:
            yield _change(name, *pair)


def _changed_gpus(was: RunResult, now: RunResult) -> Iterator[str]:
    """Yield the change of the GPUs' names, if both runs recorded them and trained on GPUs."""
    before, after = (", ".join(dict.fromkeys(used.devices)) if used.gpus else "" for used in (was, now))
    if before and after and before != after:
        yield _change("GPU", before, after)


def _changed_fields(
    before: Mapping[str, Any], after: Mapping[str, Any], neutral: Collection[str] = ()
) -> Iterator[str]:
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name) and name not in neutral:
            yield _change(name, before.get(name), after.get(name))


def _change(name: str, was: object, now: object) -> str:
    """Return "name old -> new"."""
    return f"{name} {_text(was)} -> {_text(now)}"


def _text(value: object) -> str:
    return "(none)" if value is None else repr(value) if isinstance(value, float) else str(value)
