"""Prepare a dataset from any source: prebuilt shards, text, the user's shards, or a mix.

A prepared dataset is recognized by its dataset.json, without heavy imports or network access.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gpt2.data import shards, tokenizer
from gpt2.prepare import hub, text
from gpt2.prepare.catalog import CATALOG, DatasetRequest, PreparedDataset
from gpt2.prepare.progress import say
from gpt2.prepare.writer import ShardWriter
from kmatrix.errors import ConfigError, DataError
from kmatrix.records.dataset import (
    RECORD,
    DatasetFile,
    SourceEntry,
    kind_of,
    read_dataset,
    read_dataset_or_empty,
    sha256_of_mix,
    train_shards,
)
from kmatrix.records.decode import as_json
from kmatrix.records.files import write_json
from kmatrix.records.train_config import parse_mix
from kmatrix.text import count, disk_size, plural

DATASETS = ("stdlib", *CATALOG, "hub", "folder", "shards", "mix")
WHOLE = ("stdlib", "shakespeare", "folder")  # small datasets, always prepared completely unless they are streamed


def prepare_dataset(request: DatasetRequest, data_dir: Path) -> PreparedDataset:
    """Find, download or tokenize a dataset."""
    if request.dataset == "mix":
        return mixture(request, data_dir)
    known = CATALOG.get(request.dataset)
    if known and known.terms:
        say(f"{request.dataset}: licence {known.licence}, {known.terms}")
    request = request.as_named()
    if request.streaming:
        request = replace(request, shards=1)
    if request.dataset == "shards" and not request.shards_on_hub:
        return local_shards(request, data_dir / Path(request.data_path).expanduser())
    return _prepare(request, *place_of(request, data_dir), part=request.streaming or request.dataset not in WHOLE)


def more_shards(folder: Path, *, tokens: int, block_size: int) -> None:
    """Make further shards of a dataset until it holds this many tokens for training; 0: all.

    Raises DataError if its text has changed since its first shards were made.
    """
    recipe = read_dataset(folder / RECORD).recipe
    names = [field.name for field in fields(DatasetRequest) if field.name in recipe]
    request = DatasetRequest(**{name: recipe[name] for name in names}, tokens=tokens, block_size=block_size)
    if request.dataset == "shards" and not request.shards_on_hub:
        return
    place, current = place_of(request, folder.parent)
    if place != folder:
        raise DataError(
            f"the text of {folder} has changed while runs read it",
            why="names, sizes or times of its files are others",
            hint="restore the files, or start a new matrix",
        )
    _prepare(request, place, current, part=True)


def place_of(request: DatasetRequest, data_dir: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a dataset, and what its shards are made from."""
    recipe, label = request.recipe, request.dataset
    remote = request.shards_on_hub
    if remote and request.dataset != "shards":
        return data_dir / (remote.label if request.repository else label), recipe
    # The folder's name contains the text: changed text becomes a new dataset, and runs on the old one stay comparable.
    if request.dataset == "stdlib":
        recipe["python"] = platform.python_version()
        label = f"stdlib-{platform.python_version()}"
    elif request.dataset == "folder":
        recipe["files"] = text.fingerprint(text.local(data_dir, request.data_path))
    elif request.dataset == "hub" and request.text_on_hub:
        label = request.text_on_hub.label
    elif (known := CATALOG.get(request.dataset)) and known.by_language:
        label = f"{request.dataset}-{request.data_path or known.language}"
    # Sorted, so that the order of the fields does not matter. 8 digits: few recipes, and a name that can be typed.
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]
    return data_dir / (f"{remote.label}-{digest}" if remote else f"{label}-{request.tokenizer}-{digest}"), recipe


def _prepare(request: DatasetRequest, folder: Path, recipe: dict[str, Any], *, part: bool) -> PreparedDataset:
    """Make what is missing of a dataset. part: no more than is needed, also of a small one."""
    made = False
    if not _sufficient(folder, request, recipe):  # before the lock: no waiting if nothing is missing
        with locked(folder):
            # Again, because another process may have prepared it while this one waited.
            if made := not _sufficient(folder, request, recipe):
                if remote := request.shards_on_hub:
                    hub.fetch_shards(request, remote, folder, recipe)
                else:
                    _tokenize(request, folder, recipe, part=part)
    return _prepared(folder, request, part=part, made=made)


def _prepared(folder: Path, request: DatasetRequest, *, part: bool, made: bool) -> PreparedDataset:
    """Return the prepared dataset in a folder. part: only the required shards are read."""
    record = read_dataset(folder / RECORD)
    train = [shard for shard in record.shards if kind_of(shard.name) == "train"]
    val = [shard for shard in record.shards if kind_of(shard.name) == "val"]
    needed = request.enough(train_shards(record)) if part else None
    read = train[:needed]
    return PreparedDataset(
        path=str(folder),
        sha256=shards.folder_sha256([*read, *val]),
        vocab_size=record.vocab_size or 0,
        train_tokens=sum(shard.tokens for shard in read),
        train_shards=tuple(shard.tokens for shard in read),
        val_tokens=sum(shard.tokens for shard in val),
        shards=len(read) if part else 0,
        made=made,
    )


