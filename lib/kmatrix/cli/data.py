"""The data of a matrix: prepared by themselves, told before a run, counted in epochs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.planning import Plan, make_plan
from kmatrix.cli.session import ROOT, below_root, shown
from kmatrix.config import RunConfig, with_vocabulary
from kmatrix.errors import LaunchError, RecordError
from kmatrix.launch.prepare import Dataset, Key, key, most_epochs, overfitting, prepare_data, prepared
from kmatrix.records import RunDir, read_json

Fields = Mapping[str, Any]


def prepare(arguments: Arguments) -> int:
    """Fetch or make the data of every run of the matrix, and say where they lie."""
    plan = make_plan(arguments)
    fields = [plan.run_config(run).fields for run in plan.matrix.runs]
    data_dir = below_root(plan.config.data_dir)
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"DATA_DIR={data_dir} cannot be made", why=str(error), fix="name a folder of yours") from None
    data = prepare_data(Path(sys.executable), ROOT, data_dir, fields)
    for found in data.values():
        print(
            f"{found.train_tokens:,} training and {found.val_tokens:,} validation tokens in {shown(Path(found.path))}"
        )
    for line in data_lines(fields, data):
        print(line)
    return 0


def data_lines(runs: Sequence[Fields], data: Mapping[Key, Dataset]) -> list[str]:
    """Return what is said of the data before the first run: how much there is, how often it is read, the warnings."""
    most = most_epochs((run, data[key(run)]) for run in runs)
    tokens = {name: count for run in runs for name, count in _tokens(run, data[key(run)]).items()}
    lines = [
        f"data: {name}, {tokens[name]:,} training tokens, read {count:.2f} times by the longest run"
        for name, count in most.items()
    ]
    return lines + [f"warning: {text}" for text in overfitting(most)]


def _tokens(run: Fields, data: Dataset) -> dict[str, int]:
    return {name: tokens for name, _, tokens in data.parts} or {str(run["dataset"]): data.train_tokens}


def forecast_lines(data_dir: Path, runs: Sequence[Fields]) -> tuple[list[str], list[str]]:
    """Return what a plan knows of data that may not be there yet: notes, and warnings."""
    there = [(run, prepared(data_dir, run)) for run in runs]
    notes = []
    if any(run["tokenizer"] == "char" and not known for run, known in there):
        notes = ["the vocabulary of the tokenizer char is known once the data are prepared: counted with 256"]
    return notes, overfitting(most_epochs((run, known) for run, known in there if known))


def with_known_vocabulary(run: RunConfig, data_dir: Path) -> RunConfig:
    """Return a run's configuration with the vocabulary of its data, where those are prepared."""
    known = prepared(data_dir, run.fields) if run.fields["tokenizer"] in ("char", "bpe") else None
    return with_vocabulary(run, known.vocab_size) if known else run


def known_shards(run: RunDir, plan: Plan) -> dict[Key, int]:
    """Return how many training shards an earlier run read: the same number is read again."""
    try:
        train = read_json(run.run_json).get("train", {})
    except RecordError:
        return {}
    fields = [plan.run_config(item).fields for item in plan.matrix.runs]
    return {key(item): int(train.get("data_shards") or 0) for item in fields}
