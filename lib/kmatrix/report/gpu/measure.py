"""Compute the numbers of the devices of a run from its recordings: each is an expression over the samples of a period.

Means are of the training (without set-up, evaluations, checkpoints, ending, and the time between attempts) and of the
whole recording; peaks and energy are of the whole. A sum over devices, attempts or nodes is unknown if one of them is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kmatrix.gpu.balance import Balance, balance_of
from kmatrix.gpu.formats.summary import SummaryFile
from kmatrix.gpu.recorder.summary import NO_POWER, NO_RESPONSE
from kmatrix.records.decode import decode_lines, decode_optional, replaced
from kmatrix.records.events import EventLine, PhaseLine
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunFile, read_run_file_or_empty
from kmatrix.report.gpu.energy import joules_within, steps_of, within
from kmatrix.report.gpu.facts import facts_of_entry, former_xids, is_computed, problems_of, reasons_of, xids_of
from kmatrix.report.gpu.recordings import Node, recordings_of
from kmatrix.report.gpu.results import Device, Gpu, Period, Statistics
from kmatrix.report.gpu.samples import CPU, MEASURED, QUANTITIES, Array, Mask, Samples, label_of, unit_of
from kmatrix.report.gpu.spans import ENDING, SET_UP, Span, spans_of, training_of
from kmatrix.stats import complete_sum
from kmatrix.status.stragglers import HIDDEN_STRAGGLER, Ranks, read_ranks
from kmatrix.text import duration, plural

WHOLE, TRAINING = "recording", "training"  # periods
MIN_COVERAGE = 0.9  # share of a period that must be sampled for its energy per token to be known
SILENT_S = 1.0  # without any value for this long, a GPU did not respond
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTotals:
    """The totals of a run that its GPU numbers refer to. None: unknown."""

    tokens: int | None = None
    seconds: float | None = None  # of its training
    device: str = ""  # "gpu", "cpu" or ""
    reused: bool = False  # from another matrix
    running: bool = False  # its last attempt has not ended


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The numbers of one node. The periods that are unknown are missing."""

    node: Node
    samples: Samples
    devices: Sequence[Device]
    seconds: Mapping[str, float]  # period -> sampled time
    joules: Mapping[str, float | None]  # period -> energy
    took_s: float  # length of the training
    notes: Sequence[str]  # besides those of its recordings


def gpu_of(run_dir: RunDir, totals: TrainingTotals, nodes: Sequence[Node] | None = None) -> Gpu | None:
    """Return the numbers of the devices of a run; None if there is no recording, and no timing of its ranks.

    nodes: its recordings, None to read them. One that is unreadable gives numbers without devices, and a note why.
    """
    nodes = recordings_of(run_dir) if nodes is None else nodes
    ranks = read_ranks(run_dir)
    known = [_measured(node, one, running=totals.running) for node in nodes if (one := node.samples) is not None]
    notes = _said((node, node.notes) for node in nodes)
    if known:
        return _combined(nodes, known, notes, totals, ranks)
    notes += reasons_of(decode_lines(run_dir.gpu_events, EventLine))
    if ranks is None and not notes:
        return None
    return Gpu(device_type=CPU if totals.device == CPU else None, ranks=ranks, notes=tuple(notes))


def _said(notes: Iterable[tuple[Node, Sequence[str]]]) -> list[str]:
    """Return the notes of nodes, with the host of each if there are several."""
    return [f"{node.host}: {note}" if node.host else note for node, mine in notes for note in mine]


# ---- one node ----------------------------------------------------------------------------------------------------


def _measured(node: Node, samples: Samples, *, running: bool) -> _Measured:
    """Return the numbers of one node."""
    spans = spans_of(samples, node.folder, node=node.number, running=running)
    training = training_of(spans, float(samples.time[-1]))
    steps = steps_of(samples)
    # The sample in which a training ends is not one of it.
    is_trained = np.searchsorted(np.ravel(training), samples.time, side="right") % 2 == 1
    whole, trained = _statistics(samples, samples.newest), _statistics(samples, samples.newest & is_trained)
    seconds, joules = dict[str, float](), dict[str, float | None]()
    if samples.usual_s:
        seconds[WHOLE] = samples.seconds
        joules[WHOLE] = _known(steps.sum())
    if any("memory_used" in one or "utilization" in one for one in trained):
        seconds[TRAINING] = float(within(samples.time, training)[~samples.gaps].sum())
        joules[TRAINING] = _known(joules_within(samples, steps, training))
    devices, notes = _devices(node, samples, steps, whole, trained)
    return _Measured(
        node=node,
        samples=samples,
        devices=devices,
        seconds=seconds,
        joules=joules,
        took_s=sum(end - begin for begin, end in training),
        notes=[*notes, *_gap_note(samples, spans)],
    )


