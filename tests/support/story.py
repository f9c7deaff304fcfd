"""What acceptance tests look at: the files that a matrix left, and the processes that work in its folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

KINDS = (  # what a process is, by a word of its command line; the first that fits
    ("guard", "guard.py"),
    ("recorder", "kmatrix.gpu.recorder"),
    ("tracker", "kmatrix.track"),
    ("trainer", "torch.distributed.run"),
    ("rank", "gpt2.train"),
    ("runner", "-m kmatrix"),
)


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log, without one that a crash or a full disk cut short."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found += [json.loads(line)] if line.endswith("\n") and line.strip() else []
    return found


def matrices(folder: Path) -> list[Path]:
    return sorted(folder.glob("test_matrix_results_*"))


def only(found: Iterable[Any]) -> Any:
    (one,) = found
    return one


def processes_of(folder: Path) -> dict[str, list[psutil.Process]]:
    """Every process whose command line names the folder, by what it is."""
    found: dict[str, list[psutil.Process]] = {kind: [] for kind, _ in KINDS}
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] == psutil.STATUS_ZOMBIE or not any(str(folder) in word for word in words):
            continue
        text = " ".join(words)
        if kind := next((kind for kind, mark in KINDS if mark in text), None):
            found[kind].append(process)
    return found


def processes_below(folder: Path) -> list[psutil.Process]:
    """Return the same as one list."""
    return [process for processes in processes_of(folder).values() for process in processes]
