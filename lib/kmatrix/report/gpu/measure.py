"""Compute the numbers of the devices of a run from its recordings: each is an expression over the samples of a period.

Means are of the training (without set-up, evaluations, checkpoints, ending, and the time between attempts) and of the
whole recording; peaks and energy are of the whole. A sum over devices, attempts or nodes is unknown if one of them is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kmatrix.gpu.balance import balance_of
from kmatrix.gpu.formats.summary import DeviceEntry, SummaryFile
from kmatrix.gpu.recorder.summary import NO_POWER, NO_RESPONSE
from kmatrix.records.decode import decode_lines, decode_optional, replaced
from kmatrix.records.events import EventLine, PhaseLine
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunFile, read_run_file_or_empty
from kmatrix.report.gpu.energy import between, steps_of
from kmatrix.report.gpu.facts import (
    facts_of_entry,
    is_computed,
    lost_now,
    problems_of,
    reasons_of,
    stored_devices,
    with_xids,
)
from kmatrix.report.gpu.recordings import Recording, RunRecordings, earlier_text, recordings_of
from kmatrix.report.gpu.results import (
    Balance,
    Balances,
    Device,
    Factors,
    Gpu,
    MeasuredDevice,
    Phase,
    Ranks,
    Statistics,
    Totals,
    Training,
)
from kmatrix.report.gpu.samples import CPU, MEASURED, QUANTITIES, Array, Samples, label_of, unit_of
from kmatrix.report.gpu.spans import ENDING, PHASES, SET_UP, TRAINING, Trained, spans_of, trained_attempts, training_of
from kmatrix.report.metrics import Log
from kmatrix.stats import complete_sum
from kmatrix.status.stragglers import HIDDEN_STRAGGLER, RankNumbers, read_ranks
from kmatrix.text import duration, plural

MIN_COVERAGE = 0.9  # share of a phase that must be sampled for its energy to be known
SILENT_S = 1.0  # without any value for this long, a GPU did not respond
JOULES_PER_KWH = 3.6e6
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTotals:
    """The totals of a run that its GPU numbers refer to. None: unknown."""

    tokens: int | None = None
    seconds: float | None = None  # of its training
    device: str = ""  # "gpu", "cpu" or ""
    mfu: float | None = None  # 0 to 1
    wall_s: float | None = None  # s, of all attempts in this matrix; None: a recording without a run
    gpu_hours: float | None = None
    dollars: float | None = None
    reused: bool = False  # from another matrix
    running: bool = False  # its last attempt has not ended
    last_times: Mapping[int, float] | None = None  # attempt -> Unix s of its last training line; None: read them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One recording of a node with its periods."""

    samples: Samples
    steps: Array  # (samples - 1, devices), J
    training: tuple[tuple[float, float], ...] | None  # s since the first sample; None: unknown
    phases: Mapping[str, tuple[tuple[float, float], ...]]  # the same for each phase

    def seconds(self, spans: Sequence[tuple[float, float]]) -> float:
        """Return the sampled time (s) in some spans: without gaps."""
        begins, ends = np.array(spans, dtype=float).reshape(-1, 2).T
        widths = np.diff(self.samples.time)[:, None]
        return float(
            between(self.samples.time, np.where(widths <= self.samples.gap_s, widths, 0.0), begins, ends).sum()
        )

    def joules(self, spans: Sequence[tuple[float, float]]) -> float | None:
        """Return the energy (J) of all devices in some spans; None if a part of it is unknown."""
        begins, ends = np.array(spans, dtype=float).reshape(-1, 2).T
        return _known(between(self.samples.time, self.steps, begins, ends).sum())

    def mask(self) -> Mask:
        """Return which samples are of the training (samples,)."""
        inside = np.zeros(len(self.samples), dtype=bool)
        for begin, end in self.training or ():
            first, last = np.searchsorted(self.samples.time, (begin, end))
            inside[first:last] = True
        return inside


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """The numbers of the devices of one node."""

    devices: tuple[Device, ...]
    trained: tuple[MeasuredDevice, ...] | None  # over the training; None: unknown
    samples: int
    hz: float | None
    seconds: float | None
    joules: float | None
    peak: float | None  # MiB
    times: Mapping[str, float] = field(default_factory=dict)  # phase or TRAINING -> sampled s; empty: unknown
    energies: Mapping[str, float | None] = field(default_factory=dict)  # the same -> J
    device_type: str = ""
    simulated: bool = False
    energy_source: str | None = None
    evidence: str = ""
    doubt: str = ""
    has_earlier: bool = False
    notes: tuple[str, ...] = ()