def _record_of(folder: Path, recipe: dict[str, Any]) -> DatasetFile | None:
    """Return dataset.json of a folder; None if it has another recipe, or does not match the files."""
    record = read_dataset_or_empty(folder / RECORD)
    same = record.recipe == recipe and record.shards
    return record if same and all(shards.is_unchanged(folder / shard.name, shard) for shard in record.shards) else None


def _sufficient(folder: Path, request: DatasetRequest, recipe: dict[str, Any]) -> bool:
    """Return whether a folder has all that the request needs."""
    record = _record_of(folder, recipe)
    return record is not None and bool(record.complete or request.enough(train_shards(record)))


def local_shards(request: DatasetRequest, folder: Path) -> PreparedDataset:
    """Check and hash the shards in the user's folder."""
    say(f"checking the shards in {folder}")
    size = tokenizer.load(request.tokenizer, folder).vocab_size
    about = {"dataset": request.dataset, "source": str(folder), "tokenizer": request.tokenizer}
    shards.describe(folder, size, **about, recipe=request.recipe)
    return _prepared(folder, request, part=request.streaming, made=False)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a dataset inside the context. The kernel releases the lock when the process exits."""
    # Next to the folder, because the lock must not create what it protects. The file stays: if it were removed, two
    # processes could hold locks on two files of the same name.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _tokenize(request: DatasetRequest, folder: Path, recipe: dict[str, Any], *, part: bool) -> None:
    """Write the shards of a text dataset, or continue writing. part: only as many as are needed."""
    known = _record_of(folder, recipe)
    if known is None:  # of another recipe, or damaged: shards without a record are overwritten
        (folder / RECORD).unlink(missing_ok=True)
    # The commit of the shards that exist: other documents would follow at their position otherwise.
    corpus = corpus_of(request, folder, known.commit if known else None)
    size = sum(file.size for file in corpus.parts)
    start = f", starting at file {known.position[0] + 1}" if known and known.position else ""
    say(f"writing {folder} from {corpus.source}: {plural(len(corpus.parts), 'file')}, {disk_size(size)}{start}")
    if part and request.tokens:
        say(f"until {count(request.tokens)} tokens for the longest run are written")
    ShardWriter(request, corpus, folder, recipe, request.enough if part else lambda _: False).run()
    hub.clear(folder)


def corpus_of(request: DatasetRequest, folder: Path, commit: str | None) -> text.Corpus:
    """Return the files of a dataset. commit: of the shards that exist."""
    if request.dataset == "stdlib":
        return text.standard_library(f"{platform.python_implementation()} {platform.python_version()}")
    if request.dataset == "folder":
        return text.local(folder.parent, request.data_path)
    if remote := request.text_on_hub:
        return text.from_hub(hub.listing(remote, commit), folder)
    return text.from_web(CATALOG[request.dataset], folder)


def mixture(request: DatasetRequest, data_dir: Path) -> PreparedDataset:
    """Prepare the datasets of a mix, and list them with weights and hashes in its own dataset.json."""
    if request.tokenizer not in ("gpt2", "byte"):
        raise ConfigError(
            f"a mix cannot use the {request.tokenizer} tokenizer",
            why="char and bpe have a separate vocabulary for each dataset",
            hint="choose TOKENIZER=gpt2 or TOKENIZER=byte",
        )
    parts = parse_mix(request.mix)
    total = sum(part.weight for part in parts)
    sources: list[SourceEntry] = []
    prepared: list[PreparedDataset] = []
    for part in parts:
        found = prepare_dataset(request.part(part.dataset, part.path, share=part.weight / total), data_dir)
        alone = sum(other.dataset == part.dataset for other in parts) == 1  # losses are logged by name
        entry = SourceEntry(
            name=part.dataset if alone else f"{part.dataset}={part.path}",
            path=found.path,
            weight=part.weight,
            shards=found.shards,
            sha256=found.sha256,
            train_tokens=found.train_tokens,
        )
        prepared.append(found)
        sources.append(entry)
    sha256 = sha256_of_mix((source.name, source.weight, source.sha256) for source in sources)
    mixed = PreparedDataset(
        path=str(data_dir / f"mix-{sha256[:12]}"),
        sha256=sha256,
        vocab_size=prepared[0].vocab_size,
        train_tokens=sum(found.train_tokens for found in prepared),
        train_shards=tuple(tokens for found in prepared for tokens in found.train_shards),
        val_tokens=sum(found.val_tokens for found in prepared),
        shards=0,
        made=any(found.made for found in prepared),
        parts=tuple((source.name, source.weight / total, source.train_tokens) for source in sources),
    )
    path = Path(mixed.path, RECORD)
    if read_dataset_or_empty(path).sha256 != sha256:  # DATA_DIR may be read-only by now
        about = {"dataset": "mix", "source": request.mix, "tokenizer": request.tokenizer, "recipe": request.recipe}
        numbers = {name: getattr(mixed, name) for name in ("vocab_size", "sha256", "train_tokens", "val_tokens")}
        entries = [as_json(source) for source in sources]
        write_json(path, {**about, **numbers, "complete": not request.streaming, "sources": entries})
    return mixed
