"""The command that runs a run again, from the .config in its directory, and says whether the same came of it."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.data import known_shards
from kmatrix.cli.execution import execute, need_torch
from kmatrix.cli.planning import make_plan
from kmatrix.cli.run import make_matrix
from kmatrix.cli.session import ROOT, shown
from kmatrix.errors import ConfigError, KmatrixError
from kmatrix.launch.reopen import reopen
from kmatrix.records import MatrixDir, RunDir, read_json
from kmatrix.records.checkpoints import Kind, Shelf, folder_of
from kmatrix.report.repeat import Changes, changes, in_words, named, repetition

EXIT_DIFFERS = 1
EXAMPLE = "pass RUN=test_matrix_results_.../gpt2_..."
APART = "../kmatrix-then"  # where the code of then may be laid out


def reproduce(arguments: Arguments) -> int:
    """Run the configuration of an earlier run again, and compare: bit for bit where that is promised."""
    folder = Path(arguments.get("RUN"))
    if not arguments.get("RUN"):
        raise ConfigError("reproduce needs a run", fix=EXAMPLE)
    was = RunDir(folder.resolve())
    if not was.config.is_file():
        raise ConfigError(f"RUN={folder} is no run directory", fix=EXAMPLE)
    need_torch()
    for_now = {name: text for name, text in arguments.values.items() if name == "TRACKER"}
    plan = make_plan(dataclasses.replace(arguments, assignments=for_now), one=True, path=was.config)
    matrix, recorder = make_matrix(arguments, plan, shards=known_shards(was, plan))
    now = matrix.runs()[0]
    for line in _code_then(was, changes(was, now)):
        print(f"note: {line}")
    print(f"again {shown(was.path)} as {shown(now.path)}")
    status = execute(matrix, reopen(matrix, plan.gpus), recorder, plan.gpus)
    return status or _compare(was, now, _neutral(plan.tree))


def _neutral(tree: Any) -> set[str]:
    """Return the trainer's fields that cannot change a result."""
    return {name.removeprefix("GPT2_").lower() for name in (*tree.neutral, *tree.neutral_unless)}


def _compare(was: RunDir, now: RunDir, neutral: Collection[str]) -> int:
    """Print how the two compare; 1 where they differ and must not."""
    found, changed = repetition(was, now), changes(was, now, neutral)
    weights, words = _weights(was, now)
    equal = found.equal and weights is not False and not changed.configuration
    print(f"\n{shown(was.path)} and its repetition {shown(now.path)}:")
    for line in [*in_words(found), words]:
        print(f"  {line}")
    if changed.configuration:
        print(f"  not the same configuration: {named(changed.configuration)}")
    if changed.promised:
        print("  equality is promised here: the same code, torch and processor, and no GPU")
        return 0 if equal else EXIT_DIFFERS
    for line in _not_promised(changed):
        print(f"  equality is not promised: {line}")
    return 0


def _not_promised(changed: Changes) -> list[str]:
    """Say why the numbers may differ."""
    why = ["GPUs add in an order of their own"] if changed.gpu else []
    why += [f"the trainer's code has changed: {named(changed.code)}"] if changed.code else []
    return [*why, *changed.others]


def _code_then(was: RunDir, changed: Changes) -> list[str]:
    """Say how to get the code that a run was made with, where it is not that of now."""
    if not changed.code:
        return []
    try:
        about = read_json(was.run_json).get("provenance") or {}
    except KmatrixError:
        return []
    lines = [f"the trainer's code has changed since: {named(changed.code)}"]
    commit, patch = about.get("git_commit"), MatrixDir(was.path.parent).patch
    if not commit:
        return [*lines, "the code of then is in no commit that is known"]
    command = f"git worktree add {APART} {str(commit)[:10]}"
    if about.get("patch") and patch.is_file():
        command += f" && git -C {APART} apply {shlex.quote(str(patch))}"
    lines.append(f"the code of then: {command}")
    if about.get("git_dirty") and not about.get("patch"):
        lines.append(f"its changes that no commit has were not kept: {about.get('no_patch') or 'not recorded'}")
    if about.get("untracked"):
        lines.append(f"these files were there, and are in neither: {named(about['untracked'])}")
    return lines


def _weights(was: RunDir, now: RunDir) -> tuple[bool | None, str]:
    """Say whether the final weights are the same; None where one of them is not there to compare."""
    paths = []
    for run in (was, now):
        shelf = Shelf(folder_of(run))
        entry = shelf.of_kind(Kind.FINAL)
        if entry is None:
            return None, f"weights not compared: {shown(run.path)} has no final checkpoint"
        paths.append(str(shelf.folder / entry.name))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "lib")])}
    done = subprocess.run(
        [sys.executable, "-m", "gpt2.weights", *paths], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        why = done.stderr.strip().splitlines()
        return None, f"weights not compared: {why[0] if why else 'the trainer gave no answer'}"
    found = json.loads(done.stdout.strip().splitlines()[-1])
    if found["equal"]:
        return True, f"equal bit for bit: the final weights, SHA-256 {found['sha256'][:12]}"
    apart = "" if found["by"] is None else f", {found['by']:.3g} apart"
    return False, f"not equal: {found['differing']} of {found['tensors']} final weights, most {found['most']}{apart}"
