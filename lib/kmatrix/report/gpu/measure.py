"""Compute the numbers of the devices of a run from its recordings: each is an expression over the samples of a period.

Means are of the training (without set-up, evaluations, checkpoints, ending, and the time between attempts) and of the
whole recording; peaks and energy are of the whole. A sum over devices, attempts or nodes is unknown if one of them is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kmatrix.gpu.balance import Balance, balance_of
from kmatrix.gpu.formats.summary import SummaryFile
from kmatrix.gpu.recorder.summary import NO_POWER, NO_RESPONSE
from kmatrix.records.decode import decode_lines, decode_optional, replaced
from kmatrix.records.events import EventLine, PhaseLine
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunFile, read_run_file_or_empty
from kmatrix.report.gpu.energy import between, steps_of
from kmatrix.report.gpu.facts import facts_of_entry, former_xids, is_computed, problems_of, reasons_of, xids_of
from kmatrix.report.gpu.recordings import Recording, RunRecordings, earlier_text, recordings_of
from kmatrix.report.gpu.results import Device, Gpu, Period, Statistics
from kmatrix.report.gpu.samples import CPU, MEASURED, QUANTITIES, Array, Samples, label_of, unit_of
from kmatrix.report.gpu.spans import (
    ENDING,
    SET_UP,
    TRAINING,
    Interval,
    Trained,
    attempts_of,
    spans_of,
    training_of,
)
from kmatrix.stats import complete_sum
from kmatrix.status.stragglers import HIDDEN_STRAGGLER, Ranks, read_ranks
from kmatrix.text import duration, plural

WHOLE = "recording"  # all of it, as a phase
MIN_COVERAGE = 0.9  # share of a phase that must be sampled for its energy to be known
SILENT_S = 1.0  # without any value for this long, a GPU did not respond
JOULES_PER_KWH = 3.6e6
EARLIER = "in time, energy and mean power of the run; memory and balance are of the last attempt"
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTotals:
    """The totals of a run that its GPU numbers refer to. None: unknown."""

    tokens: int | None = None
    seconds: float | None = None  # of its training
    device: str = ""  # "gpu", "cpu" or ""
    reused: bool = False  # from another matrix
    running: bool = False  # its last attempt has not ended
    last_times: Mapping[int, float] | None = None  # attempt -> Unix s of its last training line; None: read them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One recording of a node with its periods."""

    samples: Samples
    steps: Array  # (samples - 1, devices), J
    spans: Mapping[str, Sequence[Interval]]  # WHOLE, TRAINING or another phase -> its time, s since the first sample

    def spent(self, phase: str) -> tuple[float, float | None]:
        """Return the sampled time (s), without gaps, and the energy (J) of all devices in a phase."""
        begins, ends = np.array(self.spans.get(phase, ()), dtype=float).reshape(-1, 2).T
        widths = np.diff(self.samples.time)[:, None]
        sampled = np.where(widths <= self.samples.gap_s, widths, 0.0)
        seconds, joules = (between(self.samples.time, each, begins, ends).sum() for each in (sampled, self.steps))
        return float(seconds), _known(joules)

    def trained(self) -> Mask:
        """Return which samples are of the training (samples,)."""
        inside = np.zeros(len(self.samples), dtype=bool)
        for interval in self.spans.get(TRAINING, ()):
            inside[slice(*np.searchsorted(self.samples.time, interval))] = True
        return inside


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """The numbers of the devices of one node."""

    last: Recording
    devices: tuple[Device, ...]
    samples: int
    peak: float | None  # MiB
    spent: Mapping[str, tuple[float, float | None]]  # WHOLE, TRAINING -> sampled s, J; those unknown are missing
    phases: Mapping[str, float]  # phase without training, TRAINING -> s by the log of phases
    has_earlier: bool
    notes: Sequence[str]


