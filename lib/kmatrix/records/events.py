"""The lines of the logs of a run: events, stretches without training, and the times of each rank."""

from __future__ import annotations

from kmatrix.records.decode import Amount, Count, Record, UnixTime


class EventLine(Record, frozen=True, kw_only=True):
    """A line of events.jsonl, gpu_events.jsonl or journal.jsonl."""

    event: str
    time: UnixTime
    step: Count | None = None
    text: str | None = None
    run: str | None = None
    gpu_index: Count | None = None
    monotonic: Amount | None = None  # seconds since the boot, in gpu_events.jsonl
    xid: Count | None = None  # code of an XID error
    xid_count: Count = 1  # number of these errors since the event before
    attempt: Count | None = None  # of the run, in `started` of gpu_events.jsonl


class PhaseLine(Record, frozen=True, kw_only=True):
    """A line of phases.jsonl: a stretch without training."""

    phase: str
    begin: UnixTime
    end: UnixTime
    attempt: Count = 1
    step: Count | None = None
    begin_monotonic: Amount | None = None  # seconds since the boot
    end_monotonic: Amount | None = None

    @property
    def duration_s(self) -> float:
        known = self.begin_monotonic is not None and self.end_monotonic is not None
        seconds = self.end_monotonic - self.begin_monotonic if known else self.end - self.begin  # type: ignore[operator]
        return max(0.0, seconds)


class TimingLine(Record, frozen=True, kw_only=True):
    """A line of a rank's timings.jsonl: means since the line before."""

    step: Count
    steps: Count
    compute_ms: Amount
    step_ms: Amount
