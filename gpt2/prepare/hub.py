"""Files of a dataset on Hugging Face: their list, their download, and prebuilt token shards among them.

huggingface_hub continues downloads, and reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE from the environment.
"""

from __future__ import annotations

import fnmatch
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from gpt2.data import shards, tokenizer
from gpt2.prepare.catalog import HUB, DatasetRequest, Repository
from gpt2.prepare.progress import say
from kmatrix.errors import DataError
from kmatrix.records.dataset import RECORD, ShardInfo, kind_of, read_dataset_or_empty
from kmatrix.records.files import write_json
from kmatrix.text import count, disk_size, plural

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

# Branch with Hugging Face's conversion to Parquet (https://huggingface.co/docs/dataset-viewer/parquet)
CONVERTED = "refs/convert/parquet"
DOWNLOADS = ".fetched"  # in the dataset's folder: files that are not verified or used yet
AT_ONCE = 4  # parallel downloads: a single connection rarely uses the whole bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The matching files of a dataset at one commit, sorted by path."""

    repository: Repository
    commit: str
    files: tuple[RepoFile, ...]


def listing(repository: Repository, commit: str | None = None) -> Listing:
    """Return the files of a dataset that match its patterns. commit: the one of an earlier listing.

    If the branch has no such files, use the Parquet files that Hugging Face converted.
    """
    found = _listing(repository, commit or repository.revision)
    if not found.files and not commit:  # with a commit, never mix two versions of the data
        with suppress(DataError):  # there is no conversion
            found = _listing(repository, CONVERTED)
    if not found.files:
        raise DataError(
            f"{repository.name} has no files that match {', '.join(repository.patterns)}",
            hint=f"name its files: DATA_PATH={repository.name}:PATTERN",
        )
    return found


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
    files = [item for item in tree if isinstance(item, RepoFile) and _fits(item.path, repository.patterns)]
    return Listing(repository=repository, commit=commit, files=tuple(sorted(files, key=lambda file: file.path)))


def _fits(path: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a path matches. A pattern with a slash applies to the whole path, else to the file name."""
    name = PurePosixPath(path).name
    leads_out = path.startswith("/") or ".." in path.split("/")  # a mirror must not write outside the folder
    return not leads_out and any(fnmatch.fnmatchcase(path if "/" in each else name, each) for each in patterns)


def fetch(found: Listing, path: str, folder: Path) -> Path:
    """Download a file into folder/.fetched, and return its path there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():  # a log file would keep each state of the bar
        disable_progress_bars()
    name, commit, place = found.repository.name, found.commit, folder / DOWNLOADS
    try:
        return Path(hf_hub_download(name, path, repo_type="dataset", revision=commit, local_dir=place))
    except Exception as error:  # broad for the same reason as in _listing, with the same result
        raise refused(found.repository, error) from None


def clear(folder: Path) -> None:
    """Delete the downloads of a folder."""
    shutil.rmtree(folder / DOWNLOADS, ignore_errors=True)


def refused(repository: Repository, error: Exception) -> DataError:
    """Return a DataError with a hint for an error of huggingface_hub, without headers and tokens."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    # Without a status, the first line of the message: the others have request ids and URLs.
    why = f"HTTP {status}" if status else (str(error).strip().splitlines() or [type(error).__name__])[0]
    hint = "run it again: partial downloads are kept and continue"
    if status in (401, 403, 404):
        hint = "check the name and @REVISION; if access is restricted, request it, and set HF_TOKEN in the environment"
    return DataError(f"cannot download the dataset {repository.name}", why=why, hint=hint)


def fetch_shards(request: DatasetRequest, repository: Repository, folder: Path, recipe: dict[str, Any]) -> None:
    """Download the validation shards and the required training shards, in their order, and write dataset.json.

    Existing shards are not downloaded again. dataset.json is updated after each shard.
    """
    record = read_dataset_or_empty(folder / RECORD)
    same = record.recipe == recipe
    known = {shard.name: shard for shard in record.shards if same}
    found = listing(repository, record.commit if same else None)  # later shards are of the same commit
    val, train = _shards_of(found)
    needed = request.enough([(file.size - shards.HEADER_BYTES) // 2 for file in train]) or len(train)
    required = [*val, *train[:needed]]
    missing = [file for file in required if not (folder / _name(file)).is_file()]
    say(
        f"{request.dataset}: {needed} of {len(train)} training shards; downloading {plural(len(missing), 'file')}, "
        f"{disk_size(sum(file.size for file in missing))}, from {repository.name}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = tokenizer.load(request.tokenizer, folder).vocab_size
    about: dict[str, Any] = {"dataset": request.dataset, "source": repository.address, "commit": found.commit}
    about |= {"tokenizer": request.tokenizer, "recipe": recipe, "vocab_size": vocab_size}
    # Never fewer than a run may read now
    listed = {name: shard for name, shard in known.items() if shards.is_unchanged(folder / name, shard)}
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        done = pool.map(lambda file: _shard(found, file, folder, known.get(_name(file)), vocab_size), required)
        for number, shard in enumerate(done, 1):  # in order: a run that waits for the next one reads it then
            listed[shard.name] = shard
            # "complete": the repository has no more shards, so a longer run need not ask
            complete = number == len(required) and needed == len(train)
            write_json(folder / RECORD, shards.record(list(listed.values()), **about, complete=complete))
            say(f"{shard.name}: {count(shard.tokens)} tokens, {number} of {len(required)} shards")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    clear(folder)
    try:  # now, because training may run on a node without network access: sample texts need it, not the shards
        tokenizer.fetch_gpt2()
    except DataError as error:
        say(f"note: bits per byte and sample texts are not available: {error.what} ({error.why})")


def _name(file: RepoFile) -> str:
    return PurePosixPath(file.path).name


def _shards_of(found: Listing) -> tuple[list[RepoFile], list[RepoFile]]:
    """Return the shards for validation and for training."""
    val, train = ([file for file in found.files if kind_of(_name(file)) == kind] for kind in ("val", "train"))
    names = {_name(file) for file in (*val, *train)}
    if not val or not train or len(names) < len(val) + len(train):
        name = found.repository.name
        raise DataError(
            f"{name} is not one dataset of token shards",
            why=f"it has {len(train)} training and {len(val)} validation shards with {len(names)} different names",
            hint=f"name the shards of one directory, DATA_PATH={HUB}{name}:DIRECTORY/*.bin, or DATASET=hub for text",
        )
    return val, train


def _shard(found: Listing, file: RepoFile, folder: Path, known: ShardInfo | None, vocab_size: int) -> ShardInfo:
    """Return a shard of the repository, downloaded and verified unless it is there."""
    path = folder / _name(file)
    is_there = path.is_file() and path.stat().st_size == file.size
    source = path if is_there else fetch(found, file.path, folder)
    shard = shards.read_info(source, known)
    if file.lfs and file.lfs.sha256 != shard.sha256:  # small files are not in LFS
        source.unlink()
        raise DataError(
            f"{found.repository.name}: {file.path} differs from the repository's listing",
            why=f"SHA-256 {shard.sha256[:12]}..., expected {file.lfs.sha256[:12]}...",
            hint="run it again; if it fails again, HF_ENDPOINT may name a broken mirror",
        )
    shards.check_tokens(source, shard, vocab_size)  # before it is moved: what is in the folder is used
    source.replace(path)
    return shard
