"""Write bundles of CORE in nanochat's format; the default tasks are those of tests/fixtures/nanochat/core.json."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nanochat_numbers as public

NUMBERS = public.read("core")


def original_lines(label: str) -> list[dict[str, Any]]:
    """Return the examples of a task before nanochat shuffled them."""
    task = NUMBERS["tasks"][label]
    placed = zip(task["order"], (example["item"] for example in task["examples"]), strict=True)
    return [item for _, item in sorted(placed, key=lambda pair: pair[0])]


def bundle_files() -> dict[str, str]:
    """Return the files of a bundle by their paths."""
    tasks = NUMBERS["tasks"]
    yaml = ["icl_tasks:"]
    for label, task in tasks.items():
        yaml += ["-", f"  label: {label}", f"  dataset_uri: own/{label}.jsonl"]
        yaml += [f"  num_fewshot: [{task['num_fewshot']}]", f"  icl_task_type: {task['task_type']}"]
        if task["continuation_delimiter"] != " ":  # the default of the public code
            yaml += [f"  continuation_delimiter: {json.dumps(task['continuation_delimiter'])}"]
    files = {"core.yaml": "\n".join(yaml) + "\n"}
    rows = [f"{label},{task['baseline']},more" for label, task in tasks.items()]
    files["eval_meta_data.csv"] = "\n".join(["Eval Task,Random baseline,Task Category", *rows]) + "\n"
    for label in tasks:
        lines = original_lines(label)
        files[f"eval_data/own/{label}.jsonl"] = "".join(json.dumps(line) + "\n" for line in lines)
    return files


def write_zip(path: Path, files: Mapping[str, str] | None = None, folder: str = "eval_bundle/") -> Path:
    """Write a bundle as a zip file, below a folder as the published one."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (files or bundle_files()).items():
            archive.writestr(folder + name, text)
    return path


def write_folder(path: Path, files: Mapping[str, str] | None = None) -> Path:
    """Write a bundle as a folder."""
    for name, text in (files or bundle_files()).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
    return path
