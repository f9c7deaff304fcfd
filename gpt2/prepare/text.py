"""Documents from text files: plain text, JSON lines and Parquet; local, from Hugging Face or from the web."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import platform
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.data.shards import check_name
from gpt2.prepare import hub
from kmatrix.errors import DataError

ROWS = (".parquet", ".jsonl", ".jsonl.gz", ".json.gz", ".ndjson")  # files with a document per row; others are one
# Of the standard library: tests are not installed everywhere, packages are the user's, and config-* and some modules
# differ between builds. With them, the losses of two machines with the same Python would not be comparable.
BUILD_DEPENDENT = re.compile(
    r"/((tests?|idle_test|site-packages|dist-packages|__pycache__|config-[^/]*)/|(_sysconfigdata|(site|user)customize)[^/]*$)"
)


@dataclass(frozen=True, slots=True)
class TextPart:
    """One file of a corpus."""

    name: str
    size: int  # bytes on the disk or in the repository
    mark: str = ""  # changes when the file does


@dataclass(frozen=True, slots=True)
class Corpus:
    """Text files in a fixed order."""

    source: str  # its name
    parts: list[TextPart]
    path: Callable[[TextPart], Path]  # of a file, which is downloaded if necessary
    release: Callable[[TextPart], object] = lambda _: None  # deletes a download that is not needed any more
    commit: str | None = None  # of a repository

    def fingerprint(self) -> str:
        """Return a hash that changes if a file changes."""
        # Names, sizes and modification times: reading a large folder only to find it unchanged would take minutes.
        lines = "".join(f"{part.name}\0{part.size}\0{part.mark}\n" for part in self.parts)
        return hashlib.sha256(lines.encode()).hexdigest()


def from_hub(found: hub.Listing, folder: Path) -> Corpus:
    """Return the files of a dataset on Hugging Face, downloaded one by one and deleted after use."""
    return Corpus(
        found.repository,
        [TextPart(file.path, file.size) for file in found.files],
        path=lambda part: hub.fetch(found, part.name, folder),
        release=lambda part: (folder / hub.DOWNLOADS / part.name).unlink(missing_ok=True),
        commit=found.commit,
    )


def from_web(named: Mapping[str, Any], folder: Path) -> Corpus:
    """Return the file of a named dataset that is one text on the web. It is kept in the folder."""
    url, part = named["url"], TextPart(named["url"].rsplit("/", 1)[-1], named["size"])
    return Corpus(url, [part], lambda _: hub.fetch_url(url, folder / part.name, sha256=named["sha256"]))


def local(data_dir: Path, pattern: str) -> Corpus:
    """Return the files of a folder, or those that match a glob; hidden files (.git, .DS_Store) are excluded.

    Raises DataError if there is none.
    """
    wanted = data_dir / Path(pattern).expanduser()
    if wanted.is_dir():
        found = _files(
            pattern, (path for path in wanted.rglob("*") if "/." not in f"/{path.relative_to(wanted)}"), wanted
        )
    else:
        found = _files(pattern, map(Path, glob.iglob(str(wanted), recursive=True)), data_dir)  # noqa: PTH207
    if not found.parts:
        hint = "set DATA_PATH to a folder or a quoted pattern; relative paths start at DATA_DIR"
        raise DataError(f"no text files at {wanted}", hint=hint)
    return found


def _files(source: str, paths: Iterable[Path], root: Path) -> Corpus:
    parts: list[TextPart] = []
    for path in sorted(paths):  # folders list files in any order; shards must not
        if path.is_file():
            check_name(path)
            stat = path.stat()
            name = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)
            parts.append(TextPart(name, stat.st_size, str(stat.st_mtime_ns)))
    return Corpus(source, parts, lambda part: root / part.name)


def standard_library() -> Corpus:
    """Return the modules of the running Python that are the same in every build of its version."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path for path in root.rglob("*.py") if not BUILD_DEPENDENT.search(f"/{path.relative_to(root)}"))
    return _files(f"{platform.python_implementation()} {platform.python_version()} standard library", paths, root)


def documents(path: Path, part: TextPart, column: str, skipped: set[str]) -> Iterator[str]:
    """Yield the non-empty documents of a file.

    column: of JSON lines and Parquet; of `A+B` the texts of both, one per line.
    skipped: gets the name of a plain file that is not UTF-8 text: a folder may also contain images.
    Raises DataError for other files that cannot be read.
    """
    try:
        for text in _texts(path, part.name, column.split("+")):
            if text:
                yield text if text.isascii() else text.encode("utf-8", "replace").decode()  # lone surrogates of JSON
    # Of json, pyarrow and gzip
    except (ValueError, KeyError, TypeError, EOFError, OSError, zlib.error) as error:
        if isinstance(error, UnicodeDecodeError) and not part.name.endswith(ROWS):
            skipped.add(part.name)
            return
        why = f"no column {error}" if isinstance(error, KeyError) else str(error)
        hint = "fix or download it again, or set TEXT_COLUMN= to the text column"
        raise DataError(f"{path} cannot be read", why=why, hint=hint) from None


def _texts(path: Path, name: str, columns: list[str]) -> Iterator[str]:
    if name.endswith(".parquet"):
        from pyarrow.parquet import ParquetFile

        with ParquetFile(path) as table:
            for rows in table.iter_batches(batch_size=1000, columns=columns, use_threads=False):
                for texts in zip(*(rows.column(column).to_pylist() for column in columns), strict=True):
                    if None not in texts:
                        yield "\n".join(map(str, texts))
        return
    with gzip.open(path) if name.endswith(".gz") else path.open("rb") as file:
        if not name.endswith(ROWS):
            yield file.read().decode("utf-8-sig")  # without the byte order mark that Windows editors write
            return
        for line in filter(bytes.strip, file):
            row = json.loads(line)
            yield "\n".join(str(row[column]) for column in columns)
