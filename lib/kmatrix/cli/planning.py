"""From .config and the command line to the runs of a matrix, with everything resolved that the machine decides."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import config_path, load_config, open_tree, overrides, single
from kmatrix.config import RULES, Config, RunConfig, read, read_run, resolve_count, resolve_device
from kmatrix.errors import ConfigError
from kmatrix.gpu.nvml import Gpu, detect, usable
from kmatrix.kconfig import Assignment, Tree
from kmatrix.kconfig.assign import merge
from kmatrix.kconfig.tree import NOT_AN_AXIS
from kmatrix.matrix import Matrix, Point, Run, expand, plan_axes, settle
from kmatrix.matrix.axes import Axes

DEVICE, GPUS, BACKEND, DDP = "GPT2_DEVICE", "GPT2_NUM_GPUS", "GPT2_DDP_BACKEND", "GPT2_USE_DDP"
EQUAL = "MATRIX_EQUAL"


@dataclass(slots=True)
class Plan:
    """An expanded matrix, and what is needed to resolve each of its runs.

    gpus: those that may be used.  equal: what the runs are promised to have in common (MATRIX_EQUAL).
    """

    tree: Tree
    base: list[Assignment]
    matrix: Matrix
    config: Config
    gpus: tuple[Gpu, ...]
    notes: tuple[str, ...]
    path: Path
    equal: str

    def symbols(self, run: Run) -> dict[str, Any]:
        """Return a run's typed values in force. They stay in force in the tree until the next call."""
        settle(self.tree, self.base, run)
        return {name: self.tree.typed(name, self.tree.value(name)) for name in self.tree.names()}

    def run_config(self, run: Run) -> RunConfig:
        return read_run(self.symbols(run))


def make_plan(arguments: Arguments, *, one: bool = False, path: Path | None = None) -> Plan:
    """Read .config, lay the command line over it, resolve devices, and expand.

    one: a matrix of one run; axes on the command line are refused, and those of .config are left out. What is coupled
    to the values of that one run still holds.
    """
    tree = open_tree(arguments)
    path = path or config_path(arguments)
    base = load_config(tree, path)
    asked = overrides(tree, arguments)
    if one:
        base = _without_matrix(base, asked)
    base, _ = merge(tree, base, single(asked))
    gpus, notes = gpus_here(arguments)
    axes = plan_axes(tree, base, asked)
    if one:  # lines that only other runs of the matrix would use are noted, not refused
        axes = dataclasses.replace(axes, overridden=axes.overridden | {"MATRIX"})
    base, axes = _resolve(tree, base, axes, len(gpus))
    matrix = expand(tree, base, axes, RULES)
    symbols = {name: tree.typed(name, tree.value(name)) for name in tree.names()}
    equal = "any" if one else next((item.value for item in base if item.name == EQUAL), "any")
    return Plan(tree, base, matrix, read(symbols), gpus, notes, path, equal)


def _without_matrix(base: list[Assignment], asked: Mapping[str, Sequence[Assignment]]) -> list[Assignment]:
    several = [values[0].where.removeprefix("command line: ") for values in asked.values() if len(values) > 1]
    if several:
        raise ConfigError(
            f"train runs one configuration: {', '.join(several)}", fix="use make test-matrix for a matrix"
        )
    return [item for item in base if not item.name.startswith("MATRIX_") or item.name in NOT_AN_AXIS]


def gpus_here(arguments: Arguments) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs that may be used, and what is to be said of the others."""
    found = detect()
    gpus = usable(found, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), asked=arguments.get("GPUS") or None)
    return tuple(gpus), tuple(found.notes)


@dataclass(frozen=True, slots=True)
class _Here:
    """What the device `auto` and the GPU count 0 come to on this machine. ranks: what 0 comes to."""

    tree: Tree
    auto: str
    ranks: int

    def point(self, point: Point) -> Point:
        """Return a point with its value resolved; other values stay as asked."""
        if point.axis == DEVICE and point.text == "auto":
            return dataclasses.replace(self.fixed(DEVICE, self.auto), swept=point.swept)
        if point.axis == GPUS and point.text == "0":
            return dataclasses.replace(self.fixed(GPUS, str(self.ranks)), swept=point.swept)
        return point

    def points(self, points: Sequence[Point]) -> tuple[Point, ...]:
        """Return points resolved; those that come to the same are one."""
        return tuple({point.text: point for point in map(self.point, points)}.values())

    def fixed(self, name: str, text: str) -> Point:
        member = self.tree.members(DEVICE)[text].name if name == DEVICE else name
        return Point(name, text, Assignment(member, "y" if name == DEVICE else text, f"resolved: {name}={text}"))


def _resolve(tree: Tree, base: list[Assignment], axes: Axes, detected: int) -> tuple[list[Assignment], Axes]:
    """Replace the device `auto` and the GPU count 0 by what they come to here, wherever they stand."""
    for item in base:
        if not item.name.startswith("MATRIX"):
            tree.kconf.syms[item.name].set_value(item.value)
    written = {item.name: item.value for item in base}
    asked_device = tree.value(DEVICE) or "cpu"
    asked_gpus = int(written.get(GPUS) or tree.value(GPUS) or 1)  # as written, though it be out of range
    swept = {axis.name: axis.points for axis in axes.axes}
    coupled = [point for rule in axes.couplings for group in rule.points for point in group]
    counts = [int(point.text) for point in (*swept.get(GPUS, ()), *coupled) if point.axis == GPUS]
    counts += [] if GPUS in swept else [asked_gpus]
    auto = resolve_device("auto", counts, detected, backend=tree.value(BACKEND))
    device = auto if asked_device == "auto" else asked_device
    usable_here = min(detected, 1) if tree.value(DDP) == "n" else detected
    here = _Here(tree, auto, resolve_count(0, device, usable_here) if 0 in counts else 0)
    extra: list[Assignment] = []
    if DEVICE not in swept and asked_device == "auto":
        extra.append(here.fixed(DEVICE, auto).assignment)
    if GPUS not in swept and asked_gpus == 0:
        extra.append(here.fixed(GPUS, str(here.ranks)).assignment)
    kept, _ = merge(tree, base, extra)
    tree.reset()
    return kept, dataclasses.replace(
        axes,
        axes=tuple(dataclasses.replace(axis, points=here.points(axis.points)) for axis in axes.axes),
        couplings=tuple(
            dataclasses.replace(rule, points=tuple(here.points(group) for group in rule.points))
            for rule in axes.couplings
        ),
    )
