"""Compare a run with its repetition bit for bit, and list the changes that may make them differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kmatrix.records import attempts
from kmatrix.records.decode import decode_optional
from kmatrix.records.matrix import CODE
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Provenance, RunResult, Status, merged_metrics, read_run_file_or_empty
from kmatrix.sources import trainer_files

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
        """Return the result as lines: equal, or the first and the last difference."""
        if not self.values:
            return ["nothing to compare: no values were logged"]
        counted = f"{len(self.values)} values in {len({step for step, _ in self.values})} steps"
        if self.equal:
            return [f"equal bit for bit: {counted}"]
        differing = [key for key, (was, now) in self.values.items() if was != now]
        lines = [f"not equal: {len(differing)} of {counted} differ", f"first at {self._line(differing[0])}"]
        return [*lines, f"last at {self._line(differing[-1])}"] if len(differing) > 1 else lines

    def _line(self, key: tuple[int, str]) -> str:
        return f"step {key[0]}: {_change(key[1], *self.values[key])}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes between two runs that may change their results."""

    code: tuple[str, ...] = ()  # files of the trainer
    others: tuple[str, ...] = ()  # devices, packages, environment: one sentence each
    configuration: tuple[str, ...] = ()  # fields of run.json's "train": one sentence each
    gpu: bool = False  # True if either run used GPUs, and its order of additions was not fixed (DETERMINISTIC=y)

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
    records = [read_run_file_or_empty(run) for run in (was, now)]
    # Only result.json has the devices that trained, and a micro-batch that was reduced for lack of memory.
    results = [decode_optional(run.result, RunResult) or RunResult() for run in (was, now)]
    around = [_environment(record.provenance) for record in records]
    # Equal devices of other hosts are equal, and the host that submitted a matrix to a cluster computed nothing.
    if all(result.devices for result in results):
        for known, result in zip(around, results, strict=True):
            known["device"] = ", ".join(dict.fromkeys(result.devices))
    trained = [{**record.train.to_json(), **result.used} for record, result in zip(records, results, strict=True)]
    return Changes(
        code=_changed_code(was, now, records[0].provenance, records[1].provenance),
        others=tuple(_changed_fields(around[0], around[1])),
        configuration=tuple(sorted(_changed_fields(trained[0], trained[1], {*PATH_FIELDS, *neutral}))),
        gpu=any(record.train.device == "cuda" and not record.train.deterministic for record in records),
    )


def _environment(about: Provenance) -> dict[str, str | None]:
    """Return what a result depends on besides code and settings: processor, Python, packages, variables."""
    versions = about.get("versions") or {}
    # The packages that compute; a tokenizer acts through the data, which have their own hash.
    packages = {name: versions.get(name) for name in ("torch", "numpy", "pytorch_optimizer")}
    return {"device": about.get("cpu"), "Python": about.get("python"), **packages, **(about.get("environment") or {})}


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
