"""Documents from text files: plain text, JSON lines and Parquet; local, from Hugging Face or from the web."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpt2.data.download import fetch
from gpt2.data.shards import check_name
from gpt2.prepare import hub
from gpt2.prepare.catalog import NamedDataset
from kmatrix.errors import DataError

LINES = (".jsonl", ".jsonl.gz", ".json.gz", ".ndjson")
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
BUILD_DEPENDENT = ("_sysconfigdata", "sitecustomize", "usercustomize")  # files that differ between builds
ROWS = 1000  # Parquet rows read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """One file of a corpus."""

    name: str
    size: int  # bytes on the disk or in the repository
    mark: str = ""  # changes when the file does

    @property
    def plain(self) -> bool:
        """Return whether the whole file is one document."""
        return not self.name.endswith((".parquet", *LINES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Text files in a fixed order."""

    source: str  # its name
    parts: tuple[TextPart, ...]
    path: Callable[[TextPart], Path]  # of a file, which is downloaded if necessary
    release: Callable[[TextPart], object] = lambda _: None  # deletes a download that is not needed any more
    commit: str | None = None  # of a repository


def from_hub(found: hub.Listing, folder: Path) -> Corpus:
    """Return the files of a dataset on Hugging Face, downloaded one by one and deleted after use."""
    return Corpus(
        source=found.repository.address,
        parts=tuple(TextPart(name=file.path, size=file.size) for file in found.files),
        path=lambda part: hub.fetch(found, part.name, folder),
        release=lambda part: (folder / hub.DOWNLOADS / part.name).unlink(missing_ok=True),
        commit=found.commit,
    )


def from_web(known: NamedDataset, folder: Path) -> Corpus:
    """Return the file of a named dataset that is one text on the web. It is kept in the folder."""
    part = TextPart(name=known.url.rsplit("/", 1)[-1], size=known.size)
    path = folder / part.name
    return Corpus(source=known.url, parts=(part,), path=lambda _: fetch(known.url, path, sha256=known.sha256))


def local(data_dir: Path, pattern: str) -> Corpus:
    """Return the files of a folder, or those that match a glob; hidden files are excluded.

    Raises DataError if there is none, and OSError if a folder cannot be read: its texts would be missing.
    """
    wanted = data_dir / Path(pattern).expanduser()
    if wanted.is_dir():
        found = _files(pattern, _below(wanted), wanted)
    else:
        found = _files(pattern, map(Path, glob.iglob(str(wanted), recursive=True)), data_dir)  # noqa: PTH207
    if not found.parts:
        raise DataError(
            f"no text files at {wanted}",
            why="expected a folder with files, or a pattern that matches some",
            hint="set DATA_PATH to a folder or a quoted pattern; relative paths start at DATA_DIR",
        )
    return found


def _below(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder that is not hidden (.git, .DS_Store). Links to folders are not followed."""

    def refuse(error: OSError) -> None:
        raise error

    # Not rglob, which leaves out folders that it cannot read.
    for name, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [each for each in folders if not each.startswith(".")]
        yield from (Path(name, each) for each in files if not each.startswith("."))


def _files(source: str, paths: Iterable[Path], root: Path) -> Corpus:
    parts: list[TextPart] = []
    for path in sorted(paths):  # folders list files in any order; shards must not
        if path.is_file():
            check_name(path)
            stat = path.stat()
            name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
            parts.append(TextPart(name=name, size=stat.st_size, mark=str(stat.st_mtime_ns)))
    return Corpus(source=source, parts=tuple(parts), path=lambda part: root / part.name)


def standard_library(version: str) -> Corpus:
    """Return the modules of the running Python that are the same in every build of its version."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if _same_in_every_build(path.relative_to(root)))
    return _files(f"{version} standard library", paths, root)


def _same_in_every_build(relative: Path) -> bool:
    # Tests are not installed everywhere, packages are the user's, and config-* depends on the compiler: with them, the
    # losses of two machines with the same Python version would not be comparable.
    *folders, file = relative.parts
    named = SKIPPED_FOLDERS.intersection(folders) or any(part.startswith("config-") for part in folders)
    return not named and not file.startswith(BUILD_DEPENDENT)


def fingerprint(corpus: Corpus) -> str:
    """Return a hash that changes if a file of the corpus changes."""
    # Names, sizes and modification times: reading a large folder only to find it unchanged would take minutes.
    lines = "".join(f"{part.name}\0{part.size}\0{part.mark}\n" for part in corpus.parts)
    return hashlib.sha256(lines.encode()).hexdigest()


def documents(path: Path, part: TextPart, column: str, skipped: set[str]) -> Iterator[str]:
    """Yield the non-empty documents of a file.

    column: of JSON lines and Parquet; of `A+B` the texts of both, one per line.
    skipped: gets the name of a plain file that is not UTF-8 text: a folder may also contain images.
    Raises DataError for other files that cannot be read.
    """
    if part.name.endswith(".parquet"):
        texts = _parquet(path, column)
    elif part.name.endswith(LINES):
        texts = _lines(path, column)
    else:
        texts = _plain(path, part.name, skipped)
    for text in texts:
        if text:
            yield text if text.isascii() else text.encode("utf-8", "replace").decode()  # lone surrogates of JSON


def _open(path: Path) -> gzip.GzipFile | BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _plain(path: Path, name: str, skipped: set[str]) -> Iterator[str]:
    try:
        with _open(path) as file:
            yield file.read().decode("utf-8-sig")  # without the byte order mark that Windows editors write
    # A damaged gzip file raises any of three: BadGzipFile, EOFError if it is truncated, zlib.error inside a block.
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error):
        skipped.add(name)


def _lines(path: Path, column: str) -> Iterator[str]:
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):  # noqa: B007  (an error has it)
                if line.strip():
                    row = json.loads(line)
                    yield "\n".join(str(row[name]) for name in column.split("+"))
    except (ValueError, KeyError, TypeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        why = f"no column {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path}:{number} cannot be read", why=why, hint="fix the file, or TEXT_COLUMN=") from None


def _parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = column.split("+")
            if missing := [name for name in names if name not in file.schema_arrow.names]:
                raise DataError(
                    f"{path} has no column {missing[0]!r}",
                    why=f"it has {', '.join(file.schema_arrow.names)}",
                    hint="set TEXT_COLUMN= to the text column",
                )
            # Its columns in small batches: files have gigabytes.
            for rows in file.iter_batches(batch_size=ROWS, columns=names, use_threads=False):
                columns = [rows.column(name).to_pylist() for name in names]
                for texts in zip(*columns, strict=True):
                    if None not in texts:
                        yield "\n".join(map(str, texts))
    except (pa.ArrowInvalid, OSError) as error:
        why = str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read as Parquet", why=why, hint="download or create it again") from None
