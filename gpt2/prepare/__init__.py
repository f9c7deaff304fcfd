"""Make a dataset ready, from whatever it comes, and say what it is.

A dataset that is ready is found by its dataset.json, before anything heavy is imported or any network is asked.
"""

from __future__ import annotations

import fcntl
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpt2 import shards
from gpt2.prepare.catalog import CATALOG, HUB, SHARD_FILES, TEXT_FILES, Repository, repository
from gpt2.prepare.progress import say
from gpt2.prepare.wanted import Answer, Wanted, digest, vocabulary
from gpt2.shards import ShardInfo
from kmatrix.errors import ConfigError, DataError, RecordError
from kmatrix.records import read_json

DATASETS = ("stdlib", *CATALOG, "hub", "folder", "shards", "mix")
OWN_PATH = ("hub", "folder", "shards")  # datasets that DATA_PATH says where to find
WHOLE = ("stdlib", "shakespeare", "folder")  # small ones: never a part of them


def prepare(dataset: str, data_dir: Path, data_path: str = "", tokenizer: str = "byte", **more: Any) -> dict[str, Any]:
    """Make one dataset ready, and return its path, hash, vocabulary and numbers of tokens. more: fields of Wanted."""
    return ready(Wanted(dataset=dataset, tokenizer=tokenizer, data_path=data_path, **more), data_dir).to_json()


def ready(wanted: Wanted, data_dir: Path) -> Answer:
    """Make a dataset ready: find it, fetch it or make it."""
    _check(wanted)
    if wanted.dataset == "mix":
        from gpt2.prepare.mixture import mixture

        return mixture(wanted, data_dir, ready)
    known = CATALOG.get(wanted.dataset)
    if known and known.shards and wanted.ready_made:
        return _fetched(wanted, data_dir / wanted.dataset, known.shards)
    if wanted.dataset == "shards" and wanted.data_path.startswith(HUB):
        found = repository(wanted.data_path, patterns=SHARD_FILES)
        return _fetched(wanted, data_dir / f"{found.name.replace('/', '--')}-{digest(wanted.recipe)}", found)
    if wanted.dataset == "shards":
        return local_shards(wanted, data_dir / Path(wanted.data_path).expanduser())
    return _from_text(wanted, data_dir)


def _check(wanted: Wanted) -> None:
    if wanted.dataset in OWN_PATH and not wanted.data_path:
        raise ConfigError(f"the dataset {wanted.dataset} needs a path", fix="set CONFIG_GPT2_DATA_PATH")
    if wanted.dataset not in DATASETS:
        raise ConfigError(f"there is no dataset {wanted.dataset!r}", why=f"known are {', '.join(DATASETS)}")


def answer(folder: Path, wanted: Wanted, record: dict[str, Any], *, part: bool, made: bool) -> Answer:
    """Return what is ready in a folder. record: its dataset.json.  part: only the shards that are needed are read."""
    listed = shards.recorded(folder)
    train = [shard for shard in listed if shards.kind_of(shard.name) == "train"]
    val = [shard for shard in listed if shards.kind_of(shard.name) == "val"]
    count = wanted.needed([shard.tokens for shard in train]) if part else len(train)
    return Answer(
        path=str(folder),
        sha256=shards.folder_sha256([*train[:count], *val]),
        vocab_size=int(record.get("vocab_size") or vocabulary(wanted.tokenizer)),
        train_tokens=sum(shard.tokens for shard in train[:count]),
        val_tokens=sum(shard.tokens for shard in val),
        shards=count if part else 0,
        made=made,
    )


def record_of(folder: Path, recipe: dict[str, Any]) -> dict[str, Any] | None:
    """Return dataset.json of a folder, None where it is of another recipe or speaks of files that are not there."""
    try:
        record = read_json(folder / shards.RECORD)
        unchanged = all(_unchanged(folder / shard.name, shard) for shard in shards.recorded(folder))
    except (RecordError, OSError):
        return None
    return record if record.get("recipe") == recipe and record.get("shards") and unchanged else None


def _unchanged(path: Path, shard: ShardInfo) -> bool:
    stat = path.stat()
    return (stat.st_size, stat.st_mtime_ns) == (shard.size, shard.mtime_ns)


