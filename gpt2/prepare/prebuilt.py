"""Prebuilt token shards from Hugging Face: as many as needed, verified with the repository's hashes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from gpt2.data import shards, tokenizer
from gpt2.prepare import hub
from gpt2.prepare.catalog import HUB, DatasetOrigin, DatasetRequest, Repository, vocabulary
from gpt2.prepare.progress import PreparationProgress, check_space, say
from kmatrix.errors import DataError
from kmatrix.records.dataset import KINDS, RECORD, ShardInfo, kind_of, read_dataset_or_empty
from kmatrix.records.files import write_json
from kmatrix.text import count, disk_size, plural

AT_ONCE = 4  # parallel downloads: a single connection rarely uses the whole bandwidth


def listed(request: DatasetRequest, repository: Repository, folder: Path) -> hub.Listing:
    """Return the available shards, at the commit of shards that were downloaded before."""
    return hub.listing(repository, _commit(folder, request))


def fetch(request: DatasetRequest, found: hub.Listing, folder: Path) -> None:
    """Download the validation shards and the required training shards into a folder, and write dataset.json.

    Existing shards are not downloaded again. dataset.json is updated after each shard.
    """
    # Choose the shards: all for validation, and the first for training until they have enough tokens
    repository = found.repository
    val, train = (_of_kind(found.files, kind) for kind in ("val", "train"))
    if not val or not train:
        raise DataError(
            f"{repository.name} has {len(train)} training and {len(val)} validation shards",
            why=f"patterns: {', '.join(repository.patterns)}",
            hint="name a dataset of token shards, or use DATASET=hub for text",
        )
    repeated = [name for name, times in Counter(file.name for file in (*val, *train)).items() if times > 1]
    if repeated:  # the second file would replace the first one, and the data would be half of what was announced
        raise DataError(
            f"{repository.name} has several shards named {repeated[0]}",
            why="a dataset is one folder, in which names are unique",
            hint=f"name the shards of one directory: DATA_PATH={HUB}{repository.name}:DIRECTORY/*.bin",
        )
    needed = request.shards_needed([_tokens(file) for file in train])
    sums = {file.name: file.sha256 for file in found.files}
    # Existing shards with the repository's hash; None: it has no hash, and the size decides in `_fetch`.
    known = {
        shard.name: shard
        for shard in shards.recorded(folder)
        if _is_unchanged(folder, shard) and sums.get(shard.name) in (None, shard.sha256)
    }

    # Download what is missing
    required = [*val, *train[:needed]]
    missing = [file for file in required if file.name not in known]
    _announce(request, repository, required, missing, len(train))
    check_space(folder, sum(file.size for file in missing))
    folder.mkdir(parents=True, exist_ok=True)
    origin = DatasetOrigin(
        dataset=request.dataset,
        source=repository.address,
        commit=found.commit,
        tokenizer=request.tokenizer,
        recipe=request.recipe,
    )
    with PreparationProgress(request.dataset, "B") as progress, ThreadPoolExecutor(AT_ONCE) as pool:
        under_way = [pool.submit(_fetch, found, file, folder, request.tokenizer, progress) for file in missing]
        try:
            for done in as_completed(under_way):
                shard = done.result()
                known[shard.name] = shard
                _write(folder, known, origin, complete=False)
                say(f"{shard.name}: {count(shard.tokens)} tokens, {len(known)} of {len(required)} shards")
        # Broad, because Ctrl+C (KeyboardInterrupt) must end the threads too: they would finish their files first. The
        # flag ends each at its next chunk; shards that are complete are recorded, and the error continues.
        except BaseException:
            progress.stopped = True
            pool.shutdown(cancel_futures=True)
            for future in under_way:
                if future.done() and not future.cancelled() and not future.exception():
                    known[future.result().name] = future.result()
            _write(folder, known, origin, complete=False)
            raise

    # "complete": the repository has no more shards, so a longer run need not ask
    hub.clear(folder)
    _write(folder, known, origin, complete=needed == len(train))
    _vocabulary()


def _vocabulary() -> None:
    """Download GPT-2's vocabulary, which sample texts and bits per byte need. Its failure is only logged."""
    # Now, because training may run on a node without network access. The shards are tokenized already.
    try:
        tokenizer.fetch_gpt2()
    except DataError as error:
        say(f"note: bits per byte and sample texts are not available: {error.what} ({error.why})")


def _commit(folder: Path, request: DatasetRequest) -> str | None:
    """Return the commit of existing shards, so that later downloads match them."""
    record = read_dataset_or_empty(folder / RECORD)
    return record.commit if record.recipe == request.recipe else None


def _announce(
    request: DatasetRequest,
    repository: Repository,
    files: Sequence[hub.RemoteFile],
    missing: Sequence[hub.RemoteFile],
    all_: int,
) -> None:
    tokens = sum(_tokens(file) for file in files if kind_of(file.name) == "train")
    size = sum(file.size for file in missing)
    asked = f" for the {count(request.tokens)} tokens of the longest run" if request.tokens else ""
    of_train = sum(kind_of(file.name) == "train" for file in files)
    say(
        f"{request.dataset}: {of_train} of {all_} training shards ({count(tokens)} tokens){asked}; "
        f"downloading {plural(len(missing), 'file')}, {disk_size(size)}, from {repository.name}"
    )


def _of_kind(files: Sequence[hub.RemoteFile], kind: str) -> list[hub.RemoteFile]:
    return [file for file in files if any(Path(file.name).match(pattern) for pattern in KINDS[kind])]


def _tokens(file: hub.RemoteFile) -> int:
    """Return the tokens of a shard in llm.c's format, from its size."""
    return max(0, file.size - shards.HEADER_BYTES) // 2


def _is_unchanged(folder: Path, shard: ShardInfo) -> bool:
    path = folder / shard.name
    return path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) == (shard.size, shard.mtime_ns)


def _fetch(
    found: hub.Listing, file: hub.RemoteFile, folder: Path, tokens_of: str, progress: PreparationProgress
) -> ShardInfo:
    """Download, verify and move one shard into place, unless it exists."""
    path = folder / file.name
    if path.is_file() and path.stat().st_size == file.size:
        shard = shards.read_info(path)
        if file.sha256 in (None, shard.sha256):
            return shard
    fetched = hub.fetch(found, file, folder, progress.add)
    shard = shards.read_info(fetched)
    shards.check_tokens(fetched, shard, vocabulary(tokens_of))  # before it is moved: what is in the folder is used
    fetched.replace(path)
    return shard


def _write(folder: Path, known: dict[str, ShardInfo], origin: DatasetOrigin, *, complete: bool) -> None:
    listed = [known[name] for name in sorted(known)]
    size = vocabulary(origin.tokenizer)
    record = shards.record(listed, **origin.to_json(), vocab_size=size, complete=complete)
    write_json(folder / RECORD, record)
