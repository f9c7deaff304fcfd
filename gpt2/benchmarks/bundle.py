"""Read HellaSwag's JSONL, and the tasks of CORE: a zip or folder with core.yaml, eval_meta_data.csv and eval_data/.

CORE has the format of nanochat's scripts/base_eval.py, with the tasks of DCLM (Li et al. 2024, arXiv:2406.11794).
"""

from __future__ import annotations

import csv
import json
import random
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kmatrix.errors import DataError
from kmatrix.text import plural

TASKS, BASELINES, DATA = "core.yaml", "eval_meta_data.csv", "eval_data"
FOLDER = "eval_bundle"  # of the published zip file
ORDER_SEED = 1337  # the lines of a task are shuffled before they are cut
HINT = "use the published file: remove this one, and it is downloaded again (docs/evaluation.md)"
INVALID = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task: HellaSwag, or one of CORE."""

    label: str
    kind: Kind
    shots: int  # examples that are shown before the question
    delimiter: str  # between context and continuation
    baseline: float  # accuracy of guessing, 0 to 1
    items: tuple[Item, ...]  # in the order in which they are numbered


Place = Path | zipfile.Path


def read_tasks(path: Path, most: int = 0) -> list[Task]:
    """Return the tasks of a bundle. most: examples of a task, 0: all.

    Raises DataError if a file is missing or damaged.
    """
    import yaml  # here, because runs without CORE need not have it

    try:
        root: Place = path if path.is_dir() else zipfile.Path(zipfile.ZipFile(path))
        root = root / FOLDER if (root / FOLDER).is_dir() else root
        rows = csv.DictReader(_text(root, BASELINES).splitlines())
        baselines = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}  # the file has percents
        return [_task(root, task, baselines, most) for task in yaml.safe_load(_text(root, TASKS))["icl_tasks"]]
    except (OSError, zipfile.BadZipFile, zlib.error, yaml.YAMLError, NotImplementedError, *INVALID) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise DataError(f"{path} cannot be read", why=why, hint=HINT) from None


def read_hellaswag(path: Path) -> Task:
    """Return the examples of a file in the dataset's format: one object per line with ctx, endings and label.

    Raises DataError if the file is missing or damaged.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise DataError(f"{path} cannot be read", why=why or "", hint='HELLASWAG="" disables this benchmark') from None
    items = tuple(_items(text, str(path), PARSERS[Kind.ENDING]))
    return Task(label="hellaswag", kind=Kind.ENDING, shots=0, delimiter="", baseline=0.25, items=items)


def _text(root: Place, name: str) -> str:
    return root.joinpath(*name.split("/")).read_text(encoding="utf-8")


def _task(root: Place, task: Mapping[str, Any], baselines: Mapping[str, float], most: int) -> Task:
    label, name, shots = str(task["label"]), str(task["dataset_uri"]), int(task["num_fewshot"][0])
    kind = Kind(task["icl_task_type"])
    items = _items(_text(root, f"{DATA}/{name}"), f"{DATA}/{name}", PARSERS[kind])
    random.Random(ORDER_SEED).shuffle(items)
    kept = items[: most or None]
    if shots >= len(kept):
        raise DataError(
            f"{label} shows {plural(shots, 'other example')}, but {len(kept)} of {len(items)} are used",
            hint="CORE_EXAMPLES=0 uses all of them" if most else "",
        )
    delimiter = str(task.get("continuation_delimiter", " "))
    return Task(label=label, kind=kind, shots=shots, delimiter=delimiter, baseline=baselines[label], items=tuple(kept))


def _items(text: str, name: str, parse: Callable[[Mapping[str, Any]], Item]) -> list[Item]:
    items = []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: texts may have other line ends
        if not line.strip():
            continue
        try:
            item = parse(json.loads(line))
            if not 0 <= item.correct < len(item.contexts):
                raise ValueError(f"answer {item.correct} of {len(item.contexts)}")
            items.append(item)
        except INVALID as error:
            why = f"{type(error).__name__}: {error}"
            raise DataError(f"{name}:{number} is not an example of its task", why=why) from None
    if not items:
        raise DataError(f"{name} has no examples")
    return items


def _choice(line: Mapping[str, Any]) -> Item:
    answers = tuple(_string(answer) for answer in line["choices"])
    return Item((_string(line["query"]),) * len(answers), answers, int(line["gold"]))


def _ending(line: Mapping[str, Any]) -> Item:
    # A space before each ending, as GPT-2's tokenizer expects
    endings = tuple(f" {_string(ending)}" for ending in line["endings"])
    if not line["ctx"]:
        raise ValueError("no context")
    return Item((_string(line["ctx"]),) * len(endings), endings, int(line["label"]))


def _schema(line: Mapping[str, Any]) -> Item:
    contexts = tuple(_string(context) for context in line["context_options"])
    return Item(contexts, (_string(line["continuation"]),) * len(contexts), int(line["gold"]))


def _exact(line: Mapping[str, Any]) -> Item:
    return Item((_string(line["context"]).strip(),), (_string(line["continuation"]),), 0)


def _string(value: Any) -> str:
    """Return a text as jinja2, with which nanochat renders the prompts, shows it."""
    if not isinstance(value, str | int | float):
        raise TypeError(f"expected a text, not {type(value).__name__}")
    return str(value)


PARSERS: dict[Kind, Callable[[Mapping[str, Any]], Item]] = {
    Kind.CHOICE: _choice,
    Kind.ENDING: _ending,
    Kind.SCHEMA: _schema,
    Kind.EXACT: _exact,
}
