"""Prepare a dataset from any source: prebuilt shards, text, the user's shards, or a mix.

A prepared dataset is recognized by its dataset.json, without heavy imports or network access.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpt2.data import shards, tokenizer
from gpt2.prepare import foreign, hub, prebuilt, text, writer
from gpt2.prepare.catalog import (
    CATALOG,
    HUB,
    SHARD_FILES,
    TEXT_FILES,
    DatasetOrigin,
    DatasetRequest,
    PreparedDataset,
    Repository,
    WebFile,
    digest,
    repository,
    vocabulary,
)
from gpt2.prepare.progress import check_space, say
from kmatrix.errors import ConfigError, DataError
from kmatrix.records.dataset import (
    DROPPED,
    KINDS,
    RECORD,
    STREAM,
    DatasetFile,
    ShardInfo,
    StreamFile,
    kind_of,
    read_dataset,
    read_dataset_or_empty,
    train_shards,
)
from kmatrix.records.decode import as_json, decode_optional
from kmatrix.records.files import read_json, write_json
from kmatrix.records.train_config import parse_mix
from kmatrix.text import count, disk_size, plural

DATASETS = ("stdlib", *CATALOG, "hub", "folder", "shards", "mix")
# Datasets that need a DATA_PATH
OWN_PATH = ("hub", "folder", "shards", *(name for name, it in CATALOG.items() if it.by_language and not it.language))
WHOLE = ("stdlib", "shakespeare", "folder")  # small datasets, always prepared completely

# Shard bytes, to estimate disk space: 2 bytes/token, and a token of gpt2 has about 3 to 4 bytes of English text
BYTES_PER_TEXT_BYTE = {"byte": 2.0, "char": 2.0, "gpt2": 0.7, "bpe": 1.0}


def prepare(dataset: str, data_dir: Path, data_path: str = "", tokenizer: str = "byte", **more: Any) -> dict[str, Any]:
    """Prepare one dataset and return it as JSON values. more: fields of DatasetRequest."""
    return prepare_dataset(
        DatasetRequest(dataset=dataset, tokenizer=tokenizer, data_path=data_path, **more), data_dir
    ).to_json()


def prepare_dataset(request: DatasetRequest, data_dir: Path) -> PreparedDataset:
    """Find, download or tokenize a dataset."""
    _check(request)
    if request.dataset == "mix":
        return mixture(request, data_dir)
    known = CATALOG.get(request.dataset)
    if request.stream and request.dataset == "shards" and not request.data_path.startswith(HUB):
        raise ConfigError("local token shards cannot be streamed", hint="set DATA_STREAMING=n: they are read at once")
    if known:
        _say_terms(request.dataset)
        known.text_of(request.data_path)  # refuses an invalid language
        request = replace(request, text_column=known.column or request.text_column)
    if found := shards_on_hub(request):
        folder = data_dir / _folder_of_shards(request, found)
        return open_stream(request, data_dir, folder) if request.stream else _download_shards(request, folder, found)
    if request.dataset == "shards":
        return local_shards(request, data_dir / Path(request.data_path).expanduser())
    return _tokenize_text(request, data_dir)


def shards_on_hub(request: DatasetRequest) -> Repository | None:
    """Return the repository of a dataset that is token shards on Hugging Face, else None."""
    known = CATALOG.get(request.dataset)
    if known and request.prebuilt:
        return request.larger or known.shards
    if request.dataset == "shards" and request.data_path.startswith(HUB):
        return repository(request.data_path, patterns=SHARD_FILES)
    return None


def _folder_of_shards(request: DatasetRequest, found: Repository) -> str:
    if request.dataset == "shards":
        return f"{found.name.replace('/', '--')}-{digest(request.recipe)}"
    return found.name.replace("/", "--") if request.larger else request.dataset


def _say_terms(dataset: str) -> None:
    """Print the licence of a dataset that does not allow every use, also if it is prepared already."""
    if terms := CATALOG[dataset].terms:
        say(f"{dataset}: licence {CATALOG[dataset].licence}, {terms}")


def _check(request: DatasetRequest) -> None:
    if request.dataset in OWN_PATH and not request.data_path:
        raise ConfigError(f"the dataset {request.dataset} needs a path", hint="set CONFIG_GPT2_DATA_PATH")
    if request.dataset not in DATASETS:
        raise ConfigError(f"unknown dataset {request.dataset!r}", why=f"known: {', '.join(DATASETS)}")


def prepared(
    folder: Path, request: DatasetRequest, vocab_size: int | None, *, part: bool, made: bool
) -> PreparedDataset:
    """Return the prepared dataset in a folder. vocab_size: of dataset.json.  part: read only the required shards."""
    listed = shards.recorded(folder)
    train = [shard for shard in listed if kind_of(shard.name) == "train"]
    val = [shard for shard in listed if kind_of(shard.name) == "val"]
    needed = request.shards_needed([shard.tokens for shard in train]) if part else len(train)
    return PreparedDataset(
        path=str(folder),
        sha256=shards.folder_sha256([*train[:needed], *val]),
        vocab_size=vocab_size or vocabulary(request.tokenizer),
        train_tokens=sum(shard.tokens for shard in train[:needed]),
        train_shards=tuple(shard.tokens for shard in train[:needed]),
        val_tokens=sum(shard.tokens for shard in val),
        shards=needed if part else 0,
        made=made,
    )


def record_of(folder: Path, recipe: dict[str, Any]) -> DatasetFile | None:
    """Return dataset.json of a folder; None if it has another recipe, or does not match the files."""
    try:
        record = read_dataset_or_empty(folder / RECORD)
        unchanged = all(_unchanged(folder / shard.name, shard) for shard in shards.recorded(folder))
    except OSError:
        return None
    return record if record.recipe == recipe and record.shards and unchanged else None


def _unchanged(path: Path, shard: ShardInfo) -> bool:
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns) == (shard.size, shard.mtime_ns)


def _sufficient_record(folder: Path, request: DatasetRequest, recipe: dict[str, Any]) -> DatasetFile | None:
    """Return dataset.json of a folder if the request needs nothing more, else None."""
    record = record_of(folder, recipe)  # None also if the user replaced a shard
    train = [shard for shard in shards.recorded(folder) if kind_of(shard.name) == "train"]
    return record if record and (record.complete or request.is_satisfied_by(train)) else None


def local_shards(request: DatasetRequest, folder: Path) -> PreparedDataset:
    """Check and hash the shards in the user's folder."""
    say(f"checking the shards in {folder}")
    foreign.check_tokenizer(folder, request.tokenizer)
    size = vocabulary(request.tokenizer)
    if request.tokenizer in ("char", "bpe"):
        size = tokenizer.load(request.tokenizer, folder).vocab_size
    record = shards.describe(
        folder,
        size,
        dataset=request.dataset,
        source=str(folder),
        tokenizer=request.tokenizer,
        recipe=request.recipe,
    )
    return prepared(folder, request, record["vocab_size"], part=False, made=False)


