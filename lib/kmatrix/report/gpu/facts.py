"""What samples do not show of the devices of a run: what the recorder logged, and its summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kmatrix.gpu.formats.summary import DeviceEntry, ProcessEntry
from kmatrix.gpu.recorder.summary import EXCLUDED_ATTEMPT, NO_POWER, NO_RESPONSE
from kmatrix.gpu.xid import xids_text
from kmatrix.records.events import EventLine
from kmatrix.report.gpu.results import Device
from kmatrix.text import duration, time_of_day

NOTHING_RECORDED, XID = "nothing recorded", "xid"  # events of the recorder


def reasons_of(events: Sequence[EventLine]) -> list[str]:
    """Return why the recorder recorded nothing, as it logged it last; nothing if it did not."""
    return [event.text or "" for event in events if event.event == NOTHING_RECORDED][-1:]


def facts_of_entry(entry: DeviceEntry | None) -> dict[str, Any]:
    """Return the fields of a device that only the recorder knows."""
    if entry is None:
        return {}
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


def xids_of(events: Iterable[EventLine], index: int, uuid: str) -> dict[int, int]:
    """Return the XID errors of a GPU: code -> number."""
    return _counted(event for event in events if _is_of(event, index, uuid))


def former_xids(events: Sequence[EventLine], devices: Sequence[Device]) -> list[str]:
    """Return a note about the XID errors of each GPU that is not among the devices."""
    rest: dict[int | None, list[EventLine]] = {}
    for event in events:
        if event.event == XID and not any(_is_of(event, one.gpu_index, one.uuid or "") for one in devices):
            rest.setdefault(event.gpu_index, []).append(event)
    return [f"GPU {index} of an earlier attempt: {xids_text(_counted(mine))}" for index, mine in rest.items()]


def _is_of(event: EventLine, index: int, uuid: str) -> bool:
    # The text has the UUID: an index alone may be of another machine.
    return event.event == XID and event.gpu_index == index and uuid in (event.text or "")


def _counted(events: Iterable[EventLine]) -> dict[int, int]:
    found = Counter[int]()
    for event in events:
        found[event.xid or 0] += event.xid_count
    return dict(found)


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
