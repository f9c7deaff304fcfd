"""Compute the numbers of the devices of a run from its recordings: each is an expression over the samples of a period.

Means are of the training (without set-up, evaluations, checkpoints, ending, and the time between attempts) and of the
whole recording; peaks and energy are of the whole. A sum over devices, attempts or nodes is unknown if one of them is.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec.structs import asdict

from kmatrix.gpu.balance import Balance, balance_of
from kmatrix.gpu.formats.summary import DeviceEntry, SummaryFile
from kmatrix.gpu.recorder.summary import EXCLUDED_ATTEMPT, NO_POWER, NO_RESPONSE
from kmatrix.gpu.xid import xids_text
from kmatrix.records.decode import decode_lines, decode_optional, replaced
from kmatrix.records.events import EventLine, PhaseLine
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.energy import joules_within, steps_of, within
from kmatrix.report.gpu.recordings import Node, recordings_of
from kmatrix.report.gpu.results import Device, Gpu, Period, Statistics
from kmatrix.report.gpu.samples import MEASURED, QUANTITIES, Mask, Samples
from kmatrix.report.gpu.timeline import ENDING, SET_UP, Span, spans_of, training_of
from kmatrix.stats import complete_sum
from kmatrix.status.stragglers import HIDDEN_STRAGGLER, read_ranks
from kmatrix.text import duration, plural, time_of_day

MIN_COVERAGE = 0.9  # share of a period that must be sampled for its energy per token to be known
SILENT_S = 1.0  # without any value for this long, a GPU did not respond
COMPUTED = (NO_RESPONSE, NO_POWER, EXCLUDED_ATTEMPT)  # in warnings of the recorder which the report replaces
NOTHING_RECORDED, XID = "nothing recorded", "xid"  # events of the recorder


class Spent(NamedTuple):
    """What a node sampled of a period. None: unknown."""

    seconds: float | None
    joules: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The numbers of one node."""

    samples: Samples
    devices: Sequence[Device]
    whole: Spent
    training: Spent | None  # None: unknown
    took_s: float  # length of the training
    notes: Sequence[str]  # besides those of its recordings


def gpu_of(
    run_dir: RunDir,
    nodes: Sequence[Node] | None = None,
    *,
    tokens: int | None = None,
    seconds: float | None = None,
    running: bool = False,
) -> Gpu | None:
    """Return the numbers of the devices of a run; None if there is no recording, and no timing of its ranks.

    One that is unreadable gives numbers without devices, and a note why. No clocks of two nodes are compared.
    nodes: its recordings, None to read them. tokens, seconds: of its training. running: its last attempt has not ended.
    """
    nodes = recordings_of(run_dir) if nodes is None else nodes
    ranks = read_ranks(run_dir)
    notes = [note for node in nodes for note in node.notes]
    known = [_measured(node, one, running=running) for node in nodes if (one := node.samples)]
    if not known:
        events = decode_lines(run_dir.gpu_events, EventLine)
        notes += [one.text or "" for one in events if one.event == NOTHING_RECORDED][-1:]
        return Gpu(ranks=ranks, notes=tuple(notes)) if ranks or notes else None
    first, samples = known[0], known[0].samples
    silent = [node.host for node in nodes if node.samples is None]
    notes += [f"nothing recorded on {', '.join(silent)}"] if silent else []
    notes += [note for one in known for note in one.notes]
    devices = [device for one in known for device in one.devices]
    period = partial(_period, tokens=tokens, doubt=any(one.samples.doubt for one in known))
    nothing, unknown = [dict[str, Statistics]()] * len(silent), [Spent(None, None)] * len(silent)
    whole = period([one.whole for one in devices] + nothing, [one.whole for one in known] + unknown, wanted=seconds)
    trained = [one.training for one in known if one.training]
    if len(trained) == len(known):
        training = period([one.main for one in devices] + nothing, trained + unknown, wanted=first.took_s)
    else:
        devices, training = [replaced(device, training=None) for device in devices], None
    for name, of, length in (("training", training, first.took_s), ("recording", whole, seconds)):
        if tokens and of and of.joules is not None and of.joules_per_token is None:
            notes.append(f"J/token of the {name} unknown: {duration(of.seconds)} of {duration(length)} were recorded")
    even = (training or whole).balance.get("memory_used")
    if ranks and even and even.quality == "Excellent":
        ranks = replaced(ranks, hidden=ranks.straggler_time_share > HIDDEN_STRAGGLER)
    memory, unit = samples["memory_used"], samples.devices[0].unit
    peak = float(np.nansum(memory, axis=1).max()) if len(nodes) == 1 and np.isfinite(memory).any() else None
    # Ranks share the memory of their host.
    sizes = {device.label if unit == "GPU" else device.host: device.memory_total for device in devices}
    is_counted = np.isfinite(samples["energy_j"]).any(axis=0).all()
    phases = defaultdict[str, float](float)
    for line in decode_lines(nodes[0].folder.phases, PhaseLine):
        phases[line.phase] += line.duration_s
    return Gpu(
        evidence=next(node.evidence for node in nodes if node.samples),
        unit=unit,
        simulated=samples.simulated,
        samples=sum(len(one.samples) for one in known),
        energy_source=("counter" if is_counted else "power") if whole.joules is not None else None,
        gpus=tuple(devices),
        whole=whole,
        training=training,
        memory_used_max=peak,
        memory_total=complete_sum(list(sizes.values())),
        phases={phase: spent for phase, spent in phases.items() if spent},
        ranks=ranks,
        notes=tuple(notes),
    )