def _download_shards(request: DatasetRequest, folder: Path, found: Repository) -> PreparedDataset:
    """Return prebuilt shards from Hugging Face, and download the missing ones."""
    record = _sufficient_record(folder, request, request.recipe)  # before the lock: no waiting if nothing is missing
    if record:
        return prepared(folder, request, record.vocab_size, part=True, made=False)
    if _has_foreign_shards(folder, found):
        return local_shards(request, folder)
    with locked(folder):
        # Again, because another process may have prepared it while this one waited.
        missing = not _sufficient_record(folder, request, request.recipe)
        if missing:
            try:
                listing = prebuilt.listed(request, found, folder)
            except DataError as error:  # without a network, shards that were copied here by hand are good enough
                if not _has_shards(folder) or record_of(folder, request.recipe):
                    raise
                say(f"note: {error.what}: using the shards in {folder}")
                return local_shards(request, folder)
            prebuilt.fetch(request, listing, folder)
    return prepared(folder, request, read_dataset(folder / RECORD).vocab_size, part=True, made=missing)


def _has_shards(folder: Path) -> bool:
    return all(any(folder.glob(pattern)) for pattern in ("*_train_*.bin", "*_val_*.bin"))


def _has_foreign_shards(folder: Path, found: Repository) -> bool:
    """Return whether the user put other shards into the folder than those of the repository."""
    here = [path for kind in KINDS for pattern in KINDS[kind] for path in folder.glob(pattern)]
    return _has_shards(folder) and not any(path.match(pattern) for path in here for pattern in found.patterns)


