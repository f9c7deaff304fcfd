"""Files of a dataset on Hugging Face: their list, their download, and prebuilt token shards among them.

huggingface_hub resumes and retries downloads, and reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE from the environment.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from gpt2.data import shards, tokenizer
from gpt2.prepare.catalog import HUB, DatasetRequest, Repository, vocabulary
from gpt2.prepare.progress import say
from kmatrix.errors import DataError, KmatrixError
from kmatrix.records.dataset import RECORD, ShardInfo, kind_of, read_dataset_or_empty
from kmatrix.records.files import write_json
from kmatrix.text import count, disk_size, plural

# Branch with Hugging Face's conversion to Parquet (https://huggingface.co/docs/dataset-viewer/parquet)
CONVERTED = "refs/convert/parquet"
DOWNLOADS = ".fetched"  # in the dataset's folder: files that are not verified or used yet
AT_ONCE = 4  # parallel downloads: a single connection rarely uses the whole bandwidth
PAUSES_S = (1.0, 5.0, 25.0)  # before a server that is busy is asked again
FORBIDDEN, MISSING, BUSY = (401, 403), 404, 429  # HTTP


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
    from huggingface_hub import HfApi, RepoFile

    try:
        api = HfApi()
        # Ask for the commit first: the branch may move between the pages of the listing.
        commit = api.dataset_info(repository.name, revision=revision, timeout=30).sha or revision
        tree = list(api.list_repo_tree(repository.name, repo_type="dataset", revision=commit, recursive=True))
    # Broad, because connection errors are those of the HTTP library below, which differs between versions. `from None`,
    # because a traceback of that library may contain headers with the token.
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


def fetch(found: Listing, path: str, folder: Path) -> Path:
    """Download a file into folder/.fetched, and return its path there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():  # a log file would keep each state of the bar
        disable_progress_bars()
    name, commit, place = found.repository.name, found.commit, folder / DOWNLOADS
    for pause in (*PAUSES_S, None):
        try:
            return Path(hf_hub_download(name, path, repo_type="dataset", revision=commit, local_dir=place))
        except Exception as error:  # broad for the same reason as in _listing, with the same result
            if pause is None or not _is_passing(error):
                raise refused(found.repository, error) from None
            time.sleep(pause)
    raise AssertionError


def _is_passing(error: Exception) -> bool:
    """Return whether the server refuses a file for now: huggingface_hub only repeats what breaks off."""
    status = _status(error)
    return status is not None and (status == BUSY or status >= HTTPStatus.INTERNAL_SERVER_ERROR)


def clear(folder: Path) -> None:
    """Delete the downloads of a folder."""
    shutil.rmtree(folder / DOWNLOADS, ignore_errors=True)


