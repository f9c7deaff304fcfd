"""Repeat a run and compare the results: reproduce."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.cli.running.make import make_dirs
from kmatrix.cli.running.start import run_and_report
from kmatrix.errors import ConfigError
from kmatrix.experiment.inputs.data import known_shards
from kmatrix.experiment.plan import make_plan
from kmatrix.kconfig.tree import open_tree
from kmatrix.matrix.axes import overrides
from kmatrix.records.checkpoint_dir import checkpoint_dir
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.jobs.files import LOCAL
from kmatrix.records.paths import MatrixDir, RunDir, program_environment
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.report.reproduction import Changes, changes, describe_distance, describe_repetition, repetition
from kmatrix.runner.execute import (
    need_torch,
)
from kmatrix.runner.resume import (
    reopen,
)
from kmatrix.text import first_names, shown

# Files of the run, which may have another path now.
FILES = ("GPT2_INIT_FROM", "GPT2_DATA_PATH", "GPT2_DATA_MIX", "GPT2_HELLASWAG", "GPT2_CORE")
EXIT_DIFFERS = 1  # of `reproduce`: the runs must be equal and are not
EXAMPLE = "pass RUN=test_matrix_results_.../gpt2_..."
WORKTREE = "../kmatrix-then"  # suggested directory for a checkout of the old code


def reproduce(arguments: Arguments) -> int:
    """Repeat an earlier run and compare the results. They must be equal bit for bit if nothing relevant changed."""
    folder = Path(arguments.get("RUN"))
    if not arguments.get("RUN"):
        raise ConfigError("reproduce needs a run", hint=EXAMPLE)
    was = RunDir(folder.resolve())
    if not was.config.is_file():
        raise ConfigError(f"RUN={folder} is not a run directory", hint=EXAMPLE)
    need_torch()
    asked = {name: text for name, text in arguments.values.items() if name == "TRACKER"}
    asked |= _local_assignments(arguments)
    plan = make_plan(
        was.config, asked, kconfig=arguments.kconfig, gpus=arguments.get("GPUS"), one=True, machine=arguments.config
    )
    shards = known_shards(was, [config.train for config in plan.configs.values()])
    on_cluster = plan.config.engine != LOCAL
    if on_cluster:
        from kmatrix.cli.running.cluster import submit_matrix

        matrix, recorders = submit_matrix(arguments, plan, reuse=False, shards=shards), None
    else:
        matrix, recorders = make_dirs(arguments, plan, reuse=False, shards=shards)
    now = matrix.runs()[0]
    for line in _how_to_restore_code(was, changes(was, now)):
        print(f"note: {line}")
    print(f"repeating {shown(was.path)} as {shown(now.path)}")
    if on_cluster:
        from kmatrix.cli.running.follow import follow

        status = follow(matrix, report=False)
    else:
        status = run_and_report(matrix, reopen(matrix, plan.gpus), gpus=plan.gpus, recorders=recorders)
    return status or _compare(was, now, plan.neutral)


def _local_assignments(arguments: Arguments) -> dict[str, str]:
    """Return the assignments of `reproduce`: where the run trains. Any other one would make it another run."""
    tree = open_tree(arguments.kconfig)
    for name, text in arguments.assignments.items():
        if not set(overrides(tree, {name: text}, arguments.takes)) <= {*tree.machine, "ENGINE", *FILES}:
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
    for line in [*describe_repetition(found), text]:
        print(f"  {line}")
    if changed.hosts:
        print(f"  hosts {changed.hosts}")
    if changed.configuration:
        print(f"  the configuration differs in {first_names(changed.configuration)}")
    # Equality is an error only if nothing changed that may change a result.
    if changed.promised:
        print(f"  the results must be equal: same code, torch and {_device_words(was)}")
        return 0 if equal else EXIT_DIFFERS
    if changed.gpu and not found.equal and (distance := describe_distance(found)):
        print(f"  {distance}")
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


def _how_to_restore_code(was: RunDir, changed: Changes) -> list[str]:
    """Return how to check out the code of an earlier run, if the trainer has changed since."""
    if not changed.code:
        return []
    about = read_run_file_or_empty(was).provenance
    lines = [f"the code of the trainer changed: {first_names(changed.code)}"]
    commit, patch = str(about.get("git_commit") or ""), MatrixDir(was.path.parent).patch
    # The line below is made to be pasted into a shell, and the run may be anybody's.
    if not re.fullmatch(r"[0-9a-f]{7,64}", commit):
        return [*lines, "the old code cannot be checked out: its commit is unknown"]
    command = f"git worktree add {WORKTREE} {commit[:10]}"
    if about.get("patch") and patch.is_file():
        command += f" && git -C {WORKTREE} apply {shlex.quote(str(patch))}"
    lines.append(f"check out the old code: {command}")
    if about.get("git_dirty") and not about.get("patch"):
        lines.append(f"its uncommitted changes were not recorded: {about.get('no_patch') or 'unknown reason'}")
    if about.get("untracked"):
        lines.append(f"untracked files that are in neither commit nor patch: {first_names(about['untracked'])}")
    return lines


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
