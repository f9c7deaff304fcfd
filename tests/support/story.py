"""Read the files of a matrix and find its processes, for stories."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from checkpoints import final_of

KINDS = (  # kind of a process, and a part of its command line; the first match counts
    ("recorder", "kmatrix.gpu.recorder"),
    ("tracker", "kmatrix.track"),
    ("rank", "gpt2.train"),
    ("program", "-m kmatrix run "),
    ("runner", "-m kmatrix runner "),
    ("command", "-m kmatrix"),
)


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log, without one that a crash or a full disk truncated."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found += [json.loads(line)] if line.endswith("\n") and line.strip() else []
    return found


def matrices(folder: Path) -> list[Path]:
    return sorted(folder.glob("test_matrix_results_*"))


def only(items: Iterable[Any]) -> Any:
    (item,) = items
    return item


def processes_of(folder: Path) -> dict[str, list[psutil.Process]]:
    """Return every process whose command line names the folder, by kind."""
    named: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline", "status", "ppid"]):
        command_line = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(folder) in part for part in command_line):
            named[process.pid] = process
    found: dict[str, list[psutil.Process]] = {kind: [] for kind, _ in KINDS}
    for process in named.values():
        parent = named.get(process.info["ppid"])
        # A child that was just forked has the command line of its parent, until it becomes the program that it starts.
        if parent is not None and parent.info["cmdline"] == process.info["cmdline"]:
            continue
        text = " ".join(process.info["cmdline"])
        if kind := next((kind for kind, mark in KINDS if mark in text), None):
            found[kind].append(process)
    return found


def processes_below(folder: Path) -> list[psutil.Process]:
    """Return every process whose command line names the folder, as one list."""
    return [process for processes in processes_of(folder).values() for process in processes]


def kill(processes: Iterable[psutil.Process]) -> int:
    """Send SIGKILL to these processes; return how many there were. Some may end with others, or by themselves."""
    killed = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            killed += 1
    return killed


def numbers_of(run: Path) -> dict[str, Any]:
    """Return the losses of every step and the hash of the weights of a run."""
    import torch

    steps: dict[int, dict[str, float]] = {}
    for line in complete_lines(run / "metrics.jsonl"):
        if line.get("resumed"):  # steps after the checkpoint are trained again
            steps = {step: values for step, values in steps.items() if step <= line["step"]}
        values = steps.setdefault(line["step"], {})
        values |= {key: line[key] for key in ("train/loss", "val/loss", "train/lr", "grad/norm") if key in line}
    weights = torch.load(final_of(run), weights_only=True)["model"]
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    result = load_json(run / "result.json")
    known = {name: result[name] for name in ("final_val_loss", "best_val_loss", "tokens")}
    return {"weights": digest.hexdigest(), "steps": dict(sorted(steps.items())), **known}
