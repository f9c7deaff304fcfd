"""The one door to Hugging Face: which files a dataset has, and one of them on this disk, whole and checked.

HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are huggingface_hub's own, and are read from the environment by it.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gpt2.fetch import TIMEOUT_S, Address, file_sha256, part_of, receive
from gpt2.prepare.catalog import Repository
from kmatrix.errors import DataError, KmatrixError

CONVERTED = "refs/convert/parquet"  # the branch where Hugging Face keeps what it converted
ASIDE = ".fetched"  # below the dataset's folder: what is not checked yet


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file of a dataset. size: bytes.  sha256: None for small files, which are not kept in LFS."""

    path: str
    size: int
    sha256: str | None

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of a dataset that are wanted, in order of their paths. commit: the one that was looked at."""

    repository: Repository
    commit: str
    files: tuple[RemoteFile, ...]


def listing(repository: Repository, commit: str | None = None) -> Listing:
    """Return the files of a dataset that fit its patterns. commit: the one that an earlier call looked at.

    Where the branch itself has none, what Hugging Face converted to Parquet is taken.
    """
    for revision in dict.fromkeys((commit or repository.revision, CONVERTED)):
        try:
            found = _listing(repository, revision)
        except KmatrixError:
            if revision == CONVERTED and not commit:
                break
            raise
        if found.files or commit:
            return found
    raise DataError(
        f"{repository.name} has no files {', '.join(repository.patterns)}",
        why="those are looked for in the dataset's repository",
        fix=f"look at its files, and name some: DATA_PATH={repository.name}:PATTERN",
    )


def _listing(repository: Repository, revision: str) -> Listing:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    try:
        api = HfApi()
        commit = api.dataset_info(repository.name, revision=revision, timeout=30).sha or revision
        tree = list(api.list_repo_tree(repository.name, repo_type="dataset", revision=commit, recursive=True))
    except Exception as error:  # HTTP, connection, repository, offline: the library has a class for each
        raise refused(repository, error) from None
    files = [
        RemoteFile(path=item.path, size=item.size, sha256=item.lfs.sha256 if item.lfs else None)
        for item in tree
        if isinstance(item, RepoFile) and _fits(item.path, repository.patterns) and _stays_below(item.path)
    ]
    return Listing(repository=repository, commit=commit, files=tuple(sorted(files, key=lambda file: file.path)))


def _fits(path: str, patterns: tuple[str, ...]) -> bool:
    """A pattern with a slash is of the whole path, one without is of the name."""
    name = path.rsplit("/", 1)[-1]
    return any(fnmatch.fnmatchcase(path if "/" in pattern else name, pattern) for pattern in patterns)


def _stays_below(path: str) -> bool:
    """Say whether a path leads nowhere else than below the folder that it is put in: a mirror may say anything."""
    return not path.startswith("/") and ".." not in path.split("/")


def fetch(found: Listing, file: RemoteFile, folder: Path, received: Callable[[int], None] | None = None) -> Path:
    """Return a file in folder/.fetched, whole and with its hash; the caller puts it in place.

    What an interrupted download left is gone on with: huggingface_hub says where the file is, and begins anew itself.
    A file that is not what the repository lists is removed.
    """
    path = folder / ASIDE / file.path
    if path.is_file() and _is_listed(path, file):
        return path
    part = part_of(path)
    receive(lambda: _address(found, file), part, name=f"{found.repository.name}: {file.path}", received=received)
    if not _is_listed(part, file):
        why = f"it has {part.stat().st_size} bytes and the SHA-256 {file_sha256(part)[:12]}..., and the list says "
        part.unlink()
        raise DataError(
            f"{found.repository.name}: {file.path} is not the file that the repository lists",
            why=f"{why}{file.size} and {(file.sha256 or 'none')[:12]}...",
            fix="run it again; where that does not help, HF_ENDPOINT leads to a mirror that is not in order",
        )
    return part.replace(path)


def _is_listed(path: Path, file: RemoteFile) -> bool:
    return path.stat().st_size == file.size and file.sha256 in (None, file_sha256(path))


def _address(found: Listing, file: RemoteFile) -> Address:
    """Ask where the content of a file is: on the hub itself, or on another server, which gets no token."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers

    url = hf_hub_url(found.repository.name, file.path, repo_type="dataset", revision=found.commit)
    try:
        location = get_hf_file_metadata(url, timeout=TIMEOUT_S).location
    except Exception as error:  # HTTP, connection, repository, offline: the library has a class for each
        raise refused(found.repository, error) from None
    headers = {name: text for name, text in build_hf_headers().items() if name.lower() == "authorization"}
    return Address(location, headers if urlsplit(location).netloc == urlsplit(url).netloc else {})


def clear(folder: Path) -> None:
    """Remove what is left of downloads below a folder."""
    shutil.rmtree(folder / ASIDE, ignore_errors=True)


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def is_offline() -> bool:
    """Say whether the environment forbids the network."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def refused(repository: Repository, error: Exception) -> DataError:
    """Return what a user can do about an error of the library; no header and no token is told."""
    status = _status(error)
    why = f"HTTP {status}" if status else (str(error).strip().splitlines() or [type(error).__name__])[0]
    fix = "run it again: what has come is kept, and the next attempt goes on from there"
    if is_offline():
        why, fix = "HF_HUB_OFFLINE is set", "prepare the data where there is a network, and copy DATA_DIR"
    elif status in (401, 403):
        fix = "ask for access on its page, and put your token in the environment as HF_TOKEN"
    elif status == 404:
        fix = "look at its name and at @REVISION; for a private one put your token in the environment as HF_TOKEN"
    return DataError(f"the dataset {repository.name} cannot be fetched", why=why, fix=fix)
