"""Prepare a dataset from any source: prebuilt shards, text, the user's shards, or a mix.

A prepared dataset is recognized by its dataset.json, without heavy imports or network access.
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gpt2.data import shards, tokenizer
from gpt2.prepare import hub, text, writer
from gpt2.prepare.catalog import (
    CATALOG,
    HUB,
    SHARD_FILES,
    TEXT_FILES,
    DatasetRequest,
    PreparedDataset,
    Repository,
    digest,
    repository,
    vocabulary,
)
from gpt2.prepare.progress import say
from kmatrix.errors import ConfigError, DataError
from kmatrix.records.dataset import KINDS, RECORD, DatasetFile, kind_of, read_dataset, read_dataset_or_empty
from kmatrix.records.dataset import train_shards as tokens_of_shards
from kmatrix.records.files import read_json, write_json
from kmatrix.records.train_config import parse_mix
from kmatrix.text import count, disk_size, plural

DATASETS = ("stdlib", *CATALOG, "hub", "folder", "shards", "mix")
# Datasets that need a DATA_PATH
OWN_PATH = ("hub", "folder", "shards", *(name for name, it in CATALOG.items() if it.by_language and not it.language))
WHOLE = ("stdlib", "shakespeare", "folder")  # small datasets, always prepared completely unless they are streamed


def prepare(dataset: str, data_dir: Path, data_path: str = "", tokenizer: str = "byte", **more: Any) -> dict[str, Any]:
    """Prepare one dataset and return it as JSON values. more: fields of DatasetRequest."""
    return prepare_dataset(
        DatasetRequest(dataset=dataset, tokenizer=tokenizer, data_path=data_path, **more), data_dir
    ).to_json()


def prepare_dataset(request: DatasetRequest, data_dir: Path) -> PreparedDataset:
    """Find, download or tokenize a dataset."""
    if request.dataset not in DATASETS:
        raise ConfigError(f"unknown dataset {request.dataset!r}", why=f"known: {', '.join(DATASETS)}")
    if request.dataset in OWN_PATH and not request.data_path:
        raise ConfigError(f"the dataset {request.dataset} needs a path", hint="set CONFIG_GPT2_DATA_PATH")
    if request.dataset == "mix":
        return mixture(request, data_dir)
    if known := CATALOG.get(request.dataset):
        if known.terms:
            say(f"{request.dataset}: licence {known.licence}, {known.terms}")
        larger = known.larger if request.prebuilt and request.tokens > known.above else None
        request = replace(
            request, text_column=known.column or request.text_column, repository=larger.name if larger else ""
        )
    elif is_local_shards(request):
        return local_shards(request, data_dir / Path(request.data_path).expanduser())
    if request.streaming:
        request = replace(request, shards=1)
    return _prepare(request, data_dir, *place_of(request, data_dir))


def more_shards(folder: Path, *, tokens: int, block_size: int) -> None:
    """Make further shards of a dataset until it holds this many tokens for training; 0: all.

    Raises DataError if its text has changed since its first shards were made.
    """
    recipe = read_dataset(folder / RECORD).recipe
    names = [field.name for field in fields(DatasetRequest) if field.name in recipe]
    request = DatasetRequest(**{name: recipe[name] for name in names}, tokens=tokens, block_size=block_size)
    if is_local_shards(request):
        return
    place, current = place_of(request, folder.parent)
    if place != folder:
        raise DataError(
            f"the text of {folder} has changed while runs read it",
            why="names, sizes or times of its files are others",
            hint="restore the files, or start a new matrix",
        )
    _prepare(request, folder.parent, place, current, part=True)


def is_local_shards(request: DatasetRequest) -> bool:
    """Return whether a dataset is a folder of the user's with shards."""
    return request.dataset == "shards" and not request.data_path.startswith(HUB)


def shards_on_hub(request: DatasetRequest) -> Repository | None:
    """Return the repository of a dataset that is token shards on Hugging Face, else None."""
    if request.dataset == "shards":
        return repository(request.data_path, patterns=SHARD_FILES)
    return request.prebuilt


