"""Combine the recordings of the nodes of a run: each has the devices and the clock of its own node."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kmatrix.records.attempts import host_of
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.numbers import GpuNumbers, PeriodNumbers, TimelinePoint
from kmatrix.stats import complete_sum

SET_UP = "set-up"  # the phase that all nodes leave together: the training begins


def over_nodes(run: RunDir, parts: Mapping[int, GpuNumbers | None]) -> GpuNumbers | None:
    """Return the numbers of the devices of all nodes of a run, None if nothing was recorded.

    parts: the recordings of all nodes by number, None without one.
    Sums are unknown if a node recorded nothing. The maximum of their sum is unknown: their clocks may differ.
    """
    hosts = {node: host_of(run.path, node) for node in parts}
    silent = [hosts[node] for node, part in parts.items() if not part or not part.devices]
    found = {node: _named(run, part, node, hosts[node]) for node, part in parts.items() if part and part.devices}
    if not found:
        return next((part for part in parts.values() if part is not None), None)
    notes = [f"nothing recorded on {', '.join(silent)}"] if silent else []
    notes += [f"{hosts[node]}: {note}" for node, part in found.items() for note in part.notes]
    first, whole = next(iter(found.values())), [None] if silent else []  # None makes a sum unknown
    trained = [part.training for part in found.values()]
    periods = [period for period in trained if period is not None]
    return replace(
        first,
        devices=tuple(device for part in found.values() for device in part.devices),
        samples=sum(part.samples for part in found.values()),
        # The time that all recordings cover.
        seconds=min((part.seconds for part in found.values() if part.seconds is not None), default=None),
        final=all(part.final for part in found.values()),
        total_mean=complete_sum([*(part.total_mean for part in found.values()), *whole]),
        total_max=None,
        joules=complete_sum([*(part.joules for part in found.values()), *whole]),
        training=_together(periods, whole) if len(periods) == len(trained) else None,
        consistent=all(part.consistent for part in found.values()),
        nodes=found,
        earlier=(),
        notes=tuple(notes),
        timeline=(),
    )


def _named(run: RunDir, part: GpuNumbers, node: int, host: str) -> GpuNumbers:
    """Return the numbers of a node with its host, and the place of their file in the run."""
    training = part.training
    if training is not None:
        training = replace(training, devices=tuple(replace(device, host=host) for device in training.devices))
    return replace(
        part,
        evidence=f"{run.name}/nodes/{node}/{Path(part.evidence).name}" if node else part.evidence,
        devices=tuple(replace(device, host=host) for device in part.devices),
        training=training,
    )


def _together(periods: Sequence[PeriodNumbers], whole: Sequence[None]) -> PeriodNumbers:
    """Return the training on all nodes. whole: a None that makes sums unknown, if a node recorded nothing."""
    return PeriodNumbers(
        devices=tuple(device for period in periods for device in period.devices),
        seconds=min((period.seconds for period in periods if period.seconds is not None), default=None),
        total_mean=complete_sum([*(period.total_mean for period in periods), *whole]),
        joules=complete_sum([*(period.joules for period in periods), *whole]),
        consistent=all(period.consistent for period in periods),
        is_mixed=any(period.is_mixed for period in periods),
    )


def merged_timeline(nodes: Sequence[GpuNumbers]) -> tuple[TimelinePoint, ...]:
    """Return the memory timeline of the devices of all nodes, each node with its own.

    The time is that of the first node. The start of the training, which all nodes share, places the
    others on it; the memory of a node that did not get that far is unknown.
    """
    first, *others = nodes
    columns = [_placed(first, other) for other in others]
    return tuple(
        replace(point, memory=(*point.memory, *(value for column in columns for value in column[at])))
        if point.memory
        else point
        for at, point in enumerate(first.timeline)
    )


def _placed(first: GpuNumbers, other: GpuNumbers) -> list[tuple[float | None, ...]]:
    """Return the memory of the devices of another node at each point of the first node's timeline."""
    unknown: tuple[float | None, ...] = (None,) * len(other.devices)
    began, there = training_began(first), training_began(other)
    if began is None or there is None or not other.timeline:
        return [unknown] * len(first.timeline)
    times = [point.seconds + began - there for point in other.timeline]
    reach = max(_interval(first.timeline), _interval(other.timeline))  # s, a point stands for the time around it
    found = []
    for point in first.timeline:
        at = bisect_left(times, point.seconds)
        near = min((max(0, at - 1), min(at, len(times) - 1)), key=lambda place: abs(times[place] - point.seconds))
        is_near = abs(times[near] - point.seconds) <= reach
        found.append(other.timeline[near].memory or unknown if is_near else unknown)
    return found


def training_began(node: GpuNumbers) -> float | None:
    """Return the recording time (s) at which the set-up of a node ended, in its last recording; None if unknown."""
    return next((phase.end for phase in node.phases if phase.name == SET_UP and not phase.is_earlier), None)


def _interval(timeline: Sequence[TimelinePoint]) -> float:
    """Return the mean distance of two points, s."""
    return (timeline[-1].seconds - timeline[0].seconds) / max(1, len(timeline) - 1) if timeline else 0.0