def _period(
    of: Sequence[dict[str, Statistics]], spent: Sequence[Spent], wanted: float | None, tokens: int | None, doubt: bool
) -> Period:
    """Return the numbers of all devices over a period.

    spent: by each node. wanted: length of the period (s). doubt: the devices cannot be compared.
    """
    means, balances = dict[str, list[float]](), dict[str, Balance]()
    for name in ("memory_used", "utilization", "power"):
        known = [one[name].mean for one in of if name in one]
        means[name] = known if len(known) == len(of) else []
        if any(means[name]) and not doubt and (found := balance_of(known)):
            balances[name] = found
    seconds = min((one.seconds for one in spent if one.seconds is not None), default=None)
    joules = complete_sum([one.joules for one in spent])
    is_covered = not wanted or (seconds or 0.0) >= MIN_COVERAGE * wanted
    return Period(
        seconds=seconds,
        memory_used_mean=complete_sum(means["memory_used"]),
        mean_power=complete_sum(means["power"]),
        utilization=math.fsum(means["utilization"]) / len(of) if means["utilization"] else None,
        joules=joules,
        joules_per_token=joules / tokens if joules is not None and tokens and is_covered else None,
        balance=balances,
    )


def _measured(node: Node, samples: Samples, *, running: bool) -> _Measured:
    """Return the numbers of one node; its devices are those of its last recording."""
    spans = spans_of(samples, node.folder, node=node.number, running=running)
    training = training_of(spans, float(samples.time[-1]))
    steps = steps_of(samples)
    joules = steps.sum(axis=0) if samples.usual_s else np.full(len(samples.devices), np.nan)
    # The sample in which a training ends is not one of it.
    is_trained = np.searchsorted(np.ravel(training), samples.time, side="right") % 2 == 1
    whole, trained = _statistics(samples, np.full(len(samples), True)), _statistics(samples, is_trained)
    summary = decode_optional(node.folder.gpu_summary, SummaryFile) or SummaryFile()
    entries = {(gpu.gpu_index, gpu.uuid): gpu for gpu in summary.gpus}
    is_known = np.logical_or.reduce([~np.isnan(samples[quantity]) for quantity in MEASURED])
    devices, notes = list[Device](), [text for text in summary.warnings if not any(part in text for part in COMPUTED)]
    for at, one in enumerate(samples.devices[: len(whole)]):
        entry = entries.get((one.gpu_index, one.uuid), DeviceEntry())
        may_be_lost = not samples.doubt and one.unit == "GPU"
        lost_at, lost_s = _lost(samples, is_known[:, at]) if may_be_lost else (None, 0.0)
        if lost_at is None:
            lost_at = entry.lost_at  # a run ends soon after: too soon for samples to tell
        notes += [f"{one.name_on('')} {problem}" for problem in _problems(entry, lost_at, lost_s)]
        if lost_s or lost_at is not None:
            whole[at].pop("power", None)
            trained[at].pop("power", None)
        elif samples.usual_s and math.isnan(joules[at]) and "power" in whole[at] and may_be_lost:
            notes.append(f"{one.name_on('')} {NO_POWER} {samples.gap_s:g} s: its energy is unknown")
        devices.append(
            Device(
                **asdict(one),
                label=one.name_on(node.host),
                host=node.host or None,
                whole=whole[at],
                training=trained[at],
                joules=_known(joules[at]),
                lost_at=lost_at,
                lost_s=lost_s,
            )
        )
    notes += [*_xids(node.folder), *_gap_note(samples, spans)]
    inside = float(within(samples.time, training)[~samples.gaps].sum())
    in_training = Spent(inside, _known(joules_within(samples, steps, training)))
    return _Measured(
        samples=samples,
        devices=devices,
        whole=Spent(samples.seconds or None, _known(joules.sum())),
        training=in_training if any(trained) and samples.usual_s else None,
        took_s=sum(end - begin for begin, end in training),
        notes=[node.prefix + note for note in notes],
    )


