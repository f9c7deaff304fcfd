"""The command that looks at this machine: what it has, what is missing, what to do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from kmatrix.cli.again import yes
from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import ROOT, below_root, config_path, load_config, open_tree, shown
from kmatrix.cli.trackers import PACKAGES, TITLES, WANDB_SYMBOLS, missing, wandb_words
from kmatrix.config import read
from kmatrix.doctor import Check, Level, gpus, machine, places, torch
from kmatrix.doctor.checks import broken, ok
from kmatrix.errors import KmatrixError
from kmatrix.gpu.nvml import detect
from kmatrix.records import SCHEMA

CONFIG = "configuration"


def doctor(arguments: Arguments) -> int:
    """Print each finding; the exit status is 1 where something is broken."""
    found = list(_checks(arguments))
    if yes(arguments, "JSON"):
        print(json.dumps({"schema": SCHEMA, "checks": [asdict(check) for check in found]}, indent=2))
    else:
        print("\n".join(lines(found)))
    return 1 if any(check.level is Level.BROKEN for check in found) else 0


def lines(found: list[Check]) -> Iterator[str]:
    """Yield the findings as a table, with what to do below those that need it, and a count."""
    width = max(len(check.name) for check in found)
    for check in found:
        yield f"{check.level:8} {check.name:{width}}  {check.said}"
        if check.fix:
            yield f"{'':8} {'':{width}}  fix: {check.fix}"
    counts = [sum(check.level is level for check in found) for level in (Level.WARNING, Level.BROKEN)]
    yield f"{len(found)} looked at, {counts[0]} warning{'' if counts[0] == 1 else 's'}, {counts[1]} broken"


def _checks(arguments: Arguments) -> Iterator[Check]:
    yield from machine(ROOT, os.environ)
    detected = detect()
    yield from gpus(detected)
    yield from torch(Path(sys.executable), ROOT, len(detected.gpus))
    yield from _configured(arguments)


def trackers(chosen: Collection[str], symbols: Mapping[str, str]) -> Iterator[Check]:
    """Yield for each tracker whether it is installed. chosen: those of .config, which must be.  symbols: W&B's."""
    for name, title in TITLES.items():
        if absent := missing([name]):
            said = f"not installed: {', '.join(absent)}"
            if name in chosen:
                yield broken(title, f"{said}, and .config has it", "make setup-trackers")
            else:
                yield ok(title, f"{said} (TRACKER={name} needs make setup-trackers)")
            continue
        versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES[name])
        yield ok(title, f"{versions}; {wandb_words(symbols)}" if name == "wandb" else versions)


def _configured(arguments: Arguments) -> Iterator[Check]:
    """Yield whether .config can be read, and what its folders are like; those of the defaults where there is none."""
    path = config_path(arguments)
    tree = open_tree(arguments)
    try:
        if path.exists():
            load_config(tree, path)
        config = read({name: tree.typed(name, tree.value(name)) for name in tree.names()})
    except KmatrixError as error:
        yield Check(
            name=CONFIG,
            level=Level.BROKEN,
            said=" ".join(filter(None, (error.what, error.why))),
            fix=error.fix or "make menuconfig, or take a ready one: make list-defconfigs",
        )
        return
    said = f"{shown(path)}, every line in force" if path.exists() else f"no {shown(path)} yet"
    yield Check(name=CONFIG, level=Level.OK, said=said)
    yield from trackers(config.trackers, {name: tree.value(name) or "" for name in WANDB_SYMBOLS})
    folders = {"RESULTS_DIR": config.results_dir, "DATA_DIR": config.data_dir, "CHECKPOINT_DIR": config.checkpoint_dir}
    yield from places({name: below_root(folder) for name, folder in folders.items() if folder})