def gpu_of(run_dir: RunDir, totals: TrainingTotals, found: RunRecordings | None = None) -> Gpu | None:
    """Return the numbers of the devices of a run; None if there is no recording, and no timing of its ranks.

    found: its recordings, None to read them. One that is unreadable gives numbers without devices, and a note why.
    """
    found = recordings_of(run_dir, cpu=totals.device == CPU) if found is None else found
    ranks = read_ranks(run_dir)
    if found.recordings:
        return _combined(found, totals, ranks)
    notes = (*found.notes, *reasons_of(decode_lines(run_dir.gpu_events, EventLine)))
    if ranks is None and not notes:
        return None
    is_cpu = totals.device == CPU
    return Gpu(device_type=CPU if is_cpu else None, ranks=ranks, notes=notes)


# ---- one node ----------------------------------------------------------------------------------------------------


def _node(found: RunRecordings, node: int, totals: TrainingTotals) -> _Node | None:
    """Return the numbers of one node; None without a recording."""
    mine = [one for one in found.recordings if one.node == node]
    if not mine:
        return None
    folder, last = found.folders[node], mine[-1]
    attempts = attempts_of(folder, totals.last_times, is_first=node == 0)
    parts = [_part(one.samples, attempts, running=totals.running) for one in mine]
    others = [one for one in mine if _identities(one) != _identities(last)]
    current = [part for one, part in zip(mine, parts, strict=True) if one not in others]
    summary = decode_optional(folder.gpu_summary, SummaryFile) or SummaryFile()
    events = decode_lines(folder.gpu_events, EventLine)
    has_time = any(part.samples.usual_s for part in parts)
    spent = {}
    for phase in (*([WHOLE] if has_time else []), *([TRAINING] if attempts else [])):
        each = [part.spent(phase) for part in parts]
        spent[phase] = math.fsum(seconds for seconds, _ in each), complete_sum([joules for _, joules in each])
    devices, lost = _devices(last, current, summary, events)
    if not any(one.training and ("memory_used" in one.training or "utilization" in one.training) for one in devices):
        spent.pop(TRAINING, None)
    took = Counter[str]()
    for attempt in attempts:
        for phase, seconds in attempt.seconds().items():
            took[phase] += seconds  # type: ignore[assignment]
    for line in decode_lines(folder.phases, PhaseLine):
        if line.phase == ENDING:
            took[ENDING] += line.duration_s  # type: ignore[assignment]
    notes = [note for one in mine for note in one.samples.notes]
    notes += [f"{earlier_text(one)}: {EARLIER}" for one in others]
    notes += [*(text for text in summary.warnings if not is_computed(text)), *lost]
    notes += [*_gap_note(parts), *former_xids(events, devices)]
    return _Node(
        last=last,
        devices=devices,
        samples=sum(len(part.samples) for part in parts),
        peak=max((peak for one in mine if (peak := _peak(one.samples)) is not None), default=None),
        spent=spent,
        phases={phase: seconds for phase, seconds in took.items() if seconds},
        has_earlier=bool(others),
        notes=list(dict.fromkeys(notes)),
    )


def _identities(one: Recording) -> list[tuple[int, str, str]]:
    return [(device.index, device.uuid, device.name) for device in one.samples.devices]


def _part(samples: Samples, attempts: Sequence[Trained], *, running: bool) -> _Part:
    intervals: dict[str, Sequence[Interval]] = {WHOLE: [(0.0, math.inf)]}
    if attempts:
        spans = spans_of(samples, attempts, running=running)
        # Up to the last sample, which is the begin of nothing.
        intervals[TRAINING] = training_of(spans, float(samples.time[-1]))
        for phase in (SET_UP, ENDING):
            intervals[phase] = [(one.begin, one.end) for one in spans if one.phase == phase]
    return _Part(samples=samples, steps=steps_of(samples), spans=intervals)


