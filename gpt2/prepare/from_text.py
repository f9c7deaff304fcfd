"""Text of any origin to token shards: which files it is, what it will take, and the shards."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from gpt2 import shards
from gpt2.prepare import hub, room, text, writer
from gpt2.prepare.catalog import CATALOG, TEXT_FILES, Repository, repository
from gpt2.prepare.progress import readable, say
from gpt2.prepare.wanted import Wanted

BYTES_PER_TEXT_BYTE = {"byte": 2.0, "char": 2.0, "gpt2": 0.7, "bpe": 1.0}  # of shards, for the check of the disk


def make(wanted: Wanted, data_dir: Path, folder: Path, recipe: dict[str, Any], *, part: bool) -> None:
    """Write the shards of a dataset of text, or go on with them. part: no more than are needed."""
    known = _former(folder, recipe)
    corpus, source, commit = _corpus(wanted, data_dir, folder, known)
    size = sum(file.size for file in corpus.parts)
    far = f", from file {known['position'][0] + 1} on" if known and known.get("position") else ""
    say(f"making {folder} from {source}: {len(corpus.parts)} files, {readable(size, 'B')}{far}")
    if part and wanted.tokens:
        say(f"as many of them as the {readable(wanted.tokens)} tokens of the longest run take")
    room.check(folder, _needed(wanted, corpus, size, part=part))
    about = {
        "dataset": wanted.dataset,
        "source": source,
        "commit": commit,
        "tokenizer": wanted.tokenizer,
        "recipe": recipe,
    }
    recipe_ = writer.Recipe(
        name=wanted.dataset,
        tokenizer=wanted.tokenizer,
        column=wanted.text_column,
        val_percent=wanted.val_percent,
        shard_tokens=wanted.shard_tokens,
        bpe_vocab_size=wanted.bpe_vocab_size,
    )
    guessed = wanted.dataset == "stdlib" or (wanted.dataset == "folder" and "*" not in wanted.data_path)
    writer.write(recipe_, corpus, folder, about, wanted.enough if part else lambda _: False, guessed=guessed)
    hub.clear(folder)


def _former(folder: Path, recipe: dict[str, Any]) -> dict[str, Any] | None:
    """Return the dataset.json to go on from; what does not fit to it is removed."""
    from gpt2.prepare import record_of

    known = record_of(folder, recipe)
    if known is None:
        (folder / shards.RECORD).unlink(missing_ok=True)
        for kind in shards.KINDS:
            for path in folder.glob(shards.KINDS[kind][0]):
                path.unlink()
    return known


def _corpus(
    wanted: Wanted, data_dir: Path, folder: Path, known: dict[str, Any] | None
) -> tuple[text.Corpus, str, str | None]:
    """Return the files of a dataset, what to call them, and the commit that they are of."""
    if wanted.dataset == "stdlib":
        library = text.standard_library()
        return library, f"{platform.python_implementation()} {platform.python_version()} standard library", None
    if wanted.dataset == "folder":
        return text.local(data_dir, wanted.data_path), wanted.data_path, None
    origin: Any = repository(wanted.data_path, patterns=TEXT_FILES) if wanted.dataset == "hub" else None
    origin = origin or CATALOG[wanted.dataset].text
    if not isinstance(origin, Repository):
        return text.OnTheWeb(origin, folder), origin.url, None
    found = hub.listing(origin, known.get("commit") if known else None)
    return text.Remote(found, folder), origin.address, found.commit


def _needed(wanted: Wanted, corpus: text.Corpus, size: int, *, part: bool) -> int:
    """Return the bytes that the shards, and the largest file that is fetched, will take at most."""
    largest = max(file.size for file in corpus.parts) if isinstance(corpus, text.Remote) else 0
    packed = 3 if any(not file.plain for file in corpus.parts) else 1  # what Parquet and gzip save
    of_all = int(size * packed * BYTES_PER_TEXT_BYTE[wanted.tokenizer])
    return largest + (min(of_all, 2 * (wanted.tokens + wanted.shard_tokens)) if part and wanted.tokens else of_all)
