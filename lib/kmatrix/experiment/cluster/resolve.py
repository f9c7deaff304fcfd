"""Resolve what depends on where runs execute, this machine or a cluster: device `auto`, NUM_GPUS=0, NUM_NODES=0."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass

from kmatrix.config import (
    resolve_count,
    resolve_device,
)
from kmatrix.errors import ConfigError
from kmatrix.experiment.cluster.nodes import Nodes, cluster_nodes
from kmatrix.gpu.nvml.detect import Gpu, detect, usable
from kmatrix.kconfig.assignments import merge
from kmatrix.kconfig.tree import Assignment, Tree
from kmatrix.matrix.axes import Axes, AxisValue, Condition, Coupling
from kmatrix.packing import fewest_nodes
from kmatrix.records.matrix import LOCAL

DEVICE, GPUS, BACKEND, DDP = "GPT2_DEVICE", "GPT2_NUM_GPUS", "GPT2_DDP_BACKEND", "GPT2_USE_DDP"
NODES, PER_NODE = "GPT2_NUM_NODES", "GPUS_PER_NODE"
MOST_RANKS = 4096  # of a run: the upper bound of NUM_GPUS


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """A configuration without values that depend on where runs execute."""

    base: list[Assignment]  # the lines that hold in every run
    axes: Axes
    gpus: tuple[Gpu, ...]  # of this machine that runs may use; empty if no run needs one, and on a cluster
    nodes: Nodes | None  # of the cluster that executes the runs; None: this machine does
    notes: tuple[str, ...]  # about GPUs that cannot be used


def resolve(tree: Tree, base: list[Assignment], axes: Axes, gpus: str) -> ResolvedConfig:
    """Return the configuration with the device and the numbers of GPUs and nodes that it asks for.

    gpus: indices or UUIDs of the GPUs that may be used, "" for all.
    Raises ConfigError if NUM_NODES=0 cannot be resolved.
    """
    nodes = _nodes(tree, base)
    base, axes, found, notes = _resolve_devices(tree, base, axes, gpus, nodes)
    base = _limit_gpus(tree, base, axes, nodes)
    base, axes = _resolve_nodes(tree, base, axes)
    return ResolvedConfig(base=base, axes=axes, gpus=found, nodes=nodes, notes=notes)


def find_gpus(asked: str) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs that may be used here, and a note for each that cannot. asked: GPUS=, "" for all."""
    found = detect()
    gpus = usable(found, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), asked=asked or None)
    return gpus, found.notes


@dataclass(frozen=True, slots=True)
class _Here:
    """The device `auto` and the GPU count 0, resolved for this machine."""

    tree: Tree
    auto: str  # cuda or cpu
    ranks: int  # what NUM_GPUS=0 stands for

    def point(self, point: AxisValue) -> AxisValue:
        """Return an axis value with `auto` or 0 resolved; other values unchanged."""
        if point.axis == DEVICE and point.text == "auto":
            return dataclasses.replace(self.fixed(DEVICE, self.auto), swept=point.swept)
        if point.axis == GPUS and point.text == "0":
            return dataclasses.replace(self.fixed(GPUS, str(self.ranks)), swept=point.swept)
        return point

    def points(self, points: Sequence[AxisValue]) -> tuple[AxisValue, ...]:
        """Return resolved axis values, each once."""
        # `auto,cuda` and `0,4` may resolve to the same value twice.
        return tuple({point.text: point for point in map(self.point, points)}.values())

    def fixed(self, name: str, text: str) -> AxisValue:
        member = self.tree.members[DEVICE][text].name if name == DEVICE else name
        return AxisValue(name, text, Assignment(member, "y" if name == DEVICE else text, f"resolved: {name}={text}"))


def _nodes(tree: Tree, base: list[Assignment]) -> Nodes | None:
    """Return the nodes of the cluster that executes the runs, None for this machine."""
    texts = tree.apply(base)
    engine = texts.get("ENGINE") or LOCAL
    return None if engine == LOCAL else cluster_nodes(engine, texts)


def _limit_gpus(tree: Tree, base: list[Assignment], axes: Axes, nodes: Nodes | None) -> list[Assignment]:
    """Return the base with the GPUs of a cluster's node as GPUS_PER_NODE, if runs use GPUs and it is not set.

    On the CPU the same symbol limits ranks, which cores decide.
    """
    if nodes is None or not nodes.gpus or DEVICE in {axis.name for axis in axes.axes}:
        return base
    texts = tree.apply(base)
    if texts.get(DEVICE) != "cuda" or int(texts.get(PER_NODE) or 0):
        return base
    resolved = Assignment(PER_NODE, str(nodes.gpus), f"resolved: {PER_NODE}={nodes.gpus}")
    return merge(tree, base, [resolved])[0]


