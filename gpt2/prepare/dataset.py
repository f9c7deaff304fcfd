"""Prepare a dataset from any source: prebuilt shards, text, the user's shards, or a mix.

A prepared dataset is recognized by its dataset.json, without heavy imports or network access.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gpt2.data import shards, tokenizer
from gpt2.prepare import hub, say, text
from gpt2.prepare.catalog import CATALOG, DatasetRequest
from gpt2.prepare.writer import ShardWriter
from kmatrix import locks
from kmatrix.errors import DataError
from kmatrix.forms import parse_mix
from kmatrix.records.dataset import (
    RECORD,
    Dataset,
    DatasetFile,
    SourceEntry,
    read_dataset,
    read_dataset_or_empty,
    sha256_of_mix,
    tokens_to_read,
    train_shards,
)
from kmatrix.records.decode import as_json
from kmatrix.records.files import write_json
from kmatrix.records.train_config import TrainConfig
from kmatrix.text import disk_size, plural

DATASETS = ("stdlib", *CATALOG, "hub", "folder", "shards", "mix")


def prepare_dataset(request: DatasetRequest, data_dir: Path) -> Dataset:
    """Find, download or tokenize a dataset."""
    if request.dataset == "mix":
        return mixture(request, data_dir)
    if request.named:
        say(f"{request.dataset}: licence {request.named['licence']}")
    request = request.as_named()
    if request.streaming:
        request = replace(request, shards=1)
    if request.dataset == "shards":  # the user's: they are checked and hashed
        folder = data_dir / Path(request.data_path).expanduser()
        size = tokenizer.load(request.tokenizer, folder).vocab_size
        about = {"dataset": "shards", "source": str(folder), "tokenizer": request.tokenizer}
        shards.describe(folder, size, **about, recipe=request.recipe)
        return _prepared(folder, request if request.streaming else replace(request, tokens=0, shards=0))
    return _prepare(request, *place_of(request, data_dir))


def prepare_for(config: TrainConfig) -> None:
    """Prepare all that a run with streamed data reads. Another process for the same dataset waits until this one ends.

    Raises DataError if a text has changed since its first shards were made.
    """
    folder = Path(config.data_path)
    mixed = read_dataset(folder / RECORD).sources
    total = sum(source.weight for source in mixed)
    for place, share in [(Path(source.path), source.weight / total) for source in mixed] or [(folder, 1.0)]:
        recipe = read_dataset(place / RECORD).recipe
        known = {field.name: recipe[field.name] for field in fields(DatasetRequest) if field.name in recipe}
        request = DatasetRequest(**known, tokens=tokens_to_read(config, share=share), block_size=config.block_size)
        if request.dataset != "shards":
            now, current = place_of(request, place.parent)
            if now != place:  # names, sizes or times of its files are others
                hint = "restore the files, or start a new matrix"
                raise DataError(f"the text of {place} has changed while runs read it", hint=hint)
            _prepare(request, place, current)


def place_of(request: DatasetRequest, data_dir: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a dataset, and what its shards are made from."""
    recipe = request.recipe
    if request.shards_on_hub:
        return data_dir / (request.repository.replace("/", "--") or request.dataset), recipe
    # The folder's name contains the text: changed text becomes a new dataset, and runs on the old one stay comparable.
    if request.dataset == "stdlib":
        recipe["python"] = platform.python_version()
    elif request.dataset == "folder":
        recipe["files"] = text.local(data_dir, request.data_path).fingerprint()
    # Sorted, so that the order of the fields does not matter. 8 digits: few recipes, and a name that can be typed.
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]
    return data_dir / f"{request.dataset}-{request.tokenizer}-{digest}", recipe


def _prepare(request: DatasetRequest, folder: Path, recipe: dict[str, Any]) -> Dataset:
    """Make what is missing of a dataset."""

    def is_made() -> bool:
        record = _record_of(folder, recipe)
        return record is not None and bool(record.complete or request.enough(train_shards(record)))

    if not is_made():  # before the lock: no waiting if nothing is missing
        with locked(folder):
            if not is_made():  # again, because another process may have prepared it while this one waited
                make = hub.fetch_shards if request.shards_on_hub else _tokenize
                make(request, folder, recipe)
                shutil.rmtree(folder / hub.DOWNLOADS, ignore_errors=True)
    return _prepared(folder, request)