def gpu_of(run_dir: RunDir, totals: TrainingTotals, found: RunRecordings | None = None) -> Gpu | None:
    """Return the numbers of the devices of a run; None if there is no recording, and no timing of its ranks.

    found: its recordings, None to read them. One that is unreadable gives numbers without devices, and a note why.
    """
    found = recordings_of(run_dir, cpu=totals.device == CPU) if found is None else found
    nodes = {node: _node(found, node, totals) for node in found.folders}
    ranks = read_ranks(run_dir)
    if not any(nodes.values()):
        notes = (*found.notes, *reasons_of(decode_lines(run_dir.gpu_events, EventLine)))
        if ranks is None and not notes:
            return None
        is_cpu = totals.device == CPU
        return Gpu(device_type=CPU if is_cpu else None, ranks=_ranks(ranks, None), notes=notes, unit=unit_of(is_cpu))
    return _combined(found, nodes, totals, ranks)


# ---- one node ----------------------------------------------------------------------------------------------------


def _node(found: RunRecordings, node: int, totals: TrainingTotals) -> _Node | None:
    """Return the numbers of one node; None without a recording."""
    folder = found.folders[node]
    mine = [one for one in found.recordings if one.node == node]
    summary = decode_optional(folder.gpu_summary, SummaryFile)
    if not mine:
        return _from_summary(folder, summary, found.hosts.get(node, "")) if summary else None
    last = mine[-1].samples
    same = [one for one in mine if _identities(one.samples) == _identities(last)]
    attempts = attempts_of(folder, totals.last_times, is_first=node == 0)
    parts = [_part(one.samples, attempts, running=totals.running) for one in mine]
    current = [part for one, part in zip(mine, parts, strict=True) if one in same]
    notes = [note for one in mine for note in one.samples.notes]
    notes += [_other_devices(one) for one in mine if one not in same]
    entries = {(gpu.gpu_index, gpu.uuid or ""): gpu for gpu in summary.gpus} if summary else {}
    notes += [text for text in summary.warnings if not is_computed(text)] if summary else []
    events = decode_lines(folder.gpu_events, EventLine)
    devices, trained, lost = _devices(current, entries, lost_now(events), mine[-1].host)
    notes += lost
    seconds = [part.seconds([(0.0, math.inf)]) for part in parts]
    has_time = any(part.samples.usual_s for part in parts)
    times, energies, missing = _phases(parts, attempts) if attempts else ({}, {}, [])
    devices, xid_notes = with_xids(devices, events)
    return _Node(
        devices=devices,
        trained=trained if attempts and any(one.memory_used or one.utilization for one in trained) else None,
        samples=sum(len(part.samples) for part in parts),
        hz=1 / last.usual_s if last.usual_s else None,
        seconds=math.fsum(seconds) if has_time else None,
        joules=complete_sum([_known(part.steps.sum()) for part in parts]) if has_time else None,
        peak=max((peak for part in parts if (peak := _peak(part.samples)) is not None), default=None),
        times=times,
        energies=energies,
        device_type=last.device_type,
        simulated=last.simulated,
        energy_source=last.energy_source,
        evidence=mine[-1].evidence,
        doubt=last.doubt,
        has_earlier=len(mine) > len(same),
        notes=tuple(dict.fromkeys([*notes, *_gap_note(parts), *missing, *xid_notes])),
    )


