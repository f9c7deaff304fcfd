"""Files of text to documents: plain text, JSON lines and Parquet, from a disk, from Hugging Face or from the web."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from gpt2.fetch import fetch
from gpt2.prepare import hub
from gpt2.prepare.catalog import Web
from kmatrix.errors import DataError

LINES = (".jsonl", ".jsonl.gz", ".json.gz", ".ndjson")
UNREADABLE = (".zst", ".xz", ".bz2", ".zip", ".tar", ".7z")
FEW = 20  # files of plain text: where there are fewer, each is divided
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
BUILD_DEPENDENT = ("_sysconfigdata", "sitecustomize", "usercustomize")  # names of files that differ between builds
ROWS = 1000  # of a Parquet file that are read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file of a corpus. size: bytes on the disk or in the repository.  mark: changes when the file does."""

    name: str
    size: int
    mark: str = ""

    @property
    def plain(self) -> bool:
        """Whether the whole file is one document."""
        return not self.name.endswith((".parquet", *LINES))


class Corpus(Protocol):
    """Files of text in an order that never changes."""

    @property
    def parts(self) -> tuple[Part, ...]: ...

    def path(self, part: Part) -> Path:
        """Return where a part lies; it is fetched if need be."""

    def release(self, part: Part) -> None:
        """A part is not needed any more."""


@dataclass(frozen=True, slots=True)
class Local:
    """Files on this disk. root: the folder that their names start at."""

    root: Path
    parts: tuple[Part, ...]

    def path(self, part: Part) -> Path:
        return self.root / part.name

    def release(self, part: Part) -> None:
        """Files of the user are never touched."""


@dataclass(frozen=True, slots=True)
class Remote:
    """Files of a dataset on Hugging Face, each fetched into the dataset's folder and removed when it is used up."""

    found: hub.Listing
    folder: Path

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(Part(name=file.path, size=file.size, mark=file.sha256 or "") for file in self.found.files)

    def path(self, part: Part) -> Path:
        file = next(file for file in self.found.files if file.path == part.name)
        return hub.fetch(self.found, file, self.folder)

    def release(self, part: Part) -> None:
        (self.folder / hub.ASIDE / part.name).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class OnTheWeb:
    """One file at an address, kept in a folder."""

    web: Web
    folder: Path

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(name=self.web.url.rsplit("/", 1)[-1], size=self.web.size, mark=self.web.sha256),)

    def path(self, part: Part) -> Path:
        return fetch(self.web.url, self.folder / part.name, sha256=self.web.sha256)

    def release(self, part: Part) -> None:
        """It is small, and kept."""


def local(data_dir: Path, pattern: str) -> Local:
    """Return the files of a folder, or those that a glob names; hidden ones are left out."""
    asked = Path(pattern).expanduser()
    wanted = asked if asked.is_absolute() else data_dir / asked
    if wanted.is_dir():
        found = (path for path in wanted.rglob("*") if not _hidden(path.relative_to(wanted)))
        root = wanted
    else:
        found = (Path(name) for name in glob.iglob(str(wanted), recursive=True))  # noqa: PTH207  (absolute patterns)
        root = data_dir
    files = sorted(path for path in found if path.is_file())
    if not files:
        raise DataError(
            f"there is no text at {wanted}",
            why="neither a folder with files nor a pattern that fits some",
            fix="set DATA_PATH to a folder, or to a pattern in quotes; relative ones start at DATA_DIR",
        )
    return Local(root, tuple(_part(path, root) for path in files))


def _hidden(relative: Path) -> bool:
    return any(name.startswith(".") for name in relative.parts)


def _part(path: Path, root: Path) -> Part:
    stat = path.stat()
    name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
    return Part(name=name, size=stat.st_size, mark=str(stat.st_mtime_ns))


def standard_library() -> Local:
    """Return the modules of the running Python that are the same in each build of its version."""
    root = Path(sysconfig.get_path("stdlib"))
    return Local(root, tuple(_part(path, root) for path in sorted(root.rglob("*.py")) if _ours(path.relative_to(root))))


def _ours(relative: Path) -> bool:
    *folders, file = relative.parts
    named = SKIPPED_FOLDERS.intersection(folders) or any(part.startswith("config-") for part in folders)
    return not named and not file.startswith(BUILD_DEPENDENT)


def fingerprint(corpus: Corpus) -> str:
    """Return what changes when a file of a corpus does."""
    lines = "".join(f"{part.name}\0{part.size}\0{part.mark}\n" for part in corpus.parts)
    return hashlib.sha256(lines.encode()).hexdigest()


def documents(path: Path, part: Part, column: str, *, guessed: bool = False) -> Iterator[str]:
    """Yield the documents of a file that are not empty.

    column: of JSON lines and Parquet.  guessed: nobody named this file, so one that is not UTF-8 text is passed over.
    """
    name = part.name
    if name.endswith(UNREADABLE):
        if guessed:
            return
        raise DataError(f"{path} is packed", why="only .gz is unpacked here", fix="unpack it first")
    if name.endswith(".parquet"):
        texts = _parquet(path, column)
    elif name.endswith(LINES):
        texts = _lines(path, column)
    else:
        texts = _plain(path, guessed=guessed)
    for text in texts:
        if text:
            yield text if text.isascii() else text.encode("utf-8", "replace").decode()  # lone surrogates of JSON


def _open(path: Path) -> gzip.GzipFile | BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _plain(path: Path, *, guessed: bool) -> Iterator[str]:
    try:
        with _open(path) as file:
            yield file.read().decode("utf-8-sig")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, PermissionError) as error:
        if not guessed:
            raise DataError(f"{path} is not text in UTF-8", why=str(error), fix="convert it, or leave it out") from None


def _lines(path: Path, column: str) -> Iterator[str]:
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):  # noqa: B007  (the error names it)
                if line.strip():
                    yield str(json.loads(line)[column])
    except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
        missing = isinstance(error, KeyError)
        why = f"there is no {column!r}" if missing else str(error)
        fix = "name the column with the text: TEXT_COLUMN=" if missing else "mend the line, or fetch the file again"
        raise DataError(f"{path}:{number} cannot be read", why=why, fix=fix) from None


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                raise DataError(
                    f"{path} has no column {column!r}",
                    why=f"it has {', '.join(file.schema_arrow.names)}",
                    fix="name the one with the text: TEXT_COLUMN=",
                )
            for rows in file.iter_batches(batch_size=ROWS, columns=[column], use_threads=False):
                yield from (str(text) for text in rows.column(0).to_pylist() if text is not None)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{path} cannot be read as Parquet", why=str(error).splitlines()[0], fix="fetch or make it again"
        ) from None