def _tokenize_text(request: DatasetRequest, data_dir: Path) -> PreparedDataset:
    """Return the shards of a text dataset, and tokenize what is missing."""
    part = request.dataset not in WHOLE
    recipe = {**request.recipe, **version_of(request, data_dir)}
    folder = data_dir / f"{_folder_label(request)}-{request.tokenizer}-{digest(recipe)}"
    if request.stream:
        return open_stream(request, data_dir, folder)
    record = _sufficient_record(folder, request, recipe)
    if record:
        return prepared(folder, request, record.vocab_size, part=part, made=False)

    with locked(folder):
        missing = not _sufficient_record(folder, request, recipe)  # again: see _download_shards
        if missing:
            make(request, data_dir, folder, recipe, part=part)
    return prepared(folder, request, read_dataset(folder / RECORD).vocab_size, part=part, made=missing)


def version_of(request: DatasetRequest, data_dir: Path) -> dict[str, str]:
    """Return the part of a recipe that identifies the text: the Python version, or a fingerprint of the files."""
    # The folder's name contains it: changed text becomes a new dataset, and runs on the old one stay comparable.
    if request.dataset == "stdlib":
        return {"python": platform.python_version()}
    if request.dataset == "folder":
        return {"files": text.fingerprint(text.local(data_dir, request.data_path))}
    return {}


def _folder_label(request: DatasetRequest) -> str:
    if request.dataset == "stdlib":
        return f"stdlib-{platform.python_version()}"
    if request.dataset == "hub":
        return repository(request.data_path, patterns=TEXT_FILES).name.replace("/", "--")
    named = CATALOG.get(request.dataset)
    if named and named.by_language:
        return f"{request.dataset}-{request.data_path or named.language}"
    return request.dataset


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


def make(request: DatasetRequest, data_dir: Path, folder: Path, recipe: dict[str, Any], *, part: bool) -> None:
    """Write the shards of a text dataset, or continue writing. part: only as many as are needed."""
    # Find the files
    known = _record_to_continue(folder, recipe)
    corpus, source, commit = corpus_of(request, data_dir, folder, known.commit if known else None)
    size = sum(file.size for file in corpus.parts)
    start = f", starting at file {known.position[0] + 1}" if known and known.position else ""
    say(f"writing {folder} from {source}: {plural(len(corpus.parts), 'file')}, {disk_size(size)}{start}")
    if part and request.tokens:
        say(f"until {count(request.tokens)} tokens for the longest run are written")
    check_space(folder, _needed(request, corpus, size, part=part))

    # Write the shards
    origin = DatasetOrigin(
        dataset=request.dataset, source=source, commit=commit, tokenizer=request.tokenizer, recipe=recipe
    )
    enough = request.is_satisfied_by if part else lambda _: False
    shard_writer(request, corpus, folder, origin, enough).run()
    hub.clear(folder)


def shard_writer(
    request: DatasetRequest,
    corpus: text.Corpus,
    folder: Path,
    origin: DatasetOrigin,
    enough: Callable[[Sequence[ShardInfo]], bool],
    *,
    first: int | None = None,
) -> writer.ShardWriter:
    """Return the writer of the shards of a text dataset. first: number of an earlier shard to begin with."""
    tokenizing = writer.Recipe(
        name=request.dataset,
        tokenizer=request.tokenizer,
        column=request.text_column,
        val_percent=request.val_percent,
        shard_tokens=request.shard_tokens,
        bpe_vocab_size=request.bpe_vocab_size,
    )
    # A folder may contain images; if the user named files with a pattern, each of them must be text.
    guessed = request.dataset == "stdlib" or (request.dataset == "folder" and "*" not in request.data_path)
    return writer.ShardWriter(tokenizing, corpus, folder, origin, enough, guessed=guessed, first=first)


def open_stream(request: DatasetRequest, data_dir: Path, folder: Path) -> PreparedDataset:
    """Write what the shards of a dataset are made from to stream.json, and return it without any shards.

    The commit of a repository is the one of the shards that exist, else the newest.
    """
    if request.tokenizer not in ("gpt2", "byte"):
        raise ConfigError(
            f"data in the tokens of {request.tokenizer} cannot be streamed",
            why="its vocabulary is known only after the text was read",
            hint="choose TOKENIZER=gpt2 or TOKENIZER=byte",
        )
    drop = request.stream == "drop"
    folder = folder.with_name(f"{folder.name}{DROPPED}") if drop else folder  # what other runs read is never deleted
    recipe = {**request.recipe, **version_of(request, data_dir)}
    if shards_on_hub(request):
        recipe = request.recipe
    elif request.tokenizer == "gpt2":
        tokenizer.fetch_gpt2()  # now: it fails before the run instead of in it
    former = decode_optional(folder / STREAM, StreamFile)
    if former and former.recipe == recipe:
        source, commit = former.source, former.commit
    else:
        source, commit = _source_of(request, data_dir, record_of(folder, recipe))
    sha256 = hashlib.sha256(json.dumps([recipe, source, commit], sort_keys=True).encode()).hexdigest()
    asked = {**asdict(request), "tokens": 0, "shards": 0, "block_size": 1}
    stream = StreamFile(
        request=asked,
        data_dir=str(data_dir),
        source=source,
        commit=commit,
        recipe=recipe,
        vocab_size=vocabulary(request.tokenizer),
        drop=drop,
        sha256=sha256,
    )
    if former != stream:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / STREAM, as_json(stream))
    say(f"{request.dataset}: {source} is tokenized while runs read it, in {folder}")
    return PreparedDataset(
        path=str(folder),
        sha256=sha256,
        vocab_size=stream.vocab_size,
        train_tokens=0,
        val_tokens=0,
        shards=0,
        made=former is None,
    )