def _from_summary(folder: RunDir, summary: SummaryFile, host: str) -> _Node | None:
    """Return the numbers of a node whose samples are missing, over the whole recording; None if it has none."""
    devices = stored_devices(summary, host)
    if not any(device.samples for device in devices):
        return None
    return _Node(
        devices=devices,
        trained=None,
        samples=summary.samples or 0,
        hz=summary.hz_reached,
        seconds=summary.seconds,
        joules=complete_sum([device.joules for device in devices]),
        peak=summary.totals.memory_used_max,
        device_type=summary.device_type or "",
        simulated=summary.simulated,
        energy_source=summary.energy_source,
        evidence=f"{folder.name}/{folder.gpu_summary.name}",
        notes=(*summary.warnings, "its samples are missing: numbers of the whole recording, without phases"),
    )


def _identities(samples: Samples) -> list[tuple[int, str, str]]:
    return [(one.index, one.uuid, one.name) for one in samples.devices]


def attempts_of(folder: RunDir, last_times: Mapping[int, float] | None, *, is_first: bool) -> list[Trained]:
    """Return the attempts of a node by its log of phases. is_first: it has the log of metrics, too."""
    lines = decode_lines(folder.phases, PhaseLine)
    if not is_first:
        return trained_attempts(lines, None)  # the log of metrics has the clock of another machine
    if last_times is None:
        killed = {line.attempt for line in lines} - {line.attempt for line in lines if line.phase == ENDING}
        last_times = Log(folder.metrics).last_times if killed else {}
    return trained_attempts(lines, last_times)


def _part(samples: Samples, attempts: Sequence[Trained], *, running: bool) -> _Part:
    if not attempts:
        return _Part(samples=samples, steps=steps_of(samples), training=None, phases={})
    spans = spans_of(samples, attempts, running=running)
    phases = {phase: tuple((one.begin, one.end) for one in spans if one.phase == phase) for phase in PHASES}
    # Up to the last sample, which is the begin of nothing.
    training = tuple(training_of(spans, float(samples.time[-1])))
    return _Part(samples=samples, steps=steps_of(samples), training=training, phases=phases)


def _devices(
    parts: Sequence[_Part], entries: Mapping[tuple[int, str], DeviceEntry], lost_now: Mapping[int, float], host: str
) -> tuple[tuple[Device, ...], tuple[MeasuredDevice, ...], list[str]]:
    """Return the devices over the whole recordings, and over the training; and notes about lost ones.

    entries: of gpu_summary.json, by index and UUID.  lost_now: index -> since when the recorder has lost a GPU, Unix s.
    """
    last = parts[-1].samples
    is_cpu = last.device_type == CPU
    may_be_lost = not is_cpu and last.shows_losses
    has_time = any(part.samples.usual_s for part in parts)
    count = len(last.devices)
    whole: list[dict[str, Any]] = [{} for _ in range(count)]
    trained: list[dict[str, Any]] = [{} for _ in range(count)]
    known = [np.zeros((len(part.samples), count), dtype=bool) for part in parts]
    masks = [part.mask() for part in parts]
    for quantity in MEASURED:
        columns = [part.samples.values[quantity] for part in parts if quantity in part.samples.values]
        if len(columns) < len(parts):
            continue
        known = [before | ~np.isnan(column) for before, column in zip(known, columns, strict=True)]
        if quantity in QUANTITIES:
            rest = [column[mask] for column, mask in zip(columns, masks, strict=True)]
            for at in range(count):
                _add(whole[at], quantity, [column[:, at] for column in columns])
                _add(trained[at], quantity, [column[:, at] for column in rest])
    joules = [complete_sum([_known(part.steps[:, at].sum()) for part in parts]) for at in range(count)]
    found: list[Device] = []
    notes: list[str] = []
    for at, facts in enumerate(last.devices):
        label = label_of(facts, host, is_cpu=is_cpu)
        lost_at, lost_s = _lost(parts, known, at) if may_be_lost else (None, 0.0)
        lost_at = lost_now.get(facts.index) if lost_at is None else lost_at  # too short for samples to tell
        device = Device(
            label=label,
            gpu_index=facts.index,
            gpu_name=facts.name,
            uuid=facts.uuid or None,
            rank=facts.rank,
            host=host or None,
            samples=sum(int(np.count_nonzero(is_known[:, at])) for is_known in known),
            lost_at=lost_at,
            lost_s=lost_s,
            memory_total=facts.memory_total,
            capacity=None if is_cpu else facts.memory_total,
            joules=joules[at] if has_time else None,
            **facts_of_entry(entries.get((facts.index, facts.uuid))),
            **whole[at],
        )
        is_lost = lost_s > 0 or lost_at is not None
        if is_lost and lost_at is None:
            unknown = "its energy and mean power are" if device.joules is None else "its mean power is"
            notes.append(f"{label} {NO_RESPONSE} {lost_s:.1f} s: {unknown} unknown, its other means are of the rest")
        elif has_time and device.joules is None and device.power and not is_lost and may_be_lost:
            notes.append(f"{label} {NO_POWER} {last.gap_s:g} s: its energy is unknown")
        if is_lost:
            device = replaced(device, power=None)
            trained[at].pop("power", None)
        found.append(device)
    over_training = (
        MeasuredDevice(label=one.label, gpu_index=one.gpu_index, uuid=one.uuid, rank=one.rank, host=one.host, **its)
        for one, its in zip(found, trained, strict=True)
    )
    return tuple(found), tuple(over_training), notes


