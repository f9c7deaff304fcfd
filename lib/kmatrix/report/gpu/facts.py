"""What samples do not show of the devices of a run: what the recorder logged, and its summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kmatrix.gpu.formats.summary import DeviceEntry, ProcessEntry
from kmatrix.gpu.recorder.summary import EXCLUDED_ATTEMPT, NO_POWER, NO_RESPONSE
from kmatrix.gpu.xid import xids_text
from kmatrix.records.events import EventLine
from kmatrix.report.gpu.results import Device, DeviceFacts
from kmatrix.text import duration, time_of_day

NOTHING_RECORDED, XID = "nothing recorded", "xid"  # events of the recorder


def reasons_of(events: Sequence[EventLine]) -> list[str]:
    """Return why the recorder recorded nothing, as it logged it last; nothing if it did not."""
    return [event.text or "" for event in events if event.event == NOTHING_RECORDED][-1:]


def facts_of(entry: DeviceEntry) -> dict[str, Any]:
    """Return the fields of a device that only the recorder knows."""
    return {
        "throttled_s": {why: seconds for why, seconds in entry.throttled_s.items() if seconds},
        "foreign": tuple(map(_process, entry.foreign)),
        "ecc_uncorrected": entry.ecc_uncorrected or 0,
    }


def _process(process: ProcessEntry) -> str:
    size = "" if process.memory_mib is None else f", {process.memory_mib:.0f} MiB"
    return f"{process.name or 'a process'} (pid {process.pid}{size})"


def is_computed(text: str) -> bool:
    """Return whether a warning of the recorder is one that the report computes from the samples."""
    return any(part in text for part in (NO_RESPONSE, NO_POWER, EXCLUDED_ATTEMPT))


def xids_of(events: Sequence[EventLine], devices: Sequence[DeviceFacts]) -> tuple[list[dict[int, int]], list[str]]:
    """Return code -> number of the XID errors of each device, and a note for each GPU that is not among them."""
    found: list[dict[int, int]] = [{} for _ in devices]
    others: dict[int | None, dict[int, int]] = {}
    for event in (one for one in events if one.event == XID):
        # The text has the UUID: an index alone may be of another machine.
        places = (
            at
            for at, one in enumerate(devices)
            if one.gpu_index == event.gpu_index and (one.uuid or "") in (event.text or "")
        )
        place = next(places, None)
        counts = others.setdefault(event.gpu_index, {}) if place is None else found[place]
        counts[event.xid or 0] = counts.get(event.xid or 0, 0) + event.xid_count
    return found, [f"GPU {index} of an earlier attempt: {xids_text(counts)}" for index, counts in others.items()]


def problems_of(device: Device) -> Iterator[str]:
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