def _source_of(request: DatasetRequest, data_dir: Path, known: DatasetFile | None) -> tuple[str, str | None]:
    """Return the name of a dataset's source and its commit. known: its dataset.json."""
    if found := shards_on_hub(request):
        return found.address, known.commit if known and known.commit else hub.listing(found).commit
    origin = _origin(request)
    if known and known.commit and isinstance(origin, Repository):
        return origin.address, known.commit
    _, source, commit = corpus_of(request, data_dir, data_dir, known.commit if known else None)
    return source, commit


def _record_to_continue(folder: Path, recipe: dict[str, Any]) -> DatasetFile | None:
    """Return the dataset.json to continue from; delete shards if there is none that matches."""
    known = record_of(folder, recipe)
    if known is None:  # the record first: if this is interrupted, the remaining shards are still recognized as invalid
        (folder / RECORD).unlink(missing_ok=True)
        for kind in KINDS:
            for path in folder.glob(KINDS[kind][0]):
                path.unlink()
    return known


def _origin(request: DatasetRequest) -> Repository | WebFile | None:
    """Return where the text of a dataset is downloaded from; None if it is on this machine."""
    if request.dataset in ("stdlib", "folder"):
        return None
    if request.dataset == "hub":
        return repository(request.data_path, patterns=TEXT_FILES)
    return CATALOG[request.dataset].text_of(request.data_path)


def corpus_of(
    request: DatasetRequest, data_dir: Path, folder: Path, commit: str | None
) -> tuple[text.Corpus, str, str | None]:
    """Return the files of a dataset, a name for them, and their commit. commit: of the shards that exist."""
    if request.dataset == "stdlib":
        library = text.standard_library()
        return library, f"{platform.python_implementation()} {platform.python_version()} standard library", None
    origin = _origin(request)
    if origin is None:
        return text.local(data_dir, request.data_path), request.data_path, None
    if isinstance(origin, WebFile):
        return text.WebCorpus(origin, folder), origin.url, None
    # The commit of the shards that exist: other documents would follow at their position otherwise.
    found = hub.listing(origin, commit)
    return text.HubCorpus(found, folder), origin.address, found.commit


def _needed(request: DatasetRequest, corpus: text.Corpus, size: int, *, part: bool) -> int:
    """Return an upper bound of the bytes for the shards and the largest downloaded file."""
    largest = max(file.size for file in corpus.parts) if isinstance(corpus, text.HubCorpus) else 0
    packed = 3 if any(not file.plain for file in corpus.parts) else 1  # compression of Parquet and gzip
    of_all = int(size * packed * BYTES_PER_TEXT_BYTE[request.tokenizer])
    # 2 bytes/token, and the last shard is always completed.
    return largest + (min(of_all, 2 * (request.tokens + request.shard_tokens)) if part and request.tokens else of_all)


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
        "complete": True,
        "sha256": sha256,
        "train_tokens": sum(source["train_tokens"] for source in sources),
        "val_tokens": sum(source["val_tokens"] for source in sources),
        "sources": sources,
    }
    total = sum(source["weight"] for source in sources)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RECORD
    if not path.exists() or read_json(path) != {"schema": 1, **value}:
        write_json(path, value)
    return PreparedDataset(
        path=str(folder),
        sha256=sha256,
        vocab_size=vocabulary(request.tokenizer),
        train_tokens=int(value["train_tokens"]),
        train_shards=train_shards(read_dataset(path)),
        val_tokens=int(value["val_tokens"]),
        shards=0,
        made=made,
        parts=tuple((source["name"], source["weight"] / total, source["train_tokens"]) for source in sources),
    )