def _devices(
    one: Recording, parts: Sequence[_Part], summary: SummaryFile, events: Sequence[EventLine]
) -> tuple[tuple[Device, ...], list[str]]:
    """Return the devices of a recording over all recordings of them, and notes about lost ones.

    one: the last recording. parts: of these devices.
    """
    last = one.samples
    count, is_cpu = len(last.devices), last.device_type == CPU
    whole: list[dict[str, Statistics]] = [{} for _ in range(count)]
    trained: list[dict[str, Statistics]] = [{} for _ in range(count)]
    known = [np.zeros((len(part.samples), count), dtype=bool) for part in parts]
    masks = [part.trained() for part in parts]
    for quantity in MEASURED:
        columns = [part.samples.values[quantity] for part in parts]
        known = [before | ~np.isnan(column) for before, column in zip(known, columns, strict=True)]
        if quantity in QUANTITIES:
            rest = [column[mask] for column, mask in zip(columns, masks, strict=True)]
            for at in range(count):
                for of, each in ((whole, columns), (trained, rest)):
                    if found := _statistics([column[:, at] for column in each]):
                        of[at][quantity] = found
    entries = {(gpu.gpu_index, gpu.uuid or ""): gpu for gpu in summary.gpus}
    has_time = any(part.samples.usual_s for part in parts)
    devices: list[Device] = []
    notes: list[str] = []
    for at, facts in enumerate(last.devices):
        label = label_of(facts, one.host, is_cpu=is_cpu)
        joules = complete_sum([_known(part.steps[:, at].sum()) for part in parts]) if has_time else None
        may_be_lost = not is_cpu and last.shows_losses
        lost_at, lost_s = _lost(parts, known, at) if may_be_lost else (None, 0.0)
        entry = entries.get((facts.index, facts.uuid))
        if lost_at is None and entry is not None:
            lost_at = entry.lost_at  # a run ends soon after: too soon for samples to tell
        if lost_s and lost_at is None:
            unknown = "its energy and mean power are" if joules is None else "its mean power is"
            notes.append(f"{label} {NO_RESPONSE} {lost_s:.1f} s: {unknown} unknown, its other means are of the rest")
        if lost_s or lost_at is not None:
            whole[at].pop("power", None)
            trained[at].pop("power", None)
        elif has_time and joules is None and "power" in whole[at] and may_be_lost:
            notes.append(f"{label} {NO_POWER} {last.gap_s:g} s: its energy is unknown")
        device = Device(
            label=label,
            gpu_index=facts.index,
            gpu_name=facts.name,
            uuid=facts.uuid or None,
            rank=facts.rank,
            host=one.host or None,
            memory_total=facts.memory_total,
            whole=whole[at],
            training=trained[at] if all(TRAINING in part.spans for part in parts) else None,
            joules=joules,
            lost_at=lost_at,
            lost_s=lost_s,
            xids=xids_of(events, facts.index, facts.uuid),
            **facts_of_entry(entry),
        )
        devices.append(device)
    return tuple(devices), notes


def _statistics(values: Sequence[Array]) -> Statistics | None:
    """Return the statistics of the known values, None without any."""
    every = np.concatenate(values)
    known = every[~np.isnan(every)]
    if not known.size:
        return None
    low, high = float(known.min()), float(known.max())
    return Statistics(mean=float(known.mean()), deviation=float(known.std()), min=low, max=high, count=known.size)


def _lost(parts: Sequence[_Part], known: Sequence[Mask], device: int) -> tuple[float | None, float]:
    """Return since when (Unix s) a device does not respond (None: it does), and for how long (s) it did not."""
    seconds = 0.0
    for part, is_known in zip(parts, known, strict=True):
        widths = np.diff(part.samples.time)
        silent = ~is_known[1:, device] & (widths <= part.samples.gap_s)
        seconds += float(widths[silent].sum())
    if seconds < SILENT_S:
        return None, 0.0
    found = np.flatnonzero(known[-1][:, device])
    first = found[-1] + 1 if len(found) else 0
    return (None if first == len(known[-1]) else float(parts[-1].samples.wall[first])), seconds


def _peak(samples: Samples) -> float | None:
    """Return the highest sum of the memory of all devices that are known at a time, MiB."""
    memory = samples.values["memory_used"]
    known = memory[~np.isnan(memory).all(axis=1)]
    return float(np.nansum(known, axis=1).max()) if len(known) else None