def place_of(request: DatasetRequest, data_dir: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a dataset, and what its shards are made from."""
    recipe, label = request.recipe, request.dataset
    if found := shards_on_hub(request):
        if request.dataset == "shards":
            return data_dir / f"{found.name.replace('/', '--')}-{digest(recipe)}", recipe
        return data_dir / (found.name.replace("/", "--") if request.repository else label), recipe
    # The folder's name contains the text: changed text becomes a new dataset, and runs on the old one stay comparable.
    known = CATALOG.get(request.dataset)
    if request.dataset == "stdlib":
        recipe["python"] = platform.python_version()
        label = f"stdlib-{platform.python_version()}"
    elif request.dataset == "folder":
        recipe["files"] = text.fingerprint(text.local(data_dir, request.data_path))
    elif request.dataset == "hub":
        label = repository(request.data_path, patterns=TEXT_FILES).name.replace("/", "--")
    elif known and known.text_of(request.data_path) and known.by_language:  # refuses an invalid language
        label = f"{request.dataset}-{request.data_path or known.language}"
    return data_dir / f"{label}-{request.tokenizer}-{digest(recipe)}", recipe


def _prepare(
    request: DatasetRequest, data_dir: Path, folder: Path, recipe: dict[str, Any], *, part: bool = False
) -> PreparedDataset:
    """Make what is missing of a dataset. part: no more than is needed, also of a small one."""
    part = part or request.streaming or request.dataset not in WHOLE
    made = False
    if not _sufficient(folder, request, recipe):  # before the lock: no waiting if nothing is missing
        with locked(folder):
            # Again, because another process may have prepared it while this one waited.
            if made := not _sufficient(folder, request, recipe):
                if found := shards_on_hub(request):
                    hub.fetch_shards(request, found, folder, recipe)
                else:
                    _tokenize(request, data_dir, folder, recipe, part=part)
    return _prepared(folder, request, part=part, made=made)


def _prepared(folder: Path, request: DatasetRequest, *, part: bool, made: bool) -> PreparedDataset:
    """Return the prepared dataset in a folder. part: only the required shards are read."""
    record = read_dataset(folder / RECORD)
    train = [shard for shard in record.shards if kind_of(shard.name) == "train"]
    val = [shard for shard in record.shards if kind_of(shard.name) == "val"]
    needed = request.shards_needed([shard.tokens for shard in train]) if part else len(train)
    return PreparedDataset(
        path=str(folder),
        sha256=shards.folder_sha256([*train[:needed], *val]),
        vocab_size=record.vocab_size or vocabulary(request.tokenizer),
        train_tokens=sum(shard.tokens for shard in train[:needed]),
        train_shards=tuple(shard.tokens for shard in train[:needed]),
        val_tokens=sum(shard.tokens for shard in val),
        shards=needed if part else 0,
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
    train = [shard for shard in record.shards if kind_of(shard.name) == "train"] if record else []
    return record is not None and (bool(record.complete) or request.is_satisfied_by(train))


def local_shards(request: DatasetRequest, folder: Path) -> PreparedDataset:
    """Check and hash the shards in the user's folder."""
    say(f"checking the shards in {folder}")
    size = vocabulary(request.tokenizer)
    if request.tokenizer in ("char", "bpe"):
        size = tokenizer.load(request.tokenizer, folder).vocab_size
    about = {"dataset": request.dataset, "source": str(folder), "tokenizer": request.tokenizer}
    shards.describe(folder, size, **about, recipe=request.recipe)
    part = replace(request, shards=1) if request.streaming else request
    return _prepared(folder, part, part=request.streaming, made=False)


def lock_path(folder: Path) -> Path:
    """Return the file that processes lock to write to a dataset."""
    return folder.parent / f".{folder.name}.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a dataset inside the context. The kernel releases the lock when the process exits."""
    # Next to the folder, because the lock must not create what it protects. The file stays: if it were removed, two
    # processes could hold locks on two files of the same name.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock_path(folder).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _tokenize(request: DatasetRequest, data_dir: Path, folder: Path, recipe: dict[str, Any], *, part: bool) -> None:
    """Write the shards of a text dataset, or continue writing. part: only as many as are needed."""
    known = _record_of(folder, recipe)
    if known is None:  # the record first: if this is interrupted, the remaining shards are still recognized as invalid
        (folder / RECORD).unlink(missing_ok=True)
        for kind in KINDS:
            for path in folder.glob(KINDS[kind][0]):
                path.unlink()
    # The commit of the shards that exist: other documents would follow at their position otherwise.
    corpus, source, commit = corpus_of(request, data_dir, folder, known.commit if known else None)
    size = sum(file.size for file in corpus.parts)
    start = f", starting at file {known.position[0] + 1}" if known and known.position else ""
    say(f"writing {folder} from {source}: {plural(len(corpus.parts), 'file')}, {disk_size(size)}{start}")
    if part and request.tokens:
        say(f"until {count(request.tokens)} tokens for the longest run are written")
    about = {"dataset": request.dataset, "source": source, "commit": commit, "tokenizer": request.tokenizer}
    enough = request.is_satisfied_by if part else lambda _: False
    # A folder may contain images; if the user named files with a pattern, each of them must be text.
    guessed = request.dataset == "stdlib" or (request.dataset == "folder" and "*" not in request.data_path)
    writer.ShardWriter(request, corpus, folder, {**about, "recipe": recipe}, enough, guessed=guessed).run()
    hub.clear(folder)


def corpus_of(
    request: DatasetRequest, data_dir: Path, folder: Path, commit: str | None
) -> tuple[text.Corpus, str, str | None]:
    """Return the files of a dataset, a name for them, and their commit. commit: of the shards that exist."""
    if request.dataset == "stdlib":
        name = f"{platform.python_implementation()} {platform.python_version()} standard library"
        return text.standard_library(), name, None
    if request.dataset == "folder":
        return text.local(data_dir, request.data_path), request.data_path, None
    known = CATALOG.get(request.dataset)
    origin = known.text_of(request.data_path) if known else repository(request.data_path, patterns=TEXT_FILES)
    if known and origin is None:
        return text.from_web(known, folder), known.url, None
    assert origin
    found = hub.listing(origin, commit)
    return text.from_hub(found, folder), origin.address, found.commit


def mixture(request: DatasetRequest, data_dir: Path) -> PreparedDataset:
    """Prepare the datasets of a mix, and list them with weights and hashes in its own dataset.json."""
    try:
        parts = parse_mix(request.mix)
    except ValueError as error:
        raise ConfigError(
            f"invalid DATA_MIX={request.mix!r}",
            why=str(error),
            hint='example: DATA_MIX="finewebedu:65 tinystories:34 stdlib:1"',
        ) from None
    if request.tokenizer not in ("gpt2", "byte"):
        raise ConfigError(
            f"a mix cannot use the {request.tokenizer} tokenizer",
            why="char and bpe have a separate vocabulary for each dataset",
            hint="choose TOKENIZER=gpt2 or TOKENIZER=byte",
        )
    # Prepare each dataset for its share of the tokens
    total = sum(part.weight for part in parts)
    sources: list[dict[str, Any]] = []
    made = False
    for part in parts:
        found = prepare_dataset(request.part(part.dataset, part.path, share=part.weight / total), data_dir)
        made = made or found.made
        alone = sum(other.dataset == part.dataset for other in parts) == 1  # losses are logged by name
        name = part.dataset if alone else f"{part.dataset}={part.path}"
        about = {"name": name, "dataset": part.dataset, "weight": part.weight, **found.to_json()}
        sources.append({name: value for name, value in about.items() if name not in ("made", "parts")})
    return _write_mixture(request, data_dir, sources, made=made)


def _write_mixture(
    request: DatasetRequest, data_dir: Path, sources: list[dict[str, Any]], *, made: bool
) -> PreparedDataset:
    """Write dataset.json of a mix, and return the prepared mix. sources: its entries in dataset.json."""
    # Weights are part of the hash: they decide the order of the sequences, as the tokens do.
    lines = "".join(f"{source['name']}\0{source['weight']}\0{source['sha256']}\n" for source in sources)
    sha256 = hashlib.sha256(lines.encode()).hexdigest()
    folder = data_dir / f"mix-{sha256[:12]}"
    value = {
        "dataset": "mix",
        "source": request.mix,
        "tokenizer": request.tokenizer,
        "vocab_size": vocabulary(request.tokenizer),
        "recipe": request.recipe,
        "complete": not request.streaming,
        "sha256": sha256,
        "train_tokens": sum(source["train_tokens"] for source in sources),
        "val_tokens": sum(source["val_tokens"] for source in sources),
        "sources": sources,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RECORD
    if not path.exists() or read_json(path) != {"schema": 1, **value}:
        write_json(path, value)
    total = sum(source["weight"] for source in sources)
    return PreparedDataset(
        path=str(folder),
        sha256=sha256,
        vocab_size=vocabulary(request.tokenizer),
        train_tokens=int(value["train_tokens"]),
        train_shards=tokens_of_shards(read_dataset(path)),
        val_tokens=int(value["val_tokens"]),
        shards=0,
        made=made,
        parts=tuple((source["name"], source["weight"] / total, source["train_tokens"]) for source in sources),
    )