def _resolve_devices(
    tree: Tree, base: list[Assignment], axes: Axes, gpus: str, nodes: Nodes | None
) -> tuple[list[Assignment], Axes, tuple[Gpu, ...], tuple[str, ...]]:
    """Replace the device `auto` and the GPU count 0 everywhere by their values on this machine, or a cluster's node.

    Returns the base and the axes, the GPUs that runs may use, and notes about GPUs. The driver is queried only if a run
    may need a GPU: a CPU matrix does not start NVML.
    """
    # What the configuration asks for: in the base, on the axes and in the rules.
    values = tree.apply(base)
    written = {item.name: item.value for item in base}
    asked_device = values.get(DEVICE) or "cpu"
    asked_gpus = int(written.get(GPUS) or values.get(GPUS) or 1)  # as written, even if it is out of range
    swept = {axis.name: axis.points for axis in axes.axes}
    coupled = [point for rule in axes.couplings for group in rule.points for point in group]
    points = [*(point for axis in axes.axes for point in axis.points), *coupled]
    counts = [int(point.text) for point in points if point.axis == GPUS] + ([] if GPUS in swept else [asked_gpus])
    devices = {asked_device, *(point.text for point in points if point.axis == DEVICE)}
    # What this machine has.
    found, notes = find_gpus(gpus) if nodes is None and (gpus or 0 in counts or devices != {"cpu"}) else ((), ())
    there = nodes.gpus if nodes else len(found)
    auto = resolve_device("auto", counts, there, backend=values.get(BACKEND))
    device = auto if asked_device == "auto" else asked_device
    # Without data parallelism there is one rank, whatever the machine has.
    usable_here = min(there, 1) if values.get(DDP) == "n" else there
    here = _Here(tree, auto, resolve_count(0, device, usable_here) if 0 in counts else 0)
    # Replace `auto` and 0 in the base, then on the axes and in the rules.
    extra: list[Assignment] = []
    if DEVICE not in swept and asked_device == "auto":
        extra.append(here.fixed(DEVICE, auto).assignment)
    if GPUS not in swept and asked_gpus == 0:
        extra.append(here.fixed(GPUS, str(here.ranks)).assignment)
    kept, _ = merge(tree, base, extra)
    resolved = dataclasses.replace(
        axes,
        axes=tuple(dataclasses.replace(axis, points=here.points(axis.points)) for axis in axes.axes),
        couplings=tuple(
            dataclasses.replace(rule, points=tuple(here.points(group) for group in rule.points))
            for rule in axes.couplings
        ),
    )
    return kept, resolved, found, notes


def _resolve_nodes(tree: Tree, base: list[Assignment], axes: Axes) -> tuple[list[Assignment], Axes]:
    """Replace NUM_NODES=0 by the fewest nodes for each number of GPUs, as rules if that is an axis.

    Raises ConfigError if GPUS_PER_NODE is not known, or a rule sets one of the two.
    """
    texts = tree.apply(base)
    written = {item.name: item.value for item in base}
    coupled = {point.axis for rule in axes.couplings for group in rule.points for point in group}
    swept = {axis.name: axis.points for axis in axes.axes}
    zero_in_list = any(point.text == "0" for point in swept.get(NODES, ()))
    asked = written.get(NODES) or texts.get(NODES)
    if not zero_in_list and (NODES in swept or asked != "0"):
        return base, axes
    per_node, engine = int(texts.get(PER_NODE) or 0), texts.get("ENGINE") or LOCAL
    if not per_node:  # this machine is one node, whatever it has
        per_node = MOST_RANKS if engine == LOCAL else 0
    if not per_node:
        raise ConfigError(
            "NUM_NODES=0 needs GPUS_PER_NODE",
            why="the number of nodes follows from the GPUs of each",
            hint="pass GPUS_PER_NODE=<number>, or NUM_NODES=<number>",
        )
    if zero_in_list or {NODES, GPUS} & coupled:
        raise ConfigError(
            "NUM_NODES=0 cannot be resolved here",
            why="it is one of several values, or a coupled value sets NUM_NODES or NUM_GPUS",
            hint="write the numbers of nodes",
        )
    counts = [point.text for point in swept.get(GPUS, ())] or [written.get(GPUS) or texts.get(GPUS) or "1"]
    nodes = {count: str(fewest_nodes(int(count), per_node)) for count in counts}
    values = {
        count: AxisValue(NODES, text, Assignment(NODES, text, f"resolved: {NODES}={text}"), swept=False)
        for count, text in nodes.items()
    }
    if len(set(nodes.values())) == 1:
        kept, _ = merge(tree, base, [values[counts[0]].assignment])
        return kept, axes
    rules = tuple(
        Coupling(Condition(((GPUS, count),), f"{GPUS}={count}"), ((value,),)) for count, value in values.items()
    )
    kept = [item for item in base if item.name != NODES]
    return kept, dataclasses.replace(axes, couplings=(*axes.couplings, *rules))
