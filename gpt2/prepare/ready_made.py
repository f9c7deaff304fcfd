"""Ready-made token shards of Hugging Face: as many as are needed, each with the hash that the repository lists."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from gpt2 import shards, tokenizer
from gpt2.prepare import hub, room
from gpt2.prepare.catalog import Repository
from gpt2.prepare.progress import Progress, readable, say
from gpt2.prepare.wanted import Wanted, vocabulary
from gpt2.shards import ShardInfo
from kmatrix.errors import DataError, RecordError
from kmatrix.records import read_json, write_json

AT_ONCE = 4  # downloads


def listed(wanted: Wanted, repository: Repository, folder: Path) -> hub.Listing:
    """Return the shards that there are, of the commit that those that were fetched before are of."""
    return hub.listing(repository, _commit(folder, wanted))


def fetch(wanted: Wanted, found: hub.Listing, folder: Path) -> None:
    """Fetch the validation shards and the training shards that are needed into a folder, and write dataset.json.

    A shard that is there is not fetched again. dataset.json is written anew with each.
    """
    repository = found.repository
    val, train = (_of_kind(found.files, kind) for kind in ("val", "train"))
    if not val or not train:
        raise DataError(
            f"{repository.name} has {len(train)} training and {len(val)} validation shards",
            why=f"those are the files {', '.join(repository.patterns)}",
            fix="name a dataset of token shards; one of text is DATASET=hub",
        )
    count = wanted.needed([_tokens(file) for file in train])
    sums = {file.name: file.sha256 for file in found.files}
    known = {
        shard.name: shard
        for shard in shards.recorded(folder)
        if _there(folder, shard) and sums.get(shard.name) in (None, shard.sha256)
    }
    wanted_files = [*val, *train[:count]]
    missing = [file for file in wanted_files if file.name not in known]
    _announce(wanted, repository, wanted_files, missing, len(train))
    room.check(folder, sum(file.size for file in missing))
    folder.mkdir(parents=True, exist_ok=True)
    about: dict[str, Any] = {
        "dataset": wanted.dataset,
        "source": repository.address,
        "commit": found.commit,
        "tokenizer": wanted.tokenizer,
        "vocab_size": vocabulary(wanted.tokenizer),
        "recipe": wanted.recipe,
    }
    with Progress(wanted.dataset, "B") as progress, ThreadPoolExecutor(AT_ONCE) as pool:
        under_way = [pool.submit(_fetch, found, file, folder, wanted.tokenizer, progress) for file in missing]
        try:
            for done in as_completed(under_way):
                shard = done.result()
                known[shard.name] = shard
                _write(folder, known, about, complete=False)
                say(f"{shard.name}: {readable(shard.tokens)} tokens, {len(known)} of {len(wanted_files)} shards")
        except BaseException:
            progress.stopped = True
            pool.shutdown(cancel_futures=True)
            for future in under_way:
                if future.done() and not future.cancelled() and not future.exception():
                    known[future.result().name] = future.result()
            _write(folder, known, about, complete=False)
            raise
    hub.clear(folder)
    _write(folder, known, about, complete=count == len(train))
    _vocabulary()


def _vocabulary() -> None:
    """Fetch the vocabulary, which shards do without, and samples and bits per byte do not."""
    try:
        tokenizer.fetch_gpt2()
    except DataError as error:
        say(f"note: no bits per byte and no samples: {error.what} ({error.why})")


def _commit(folder: Path, wanted: Wanted) -> str | None:
    """Return the commit that shards which are there are of: what is fetched later is of the same one."""
    try:
        record = read_json(folder / shards.RECORD)
    except RecordError:
        return None
    return record.get("commit") if record.get("recipe") == wanted.recipe else None


def _announce(
    wanted: Wanted,
    repository: Repository,
    files: Sequence[hub.RemoteFile],
    missing: Sequence[hub.RemoteFile],
    all_: int,
) -> None:
    tokens = sum(_tokens(file) for file in files if shards.kind_of(file.name) == "train")
    size = sum(file.size for file in missing)
    asked = f" for the {readable(wanted.tokens)} tokens of the longest run" if wanted.tokens else ""
    of_train = sum(shards.kind_of(file.name) == "train" for file in files)
    say(
        f"{wanted.dataset}: {of_train} of {all_} training shards ({readable(tokens)} tokens){asked}; "
        f"fetching {len(missing)} files, {readable(size, 'B')}, from {repository.name}"
    )


def _of_kind(files: Sequence[hub.RemoteFile], kind: str) -> list[hub.RemoteFile]:
    return [file for file in files if any(Path(file.name).match(pattern) for pattern in shards.KINDS[kind])]


def _tokens(file: hub.RemoteFile) -> int:
    """The tokens of a shard of llm.c, from its size."""
    return max(0, file.size - shards.HEADER_BYTES) // 2


def _there(folder: Path, shard: ShardInfo) -> bool:
    path = folder / shard.name
    return path.is_file() and (path.stat().st_size, path.stat().st_mtime_ns) == (shard.size, shard.mtime_ns)


def _fetch(found: hub.Listing, file: hub.RemoteFile, folder: Path, tokens_of: str, progress: Progress) -> ShardInfo:
    """Put one shard in place, once it is known to be whole and of this tokenizer; one that lies there may do."""
    path = folder / file.name
    if path.is_file() and path.stat().st_size == file.size:
        shard = shards.read_info(path)
        if file.sha256 in (None, shard.sha256):
            return shard
    fetched = hub.fetch(found, file, folder, progress.add)
    shard = shards.read_info(fetched)
    shards.check_tokens(fetched, shard, vocabulary(tokens_of))
    fetched.replace(path)
    return shard


def _write(folder: Path, known: dict[str, ShardInfo], about: dict[str, Any], *, complete: bool) -> None:
    listed = [known[name] for name in sorted(known)]
    write_json(folder / shards.RECORD, shards.record(listed, **about, complete=complete))
