"""The weights that runs start from (INIT_FROM): read and compared with the runs before anything is made."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kmatrix.errors import ConfigError
from kmatrix.experiment.inputs.ask import ask, need_torch
from kmatrix.kconfig.tree import Assignment
from kmatrix.matrix.axes import Axes
from kmatrix.records.paths import ROOT
from kmatrix.records.train_config import SAME_AS_INITIAL, TrainConfig

SYMBOL = "GPT2_INIT_FROM"
SCRATCH = {"", "none"}  # values of the symbol without a checkpoint
BY_DATA = ("char", "bpe")  # tokenizers whose vocabulary is known only after the data are prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights:
    """The weights of a checkpoint."""

    path: str  # absolute
    sha256: str  # of names and values
    settings: Mapping[str, object]  # the fields in SAME_AS_INITIAL, as the checkpoint has them


def asked(base: Iterable[Assignment], axes: Axes) -> list[str]:
    """Return the checkpoints that the configuration names in a line, an axis or a rule."""
    return sorted({item.value for item in (*base, *axes.assignments) if item.name == SYMBOL} - SCRATCH)


def read_initial(texts: Collection[str]) -> dict[str, InitialWeights]:
    """Return the weights of each checkpoint by the text that names it. Relative names start at the project's root.

    Raises ConfigError if one is missing, damaged or not a checkpoint, and LaunchError without PyTorch.
    """
    paths = {text: (ROOT / Path(text).expanduser()).resolve() for text in texts}
    for text, path in paths.items():
        if not path.is_file():
            raise ConfigError(
                f"INIT_FROM={text} is not a checkpoint",
                why=f"{path} is a directory" if path.is_dir() else f"{path} not found",
                hint="name a file of `make list-checkpoints`, or one that `make import-model` has written",
            )
    need_torch()
    found = ask("gpt2.checkpoint", "describe", *map(str, paths.values()))
    return {
        text: InitialWeights(path=str(path), sha256=about.pop("sha256"), settings=about)
        for (text, path), about in zip(paths.items(), found, strict=True)
    }


def check_fit(initial: Mapping[str, InitialWeights], runs: Mapping[str, TrainConfig], *, prepared: bool) -> None:
    """Raise ConfigError if a run differs from the checkpoint that it starts from, with the differences.

    prepared: the vocabulary of each run is that of its data.
    """
    for name, train in runs.items():
        weights = initial.get(train.init_from)
        if weights is None:
            continue
        known = [field for field in SAME_AS_INITIAL if field != "vocab_size"]
        known += ["vocab_size"] if prepared or train.tokenizer not in BY_DATA else []
        other = [
            f"{field} is {weights.settings[field]} there and {getattr(train, field)} here"
            for field in known
            if weights.settings[field] != getattr(train, field)
        ]
        if other:
            raise ConfigError(
                f"{name} cannot start from INIT_FROM={train.init_from}",
                why="; ".join(other),
                hint="set MODEL, its sizes, BLOCK_SIZE and TOKENIZER as in the checkpoint",
            )


def initial_fields(initial: Mapping[str, InitialWeights], train: TrainConfig) -> dict[str, str]:
    """Return the fields of run.json that name the initial weights of a run."""
    weights = initial.get(train.init_from)
    return {"init_from": weights.path if weights else "", "init_sha256": weights.sha256 if weights else ""}