def _prepared(folder: Path, request: DatasetRequest) -> Dataset:
    """Return the prepared dataset in a folder, with the shards that the request needs."""
    record = read_dataset(folder / RECORD)
    train, val = record.of_kind("train")[: request.enough(train_shards(record))], record.of_kind("val")
    return Dataset(
        path=str(folder),
        sha256=shards.folder_sha256([*train, *val]),
        vocab_size=record.vocab_size or 0,
        train_tokens=sum(shard.tokens for shard in train),
        train_shards=tuple(shard.tokens for shard in train),
        val_tokens=sum(shard.tokens for shard in val),
        shards=len(train),
    )


def _record_of(folder: Path, recipe: dict[str, Any]) -> DatasetFile | None:
    """Return dataset.json of a folder; None if it has another recipe, or does not match the files."""
    record = read_dataset_or_empty(folder / RECORD)
    same = record.recipe == recipe and record.shards
    return record if same and all(shards.is_recorded(folder / shard.name, shard) for shard in record.shards) else None


def locked(folder: Path) -> AbstractContextManager[None]:
    """Return a context in which this process has a dataset. The kernel releases the lock when the process exits."""
    # Next to the folder, because the lock must not create what it protects. The file stays: if it were removed, two
    # processes could hold locks on two files of the same name.
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.parent / f".{folder.name}.lock"
    if locks.is_held(lock):
        say(f"waiting for another process that prepares {folder}")
    return locks.locked(lock)


def _tokenize(request: DatasetRequest, folder: Path, recipe: dict[str, Any]) -> None:
    """Write the shards of a text dataset, or continue writing, until there are as many as are needed."""
    known = _record_of(folder, recipe)
    if known is None:  # of another recipe, or damaged: shards without a record are overwritten
        (folder / RECORD).unlink(missing_ok=True)
    if request.dataset == "stdlib":
        corpus = text.standard_library()
    elif request.dataset == "folder":
        corpus = text.local(folder.parent, request.data_path)
    elif remote := request.text_on_hub:
        # At the commit of the shards that exist: other documents would follow at their position otherwise.
        corpus = text.from_hub(hub.listing(remote, known.commit if known else None), folder)
    else:
        corpus = text.from_web(request.named, folder)
    size = disk_size(sum(file.size for file in corpus.parts))
    say(f"writing {folder} from {corpus.source}: {plural(len(corpus.parts), 'file')}, {size}")
    ShardWriter(request, corpus, folder, recipe).run()


def mixture(request: DatasetRequest, data_dir: Path) -> Dataset:
    """Prepare the datasets of a mix, and list them with weights and hashes in its own dataset.json."""
    parts = parse_mix(request.mix)
    names = [part.dataset for part in parts]
    total = sum(part.weight for part in parts)
    sources: list[SourceEntry] = []
    prepared: list[Dataset] = []
    for part in parts:
        tokens = request.tokens * part.weight // total + 1 if request.tokens else 0  # rounded up: 0 would mean all
        alone = replace(request, dataset=part.dataset, data_path=part.path, mix="", tokens=tokens, shards=0)
        prepared.append(found := prepare_dataset(alone, data_dir))
        name = part.dataset if names.count(part.dataset) == 1 else f"{part.dataset}={part.path}"  # losses have it
        about = {key: getattr(found, key) for key in ("path", "shards", "sha256", "train_tokens")}
        sources.append(SourceEntry(name=name, weight=part.weight, **about))
    sha256 = sha256_of_mix((source.name, source.weight, source.sha256) for source in sources)
    mixed = Dataset(
        path=str(data_dir / f"mix-{sha256[:12]}"),
        sha256=sha256,
        vocab_size=prepared[0].vocab_size,
        train_tokens=sum(found.train_tokens for found in prepared),
        train_shards=tuple(tokens for found in prepared for tokens in found.train_shards),
        val_tokens=sum(found.val_tokens for found in prepared),
        shards=0,
        parts=tuple((source.name, source.weight / total, source.train_tokens) for source in sources),
    )
    path = Path(mixed.path, RECORD)
    if read_dataset_or_empty(path).sha256 != sha256:  # DATA_DIR may be read-only by now
        about = {"dataset": "mix", "source": request.mix, "tokenizer": request.tokenizer, "recipe": request.recipe}
        numbers = {name: getattr(mixed, name) for name in ("vocab_size", "sha256", "train_tokens", "val_tokens")}
        entries = [as_json(source) for source in sources]
        write_json(path, {**about, **numbers, "complete": not request.streaming, "sources": entries})
    return mixed