def _add(found: dict[str, Statistics], quantity: str, values: Sequence[Array]) -> None:
    """Add the statistics of a quantity if it has a value."""
    every = np.concatenate(values)
    if (known := every[~np.isnan(every)]).size:
        found[quantity] = Statistics(
            mean=float(known.mean()),
            deviation=float(known.std()),
            min=float(known.min()),
            max=float(known.max()),
            count=known.size,
        )


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


def _phases(
    parts: Sequence[_Part], attempts: Sequence[Trained]
) -> tuple[dict[str, float], dict[str, float | None], list[str]]:
    """Return phase, or TRAINING -> sampled time (s), and -> energy (J); and a note about those of unknown energy."""
    times, energies, missing = {}, {}, []
    took = dict.fromkeys((TRAINING, *PHASES), 0.0)
    for one in attempts:
        for phase, seconds in one.seconds().items():
            took[phase] += seconds
    for phase in (TRAINING, *PHASES):
        spans = [(part, (part.training or ()) if phase == TRAINING else part.phases.get(phase, ())) for part in parts]
        times[phase] = math.fsum(part.seconds(own) for part, own in spans)
        energies[phase] = complete_sum([part.joules(own) for part, own in spans])
        if times[phase] < MIN_COVERAGE * took[phase]:
            energies[phase] = None
            missing.append(f"{duration(times[phase])} of {duration(took[phase])} of {phase}")
    return times, energies, [f"energy unknown: recorded were {', '.join(missing)}"] if missing else []


def _gap_note(parts: Sequence[_Part]) -> list[str]:
    """Return a note about the gaps of recordings, other than those between two attempts."""
    gaps = []
    for part in parts:
        widths = np.diff(part.samples.time)
        for place in np.flatnonzero(widths > part.samples.gap_s):
            begin = part.samples.time[place]
            between_attempts = [*part.phases.get(SET_UP, ()), *part.phases.get(ENDING, ())]
            if not any(first <= begin <= end for first, end in between_attempts):
                gaps.append(float(widths[place]))
    return [f"nothing was recorded for {duration(math.fsum(gaps))} in {plural(len(gaps), 'gap')}"] if gaps else []


def _other_devices(one: Recording) -> str:
    """Return a note about a recording on other devices than the last one."""
    total, peak = complete_sum([device.memory_total for device in one.samples.devices]), _peak(one.samples)
    of_all = "" if total is None else f" of {total:.0f}"
    used = "" if peak is None else f", peak {peak:.0f}{of_all} MiB"
    where = "in time, energy and mean power of the run; memory and balance are of the last attempt"
    return f"{earlier_text(one)}{used}: {where}"


# ---- all nodes ---------------------------------------------------------------------------------------------------


