"""Compute the numbers of the devices of a run from its recordings: each is an expression over the samples of a period.

Means are of the training (without set-up, evaluations, checkpoints, ending, and the time between attempts) and of the
whole recording; peaks and energy are of the whole. A sum over devices, attempts or nodes is unknown if one of them is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import asdict

from kmatrix.gpu.balance import Balance, balance_of
from kmatrix.gpu.formats.summary import DeviceEntry, ProcessEntry, SummaryFile
from kmatrix.gpu.recorder.summary import EXCLUDED_ATTEMPT, NO_POWER, NO_RESPONSE
from kmatrix.gpu.xid import xids_text
from kmatrix.records.decode import decode_lines, decode_optional, replaced
from kmatrix.records.events import EventLine, PhaseLine
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.energy import joules_within, steps_of, within
from kmatrix.report.gpu.recordings import Node, recordings_of
from kmatrix.report.gpu.results import Device, DeviceFacts, Gpu, Period, Statistics
from kmatrix.report.gpu.samples import MEASURED, QUANTITIES, Array, Mask, Samples
from kmatrix.report.gpu.spans import ENDING, SET_UP, Span, spans_of, training_of
from kmatrix.stats import complete_sum
from kmatrix.status.stragglers import HIDDEN_STRAGGLER, Ranks, read_ranks
from kmatrix.text import duration, plural, time_of_day

WHOLE, TRAINING = "recording", "training"  # periods
MIN_COVERAGE = 0.9  # share of a period that must be sampled for its energy per token to be known
SILENT_S = 1.0  # without any value for this long, a GPU did not respond
COMPUTED = (NO_RESPONSE, NO_POWER, EXCLUDED_ATTEMPT)  # in warnings of the recorder which the report replaces
NOTHING_RECORDED, XID = "nothing recorded", "xid"  # events of the recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTotals:
    """The totals of a run that its GPU numbers refer to. None: unknown."""

    tokens: int | None = None
    seconds: float | None = None  # of its training
    device: str = ""  # "gpu", "cpu" or ""
    running: bool = False  # its last attempt has not ended


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """The numbers of one node."""

    node: Node
    samples: Samples
    devices: Sequence[Device]
    spent: Mapping[str, tuple[float, float | None]]  # period -> sampled s, J; one that is unknown is missing
    took_s: float  # length of the training
    notes: Sequence[str]  # besides those of its recordings


def gpu_of(run_dir: RunDir, totals: TrainingTotals, nodes: Sequence[Node] | None = None) -> Gpu | None:
    """Return the numbers of the devices of a run; None if there is no recording, and no timing of its ranks.

    nodes: its recordings, None to read them. One that is unreadable gives numbers without devices, and a note why.
    """
    nodes = recordings_of(run_dir) if nodes is None else nodes
    ranks = read_ranks(run_dir)
    known = [_measured(node, one, running=totals.running) for node in nodes if (one := node.samples)]
    notes = [note for node in nodes for note in node.notes]
    if known:
        return _combined(nodes, known, notes, totals, ranks)
    reasons = [one.text or "" for one in decode_lines(run_dir.gpu_events, EventLine) if one.event == NOTHING_RECORDED]
    notes += reasons[-1:]
    if ranks is None and not notes:
        return None
    return Gpu(unit="rank" if totals.device == "cpu" else "GPU", ranks=ranks, notes=tuple(notes))


# ---- one node ----------------------------------------------------------------------------------------------------


def _measured(node: Node, samples: Samples, *, running: bool) -> _Measured:
    """Return the numbers of one node."""
    spans = spans_of(samples, node.folder, node=node.number, running=running)
    training = training_of(spans, float(samples.time[-1]))
    steps, spent = steps_of(samples), dict[str, tuple[float, float | None]]()
    # The sample in which a training ends is not one of it.
    is_trained = np.searchsorted(np.ravel(training), samples.time, side="right") % 2 == 1
    whole, trained = _statistics(samples, np.full(len(samples), True)), _statistics(samples, is_trained)
    if samples.usual_s:
        spent[WHOLE] = samples.seconds, _known(steps.sum())
    if any("memory_used" in one or "utilization" in one for one in trained):
        seconds = float(within(samples.time, training)[~samples.gaps].sum())
        spent[TRAINING] = seconds, _known(joules_within(samples, steps, training))
    devices, notes = _devices(node, samples, steps, whole, trained)
    notes = [node.prefix + note for note in (*notes, *_gap_note(samples, spans))]
    took_s = sum(end - begin for begin, end in training)
    return _Measured(node=node, samples=samples, devices=devices, spent=spent, took_s=took_s, notes=notes)


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
    entries = {(gpu.gpu_index, gpu.uuid): gpu for gpu in summary.gpus}
    known = samples.devices[: len(whole)]
    xids, former = _xids_of(decode_lines(node.folder.gpu_events, EventLine), known)
    is_known = np.logical_or.reduce([~np.isnan(samples[quantity]) for quantity in MEASURED])
    devices, notes = list[Device](), [text for text in summary.warnings if not any(part in text for part in COMPUTED)]
    for at, one in enumerate(known):
        label, may_be_lost = one.name_on(node.host), not samples.doubt and one.unit == "GPU"
        joules = _known(steps[:, at].sum()) if samples.usual_s else None
        lost_at, lost_s = _lost(samples, is_known[:, at]) if may_be_lost else (None, 0.0)
        entry = entries.get((one.gpu_index, one.uuid), DeviceEntry())
        if lost_at is None:
            lost_at = entry.lost_at  # a run ends soon after: too soon for samples to tell
            if lost_s:
                notes.append(f"{label} {NO_RESPONSE} {lost_s:.1f} s: its mean power is unknown")
        if lost_s or lost_at is not None:
            whole[at].pop("power", None)
            trained[at].pop("power", None)
        elif samples.usual_s and joules is None and "power" in whole[at] and may_be_lost:
            notes.append(f"{label} {NO_POWER} {samples.gap_s:g} s: its energy is unknown")
        device = Device(
            **asdict(one),
            label=label,
            host=node.host or None,
            whole=whole[at],
            training=trained[at],
            joules=joules,
            lost_at=lost_at,
            lost_s=lost_s,
            xids=xids[at],
            throttled_s={why: seconds for why, seconds in entry.throttled_s.items() if seconds},
            foreign=tuple(map(_process, entry.foreign)),
            ecc_uncorrected=entry.ecc_uncorrected or 0,
        )
        devices.append(device)
    return devices, [*notes, *former]


def _lost(samples: Samples, is_known: Mask) -> tuple[float | None, float]:
    """Return since when (Unix s) a device does not respond (None: it does), and for how long (s) it did not."""
    rows = samples.parts[-1].rows
    known, widths, gaps = is_known[rows], np.diff(samples.time[rows]), samples.gaps[rows.start :]
    seconds = float(widths[~known[1:] & ~gaps].sum())
    if seconds < SILENT_S:
        return None, 0.0
    first = 1 + max(np.flatnonzero(known), default=-1)
    return (None if first == len(known) else float(samples.wall[rows][first])), seconds


def _gap_note(samples: Samples, spans: Sequence[Span]) -> list[str]:
    """Return a note about the gaps of a recording, other than those between two attempts."""
    widths, end = np.diff(samples.time), float(samples.time[-1])
    used = training_of([one for one in spans if one.phase in (SET_UP, ENDING)], end) or [(0.0, end)]
    gaps = widths[samples.gaps & (within(samples.time, used) > widths / 2)]
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
    notes += [note for one in known for note in one.notes]
    unit, doubt = samples.devices[0].unit, next((one.samples.doubt for one in known if one.samples.doubt), "")
    has_earlier = any(len(one.samples.parts) > 1 for one in known)
    has_training = all(TRAINING in one.spent for one in known)
    devices = [device for one in known for device in one.devices]
    if not has_training:
        devices = [replaced(device, training=None) for device in devices]

    def period(name: str, wanted: float | None) -> Period:
        """Return the numbers of all devices: a sum is unknown if a node recorded nothing. wanted: length of it, s."""
        of = [device.whole if name == WHOLE else device.main for device in devices]
        spent = [one.spent.get(name, (None, None)) for one in known] + [(None, None)] * len(silent)
        seconds = min((seconds for seconds, _ in spent if seconds is not None), default=None)
        joules = complete_sum([joules for _, joules in spent])
        per_token = joules / totals.tokens if joules is not None and totals.tokens else None
        if per_token is not None and wanted and seconds is not None and seconds < MIN_COVERAGE * wanted:
            per_token = None
            notes.append(f"J/token of the {name} unknown: {duration(seconds)} of {duration(wanted)} were recorded")
        power = complete_sum(_means(of, "power"))
        if has_earlier and power is not None:  # attempts on other devices
            power = complete_sum(
                [joules / seconds if joules is not None and seconds else None for seconds, joules in spent]
            )
        used = [mean for mean in _means(of, "utilization") if mean is not None]
        balance, why = _balances(of, doubt or ("" if len(of) > 1 else f"one {unit}"))
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
    even = (training or whole).balance.get("memory_used")
    if ranks and even and even.quality == "Excellent":
        ranks = replaced(ranks, hidden=ranks.straggler_time_share > HIDDEN_STRAGGLER)
    memory = samples["memory_used"]
    is_peak_known = len(nodes) == 1 and not np.isnan(memory).all()
    # Ranks share the memory of their host.
    sizes = {device.label if unit == "GPU" else device.host: device.memory_total for device in devices}
    is_counted = np.isfinite(samples["energy_j"]).any(axis=0).all()
    phases = Counter[str]()
    for line in decode_lines(nodes[0].folder.phases, PhaseLine):
        phases[line.phase] += line.duration_s  # type: ignore[assignment]
    return Gpu(
        evidence=first.node.evidence,
        unit=unit,
        simulated=samples.simulated,
        samples=sum(len(one.samples) for one in known),
        energy_source=("counter" if is_counted else "power") if whole.joules is not None else None,
        gpus=tuple(devices),
        whole=whole,
        training=training,
        memory_used_max=float(np.nansum(memory, axis=1).max()) if is_peak_known else None,
        memory_total=complete_sum(list(sizes.values())),
        phases={phase: seconds for phase, seconds in phases.items() if seconds},
        has_earlier=has_earlier,
        ranks=ranks,
        problems=tuple(problem for device in devices for problem in _problems_of(device)),
        notes=tuple(notes),
    )


def _means(devices: Sequence[Mapping[str, Statistics]], quantity: str) -> list[float | None]:
    return [one[quantity].mean if quantity in one else None for one in devices]


def _balances(devices: Sequence[Mapping[str, Statistics]], doubt: str) -> tuple[dict[str, Balance], str]:
    """Return how evenly devices are used, and why that is unknown of memory. doubt: why they cannot be compared."""
    found = {}
    for quantity in ("memory_used", "utilization", "power") if not doubt else ():
        means = [mean for mean in _means(devices, quantity) if mean is not None]
        if len(means) == len(devices) and any(means) and (balance := balance_of(means)):
            found[quantity] = balance
    unknown = "nothing used" if None not in _means(devices, "memory_used") else "unknown for a device"
    return found, "" if "memory_used" in found else doubt or unknown


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


# ---- what samples do not show -----------------------------------------------------------------------------------


def _process(process: ProcessEntry) -> str:
    size = "" if process.memory_mib is None else f", {process.memory_mib:.0f} MiB"
    return f"{process.name or 'a process'} (pid {process.pid}{size})"


def _xids_of(events: Sequence[EventLine], devices: Sequence[DeviceFacts]) -> tuple[list[dict[int, int]], list[str]]:
    """Return code -> number of the XID errors of each device, and a note for each GPU that is not among them."""
    found: list[dict[int, int]] = [{} for _ in devices]
    others: dict[int | None, dict[int, int]] = {}
    for event in (one for one in events if one.event == XID):
        index, text = event.gpu_index, event.text or ""
        # The text has the UUID: an index alone may be of another machine.
        places = [at for at, one in enumerate(devices) if one.gpu_index == index and (one.uuid or "") in text]
        counts = found[places[0]] if places else others.setdefault(index, {})
        counts[event.xid or 0] = counts.get(event.xid or 0, 0) + event.xid_count
    return found, [f"GPU {index} of an earlier attempt: {xids_text(counts)}" for index, counts in others.items()]


def _problems_of(device: Device) -> Iterator[str]:
    """Yield what impaired a device: loss, XID errors, throttling, memory errors, other processes."""
    if device.lost_at is not None:
        yield f"{device.label} was lost at {time_of_day(device.lost_at, utc=True)}: its numbers end there"
    if device.xids:
        yield f"{device.label}: {xids_text(device.xids)}"
    if device.throttled_s:
        reasons = ", ".join(f"{why} {duration(seconds)}" for why, seconds in device.throttled_s.items())
        yield f"{device.label} was throttled: {reasons}"
    if device.ecc_uncorrected:
        yield f"{device.label} had {device.ecc_uncorrected} uncorrected memory errors: do not trust its results"
    if device.foreign:
        yield f"{device.label} was shared with {', '.join(device.foreign)}"
