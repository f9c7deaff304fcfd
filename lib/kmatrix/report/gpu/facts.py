"""What samples do not show of the devices of a run: what the recorder logged, and its summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kmatrix.gpu.devices import EXTRA_METRICS
from kmatrix.gpu.formats.summary import DeviceEntry, ProcessEntry, SummaryFile
from kmatrix.gpu.recorder.summary import EXCLUDED_ATTEMPT, NO_POWER, NO_RESPONSE
from kmatrix.gpu.xid import xid_text
from kmatrix.records.decode import as_json, replaced
from kmatrix.records.events import EventLine
from kmatrix.report.gpu.results import Device, Statistics, Xid
from kmatrix.report.gpu.samples import CPU, QUANTITIES, DeviceFacts, label_of
from kmatrix.text import duration, time_of_day

NOTHING_RECORDED, XID = "nothing recorded", "xid"  # events of the recorder


def reasons_of(events: Sequence[EventLine]) -> list[str]:
    """Return why the recorder recorded nothing, as it logged it last; nothing if it did not."""
    return [event.text or "" for event in events if event.event == NOTHING_RECORDED][-1:]


def lost_now(events: Sequence[EventLine]) -> dict[int, float]:
    """Return the index of each GPU that the recorder has lost and not found again, and since when (Unix s)."""
    found: dict[int, float] = {}
    for event in events:
        if event.event == "started":
            found.clear()
        elif event.gpu_index is not None and event.event == "lost":
            found[event.gpu_index] = event.time
        elif event.gpu_index is not None and event.event == "found":
            found.pop(event.gpu_index, None)
    return found


def facts_of_entry(entry: DeviceEntry | None) -> dict[str, Any]:
    """Return the fields of a device that only the recorder knows."""
    if entry is None:
        return {}
    means = {name: known.mean for name in EXTRA_METRICS if (known := getattr(entry, name)) and known.mean is not None}
    return {
        "throttled_s": {why: seconds for why, seconds in entry.throttled_s.items() if seconds},
        "foreign": tuple(map(_process, entry.foreign)),
        "ecc_uncorrected": entry.ecc_uncorrected or 0,
        "extras": means,
    }


def _process(process: ProcessEntry) -> str:
    size = "" if process.memory_mib is None else f", {process.memory_mib:.0f} MiB"
    return f"{process.name or 'a process'} (pid {process.pid}{size})"


def is_computed(text: str) -> bool:
    """Return whether a warning of the recorder is one that the report computes from the samples."""
    return any(part in text for part in (NO_RESPONSE, NO_POWER, EXCLUDED_ATTEMPT))


def stored_devices(summary: SummaryFile, host: str) -> tuple[Device, ...]:
    """Return devices whose samples are missing: the numbers that the recorder computed, over the whole recording."""
    is_cpu = summary.device_type == CPU
    return tuple(
        Device(
            label=label_of(DeviceFacts(index=gpu.gpu_index, name=gpu.gpu_name, rank=gpu.rank), host, is_cpu=is_cpu),
            gpu_index=gpu.gpu_index,
            gpu_name=gpu.gpu_name,
            uuid=gpu.uuid,
            rank=gpu.rank,
            host=host or None,
            samples=gpu.samples,
            lost_at=gpu.lost_at,
            lost_s=gpu.lost_s,
            memory_total=gpu.memory_total,
            capacity=None if is_cpu else gpu.memory_total,
            joules=None if gpu.energy_gap else gpu.joules,
            **facts_of_entry(gpu),
            **_stored(gpu),
        )
        for gpu in summary.gpus
    )


def _stored(gpu: DeviceEntry) -> dict[str, Any]:
    """Return the statistics that the recorder computed."""
    entries = {name: as_json(getattr(gpu, name)) for name in QUANTITIES}
    return {name: Statistics(**entry) for name, entry in entries.items() if entry and None not in entry.values()}


def with_xids(devices: Sequence[Device], events: Sequence[EventLine]) -> tuple[tuple[Device, ...], list[str]]:
    """Return devices with the XID errors in these events, and notes about those of other devices."""
    found: dict[tuple[int | None, int | None], list[EventLine]] = {}  # place of the device, index of the GPU
    for event in events:
        if event.event == XID and event.xid is not None:
            # The text has the UUID: an index alone may be of another machine.
            mine = (one.gpu_index == event.gpu_index and (one.uuid or "") in (event.text or "") for one in devices)
            place = next((at for at, is_mine in enumerate(mine) if is_mine), None)
            found.setdefault((place, event.gpu_index), []).append(event)
    notes = [
        f"GPU {index} of an earlier attempt: {xid_line(one)}"
        for (place, index), others in found.items()
        if place is None
        for one in _by_code(others)
    ]
    known = (_by_code(found.get((place, one.gpu_index), ())) for place, one in enumerate(devices))
    return tuple(replaced(one, xids=xids) for one, xids in zip(devices, known, strict=True)), notes


def _by_code(events: Sequence[EventLine]) -> tuple[Xid, ...]:
    """Return the XID errors of one device by code, in the order of their first time."""
    codes: dict[int, list[EventLine]] = {}
    for event in events:
        codes.setdefault(event.xid or 0, []).append(event)
    return tuple(
        Xid(
            code=code,
            count=sum(event.xid_count for event in same),
            first=min(event.time for event in same),
            last=max(event.time for event in same),
        )
        for code, same in codes.items()
    )


def xid_line(xid: Xid) -> str:
    """Return XID errors with their meaning, number and time."""
    first, last = (time_of_day(time, utc=True) for time in (xid.first, xid.last))
    when = f"at {first}" if first == last else f"from {first} to {last}"
    return f"{xid_text(xid.code)} ({'once' if xid.count == 1 else f'{xid.count:,} times'}, {when})"


def problems_of(device: Device) -> Iterator[str]:
    """Yield what impaired a device: loss, XID errors, throttling, memory errors, other processes."""
    if device.lost_at is not None:
        yield f"{device.label} was lost at {time_of_day(device.lost_at, utc=True)}: its numbers end there"
    for xid in device.xids:
        yield f"{device.label}: {xid_line(xid)}"
    if device.throttled_s:
        reasons = ", ".join(f"{why} {duration(seconds)}" for why, seconds in device.throttled_s.items())
        yield f"{device.label} was throttled: {reasons}"
    if device.ecc_uncorrected:
        yield f"{device.label} had {device.ecc_uncorrected} uncorrected memory errors: do not trust its results"
    if device.foreign:
        yield f"{device.label} was shared with {', '.join(device.foreign)}"
