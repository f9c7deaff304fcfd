"""Repeat a run and compare the results: reproduce."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.cli.run import make, start
from kmatrix.errors import ConfigError
from kmatrix.experiment.inputs.ask import need_torch
from kmatrix.experiment.plan import make_plan
from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.axes import overrides
from kmatrix.records.checkpoint_dir import checkpoint_dir
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.matrix import CODE, LOCAL, run_files
from kmatrix.records.paths import RunDir, program_environment
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.report.reproduction import Changes, changes, repetition
from kmatrix.text import first_names, make_command, shown

# Files of the run, which may have another path now.
FILES = ("GPT2_INIT_FROM", "GPT2_DATA_PATH", "GPT2_DATA_MIX", "GPT2_HELLASWAG", "GPT2_CORE")
EXIT_DIFFERS = 1  # of `reproduce`: the runs must be equal and are not
EXAMPLE = "pass RUN=test_matrix_results_.../gpt2_..."


def reproduce(arguments: Arguments) -> int:
    """Repeat an earlier run and compare the results. They must be equal bit for bit if nothing relevant changed."""
    folder = Path(arguments.get("RUN"))
    if not arguments.get("RUN"):
        raise ConfigError("reproduce needs a run", hint=EXAMPLE)
    was = RunDir(folder.resolve())
    if not was.config.is_file():
        raise ConfigError(f"RUN={folder} is not a run directory", hint=EXAMPLE)
    need_torch()
    plan = make_plan(
        was.config,
        _local_assignments(arguments),
        gpus=arguments.get("GPUS"),
        one=True,
        machine=arguments.config,
    )
    shards = read_run_file_or_empty(was).train.data_shards or 0  # those that its matrix had
    # The code that was planned then is what runs again.
    matrix = make(arguments, plan, reuse=False, shards=shards, code=was.path.parent / CODE)
    now = matrix.run(next(iter(run_files(matrix.path))))
    print(f"repeating {shown(was.path)} as {shown(now.path)}")
    status = start(matrix, arguments)
    if plan.config.engine != LOCAL:  # its job has only been submitted
        print(f"compare it when it has finished: {make_command('compare', BASE=str(was.path), NEW=str(now.path))}")
        return status
    return status or _compare(was, now, plan.neutral)


def _local_assignments(arguments: Arguments) -> dict[str, str]:
    """Return the assignments of `reproduce`: where the run trains. Any other one would make it another run."""
    tree = Tree.parse()
    for name, text in arguments.assignments.items():
        if not set(overrides(tree, {name: text}, arguments.takes)) <= {*tree.machine, *FILES}:
            raise ConfigError(
                f"reproduce does not take {name}=",
                why="it would be another run",
                hint="pass ENGINE=, settings of its jobs, and paths and commands of this machine, such as DATA_DIR=",
            )
    return dict(arguments.assignments)


def _compare(was: RunDir, now: RunDir, neutral: Collection[str]) -> int:
    """Print the comparison, and return 1 if the runs must be equal and are not."""
    found, changed = repetition(was, now), changes(was, now, neutral)
    weights, text = _weights(was, now)
    equal = found.equal and weights is not False and not changed.configuration
    print(f"\n{shown(was.path)} and its repetition {shown(now.path)}:")
    for line in [*found.lines(), text]:
        print(f"  {line}")
    if changed.configuration:
        print(f"  the configuration differs in {first_names(changed.configuration)}")
    # Equality is an error only if nothing changed that may change a result.
    if changed.promised:
        print(f"  the results must be equal: same code, torch and {_device_words(was)}")
        return 0 if equal else EXIT_DIFFERS
    for line in _why_different(changed):
        print(f"  the results may differ: {line}")
    return 0


def _device_words(was: RunDir) -> str:
    """Return what two equal runs have in common besides code and torch."""
    on_gpus = read_run_file_or_empty(was).train.device == "cuda"
    return "GPUs, DETERMINISTIC=y" if on_gpus else "processor, no GPU"


def _why_different(changed: Changes) -> list[str]:
    """Return the reasons why the results may differ."""
    why = ["the order of additions on GPUs is not fixed without DETERMINISTIC=y"] if changed.gpu else []
    why += [f"the code of the trainer changed: {first_names(changed.code)}"] if changed.code else []
    return [*why, *changed.others]


def _weights(was: RunDir, now: RunDir) -> tuple[bool | None, str]:
    """Return whether the final weights are equal (None: not comparable), and a message."""
    paths = []
    for run in (was, now):
        checkpoints = Checkpoints(checkpoint_dir(run))
        final = checkpoints.final()
        if final is None:
            return None, f"weights not compared: {shown(run.path)} has no final checkpoint"
        paths.append(str(checkpoints.path(final)))
    # In a process of its own: reading the weights needs torch, which kmatrix never imports.
    done = subprocess.run(
        [sys.executable, "-m", "gpt2.checkpoint", "compare", *paths],
        env=program_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines() or ['{"what": "the trainer printed no error"}']
    found = json.loads(lines[-1])  # the last line: libraries may print warnings before
    if done.returncode:
        return None, f"weights not compared: {found['what']}"
    if found["equal"]:
        return True, f"equal bit for bit: the final weights, SHA-256 {found['sha256'][:12]}"
    apart = "" if found["by"] is None else f" by {found['by']:.3g}"
    return False, f"not equal: {found['differing']} of {found['tensors']} final weights, most {found['most']}{apart}"
