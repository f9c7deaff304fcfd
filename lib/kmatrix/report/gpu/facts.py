"""What samples do not show of the devices of a run: what the recorder logged, and its summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kmatrix.gpu.devices import EXTRA_METRICS
from kmatrix.gpu.formats.summary import DeviceEntry, ProcessEntry
from kmatrix.gpu.recorder.summary import EXCLUDED_ATTEMPT, NO_POWER, NO_RESPONSE
from kmatrix.gpu.xid import xid_text
from kmatrix.records.events import EventLine
from kmatrix.report.gpu.results import Device, Xid
from kmatrix.text import duration, time_of_day

NOTHING_RECORDED, XID = "nothing recorded", "xid"  # events of the recorder


def reasons_of(events: Sequence[EventLine]) -> list[str]:
    """Return why the recorder recorded nothing, as it logged it last; nothing if it did not."""
    return [event.text or "" for event in events if event.event == NOTHING_RECORDED][-1:]


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


def is_xid_of(event: EventLine, index: int, uuid: str) -> bool:
    """Return whether an event has XID errors of a GPU."""
    # The text has the UUID: an index alone may be of another machine.
    return event.event == XID and event.gpu_index == index and uuid in (event.text or "")


def xids_of(events: Iterable[EventLine]) -> tuple[Xid, ...]:
    """Return the XID errors of one GPU by code, in the order of their first time."""
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


def former_xids(events: Sequence[EventLine], devices: Sequence[Device]) -> list[str]:
    """Return a note about the XID errors of each code of GPUs that are not among the devices."""
    rest: dict[int | None, list[EventLine]] = {}
    for event in events:
        if event.event == XID and not any(is_xid_of(event, one.gpu_index, one.uuid or "") for one in devices):
            rest.setdefault(event.gpu_index, []).append(event)
    return [f"GPU {index} of an earlier attempt: {xid_line(xid)}" for index in rest for xid in xids_of(rest[index])]


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
