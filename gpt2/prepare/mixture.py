"""A mix of datasets: each made ready as far as its share needs, and a folder that says which they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2 import shards
from gpt2.prepare.wanted import Answer, Wanted, vocabulary
from kmatrix import mix
from kmatrix.errors import ConfigError
from kmatrix.records import read_json, write_json

Ready = Callable[[Wanted, Path], Answer]


def mixture(wanted: Wanted, data_dir: Path, ready: Ready) -> Answer:
    """Make the datasets of a mix ready. Its dataset.json lists them, with their weights and hashes."""
    try:
        parts = mix.parse(wanted.mix)
    except ValueError as error:
        raise ConfigError(
            f"DATA_MIX={wanted.mix!r} cannot be read",
            why=str(error),
            fix='write it like DATA_MIX="finewebedu:65 tinystories:34 stdlib:1"',
        ) from None
    if wanted.tokenizer not in ("gpt2", "byte"):
        raise ConfigError(
            f"a mix has no {wanted.tokenizer} tokenizer",
            why="char and bpe have a vocabulary for each dataset",
            fix="choose TOKENIZER=gpt2 or TOKENIZER=byte",
        )
    total = sum(part.weight for part in parts)
    sources: list[dict[str, Any]] = []
    made = False
    for part in parts:
        found = ready(wanted.part(part.dataset, part.path, share=part.weight / total), data_dir)
        made = made or found.made
        alone = sum(other.dataset == part.dataset for other in parts) == 1
        name = part.dataset if alone else f"{part.dataset}={part.path}"
        about = {"name": name, "dataset": part.dataset, "weight": part.weight, **found.to_json()}
        sources.append({name: value for name, value in about.items() if name not in ("made", "parts")})
    return _written(wanted, data_dir, sources, made=made)


def _written(wanted: Wanted, data_dir: Path, sources: list[dict[str, Any]], *, made: bool) -> Answer:
    lines = "".join(f"{source['name']}\0{source['weight']}\0{source['sha256']}\n" for source in sources)
    sha256 = hashlib.sha256(lines.encode()).hexdigest()
    folder = data_dir / f"mix-{sha256[:12]}"
    value = {
        "dataset": "mix",
        "source": wanted.mix,
        "tokenizer": wanted.tokenizer,
        "vocab_size": vocabulary(wanted.tokenizer),
        "recipe": wanted.recipe,
        "complete": True,
        "sha256": sha256,
        "train_tokens": sum(source["train_tokens"] for source in sources),
        "val_tokens": sum(source["val_tokens"] for source in sources),
        "sources": sources,
    }
    total = sum(source["weight"] for source in sources)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / shards.RECORD
    if not path.exists() or read_json(path) != {"schema": 1, **value}:
        write_json(path, value)
    return Answer(
        path=str(folder),
        sha256=sha256,
        vocab_size=vocabulary(wanted.tokenizer),
        train_tokens=int(value["train_tokens"]),
        val_tokens=int(value["val_tokens"]),
        shards=0,
        made=made,
        parts=tuple((source["name"], source["weight"] / total, source["train_tokens"]) for source in sources),
    )
