"""Damage every field of every JSON file of a matrix, one value per case, and call what reads it in this process."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from kmatrix.curves.make import read_curves
from kmatrix.records.paths import MatrixDir
from kmatrix.records.plan import FILES, RunTexts, write_plan
from kmatrix.status.status_file import recover_status
from programs import CommandResult, run
from version_0_1 import FINISHED, MATRIX, PLANNED, STOPPED, unpack

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
NEVER = (0, 0, 0)  # version of a file that must be written
DATASET = "data/folder-byte-a8b9ef59/dataset.json"
MAGIC_BYTES, LENGTH = 8, struct.Struct("<I")  # before the header of gpu_samples.bin
NOT_DAMAGED = ("results.json", "all_results.json")  # nothing reads them


@dataclass(frozen=True)
class Reader:
    """What reads records: a command of the table, or a program that a command starts."""

    words: tuple[str, ...] = ()  # arguments of the command besides TARGET=
    call: Callable[[DamagedMatrix], CommandResult] | None = None  # a program; None: the command of the same name
    changes: bool = False  # it changes more than the reports
    weight: int = 40  # how often it is drawn: an expensive one less often
    target: bool = True  # the command takes TARGET=
    files: str = ""  # the names of the files that it may read contain this
    sound: int = 0  # its exit status without damage


@dataclass(frozen=True)
class Case:
    """One damaged field and what meets it."""

    file: str  # relative to the checkout
    path: tuple[str | int, ...]  # keys and indices from the root of the object, or of the last line
    value: str  # name in VALUES
    reader: str

    def __str__(self) -> str:
        return f"{self.reader}: {self.file} {'.'.join(map(str, self.path))} = {self.value}"


class DamagedMatrix:
    """A checkout with a small matrix of version 0.1: a finished, a stopped and a planned run with files of every kind.

    readers: by name.  more: other files of the checkout that are damaged.
    """

    def __init__(self, checkout: Path, readers: dict[str, Reader], more: Sequence[str] = ()) -> None:
        self.checkout, self.readers = checkout, readers
        self.matrix = checkout / MATRIX
        self.tree = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
        self.versions = {path: _version(path) for path in self.tree}
        names = [str(path.relative_to(checkout)) for path in sorted(self.matrix.rglob("*")) if _is_record(path)]
        self.files = {name: (checkout / name).read_bytes() for name in [*names, *more]}
        self._fields = {name: list(fields_of(_object(name, data))) for name, data in self.files.items()}

    def sample(self, random: Random, count: int) -> list[Case]:
        """Return different cases, drawn from all fields, values and readers."""
        names = list(self.readers)
        weights = [self.readers[name].weight for name in names]
        found: dict[Case, None] = {}
        while len(found) < count:
            reader = random.choices(names, weights)[0]
            # A file first, then a field: else most cases would be of run.json, which has the most fields.
            file = random.choice([file for file in self.files if self.readers[reader].files in file])
            path = random.choice(self._fields[file])
            found[Case(file, path, random.choice(list(VALUES)), reader)] = None
        return list(found)

    def check(self, case: Case) -> CommandResult:
        """Call the reader of a case on the damaged matrix, and restore the matrix."""
        path = self.checkout / case.file
        path.write_bytes(self._damaged(case))
        self.versions[path] = NEVER
        return self.call(case.reader)

    def call(self, name: str) -> CommandResult:
        """Call a reader, and restore the matrix."""
        reader = self.readers[name]
        try:
            if reader.call:
                return reader.call(self)
            words = [word.format(matrix=self.matrix, checkout=self.checkout) for word in reader.words]
            return run(name, *([f"TARGET={self.matrix}"] if reader.target else []), *words)
        finally:
            self._restore(everything=reader.changes)

    def _restore(self, *, everything: bool) -> None:
        """Write the changed files again, and delete new ones: most readers change few."""
        if everything:
            for path in self.checkout.iterdir():
                if path.is_dir() and not any(path in known.parents for known in self.tree):
                    shutil.rmtree(path)
            for path in self.checkout.rglob("*"):
                if path not in self.tree and (path.is_file() or path.is_symlink()):
                    path.unlink()
        for path, data in self.tree.items():
            if self.versions[path] is NEVER or (everything and not _is(path, self.versions[path])):
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.exists() and path.stat().st_nlink > 1:
                    path.unlink()
                path.write_bytes(data)
                self.versions[path] = _version(path)
        for folder in self.matrix.glob("*/archive") if everything else ():
            shutil.rmtree(folder)

    def _damaged(self, case: Case) -> bytes:
        data = self.files[case.file]
        value = _object(case.file, data)
        holder = value
        for key in case.path[:-1]:
            holder = holder[key]
        holder[case.path[-1]] = MARK
        text = json.dumps(value).replace(f'"{MARK}"', VALUES[case.value]).encode()
        if case.file.endswith(".bin"):
            text += b" " * (-(MAGIC_BYTES + LENGTH.size + len(text)) % 8)
            rest = data[MAGIC_BYTES + LENGTH.size + LENGTH.unpack_from(data, MAGIC_BYTES)[0] :]
            return data[:MAGIC_BYTES] + LENGTH.pack(len(text)) + text + rest
        if case.file.endswith(".gz"):
            return gzip.compress(_with_last(gzip.decompress(data), text), compresslevel=1)
        return _with_last(data, text) if case.file.endswith(".jsonl") else text + b"\n"


def make_checkout(checkout: Path) -> Path:
    """Unpack the matrix of version 0.1, add the files that it did not have, and return the checkout."""
    matrix = MatrixDir(unpack(checkout))
    for path in (*matrix.path.glob("*/former"), matrix.tensorboard / f"{FINISHED}-rerun1"):
        shutil.rmtree(path)
    for path in matrix.path.rglob("*"):
        if path.name.startswith("gpu_stats") or path.suffix == ".log":
            path.unlink()  # tests of their own damage them
    for path in matrix.path.glob("*/metrics.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:20]))
    names = (FINISHED, STOPPED, PLANNED)
    texts = [tuple((matrix.path / name / file).read_text() for file in FILES) for name in names]
    write_plan(matrix, [RunTexts(name, text) for name, text in zip(names, texts, strict=True)])
    _give_new_ids(matrix)
    for name in (FINISHED, STOPPED):
        last = recover_status(matrix.run(name), has_runner=False).number
        assert read_curves(matrix.run(name), last, keep=True).lines
    matrix.rerun.write_text('{"schema": 1, "runs": []}')
    (checkout / ".config").write_bytes(matrix.config.read_bytes())
    return checkout


def _give_new_ids(matrix: MatrixDir) -> None:
    """Replace the ids of the runs by those of this version, so that `add` and a reuse accept the runs."""
    words = json.loads(matrix.matrix_json.read_text())["overrides"]
    planned = run("test-matrix-dry-run", f"KCONFIG_CONFIG={matrix.config}", *words)
    ids = dict(zip(planned.names, planned.ids, strict=True))
    old = {name: json.loads(matrix.run(name).run_json.read_text())["run_id"] for name in ids}
    for path in matrix.path.rglob("*.json*"):
        text = path.read_bytes()
        for name, now in ids.items():
            text = text.replace(f'"{old[name]}"'.encode(), f'"{now}"'.encode())
        path.write_bytes(text)


def _is_record(path: Path) -> bool:
    kinds = (".json", ".jsonl", ".gz")
    return (path.suffix in kinds or path.name == "gpu_samples.bin") and path.name not in NOT_DAMAGED


def _object(file: str, data: bytes) -> Any:
    """Return the object of a file, of the last line of a log, or of the header of a recording."""
    if file.endswith(".bin"):
        begin = MAGIC_BYTES + LENGTH.size
        return json.loads(data[begin : begin + LENGTH.unpack_from(data, MAGIC_BYTES)[0]])
    if file.endswith(".gz"):
        data = gzip.decompress(data)
    return json.loads(data.splitlines()[-1] if file.endswith((".jsonl", ".gz")) else data)


def _with_last(data: bytes, text: bytes) -> bytes:
    return b"\n".join([*data.splitlines()[:-1], text]) + b"\n"


def _version(path: Path) -> tuple[int, int, int]:
    known = path.stat()
    return known.st_mtime_ns, known.st_size, known.st_ino


def _is(path: Path, version: tuple[int, int, int]) -> bool:
    with suppress(FileNotFoundError):
        return _version(path) == version
    return False


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
