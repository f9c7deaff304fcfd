"""Downloads: files of a dataset on Hugging Face, prebuilt token shards among them, and single files on the web.

huggingface_hub continues downloads, and reads HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE from the environment.
"""

from __future__ import annotations

import fnmatch
import hashlib
import http.client
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.data import shards, tokenizer
from gpt2.prepare import say
from gpt2.prepare.catalog import DatasetRequest
from kmatrix.errors import DataError
from kmatrix.records.dataset import RECORD, ShardInfo, kind_of, read_dataset_or_empty
from kmatrix.records.files import write_bytes, write_json
from kmatrix.text import count, disk_size

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

TEXT_FILES = ["*.parquet", "*.jsonl", "*.jsonl.gz", "*.json.gz", "*.txt", "*.txt.gz", "*.md"]
DOWNLOADS = ".fetched"  # in the dataset's folder: files that are not verified or used yet
AT_ONCE = 4  # parallel downloads: a single connection rarely uses the whole bandwidth


@dataclass(frozen=True, slots=True)
class Listing:
    """The matching files of a dataset at one commit, sorted by path."""

    repository: str  # OWNER/NAME
    commit: str
    files: list[RepoFile]


def listing(address: str, commit: str | None = None) -> Listing:
    """Return the files of OWNER/NAME[@REVISION][:PATTERN,...]. commit: the one of an earlier listing."""
    from huggingface_hub import HfApi, RepoFile

    place, _, own = address.partition(":")
    patterns = own.split(",") if own else TEXT_FILES
    name, _, revision = place.partition("@")
    with _explained(name):
        # Ask for the commit first: the branch may move between the pages of the listing.
        commit = commit or str(HfApi().dataset_info(name, revision=revision or None, timeout=30).sha)
        tree = list(HfApi().list_repo_tree(name, repo_type="dataset", revision=commit, recursive=True))
    files = [item for item in tree if isinstance(item, RepoFile) and _fits(item.path, patterns)]
    if not files:
        hint = f"name them: DATA_PATH={name}:PATTERN, or try {name}@refs/convert/parquet, which Hugging Face makes"
        raise DataError(f"{name} has no files that match {', '.join(patterns)}", hint=hint)
    return Listing(name, commit, sorted(files, key=lambda file: file.path))


def _fits(path: str, patterns: list[str]) -> bool:
    """Return whether a path matches. A pattern with a slash applies to the whole path, else to the file name."""
    leads_out = path.startswith("/") or ".." in path.split("/")  # a mirror must not write outside the folder
    names = (path if "/" in each else Path(path).name for each in patterns)
    return not leads_out and any(map(fnmatch.fnmatchcase, names, patterns))


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Raise a DataError with a hint for an error of huggingface_hub."""
    try:
        yield
    # Broad, because connection errors are those of the HTTP library below, which differs between versions. `from None`,
    # because a traceback of that library may contain headers with the token; so may all but the first line.
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        why = f"HTTP {status}" if status else (str(error).strip().splitlines() or [type(error).__name__])[0]
        hint = "check the name, the network, and HF_TOKEN if access is restricted; partial downloads continue"
        raise DataError(f"cannot download the dataset {repository}", why=why, hint=hint) from None


def fetch(found: Listing, path: str, folder: Path) -> Path:
    """Download a file into folder/.fetched, and return its path there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():  # a log file would keep each state of the bar
        disable_progress_bars()
    name, place = found.repository, folder / DOWNLOADS
    with _explained(name):
        return Path(hf_hub_download(name, path, repo_type="dataset", revision=found.commit, local_dir=place))


def fetch_url(url: str, path: Path, *, sha256: str) -> Path:
    """Return the path of a file on the web, downloaded unless it is there. Raises DataError if it has changed."""
    if path.is_file():
        return path
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise DataError(f"cannot download {url}", why=str(error), hint="run it again with network access") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(f"{url} has changed", hint=f"put the original file at {path}")
    write_bytes(path, content)
    return path


def fetch_shards(request: DatasetRequest, folder: Path, recipe: dict[str, Any]) -> None:
    """Download the validation shards and the required training shards, in their order, and write dataset.json.

    Existing shards are not downloaded again. dataset.json is updated after each shard.
    """
    record = read_dataset_or_empty(folder / RECORD)
    known = {shard.name: shard for shard in record.shards if record.recipe == recipe}
    found = listing(request.shards_on_hub, record.commit if known else None)  # later shards are of the same commit
    val, train = ([file for file in found.files if kind_of(file.path) == kind] for kind in ("val", "train"))
    needed = request.enough([(file.size - shards.HEADER_BYTES) // 2 for file in train]) or len(train)
    required = [*val, *train[:needed]]
    size = disk_size(sum(file.size for file in required if not (folder / Path(file.path).name).is_file()))
    say(f"{needed} of {len(train)} training shards of {found.repository}; {size} to download")
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = tokenizer.load(request.tokenizer).vocab_size
    about: dict[str, Any] = {"dataset": request.dataset, "source": found.repository, "commit": found.commit}
    about |= {"tokenizer": request.tokenizer, "recipe": recipe}
    # Never fewer than a run may read now
    listed = {name: shard for name, shard in known.items() if shards.is_recorded(folder / name, shard)}
    # What did not begin is cancelled after an error. In order: a run that waits for the next one reads it then.
    done = ThreadPoolExecutor(AT_ONCE).map(lambda file: _shard(found, file, folder, known), required)
    for number, shard in enumerate(done, 1):
        listed[shard.name] = shard
        complete = number == len(required) and needed == len(train)  # the repository has no more
        write_json(folder / RECORD, shards.record(list(listed.values()), vocab_size, **about, complete=complete))
        say(f"{shard.name}: {count(shard.tokens)} tokens, {number} of {len(required)} shards")
    try:  # now, because training may run on a node without network access: sample texts need it, not the shards
        tokenizer.load("gpt2").encode("")
    except DataError as error:
        say(f"note: bits per byte and sample texts are not available: {error.what} ({error.why})")


def _shard(found: Listing, file: RepoFile, folder: Path, known: dict[str, ShardInfo]) -> ShardInfo:
    """Return a shard of the repository, downloaded and verified unless it is there."""
    path = folder / Path(file.path).name
    is_there = path.is_file() and path.stat().st_size == file.size
    source = path if is_there else fetch(found, file.path, folder)
    shard = shards.read_info(source, known.get(path.name))
    if file.lfs and file.lfs.sha256 != shard.sha256:  # small files are not in LFS
        source.unlink()
        hint = "run it again; if it fails again, HF_ENDPOINT may name a broken mirror"
        raise DataError(f"{found.repository}: {file.path} differs from the repository's listing", hint=hint)
    source.replace(path)
    return shard