def _gap_note(parts: Sequence[_Part]) -> list[str]:
    """Return a note about the gaps of recordings, other than those between two attempts."""
    gaps = []
    for part in parts:
        widths = np.diff(part.samples.time)
        for place in np.flatnonzero(widths > part.samples.gap_s):
            begin = part.samples.time[place]
            between_attempts = [*part.spans.get(SET_UP, ()), *part.spans.get(ENDING, ())]
            if not any(first <= begin <= end for first, end in between_attempts):
                gaps.append(float(widths[place]))
    return [f"nothing was recorded for {duration(math.fsum(gaps))} in {plural(len(gaps), 'gap')}"] if gaps else []


# ---- all nodes ---------------------------------------------------------------------------------------------------


def _combined(found: RunRecordings, totals: TrainingTotals, ranks: Ranks | None) -> Gpu:
    """Return the numbers of all nodes of a run, at least one with a recording. No clocks of two are compared."""
    nodes = {node: _node(found, node, totals) for node in found.folders}
    known = [one for one in nodes.values() if one is not None]
    first, several = known[0], len(nodes) > 1
    last = first.last.samples
    silent = [found.hosts[node] for node, one in nodes.items() if one is None]
    notes = [*found.notes, *([f"nothing recorded on {', '.join(silent)}"] if silent else [])]
    for node, one in nodes.items():
        notes += [f"{found.hosts[node]}: {note}" if several else note for note in one.notes] if one else []
    is_cpu = last.device_type == CPU
    has_training = all(TRAINING in one.spent for one in known)
    devices = tuple(
        device if has_training else replaced(device, training=None) for one in known for device in one.devices
    )
    doubt = next((one.last.samples.doubt for one in known if one.last.samples.doubt), "")
    has_earlier = any(one.has_earlier for one in known)

    def period(phase: str, wanted: float | None) -> Period:
        """Return the numbers of all devices: a sum is unknown if a node recorded nothing. wanted: s of the run."""
        of = [device.whole if phase == WHOLE else device.training or {} for device in devices]
        each = [one.spent.get(phase, (None, None)) for one in known]
        seconds = min((seconds for seconds, _ in each if seconds is not None), default=None)
        joules = complete_sum([joules for _, joules in each]) if not silent else None
        per_token = joules / totals.tokens if joules is not None and totals.tokens else None
        if per_token is not None and wanted and seconds is not None and seconds < MIN_COVERAGE * wanted:
            per_token = None
            notes.append(f"J/token of the {phase} unknown: {duration(seconds)} of {duration(wanted)} were recorded")
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

    training = period(TRAINING, first.phases.get(TRAINING)) if has_training else None
    whole = period(WHOLE, totals.seconds)
    sizes = {device.host: device.memory_total for device in devices} if is_cpu else {}  # ranks share that of their host
    run = read_run_file_or_empty(found.folders[0])
    paid = None if totals.reused else whole.joules  # a reused run costs nothing in its new matrix
    return Gpu(
        evidence=first.last.evidence,
        device_type=last.device_type or None,
        simulated=last.simulated,
        samples=sum(one.samples for one in known),
        energy_source=last.energy_source if whole.joules is not None else None,
        gpus=devices,
        whole=whole,
        training=training,
        memory_used_max=None if several else first.peak,
        memory_total=complete_sum([*sizes.values()] or [device.memory_total for device in devices]),
        energy_cost=_per_kwh(run, "ENERGY_PRICE", paid),
        co2_g=_per_kwh(run, "CO2_FACTOR", paid),
        phases={phase: seconds for phase, seconds in first.phases.items() if phase != TRAINING},
        has_earlier=has_earlier,
        ranks=ranks and _marked(ranks, (training or whole).balance.get("memory_used")),
        problems=tuple(problem for device in devices for problem in problems_of(device)),
        notes=tuple(notes),
    )


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