def _combined(
    found: RunRecordings, nodes: Mapping[int, _Node | None], totals: TrainingTotals, ranks: RankNumbers | None
) -> Gpu:
    """Return the numbers of all nodes of a run, at least one with a recording. No clocks of two are compared."""
    known = [one for one in nodes.values() if one is not None]
    first, several = known[0], len(nodes) > 1
    factors = _factors(read_run_file_or_empty(found.folders[0]))
    silent = [found.hosts[node] for node, one in nodes.items() if one is None]
    whole: list[None] = [None] if silent else []  # makes a sum unknown
    devices = tuple(device for one in known for device in one.devices)
    is_cpu = first.device_type == CPU
    doubt = next((one.doubt for one in known if one.doubt), "")
    has_earlier = any(one.has_earlier for one in known)
    notes = [*found.notes, *([f"nothing recorded on {', '.join(silent)}"] if silent else [])]
    for node, one in nodes.items():
        host = f"{found.hosts[node]}: " if several else ""
        notes += [f"{host}{note}" for note in one.notes] if one else []
    seconds = min((one.seconds for one in known if one.seconds is not None), default=None)
    joules = complete_sum([*(one.joules for one in known), *whole])
    per_token = None if joules is None or not totals.tokens else joules / totals.tokens
    if per_token and totals.seconds and seconds is not None and seconds < MIN_COVERAGE * totals.seconds:
        notes.append(f"J/token unknown: {duration(seconds)} of {duration(totals.seconds)} of the run were recorded")
        per_token = None
    training = _training(known, whole, totals, doubt=doubt, has_earlier=has_earlier)
    balance = _balances(devices, doubt, is_cpu=is_cpu)
    sizes = {device.host: device.memory_total for device in devices}.values() if is_cpu else None
    return Gpu(
        evidence=first.evidence,
        device_type=first.device_type or None,
        unit=unit_of(is_cpu),
        names="" if is_cpu else ", ".join(dict.fromkeys(device.gpu_name for device in devices)),
        simulated=first.simulated,
        samples=sum(one.samples for one in known),
        hz_reached=first.hz,
        energy_source=first.energy_source if joules is not None else None,
        gpus=devices,
        totals=Totals(
            seconds=seconds,
            joules=joules,
            joules_per_token=per_token,
            tokens_per_joule=1 / per_token if per_token else None,
            mean_power=_mean_power(devices, joules, seconds, has_earlier=has_earlier),
            utilization=_utilization(devices),
            memory_used_mean=complete_sum([*map(_memory, devices), *whole]),
            memory_used_max=None if several else first.peak,
            memory_total=complete_sum(list(sizes) if sizes else [device.memory_total for device in devices]),
            capacity=complete_sum([device.capacity for device in devices]),
            mfu=totals.mfu,
            **_cost(joules, seconds, len(devices), totals, factors, is_cpu=is_cpu),
        ),
        balance=balance,
        training=training,
        phases=_phases_of(known),
        factors=factors,
        reused=totals.reused,
        has_earlier=has_earlier,
        ranks=_ranks(ranks, (training.balance if training else balance).memory),
        problems=tuple(problem for device in devices for problem in problems_of(device)),
        notes=tuple(notes),
    )


def _training(
    known: Sequence[_Node], whole: Sequence[None], totals: TrainingTotals, *, doubt: str, has_earlier: bool
) -> Training | None:
    """Return the training on all nodes; None if it is unknown for one. whole: a None if a node recorded nothing."""
    trained = [one.trained for one in known]
    if not all(trained):
        return None
    devices = tuple(device for one in trained for device in one or ())
    seconds = min(one.times[TRAINING] for one in known)
    joules = complete_sum([*(one.energies[TRAINING] for one in known), *whole])
    per_token = None if joules is None or not totals.tokens else joules / totals.tokens
    return Training(
        seconds=seconds,
        joules=joules,
        joules_per_token=per_token,
        tokens_per_joule=1 / per_token if per_token else None,
        mean_power=_mean_power(devices, joules, seconds, has_earlier=has_earlier),
        utilization=_utilization(devices),
        memory_used_mean=complete_sum([*map(_memory, devices), *whole]),
        balance=_balances(devices, doubt, is_cpu=known[0].device_type == CPU),
        gpus=devices,
    )