def _statistics(samples: Samples, chosen: Mask) -> list[dict[str, Statistics]]:
    """Return quantity -> statistics of each device of the last recording, over the chosen samples of this one."""
    last = samples.parts[-1]
    found = [dict[str, Statistics]() for _ in last.places]
    for quantity in QUANTITIES:
        for of, column in zip(found, samples[quantity][last.rows].T, strict=False):
            known = column[chosen[last.rows] & ~np.isnan(column)]
            if known.size:
                low, high = float(known.min()), float(known.max())
                mean, deviation = float(known.mean()), float(known.std())
                of[quantity] = Statistics(mean=mean, deviation=deviation, min=low, max=high, count=known.size)
    return found


def _lost(samples: Samples, is_known: Mask) -> tuple[float | None, float]:
    """Return since when (Unix s) a device does not respond (None: it does), and for how long (s) it did not."""
    rows = samples.parts[-1].rows
    known, widths, gaps = is_known[rows], np.diff(samples.time[rows]), samples.gaps[rows.start :]
    seconds = float(widths[~known[1:] & ~gaps].sum())
    if seconds < SILENT_S:
        return None, 0.0
    first = 1 + max(np.flatnonzero(known), default=-1)
    return (None if first == len(known) else float(samples.wall[rows][first])), seconds


def _problems(entry: DeviceEntry, lost_at: float | None, lost_s: float) -> Iterator[str]:
    """Yield what impaired a device: loss, throttling, memory errors, other processes."""
    if lost_at is not None:
        yield f"was lost at {time_of_day(lost_at, utc=True)}: its numbers end there"
    elif lost_s:
        yield f"{NO_RESPONSE} {lost_s:.1f} s: its mean power is unknown"
    if reasons := [f"{why} {duration(seconds)}" for why, seconds in entry.throttled_s.items() if seconds]:
        yield f"was throttled: {', '.join(reasons)}"
    if entry.ecc_uncorrected:
        yield f"had {entry.ecc_uncorrected} uncorrected memory errors: do not trust its results"
    if others := [f"{one.name or 'a process'} (pid {one.pid})" for one in entry.foreign]:
        yield f"was shared with {', '.join(others)}"


def _xids(folder: RunDir) -> list[str]:
    """Return the XID errors of each GPU, also of earlier attempts, by its name and UUID."""
    found = defaultdict[str, Counter[int]](Counter)
    for event in decode_lines(folder.gpu_events, EventLine):
        if event.event == XID and event.text and event.xid:
            found[event.text.partition(":")[0]][event.xid] += event.xid_count
    return [f"{name}: {xids_text(counts)}" for name, counts in found.items()]


def _gap_note(samples: Samples, spans: Sequence[Span]) -> list[str]:
    """Return a note about the gaps of a recording, other than those between two attempts."""
    widths, end = np.diff(samples.time), float(samples.time[-1])
    used = training_of([one for one in spans if one.phase in (SET_UP, ENDING)], end) or [(0.0, end)]
    gaps = widths[samples.gaps & (within(samples.time, used) > widths / 2)]
    return [f"nothing was recorded for {duration(gaps.sum())} in {plural(len(gaps), 'gap')}"] if len(gaps) else []


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
