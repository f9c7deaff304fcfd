"""Damage every field of every JSON file of a matrix, one value per case, and run commands on it in this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from programs import CommandResult, run
from version_0_1 import FINISHED, STOPPED, unpack

MARK = "@damage@"
VALUES = {
    "null": "null",
    "text": '"12"',
    "number": "-1.5",
    "large": "1e308",
    "list": "[3]",
    "object": '{"a": 3}',
    "nan": "NaN",
    "400 digits": "9" * 400,
    "nesting": "[" * 100_000 + "]" * 100_000,
}
# Maps of any key to a value of one type: some keys stand for all.
UNIFORM = frozenset({"symbols", "files", "environment", "versions"})
SOME = 3
OPTIONS = {
    "status": (),
    "estimate": ("JSON=1",),
    "summary": (),
    "compare": (),
    "list-checkpoints": (f"RUN={FINISHED}",),
    "track-sync": (),
    "checkpoints-prune": ("YES=1",),
    "continue": ("YES=1", "RETRY_FAILED=1"),
    "test-rerun": ("YES=1",),
}
NEVER = (0, 0, 0)  # version of a file that must be written
CHANGING = ("checkpoints-prune", "continue", "test-rerun")  # they change more than the reports


@dataclass(frozen=True)
class Case:
    """One damaged field and the command that meets it."""

    file: str  # relative to the matrix
    path: tuple[str | int, ...]  # keys and indices from the root of the object, or of the last line
    value: str  # name in VALUES
    command: str

    def __str__(self) -> str:
        return f"{self.command}: {self.file} {'.'.join(map(str, self.path))} = {self.value}"


class DamagedMatrix:
    """A small matrix of version 0.1: a finished, a stopped and a planned run with files of every kind."""

    def __init__(self, folder: Path) -> None:
        self.matrix = unpack(folder)
        for path in (*self.matrix.glob("*/former"), self.matrix / "tb"):
            shutil.rmtree(path)
        for path in self.matrix.rglob("*"):
            # Recordings and weights are not JSON; tests of their own damage them.
            if path.suffix in (".pt", ".bin", ".log") or path.name.startswith("gpu_stats"):
                path.unlink()
        for path in self.matrix.glob("*/metrics.jsonl"):
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:20]))
        self.tree = {path: path.read_bytes() for path in self.matrix.rglob("*") if path.is_file()}
        self.versions = {path: _version(path) for path in self.tree}
        self.files = {
            str(path.relative_to(self.matrix)): path.read_bytes()
            for path in sorted(self.matrix.rglob("*"))
            if path.suffix in (".json", ".jsonl")
            and path.parent.name not in ("gpt2_sgd_1cpu",)
            and path.name not in ("results.json", "all_results.json")
        }

    def cases(self) -> Iterator[Case]:
        """Yield a case for every field, value and command."""
        for file, data in self.files.items():
            for path in fields_of(self._object(file, data)):
                for value in VALUES:
                    for command in OPTIONS:
                        yield Case(file, path, value, command)

    def check(self, case: Case) -> CommandResult:
        """Run the command of a case on the damaged matrix, and restore the matrix."""
        path = self.matrix / case.file
        path.write_bytes(self._damaged(case))
        targets = [f"TARGET={self.matrix}"]
        if case.command == "compare":
            targets = [f"BASE={self.matrix}/{FINISHED}", f"NEW={self.matrix}/{STOPPED}"]
        result = run(case.command, *targets, *OPTIONS[case.command])
        if case.command in CHANGING:
            self.versions[path] = NEVER
            self._restore()
        else:
            path.write_bytes(self.files[case.file])
            self.versions[path] = _version(path)
        return result

    def _restore(self) -> None:
        """Write the changed files again, and delete new ones: most commands change few."""
        for path in self.matrix.rglob("*"):
            if path.is_file() and path not in self.tree:
                path.unlink()
        for path, data in self.tree.items():
            if not path.exists() or _version(path) != self.versions[path]:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                self.versions[path] = _version(path)
        for folder in self.matrix.glob("*/archive"):
            shutil.rmtree(folder)

    def _object(self, file: str, data: bytes) -> Any:
        """Return the object of a file, or of the last line of a log."""
        return json.loads(data.splitlines()[-1] if file.endswith(".jsonl") else data)

    def _damaged(self, case: Case) -> bytes:
        data = self.files[case.file]
        value = self._object(case.file, data)
        holder = value
        for key in case.path[:-1]:
            holder = holder[key]
        holder[case.path[-1]] = MARK
        text = json.dumps(value).replace(f'"{MARK}"', VALUES[case.value]).encode()
        if case.file.endswith(".jsonl"):
            return b"\n".join([*data.splitlines()[:-1], text]) + b"\n"
        return text


def _version(path: Path) -> tuple[int, int, int]:
    known = path.stat()
    return known.st_mtime_ns, known.st_size, known.st_ino


def fields_of(value: Any, path: Sequence[str | int] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every field; of a list, the fields of its first item."""
    if isinstance(value, dict):
        names = list(value)[:SOME] if path and path[-1] in UNIFORM else list(value)
        items: list[tuple[str | int, Any]] = [(name, value[name]) for name in names]
    elif isinstance(value, list) and value:
        items = [(0, value[0])]
    else:
        return
    for key, item in items:
        yield (*path, key)
        yield from fields_of(item, (*path, key))
