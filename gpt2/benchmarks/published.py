"""The published files of the benchmarks: where they are, and the hash by which they are recognized."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path

from gpt2.data.download import fetch, file_sha256
from gpt2.prepare.progress import PreparationProgress, say
from kmatrix.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFile:
    """A file on the web that never changes."""

    title: str
    name: str  # in DATA_DIR; the same as in kmatrix.experiment.inputs.benchmarks.PUBLISHED
    url: str
    sha256: str
    size: str  # for people


PUBLISHED = {
    "hellaswag": PublishedFile(
        title="HellaSwag",
        name="hellaswag_val.jsonl",
        # The last commit of https://github.com/rowanz/hellaswag
        url="https://raw.githubusercontent.com/rowanz/hellaswag/a29ff8e9a04bba4bd6588223785ce105328adc57/data/hellaswag_val.jsonl",
        sha256="0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
        size="12 MB",
    ),
    # The address has no version, and nanochat's scripts/base_eval.py reads what it finds. This was there in June 2026.
    "core": PublishedFile(
        title="CORE",
        name="eval_bundle.zip",
        url="https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip",
        sha256="90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200",
        size="162 MB",
    ),
}


def fetch_published(name: str, data_dir: Path) -> Path:
    """Download a benchmark into DATA_DIR unless it is there, and return its path.

    A file of that name is kept, whatever it holds.  Raises DataError with the address and the place of the file if it
    cannot be downloaded, or is another one.
    """
    file = PUBLISHED[name]
    path = data_dir / file.name
    if path.is_file():
        return path
    data_dir.mkdir(parents=True, exist_ok=True)
    # Two matrices that start at the same time would append to the same partial file.
    with (data_dir / f".{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            return path
        say(f"{file.title}: downloading {file.name}, {file.size}, from {file.url}")
        try:
            return fetch(file.url, path, sha256=file.sha256, received=PreparationProgress(file.title, "B").add)
        except DataError as error:
            raise DataError(
                f"{file.title}: {file.name} is missing, and {error.what}",
                why=error.why,
                hint=f"put {file.url} at {path} (SHA-256 {file.sha256}), or run this again with network access",
            ) from None


def is_published(name: str, path: Path) -> bool:
    """Return whether a file is the published one."""
    return path.is_file() and file_sha256(path) == PUBLISHED[name].sha256
