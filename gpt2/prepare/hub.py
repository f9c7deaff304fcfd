"""Access to Hugging Face: list the files of a dataset, and download a file with its hash verified.

huggingface_hub reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE from the environment.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

from gpt2.data.download import TIMEOUT_S, Address, UnavailableError, file_sha256, part_of, receive
from gpt2.prepare.catalog import Repository
from kmatrix.errors import DataError, KmatrixError

# Branch with Hugging Face's conversion to Parquet (https://huggingface.co/docs/dataset-viewer/parquet)
CONVERTED = "refs/convert/parquet"
DOWNLOADS = ".fetched"  # in the dataset's folder: files that are not verified or used yet


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """One file of a dataset on Hugging Face."""

    path: str
    size: int  # bytes
    sha256: str | None  # None: small files, which are not in LFS

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The matching files of a dataset at one commit, sorted by path."""

    repository: Repository
    commit: str
    files: tuple[RemoteFile, ...]


def listing(repository: Repository, commit: str | None = None) -> Listing:
    """Return the files of a dataset that match its patterns. commit: the one of an earlier listing.

    If the branch has no such files, use the Parquet files that Hugging Face converted.
    """
    for revision in dict.fromkeys((commit or repository.revision, CONVERTED)):  # a set with an order
        try:
            found = _listing(repository, revision)
        except KmatrixError:
            if revision == CONVERTED and not commit:  # no conversion: what is missing are files that match
                break
            raise
        if found.files or commit:  # with a commit, an empty listing is an answer: never mix two versions of the data
            return found
    raise DataError(
        f"{repository.name} has no files that match {', '.join(repository.patterns)}",
        hint=f"name its files: DATA_PATH={repository.name}:PATTERN",
    )


def _listing(repository: Repository, revision: str) -> Listing:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    try:
        api = HfApi()
        # Ask for the commit first: the branch may move between the pages of the listing.
        commit = api.dataset_info(repository.name, revision=revision, timeout=30).sha or revision
        tree = list(api.list_repo_tree(repository.name, repo_type="dataset", revision=commit, recursive=True))
    # Broad, because connection errors are those of the HTTP library below, which differs between the versions of
    # huggingface_hub (httpx, httpx2). The user gets a DataError with the reason; `from None`, because a traceback of
    # that library may contain headers with the token.
    except Exception as error:
        raise refused(repository, error) from None
    files = [
        RemoteFile(path=item.path, size=item.size, sha256=item.lfs.sha256 if item.lfs else None)
        for item in tree
        if isinstance(item, RepoFile) and _fits(item.path, repository.patterns) and _stays_below(item.path)
    ]
    return Listing(repository=repository, commit=commit, files=tuple(sorted(files, key=lambda file: file.path)))


def _fits(path: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a path matches. A pattern with a slash applies to the whole path, else to the file name."""
    name = path.rsplit("/", 1)[-1]
    return any(fnmatch.fnmatchcase(path if "/" in pattern else name, pattern) for pattern in patterns)


def _stays_below(path: str) -> bool:
    """Return whether a path is relative without "..": a mirror must not write outside the folder."""
    return not path.startswith("/") and ".." not in path.split("/")


def fetch(found: Listing, file: RemoteFile, folder: Path, received: Callable[[int], None] | None = None) -> Path:
    """Download a file into folder/.fetched, verify its hash, and return its path. The caller moves it.

    An interrupted download continues. A file that differs from the listing is deleted.
    """
    path = folder / DOWNLOADS / file.path  # with its folders, because two folders may have files of the same name
    if path.is_file() and _is_listed(path, file):
        return path
    part = part_of(path)
    receive(lambda: _address(found, file), part, name=f"{found.repository.name}: {file.path}", received=received)
    if not _is_listed(part, file):
        why = f"{part.stat().st_size} bytes, SHA-256 {file_sha256(part)[:12]}..., expected "
        part.unlink()
        raise DataError(
            f"{found.repository.name}: {file.path} differs from the repository's listing",
            why=f"{why}{file.size} and {(file.sha256 or 'none')[:12]}...",
            hint="run it again; if it fails again, HF_ENDPOINT may name a broken mirror",
        )
    return part.replace(path)


def _is_listed(path: Path, file: RemoteFile) -> bool:
    return path.stat().st_size == file.size and file.sha256 in (None, file_sha256(path))  # the cheap check first


def _address(found: Listing, file: RemoteFile) -> Address:
    """Return the URL of a file's content. Another server than the hub does not get the token."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers

    url = hf_hub_url(found.repository.name, file.path, repo_type="dataset", revision=found.commit)
    # Resolved here, not by the download: a redirect to a content server expires, and must not get the token.
    try:
        location = get_hf_file_metadata(url, timeout=TIMEOUT_S).location
    except Exception as error:  # broad for the same reason as in _listing, with the same result
        raise refused(found.repository, error) from None
    headers = {name: text for name, text in build_hf_headers().items() if name.lower() == "authorization"}
    return Address(location, headers if urlsplit(location).netloc == urlsplit(url).netloc else {})


def clear(folder: Path) -> None:
    """Delete the downloads of a folder."""
    shutil.rmtree(folder / DOWNLOADS, ignore_errors=True)


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def is_offline() -> bool:
    """Return whether the environment forbids network access."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def refused(repository: Repository, error: Exception) -> DataError:
    """Return a DataError with a hint for an error of huggingface_hub, without headers and tokens."""
    # Without a status, the first line of the message: the others have request ids and URLs.
    status = _status(error)
    why = f"HTTP {status}" if status else (str(error).strip().splitlines() or [type(error).__name__])[0]
    hint = "run it again: partial downloads are kept and continue"
    if is_offline():
        why, hint = "HF_HUB_OFFLINE is set", "prepare the data on a machine with network access, then copy DATA_DIR"
    elif status in (401, 403):
        hint = "request access on its page, and set HF_TOKEN in the environment"
    elif status == 404:
        hint = "check the name and @REVISION; for a private dataset set HF_TOKEN in the environment"
    is_away = not is_offline() and (not status or status in (408, 429) or status >= HTTPStatus.INTERNAL_SERVER_ERROR)
    kind = UnavailableError if is_away else DataError
    return kind(f"cannot download the dataset {repository.name}", why=why, hint=hint)
