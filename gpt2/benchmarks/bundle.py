"""Read HellaSwag's JSONL, and the tasks of CORE: a zip or folder with core.yaml, eval_meta_data.csv and eval_data/.

CORE has the format of nanochat's scripts/base_eval.py, with the tasks of DCLM (Li et al. 2024, arXiv:2406.11794).
"""

from __future__ import annotations

import csv
import json
import random
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kmatrix.errors import DataError

TASKS, BASELINES, DATA = "core.yaml", "eval_meta_data.csv", "eval_data"
FOLDER = "eval_bundle"  # of the published zip file
ORDER_SEED = 1337  # the lines of a task are shuffled before they are cut
HINT = "use the published file: remove this one, and it is downloaded again (docs/evaluation.md)"
INVALID = (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile)


class Kind(StrEnum):
    """How a question is answered; the values of `icl_task_type`."""

    CHOICE = "multiple_choice"  # one context, several continuations
    SCHEMA = "schema"  # several contexts, one continuation
    ENDING = "ending"  # a choice of HellaSwag's file, without an end of document before it
    EXACT = "language_modeling"  # each token of the continuation has to be the most probable one


@dataclass(frozen=True, slots=True)
class Item:
    """A line of a task: all of its texts, each with its continuation, and which one is correct."""

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]  # as many
    correct: int


@dataclass(frozen=True, slots=True)
class Task:
    """One task: HellaSwag, or one of CORE."""

    label: str
    kind: Kind
    shots: int  # examples that are shown before the question
    delimiter: str  # between context and continuation
    baseline: float  # accuracy of guessing, 0 to 1
    items: tuple[Item, ...]  # in the order in which they are numbered


def read_tasks(path: Path, most: int = 0) -> list[Task]:
    """Return the tasks of a bundle. most: examples of a task, 0: all. Raises DataError if it cannot be used."""
    import yaml  # here, because runs without CORE need not have it

    try:
        root: Path | zipfile.Path = path if path.is_dir() else zipfile.Path(zipfile.ZipFile(path))
        root = root / FOLDER if (root / FOLDER).is_dir() else root
        rows = csv.DictReader((root / BASELINES).read_text(encoding="utf-8").splitlines())
        baselines = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}  # the file has percents
        found = []
        for task in yaml.safe_load((root / TASKS).read_text(encoding="utf-8"))["icl_tasks"]:
            label, kind, shots = task["label"], Kind(task["icl_task_type"]), task["num_fewshot"][0]
            text = root.joinpath(DATA, *task["dataset_uri"].split("/")).read_text(encoding="utf-8")
            items = _items(text, kind)
            random.Random(ORDER_SEED).shuffle(items)
            kept = tuple(items[: most or None])
            if shots >= len(kept):
                raise ValueError(f"{label} shows {shots} other examples, but {len(kept)} of {len(items)} are used")
            found.append(Task(label, kind, shots, task.get("continuation_delimiter", " "), baselines[label], kept))
    except (*INVALID, yaml.YAMLError) as error:
        raise _unusable(path, error) from None
    return found


def read_hellaswag(path: Path) -> Task:
    """Return the examples of a file in the dataset's format: one object per line with ctx, endings and label.

    Raises DataError if the file is missing or damaged.
    """
    try:
        items = tuple(_items(path.read_text(encoding="utf-8"), Kind.ENDING))
    except INVALID as error:
        raise _unusable(path, error) from None
    return Task("hellaswag", Kind.ENDING, shots=0, delimiter="", baseline=0.25, items=items)


def _unusable(path: Path, error: Exception) -> DataError:
    why = " ".join(f"{type(error).__name__}: {error}".split())  # errors of YAML have several lines
    return DataError(f"{path} cannot be read", why=why, hint=HINT)


def _items(text: str, kind: Kind) -> list[Item]:
    # Not splitlines: texts may have other line ends.
    items = [_item(json.loads(line), kind) for line in text.split("\n") if line.strip()]
    if not items:
        raise ValueError("a task without examples")
    return items


def _item(line: Mapping[str, Any], kind: Kind) -> Item:
    match kind:
        case Kind.CHOICE:
            continuations, correct = line["choices"], line["gold"]
            contexts = [line["query"]] * len(continuations)
        case Kind.ENDING:  # a space before each ending, as GPT-2's tokenizer expects
            continuations, correct = [f" {ending}" for ending in line["endings"]], line["label"]
            contexts = [line["ctx"]] * len(continuations)
        case Kind.SCHEMA:
            contexts, correct = line["context_options"], line["gold"]
            continuations = [line["continuation"]] * len(contexts)
        case Kind.EXACT:
            contexts, continuations, correct = [str(line["context"]).strip()], [line["continuation"]], 0
    if not 0 <= int(correct) < len(contexts):
        raise ValueError(f"answer {correct} of {len(contexts)} in {line}")
    # A number is shown as jinja2, with which nanochat renders the prompts, shows it.
    return Item(tuple(map(str, contexts)), tuple(map(str, continuations)), int(correct))
