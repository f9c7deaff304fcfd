"""The weights that runs start from (INIT_FROM): read and compared with the runs before anything is made."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kmatrix.errors import ConfigError
from kmatrix.experiment.doctor import need_torch
from kmatrix.kconfig.tree import Assignment
from kmatrix.matrix.axes import Axes
from kmatrix.records.paths import ROOT, program_environment
from kmatrix.records.train_config import SAME_AS_INITIAL, TrainConfig

SYMBOL = "GPT2_INIT_FROM"
SCRATCH = ("", "none")  # values of the symbol without a checkpoint
BY_DATA = ("char", "bpe")  # tokenizers whose vocabulary is known only after the data are prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights:
    """The weights of a checkpoint."""

    path: str  # absolute
    sha256: str  # of names and values
    settings: Mapping[str, object]  # the fields in SAME_AS_INITIAL, as the checkpoint has them


def asked(base: Iterable[Assignment], axes: Axes) -> list[str]:
    """Return the checkpoints that the configuration names in a line, an axis or a rule, each once."""
    points = [point for axis in axes.axes for point in axis.points]
    points += [point for rule in axes.couplings for group in rule.points for point in group]
    texts = [item.value for item in base if item.name == SYMBOL]
    texts += [point.assignment.value for point in points if point.axis == SYMBOL]
    return [text for text in dict.fromkeys(texts) if text not in SCRATCH]


def read_initial(texts: Collection[str]) -> dict[str, InitialWeights]:
    """Return the weights of each checkpoint by the text that names it. Relative names start at the project's root.

    Raises ConfigError if one is missing, damaged or not a checkpoint, and LaunchError without PyTorch.
    """
    if not texts:
        return {}
    paths = {text: (ROOT / Path(text).expanduser()).resolve() for text in texts}
    for text, path in paths.items():
        if not path.is_file():
            raise ConfigError(
                f"INIT_FROM={text} is not a checkpoint",
                why=f"{path} is a directory" if path.is_dir() else f"{path} not found",
                hint="name a file of `make list-checkpoints`, or one that `make import-model` has written",
            )
    # In a process of its own: reading the weights needs torch, which kmatrix never imports.
    need_torch()
    done = subprocess.run(
        [sys.executable, "-m", "gpt2.checkpoint", "describe", *map(str, paths.values())],
        env=program_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])  # the last line: libraries may print warnings before
    except (ValueError, IndexError):
        last = done.stderr.strip().splitlines()[-1:] or ["the trainer printed no error"]
        raise ConfigError("the checkpoint of INIT_FROM could not be read", why=last[0]) from None
    if done.returncode:
        raise ConfigError(f"INIT_FROM: {found['what']}", why=found["why"], hint=found["hint"])
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