def _statistics(samples: Samples, rows: Mask) -> list[dict[str, Statistics]]:
    """Return quantity -> statistics over some samples of each device of the last recording."""
    found = [dict[str, Statistics]() for _ in samples.parts[-1].places]
    for quantity in QUANTITIES:
        for of, column in zip(found, samples[quantity].T, strict=False):
            known = column[rows & ~np.isnan(column)]
            if known.size:
                low, high = float(known.min()), float(known.max())
                mean, deviation = float(known.mean()), float(known.std())
                of[quantity] = Statistics(mean=mean, deviation=deviation, min=low, max=high, count=known.size)
    return found


def _devices(
    node: Node,
    samples: Samples,
    steps: Array,
    whole: Sequence[dict[str, Statistics]],
    trained: Sequence[dict[str, Statistics]],
) -> tuple[list[Device], list[str]]:
    """Return the devices of the last recording, and notes about them.

    whole, trained: their statistics, from which the power of a device is removed that was lost for some time.
    """
    summary = decode_optional(node.folder.gpu_summary, SummaryFile) or SummaryFile()
    entries = {(gpu.gpu_index, gpu.uuid or ""): gpu for gpu in summary.gpus}
    events = decode_lines(node.folder.gpu_events, EventLine)
    is_cpu = samples.device_type == CPU
    may_be_lost = not is_cpu and samples.shows_losses
    is_known = np.logical_or.reduce([~np.isnan(samples[quantity]) for quantity in MEASURED])
    devices, notes = list[Device](), [text for text in summary.warnings if not is_computed(text)]
    for at, facts in enumerate(samples.devices[: len(whole)]):
        label = label_of(facts, node.host, is_cpu=is_cpu)
        joules = _known(steps[:, at].sum()) if samples.usual_s else None
        lost_at, lost_s = _lost(samples, is_known[:, at]) if may_be_lost else (None, 0.0)
        entry = entries.get((facts.index, facts.uuid))
        if lost_at is None and entry is not None:
            lost_at = entry.lost_at  # a run ends soon after: too soon for samples to tell
        if lost_s and lost_at is None:
            unknown = "its energy and mean power are" if joules is None else "its mean power is"
            notes.append(f"{label} {NO_RESPONSE} {lost_s:.1f} s: {unknown} unknown, its other means are of the rest")
        if lost_s or lost_at is not None:
            whole[at].pop("power", None)
            trained[at].pop("power", None)
        elif samples.usual_s and joules is None and "power" in whole[at] and may_be_lost:
            notes.append(f"{label} {NO_POWER} {samples.gap_s:g} s: its energy is unknown")
        device = Device(
            label=label,
            gpu_index=facts.index,
            gpu_name=facts.name,
            uuid=facts.uuid or None,
            rank=facts.rank,
            host=node.host or None,
            memory_total=facts.memory_total,
            whole=whole[at],
            training=trained[at],
            joules=joules,
            lost_at=lost_at,
            lost_s=lost_s,
            xids=xids_of(events, facts.index, facts.uuid),
            **facts_of_entry(entry),
        )
        devices.append(device)
    return devices, [*notes, *former_xids(events, devices)]


def _lost(samples: Samples, is_known: Mask) -> tuple[float | None, float]:
    """Return since when (Unix s) a device does not respond (None: it does), and for how long (s) it did not."""
    silent = ~is_known[1:] & samples.newest[1:] & ~samples.gaps
    seconds = float(np.diff(samples.time)[silent].sum())
    if seconds < SILENT_S:
        return None, 0.0
    first = 1 + max(np.flatnonzero(is_known), default=-1)
    return (None if first == len(is_known) else float(samples.wall[first])), seconds


def _gap_note(samples: Samples, spans: Sequence[Span]) -> list[str]:
    """Return a note about the gaps of a recording, other than those between two attempts."""
    widths, end = np.diff(samples.time), float(samples.time[-1])
    idle = [(max(0.0, one.begin), min(end, one.end)) for one in spans if one.phase in (SET_UP, ENDING)]
    is_gap = samples.gaps & (within(samples.time, idle) <= widths / 2)
    is_gap[samples.joints] = False
    gaps = widths[is_gap]
    return [f"nothing was recorded for {duration(gaps.sum())} in {plural(len(gaps), 'gap')}"] if len(gaps) else []


# ---- all nodes ---------------------------------------------------------------------------------------------------