def _whole(folder: Path, wanted: Wanted, recipe: dict[str, Any]) -> dict[str, Any] | None:
    """Return dataset.json of a folder in which nothing is left to do."""
    record = record_of(folder, recipe)
    train = [shard for shard in shards.recorded(folder) if shards.kind_of(shard.name) == "train"]
    return record if record and (record.get("complete") or wanted.enough(train)) else None


def local_shards(wanted: Wanted, folder: Path) -> Answer:
    """Check and hash the shards in a folder of the user's own."""
    say(f"checking the shards in {folder}")
    size = vocabulary(wanted.tokenizer)
    if wanted.tokenizer in ("char", "bpe"):
        from gpt2 import tokenizer

        size = tokenizer.load(wanted.tokenizer, folder).vocab_size
    about = {"dataset": wanted.dataset, "source": str(folder), "tokenizer": wanted.tokenizer, "recipe": wanted.recipe}
    record = shards.describe(folder, size, **about)
    return answer(folder, wanted, record, part=False, made=False)


def _fetched(wanted: Wanted, folder: Path, found: Repository) -> Answer:
    """Return ready-made shards of Hugging Face, the missing ones fetched."""
    record = _whole(folder, wanted, wanted.recipe)
    if record:
        return answer(folder, wanted, record, part=True, made=False)
    if _own_shards(folder, found):
        return local_shards(wanted, folder)
    from gpt2.prepare import ready_made

    with locked(folder):
        missing = not _whole(folder, wanted, wanted.recipe)
        if missing:
            try:
                listing = ready_made.listed(wanted, found, folder)
            except DataError as error:
                if not _has_shards(folder) or record_of(folder, wanted.recipe):
                    raise
                say(f"note: {error.what}: using the shards that lie in {folder}")
                return local_shards(wanted, folder)
            ready_made.fetch(wanted, listing, folder)
    return answer(folder, wanted, read_json(folder / shards.RECORD), part=True, made=missing)


def _has_shards(folder: Path) -> bool:
    return all(any(folder.glob(pattern)) for pattern in ("*_train_*.bin", "*_val_*.bin"))


def _own_shards(folder: Path, found: Repository) -> bool:
    """Say whether somebody put shards here that are not those of the repository."""
    here = [path for kind in shards.KINDS for pattern in shards.KINDS[kind] for path in folder.glob(pattern)]
    return _has_shards(folder) and not any(path.match(pattern) for path in here for pattern in found.patterns)


def _from_text(wanted: Wanted, data_dir: Path) -> Answer:
    """Return the shards of a dataset of text, made as far as they are needed."""
    part = wanted.dataset not in WHOLE
    recipe = {**wanted.recipe, **_version(wanted, data_dir)}
    folder = data_dir / f"{_label(wanted)}-{wanted.tokenizer}-{digest(recipe)}"
    record = _whole(folder, wanted, recipe)
    if record:
        return answer(folder, wanted, record, part=part, made=False)
    from gpt2.prepare import from_text

    with locked(folder):
        missing = not _whole(folder, wanted, recipe)
        if missing:
            from_text.make(wanted, data_dir, folder, recipe, part=part)
    return answer(folder, wanted, read_json(folder / shards.RECORD), part=part, made=missing)


def _version(wanted: Wanted, data_dir: Path) -> dict[str, str]:
    """Return what a recipe has beside what was asked: which text it was made from."""
    if wanted.dataset == "stdlib":
        return {"python": platform.python_version()}
    if wanted.dataset == "folder":
        from gpt2.prepare import text

        return {"files": text.fingerprint(text.local(data_dir, wanted.data_path))}
    return {}


def _label(wanted: Wanted) -> str:
    if wanted.dataset == "stdlib":
        return f"stdlib-{platform.python_version()}"
    if wanted.dataset == "hub":
        return repository(wanted.data_path, patterns=TEXT_FILES).name.replace("/", "--")
    return wanted.dataset


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a dataset's lock, which ends with the process, however it ends."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


__all__ = ["Answer", "Wanted", "prepare", "ready"]