def is_offline() -> bool:
    """Return whether the environment forbids network access."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def refused(repository: Repository, error: Exception) -> DataError:
    """Return a DataError with a hint for an error of huggingface_hub, without headers and tokens."""
    status = _status(error)
    # Without a status, the first line of the message: the others have request ids and URLs.
    why = f"HTTP {status}" if status else (str(error).strip().splitlines() or [type(error).__name__])[0]
    hint = "run it again: partial downloads are kept and continue"
    if is_offline():
        why, hint = "HF_HUB_OFFLINE is set", "prepare the data on a machine with network access, then copy DATA_DIR"
    elif status in FORBIDDEN:
        hint = "request access on its page, and set HF_TOKEN in the environment"
    elif status == MISSING:
        hint = "check the name and @REVISION; for a private dataset set HF_TOKEN in the environment"
    return DataError(f"cannot download the dataset {repository.name}", why=why, hint=hint)


def fetch_shards(request: DatasetRequest, repository: Repository, folder: Path, recipe: dict[str, Any]) -> None:
    """Download the validation shards and the required training shards, in their order, and write dataset.json.

    Existing shards are not downloaded again. dataset.json is updated after each shard.
    """
    known = read_dataset_or_empty(folder / RECORD)
    same = known.recipe == recipe
    found = listing(repository, known.commit if same else None)  # later shards are of the same commit
    val, train = _chosen(found)
    needed = request.shards_needed([max(0, file.size - shards.HEADER_BYTES) // 2 for file in train])
    required = [*val, *train[:needed]]
    missing = [file for file in required if not (folder / file.name).is_file()]
    size = sum(file.size for file in missing)
    say(
        f"{request.dataset}: {needed} of {len(train)} training shards; "
        f"downloading {plural(len(missing), 'file')}, {disk_size(size)}, from {repository.name}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    if size > (free := shutil.disk_usage(folder).free):
        raise DataError(f"{folder} needs {disk_size(size)}, but only {disk_size(free)} are free")
    about: dict[str, Any] = {"dataset": request.dataset, "source": repository.address, "commit": found.commit}
    about |= {"tokenizer": request.tokenizer, "recipe": recipe, "vocab_size": vocabulary(request.tokenizer)}
    recorded = {shard.name: shard for shard in known.shards if same}
    here = sum(file.name in recorded and file not in missing for file in required)
    listed: list[ShardInfo] = []
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        waiting = [
            pool.submit(_shard, found, file, folder, recorded.get(file.name), request.tokenizer) for file in required
        ]
        for number, done in enumerate(waiting, 1):  # in order: a run that waits for the next one reads it then
            listed.append(shard := done.result())
            # "complete": the repository has no more shards, so a longer run need not ask
            complete = number == len(required) and needed == len(train)
            if number >= here:  # never fewer than a run may read now
                write_json(folder / RECORD, shards.record(listed, **about, complete=complete))
            say(f"{shard.name}: {count(shard.tokens)} tokens, {number} of {len(required)} shards")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    clear(folder)
    try:  # now, because training may run on a node without network access: sample texts need it, not the shards
        tokenizer.fetch_gpt2()
    except DataError as error:
        say(f"note: bits per byte and sample texts are not available: {error.what} ({error.why})")


def _chosen(found: Listing) -> tuple[Sequence[RemoteFile], Sequence[RemoteFile]]:
    """Return the shards for validation and for training."""
    name = found.repository.name
    val, train = ([file for file in found.files if kind_of(file.name) == kind] for kind in ("val", "train"))
    if not val or not train:
        raise DataError(
            f"{name} has {len(train)} training and {len(val)} validation shards",
            why=f"patterns: {', '.join(found.repository.patterns)}",
            hint="name a dataset of token shards, or use DATASET=hub for text",
        )
    repeated = [name for name, times in Counter(file.name for file in (*val, *train)).items() if times > 1]
    if repeated:  # the second file would replace the first one, and the data would be half of what was announced
        raise DataError(
            f"{name} has several shards named {repeated[0]}",
            why="a dataset is one folder, in which names are unique",
            hint=f"name the shards of one directory: DATA_PATH={HUB}{name}:DIRECTORY/*.bin",
        )
    return val, train


def _shard(found: Listing, file: RemoteFile, folder: Path, known: ShardInfo | None, tokens_of: str) -> ShardInfo:
    """Return a shard of the repository, downloaded and verified unless it is there."""
    path = folder / file.name
    if path.is_file() and path.stat().st_size == file.size:
        shard = shards.known_or_read(path, known)
        if file.sha256 in (None, shard.sha256):
            return shard
    fetched = fetch(found, file.path, folder)
    shard = shards.read_info(fetched)
    if file.sha256 not in (None, shard.sha256):
        fetched.unlink()
        raise DataError(
            f"{found.repository.name}: {file.path} differs from the repository's listing",
            why=f"SHA-256 {shard.sha256[:12]}..., expected {(file.sha256 or '')[:12]}...",
            hint="run it again; if it fails again, HF_ENDPOINT may name a broken mirror",
        )
    shards.check_tokens(fetched, shard, vocabulary(tokens_of))  # before it is moved: what is in the folder is used
    fetched.replace(path)
    return shard
