"""The commands about this machine: `make doctor` checks it, `make gputop` shows its GPUs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version

from kmatrix.cli.commands import Arguments
from kmatrix.config import read
from kmatrix.engines import kubernetes
from kmatrix.engines.kubernetes import Kubernetes
from kmatrix.engines.slurm import Slurm
from kmatrix.engines.slurm_nodes import Nodes, read_settings
from kmatrix.errors import KmatrixError
from kmatrix.experiment.doctor import Check, gpus, machine_checks, places, torch
from kmatrix.gpu.nvml.detect import detect
from kmatrix.gputop.command import main as gputop_main
from kmatrix.kconfig.assignments import load_config
from kmatrix.kconfig.tree import Tree
from kmatrix.records.decode import SCHEMA
from kmatrix.records.matrix import KUBERNETES, SLURM, TITLES
from kmatrix.records.paths import below_root, program_environment
from kmatrix.simulate.library import simulation
from kmatrix.text import Column, duration, memory_size, plural, shown, table
from kmatrix.track.available import PACKAGES, WANDB_SYMBOLS, login, missing
from kmatrix.track.available import TITLES as TRACKERS

CONFIG = "configuration"  # name of the check of .config


def doctor(arguments: Arguments) -> int:
    """Print all checks. Return 1 if something is broken, else 0."""
    found = list(_checks(arguments))
    if arguments.is_on("JSON"):
        print(json.dumps({"schema": SCHEMA, "checks": [_to_json(check) for check in found]}, indent=2))
    else:
        print("\n".join(lines(found)))
    return 1 if any(check.is_broken for check in found) else 0


def _to_json(check: Check) -> dict[str, str]:
    return {"name": check.name, "level": check.level, "message": check.message, "hint": check.hint}


def lines(found: list[Check]) -> Iterator[str]:
    """Yield the checks as a table, each hint below its check, and the number of problems."""
    rows = []
    for check in found:
        rows.append((check.level, check.name, check.message))
        rows += [("", "", f"hint: {check.hint}")] if check.hint else []
    yield from table([Column(title="", words=True)] * 3, rows)
    warnings, broken = ([check.level for check in found].count(level) for level in ("warning", "broken"))
    yield f"{plural(len(found), 'check')}, {plural(warnings, 'warning')}, {broken} broken"


def _checks(arguments: Arguments) -> Iterator[Check]:
    yield from machine_checks()
    detected = detect()
    yield from gpus(detected)
    yield from torch(len(detected.gpus))
    yield from _configured(arguments)


def trackers(chosen: Collection[str], symbols: Mapping[str, str]) -> Iterator[Check]:
    """Check whether each tracker is installed. chosen: trackers of .config, which must be.  symbols: those of W&B."""
    for name, title in TRACKERS.items():
        if absent := missing([name]):
            message = f"not installed: {', '.join(absent)}"
            if name in chosen:
                yield Check(title, f"{message}, but .config uses it", "run `make setup-trackers`", is_broken=True)
            else:
                yield Check(title, f"{message} (TRACKER={name} needs `make setup-trackers`)")
            continue
        versions = ", ".join(f"{package} {version(package)}" for package in PACKAGES[name])
        yield Check(title, f"{versions}; {login(symbols, os.environ).describe()}" if name == "wandb" else versions)


def _configured(arguments: Arguments) -> Iterator[Check]:
    """Check .config and its folders; the default folders if there is no .config."""
    path = arguments.config
    tree = Tree.parse()
    try:
        if path.exists():
            load_config(tree, path)
        config = read(tree.typed_values(tree.effective()))
    except KmatrixError as error:  # a finding like the others, not the end of the list
        hint = error.hint or "run `make menuconfig`, or choose a defconfig: `make list-defconfigs`"
        yield Check(CONFIG, " ".join(filter(None, (error.what, error.why))), hint, is_broken=True)
        return
    message = f"{shown(path)}, every line in effect" if path.exists() else f"no {shown(path)} yet"
    yield Check(CONFIG, message)
    yield from trackers(config.trackers, {name: tree.value(name) or "" for name in WANDB_SYMBOLS})
    folders = {"RESULTS_DIR": config.results_dir, "DATA_DIR": config.data_dir, "CHECKPOINT_DIR": config.checkpoint_dir}
    yield from places({name: below_root(folder) for name, folder in folders.items() if folder})
    yield from cluster(config.engine, {name: tree.value(name) or "" for name in tree.names()})


def cluster(engine: str, symbols: Mapping[str, str]) -> Iterator[Check]:
    """Check the cluster of .config: whether it answers, and which nodes it has."""
    try:
        if engine == SLURM:
            found = Slurm(read_settings(symbols, os.environ)).cluster()
            yield from (Check(f"partition {one.partition}", " ".join(_words(one))) for one in found.nodes)
            for problem in found.problems(()):
                yield Check("Slurm", ": ".join(filter(None, (problem.what, problem.why))), problem.hint, is_broken=True)
        elif engine == KUBERNETES:
            Kubernetes(kubernetes.read_settings(symbols)).poll("km-check")
            yield Check(TITLES[engine], "answers, and lists Jobs and pods")
    except KmatrixError as error:
        yield Check(TITLES[engine], ": ".join(filter(None, (error.what, error.why))), error.hint, is_broken=True)


def _words(nodes: Nodes) -> Iterator[str]:
    yield f"{plural(nodes.count, 'node')} with {plural(nodes.cpus, 'CPU')}, {memory_size(nodes.memory_mib * 2**20)}"
    yield f"and {plural(nodes.gpus, 'GPU')} ({nodes.gres})," if nodes.gpus else "and no GPU,"
    yield "no time limit" if nodes.seconds is None else f"at most {duration(nodes.seconds)}"


def gputop(arguments: Arguments) -> int:
    """Show all GPUs. RUN=<run directory> follows a run, and REPLAY= replays its recording.

    SIMULATE=<number or scenario> shows simulated GPUs.
    """
    options = {"--run": "RUN", "--replay": "REPLAY", "--gpus": "GPUS"}
    words = [f"{option}={arguments.get(name)}" for option, name in options.items() if arguments.get(name)]
    if arguments.get("SIMULATE"):  # LD_LIBRARY_PATH is read only when a program starts: replace this process
        environment = program_environment(**simulation(arguments.get("SIMULATE")))
        os.execve(sys.executable, [sys.executable, "-m", "kmatrix.gputop", *words], environment)
    return gputop_main(words)


def gpu_exporter(arguments: Arguments) -> int:
    """Serve all GPUs as metrics for Prometheus until Ctrl+C. SIMULATE=<number or scenario> serves simulated ones."""
    words = ["--port", arguments.get("PORT")] if arguments.get("PORT") else []
    words += ["--gpus", arguments.get("GPUS")] if arguments.get("GPUS") else []
    environment = program_environment(**simulation(arguments.get("SIMULATE"))) if arguments.get("SIMULATE") else {}
    # A program of its own also without simulated GPUs: the command line has parts that it does not need.
    command = [sys.executable, "-m", "kmatrix.gputop.exporter", *words]
    os.execve(sys.executable, command, environment or program_environment())