def _combined(
    nodes: Sequence[Node], known: Sequence[_Measured], notes: list[str], totals: TrainingTotals, ranks: Ranks | None
) -> Gpu:
    """Return the numbers of all nodes of a run, `known` of those with a recording. No clocks of two are compared.

    notes: on the recordings.
    """
    first, samples = known[0], known[0].samples
    silent = [node.host for node in nodes if node.samples is None]
    notes += [f"nothing recorded on {', '.join(silent)}"] if silent else []
    notes += _said((one.node, one.notes) for one in known)
    has_earlier = any(not one.samples.newest.all() for one in known)
    has_training = all(TRAINING in one.seconds for one in known)
    devices = [device for one in known for device in one.devices]
    if not has_training:
        devices = [replaced(device, training=None) for device in devices]
    is_cpu = samples.device_type == CPU
    doubt = next((one.samples.doubt for one in known if one.samples.doubt), "")

    def period(name: str, wanted: float | None) -> Period:
        """Return the numbers of all devices: a sum is unknown if a node recorded nothing. wanted: length of it, s."""
        of = [device.whole if name == WHOLE else device.main for device in devices]
        seconds = min((one.seconds[name] for one in known if name in one.seconds), default=None)
        joules = complete_sum([one.joules.get(name) for one in known]) if not silent else None
        per_token = joules / totals.tokens if joules is not None and totals.tokens else None
        if per_token is not None and wanted and seconds is not None and seconds < MIN_COVERAGE * wanted:
            per_token = None
            notes.append(f"J/token of the {name} unknown: {duration(seconds)} of {duration(wanted)} were recorded")
        power = complete_sum(_means(of, "power"))
        if has_earlier and power is not None:  # attempts on other devices
            power = joules / seconds if joules is not None and seconds else None
        used = [mean for mean in _means(of, "utilization") if mean is not None]
        balance, why = _balances(of, doubt, unit_of(is_cpu))
        return Period(
            seconds=seconds,
            memory_used_mean=complete_sum(_means(of, "memory_used")) if not silent else None,
            mean_power=power,
            utilization=math.fsum(used) / len(used) if used else None,
            joules=joules,
            joules_per_token=per_token,
            balance=balance,
            no_balance=why,
        )

    training = period(TRAINING, first.took_s) if has_training else None
    whole = period(WHOLE, totals.seconds)
    sizes = {device.host: device.memory_total for device in devices} if is_cpu else {}  # ranks share that of their host
    run = read_run_file_or_empty(nodes[0].folder)
    paid = None if totals.reused else whole.joules  # a reused run costs nothing in its new matrix
    is_counted = np.isfinite(samples["energy_j"]).any(axis=0).all()
    phases = Counter[str]()
    for line in decode_lines(nodes[0].folder.phases, PhaseLine):
        phases[line.phase] += line.duration_s  # type: ignore[assignment]
    return Gpu(
        evidence=first.node.evidence,
        device_type=samples.device_type or None,
        simulated=samples.simulated,
        samples=sum(len(one.samples) for one in known),
        energy_source=("counter" if is_counted else "power") if whole.joules is not None else None,
        gpus=tuple(devices),
        whole=whole,
        training=training,
        memory_used_max=None if len(nodes) > 1 else _peak(samples),
        memory_total=complete_sum([*sizes.values()] or [device.memory_total for device in devices]),
        energy_cost=_per_kwh(run, "ENERGY_PRICE", paid),
        co2_g=_per_kwh(run, "CO2_FACTOR", paid),
        phases={phase: seconds for phase, seconds in phases.items() if seconds},
        has_earlier=has_earlier,
        ranks=ranks and _marked(ranks, (training or whole).balance.get("memory_used")),
        problems=tuple(problem for device in devices for problem in problems_of(device)),
        notes=tuple(notes),
    )


def _peak(samples: Samples) -> float | None:
    """Return the highest sum of the memory of all devices that are known at a time, MiB."""
    memory = samples["memory_used"]
    known = memory[~np.isnan(memory).all(axis=1)]
    return float(np.nansum(known, axis=1).max()) if len(known) else None


def _means(devices: Sequence[Mapping[str, Statistics]], quantity: str) -> list[float | None]:
    return [one[quantity].mean if quantity in one else None for one in devices]


def _balances(devices: Sequence[Mapping[str, Statistics]], doubt: str, unit: str) -> tuple[dict[str, Balance], str]:
    """Return how evenly devices are used, and why that is unknown of memory. doubt: why they cannot be compared."""
    if doubt or len(devices) < 2:
        return {}, doubt or f"one {unit}"
    found = {}
    for quantity in ("memory_used", "utilization", "power"):
        means = [mean for mean in _means(devices, quantity) if mean is not None]
        if len(means) == len(devices) and any(means) and (balance := balance_of(means)):
            found[quantity] = balance
    is_known = all("memory_used" in one for one in devices)
    return found, "" if "memory_used" in found else "nothing used" if is_known else "unknown for a device"


def _marked(ranks: Ranks, memory: Balance | None) -> Ranks:
    """Return the timing of ranks, and whether the balance of their memory hides a straggler."""
    is_even = memory is not None and memory.quality == "Excellent"
    return replaced(ranks, hidden=is_even and ranks.straggler_time_share > HIDDEN_STRAGGLER)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _per_kwh(run: RunFile, symbol: str, joules: float | None) -> float | None:
    """Return energy x a factor per kWh in a run.json; None if one of them is unknown."""
    try:
        factor = float(run.symbols.get(symbol, "").strip('"'))
    except ValueError:
        return None
    return None if joules is None else joules / JOULES_PER_KWH * factor