def _phases_of(known: Sequence[_Node]) -> dict[str, Phase]:
    """Return the phases of a run: the time of the first node, the energy of all."""
    if not all(one.times for one in known):
        return {}
    return {
        phase: Phase(seconds=known[0].times[phase], joules=complete_sum([one.energies[phase] for one in known]))
        for phase in PHASES
        if known[0].times[phase] > 0
    }


def _memory(device: MeasuredDevice) -> float | None:
    return device.memory_used.mean if device.memory_used else None


def _mean_power(
    devices: Sequence[MeasuredDevice], joules: float | None, seconds: float | None, *, has_earlier: bool
) -> float | None:
    """Return the power of all devices, W; with attempts on other devices, energy / time."""
    power = complete_sum([device.power.mean if device.power else None for device in devices])
    if power is None or not has_earlier:
        return power
    return joules / seconds if joules is not None and seconds else None


def _utilization(devices: Sequence[MeasuredDevice]) -> float | None:
    known = [device.utilization.mean for device in devices if device.utilization]
    return math.fsum(known) / len(known) if known else None


def _balances(devices: Sequence[MeasuredDevice], doubt: str, *, is_cpu: bool) -> Balances:
    """Return how evenly devices are used. doubt: why they cannot be compared."""
    if doubt or len(devices) < 2:
        return Balances(unknown=doubt or f"one {unit_of(is_cpu)}")
    found: dict[str, Balance] = {}
    reason = ""
    for name, quantity in (("memory", "memory_used"), ("utilization", "utilization"), ("power", "power")):
        means = [known.mean for device in devices if (known := getattr(device, quantity)) is not None]
        if len(means) == len(devices) and any(means) and (balance := balance_of(means)):
            found[name] = Balance(cv=balance.cv, quality=balance.quality)
        elif name == "memory":
            reason = "nothing used" if len(means) == len(devices) else "unknown for a device"
    return Balances(**found, unknown=reason)


def _ranks(ranks: RankNumbers | None, memory: Balance | None) -> Ranks | None:
    if ranks is None:
        return None
    is_even = memory is not None and memory.quality == "Excellent"
    return Ranks(
        compute_ms={str(rank): value for rank, value in ranks.compute_ms},
        step_ms=ranks.step_ms,
        steps=ranks.steps,
        load_balance_efficiency=ranks.efficiency,
        straggler_time_share=ranks.waiting,
        slowest_rank=ranks.slowest,
        slowest_share=ranks.slowest_share,
        hidden=is_even and ranks.waiting > HIDDEN_STRAGGLER,
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


# ---- cost --------------------------------------------------------------------------------------------------------


def _factors(run: RunFile) -> Factors:
    """Return the prices and emissions in a run.json."""
    return Factors(
        energy_price=_number(run.symbols.get("ENERGY_PRICE")),
        co2=_number(run.symbols.get("CO2_FACTOR")),
        gpu_hour_price=run.train.gpu_hour_price,
        machine_hour_price=run.train.machine_hour_price,
    )


def _number(text: str | None) -> float | None:
    """Return a factor; an empty string means "not set"."""
    try:
        return None if text is None else float(text.strip().strip('"'))
    except ValueError:
        return None


def _cost(
    joules: float | None, seconds: float | None, devices: int, totals: TrainingTotals, factors: Factors, *, is_cpu: bool
) -> dict[str, Any]:
    """Return the cost of energy (J) and time. A reused run has no cost of energy in its new matrix."""
    kwh = None if joules is None else joules / JOULES_PER_KWH
    price = None if totals.reused else factors.energy_price
    hours = totals.gpu_hours
    if totals.wall_s is None and seconds is not None and not is_cpu:
        hours = seconds * devices / 3600  # without a run: from start to end of the recording
    return {
        "kwh": kwh,
        "energy_cost": None if kwh is None or price is None else kwh * price,
        "co2_g": None if kwh is None or factors.co2 is None else kwh * factors.co2,
        "gpu_hours": hours,
        "gpu_cost": totals.dollars if hours is not None else None,
        "machine_cost": totals.dollars if hours is None else None,
    }
