"""Resolve what depends on where runs execute, this machine or a cluster: device `auto`, NUM_GPUS=0, NUM_NODES=0."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kmatrix.config import resolve_count, resolve_device
from kmatrix.errors import ConfigError
from kmatrix.experiment.cluster.nodes import Nodes, cluster_nodes
from kmatrix.gpu.nvml.detect import Gpu, detect, usable
from kmatrix.kconfig.assignments import merge
from kmatrix.kconfig.tree import Assignment, Tree
from kmatrix.matrix.axes import Axes, AxisValue, Rule
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


def find_gpus(asked: str) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs that may be used here, and a note for each that cannot. asked: GPUS=, "" for all."""
    found = detect()
    gpus = usable(found, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), asked=asked or None)
    return gpus, found.notes


def resolve(tree: Tree, base: list[Assignment], axes: Axes, gpus: str) -> ResolvedConfig:
    """Return the configuration with the device and the numbers of GPUs and nodes that it asks for.

    gpus: indices or UUIDs of the GPUs that may be used, "" for all. The driver is queried only if a run may need a GPU:
    a CPU matrix does not start NVML.
    Raises ConfigError if NUM_NODES=0 cannot be resolved.
    """
    texts = tree.apply(base)
    # As written, even if it is out of range.
    written = {**texts, **{item.name: item.value for item in base if item.value}}
    engine = texts.get("ENGINE") or LOCAL
    nodes = None if engine == LOCAL else cluster_nodes(engine, texts)
    swept = {axis.name: [point.text for point in axis.points] for axis in axes.axes}
    coupled = [point for rule in axes.rules for group in rule.points for point in group]

    def asked(name: str, default: str) -> list[str]:
        return swept.get(name) or [(texts if name == DEVICE else written).get(name) or default]

    def everywhere(name: str, default: str) -> list[str]:
        return [*asked(name, default), *(point.text for point in coupled if point.axis == name)]

    counts, devices = [int(text) for text in everywhere(GPUS, "1")], set(everywhere(DEVICE, "cpu"))
    found, notes = find_gpus(gpus) if nodes is None and (gpus or 0 in counts or devices != {"cpu"}) else ((), ())
    there = nodes.gpus if nodes else len(found)
    stands_for, device = dict[tuple[str, str], str](), texts.get(DEVICE) or "cpu"
    if "auto" in devices:
        auto = stands_for[DEVICE, "auto"] = resolve_device("auto", counts, there, backend=texts.get(BACKEND))
        device = auto if device == "auto" else device
    if 0 in counts:  # without data parallelism there is one rank, whatever the machine has
        stands_for[GPUS, "0"] = str(resolve_count(0, device, min(there, 1) if texts.get(DDP) == "n" else there))
    per_node = int(texts.get(PER_NODE) or 0)
    extra = [
        _fixed(tree, name, text)
        for (name, marker), text in stands_for.items()
        if name not in swept and asked(name, "") == [marker]
    ]
    if nodes and nodes.gpus and DEVICE not in swept and device == "cuda" and not per_node:
        per_node = nodes.gpus  # on the CPU the same symbol limits ranks, which cores decide
        extra.append(_fixed(tree, PER_NODE, str(per_node)))
    axes = _with_points(axes, lambda point: _resolved(tree, point, stands_for.get((point.axis, point.text))))
    if "0" in asked(NODES, "1"):
        if NODES in swept or {NODES, GPUS} & {point.axis for point in coupled}:
            raise ConfigError(
                "NUM_NODES=0 cannot be resolved here",
                why="it is one of several values, or a coupled value sets NUM_NODES or NUM_GPUS",
                hint="write the numbers of nodes",
            )
        each = per_node or (MOST_RANKS if engine == LOCAL else 0)  # this machine is one node, whatever it has
        ranks = [stands_for.get((GPUS, text), text) for text in asked(GPUS, "1")]
        axes = replace(axes, rules=(*axes.rules, *_fewest_nodes(tree, ranks, each)))
        base = [item for item in base if item.name != NODES]
    return ResolvedConfig(base=merge(tree, base, extra)[0], axes=axes, gpus=found, nodes=nodes, notes=notes)


def _fixed(tree: Tree, name: str, text: str) -> Assignment:
    member = tree.members[DEVICE][text].name if name == DEVICE else name
    return Assignment(member, "y" if name == DEVICE else text, f"resolved: {name}={text}")


def _resolved(tree: Tree, point: AxisValue, text: str | None) -> AxisValue:
    if text is None:
        return point
    line = replace(_fixed(tree, point.axis, text), where=point.assignment.where)
    return replace(point, text=text, assignment=line)


def _with_points(axes: Axes, resolved: Callable[[AxisValue], AxisValue]) -> Axes:
    """Return the axes and the rules with resolved values, each once: `auto,cuda` may be the same value twice."""

    def each(points: Sequence[AxisValue]) -> tuple[AxisValue, ...]:
        return tuple({point.text: point for point in map(resolved, points)}.values())

    return replace(
        axes,
        axes=tuple(replace(axis, points=each(axis.points)) for axis in axes.axes),
        rules=tuple(replace(rule, points=tuple(map(each, rule.points))) for rule in axes.rules),
    )


def _fewest_nodes(tree: Tree, ranks: Sequence[str], per_node: int) -> list[Rule]:
    """Return the rules that set NUM_NODES for these numbers of ranks.

    per_node: GPUs of a node. Raises ConfigError if it is 0, which is unknown.
    """
    if not per_node:
        raise ConfigError(
            "NUM_NODES=0 needs GPUS_PER_NODE",
            why="the number of nodes follows from the GPUs of each",
            hint="pass GPUS_PER_NODE=<number>, or NUM_NODES=<number>",
        )
    lines = {count: _fixed(tree, NODES, str(fewest_nodes(int(count), per_node))) for count in ranks}
    vary = len({line.value for line in lines.values()}) > 1
    return [
        Rule(((GPUS, count),), line.where, ((AxisValue(NODES, line.value, line, swept=vary),),))
        for count, line in lines.items()
    ]
