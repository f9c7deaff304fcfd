"""The sampling loop of the recorder.

Every tick: the fast values of all devices. Every second: limits, one entry in both JSON files, and a check for lost
devices. Every ten seconds: the processes of each GPU, one GPU per second. Every minute: the summary.
Ticks follow a fixed schedule. A late tick is skipped and counted.
"""

from __future__ import annotations

import gc
import math
import signal
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.gpu import processes
from kmatrix.gpu.devices import UNKNOWN, WIDTH, DeviceLimits, DeviceSource, snapshot
from kmatrix.gpu.formats.binary import Calibrated, RecordingHeader, read_samples
from kmatrix.gpu.formats.samples import SIMULATED
from kmatrix.gpu.formats.summary import SummaryFile
from kmatrix.gpu.poller import BackgroundPoller
from kmatrix.gpu.recorder.files import RecordingFiles
from kmatrix.gpu.recorder.summary import EXCLUDED_ATTEMPT, SILENT_S, RunTotals
from kmatrix.gpu.xid import xids_text
from kmatrix.records.decode import decode, decode_optional
from kmatrix.records.paths import RunDir
from kmatrix.text import plural

STOP = frozenset({signal.SIGTERM, signal.SIGINT})  # both end the recording with a last summary
FIRST_SUMMARY_S = 1.0  # from it a restarted recorder continues to count energy
SUMMARY_S = 60.0  # between two summaries; after a kill, newer samples are read from gpu_samples.bin
PROCESSES_S = 10  # between two queries of the processes of one GPU
STORE_S = 0.1  # longest time that a sample is in memory only
CALIBRATION_S = 2.0  # enough for 20 changes of a value that the driver updates at 10 Hz
INTERVAL_S = 0.005  # between two reads of the first device while calibrating
MAX_STEP_S = 2.0  # throttled time that counts between two reads of the reasons
CPU = "cpu"  # device type of ranks, which have no values before their start and after their end
CLOCKED = ("power", "power_instant", "energy_j", "utilization")  # values that the driver updates at a fixed rate
TOLERANCE = 1.1  # factor: a period is measured with an error of a few ms


class Recorder:
    """Records one device source to one run directory until it is stopped."""

    def __init__(
        self,
        source: DeviceSource,
        run_dir: RunDir,
        run: RunDir | None = None,
        *,
        hz: float,
        parent: int | None,
        root: int | None,
        attempt: int | None = None,
    ) -> None:
        """Create a recorder. run: the run whose node `run_dir` is, None for `run_dir` itself.

        attempt: of the run; None: unknown, and energy is not continued from an earlier recorder.
        """
        self._source, self._dir, self._hz, self._attempt = source, run_dir, hz, attempt
        self._parent = processes.ProcessHandle(parent) if parent else None
        self._run_processes = processes.RunProcesses(root)
        self._totals = RunTotals(source.devices, ranks=source.device_type == CPU, hz=hz)
        self._read = [UNKNOWN] * (WIDTH * len(source.devices))  # the last sample, with the counters of the driver
        self._values = self._read.copy()  # the last stored sample, with energy since the recording began
        self._pending: list[tuple[float, float, list[float]]] = []  # Unix s, monotonic s, values
        self._most_pending = max(1, int(STORE_S * hz))
        self._limits = [DeviceLimits()] * len(source.devices)
        self._lost = [False] * len(source.devices)  # no response: reported by an event
        self._xids: list[Mapping[int, int]] = [{}] * len(source.devices)  # code -> number of reported XID errors
        self._poller, self._polls = BackgroundPoller(source), 0
        self._calibration: Calibration | None = Calibration()
        self._result: dict[str, dict[str, float | None]] | None = None
        self._seconds = 0  # number of the polls once per second
        self._limits_at: float | None = None  # monotonic s, of the last read of the limits
        self._simulated = any(device.gpu_name.endswith(SIMULATED) for device in source.devices)
        self._run_id = _run_id(run or run_dir)
        self._files = RecordingFiles(run_dir, self._header(), self._totals.warn)
        self._restore()
        self._before = self._totals.seconds  # s of earlier recorders

    def run(self) -> None:
        """Sample until SIGTERM, SIGINT or the exit of the parent, then write the last summary."""
        more = {} if self._attempt is None else {"attempt": self._attempt}
        self._files.write_event("started", f"{plural(len(self._source.devices), 'device')} at {self._hz:g} Hz", **more)
        self._poller.start()
        gc.freeze()  # what was created so far stays: no collection has to look at it, which costs cold memory
        begin = next_poll = time.monotonic()
        next_summary = begin + FIRST_SUMMARY_S
        # After a restart within an attempt, the time without samples is a part of the recording.
        self._before += self._totals.seconds_since_last(begin)
        period, tick = 1.0 / self._hz, 0
        while True:
            # Once per second: fold the buffered samples, poll the slow values.
            now = time.monotonic()
            poll = now >= next_poll
            if poll:
                self._store(begin)
                self._totals.fold()
                self._poll(now)
                next_poll = max(next_poll + 1.0, now)  # after a stall, no burst of polls to catch up
            # Each tick: one sample, the first before any wait, so that even the shortest recording has one.
            self._sample(begin, snapshot_due=poll)
            if poll and self._parent is not None and not self._parent.is_alive():
                break
            if now >= next_summary:
                self._files.write_summary(self._summary(final=False))
                next_summary = now + SUMMARY_S
            # Skip the ticks that are already over: samples in quick succession would repeat the same values.
            tick += 1
            behind = int((time.monotonic() - begin) / period) - tick
            if behind > 0:
                self._totals.late += behind
                tick += behind
            if self._wait(begin, begin + tick * period):
                break
        self._store(begin)
        self._end()

    def _sample(self, begin: float, *, snapshot_due: bool) -> None:
        """Read the fast values, and store them with the snapshot of this second if it is due."""
        self._source.read(self._read)
        # The times of the same sample, so read together.
        self._pending.append((time.time(), time.monotonic(), self._read.copy()))
        if snapshot_due or len(self._pending) >= self._most_pending:
            self._store(begin)
        if snapshot_due:
            wall = self._totals.ended or time.time()  # of this sample
            latest = snapshot(self._source.devices, self._values, self._limits, wall, self._poller.latest)
            self._files.write_snapshot(latest)

    def _store(self, begin: float) -> None:
        """Add the pending samples to the totals, and append them to the file.

        At 100 Hz every tick starts with cold caches: ten samples together cost a fifth of ten alone.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return
        resets: list[int] = []
        for wall, now, values in pending:
            resets += self._totals.add(now, wall, values)
        self._values = pending[-1][2]
        self._totals.seconds = self._before + pending[-1][1] - begin + 1.0 / self._hz  # a sample stands for a period
        self._files.write_samples([(wall, now, *values) for wall, now, values in pending])
        for device in resets:
            self._device_event("counter reset", device, "the energy counter was reset: counting continues")
        if resets:  # the next recorder continues from the new counter
            self._files.write_summary(self._summary(final=False))

    def _poll(self, now: float) -> None:
        """Check for lost devices, read limits, and query the processes of one GPU in turn."""
        for device in range(len(self._source.devices)):
            self._check_lost(device)
        self._read_limits(now)
        for device in range(len(self._source.devices)):
            if (self._seconds - device) % PROCESSES_S == 0:  # one GPU per second: the call can hold a driver lock
                self._poll_processes(device)
        if self._poller.polls != self._polls:
            self._polls = self._poller.polls
            self._ingest_extra_metrics()
        self._seconds += 1

    def _read_limits(self, now: float) -> None:
        """Read power limits and throttle reasons, and add the throttled time."""
        # A longer time between two polls is a suspend of the machine.
        step = 0.0 if self._limits_at is None else min(MAX_STEP_S, now - self._limits_at)
        self._limits_at = now
        for device in range(len(self._source.devices)):
            limits = self._source.limits(device)
            if limits.throttled != self._limits[device].throttled:
                text = ", ".join(sorted(limits.throttled)) or "none"
                self._device_event("throttle", device, f"throttled: {text}")
            self._totals.totals[device].throttled.add(limits.throttled, step)
            self._limits[device] = limits

    def _ingest_extra_metrics(self) -> None:
        """Add the values of the background poller; new uncorrected memory errors and XID errors are events."""
        self._report_xids()
        for device, extra in enumerate(self._poller.latest):
            if errors := self._totals.totals[device].ingest(extra):
                self._device_event("ecc", device, f"{errors} uncorrected memory errors")

    def _report_xids(self) -> None:
        """Write an event for each code of the XID errors since the last poll."""
        for device, extra in enumerate(self._poller.latest):
            for code, count in extra.xid_counts.items():
                new = count - self._xids[device].get(code, 0)
                if new > 0:
                    self._device_event("xid", device, xids_text({code: new}), xid=code, xid_count=new)
            self._xids[device] = extra.xid_counts

    def _check_lost(self, device: int) -> None:
        """Report a device that stopped or resumed responding, and try to open it again."""
        totals, is_lost = self._totals.totals[device], self._source.is_lost(device)
        if is_lost:
            # The counter of a GPU that was reset starts again: what it counted meanwhile is unknown.
            totals.energy_gap = True
        # A driver that reports an error for every query of a GPU does not call it lost: its values are as unknown.
        is_silent = self._source.device_type != CPU and totals.silent_for >= SILENT_S
        if (is_lost or is_silent) and not self._lost[device]:
            self._lost[device] = True
            totals.lost_at = time.time()
            why = self._source.failure(device)
            self._device_event("lost", device, f"no response{f' ({why})' if why else ''}: values are null")
        # A rank without any sample has not started yet: it is not lost, but must be attached.
        unseen = totals.samples == 0
        answers = self._source.recover(device) if is_lost or is_silent or unseen else True
        if answers:
            self._identify(device)
        # A GPU can open and still answer no query: then its next samples are unknown, too.
        if self._lost[device] and answers and not is_silent:
            self._lost[device] = False
            totals.lost_at = None
            self._device_event("found", device, "responds again")

    def _identify(self, device: int) -> None:
        """Write down the name, UUID and memory of a device that answers for the first time."""
        known, now = self._totals.totals[device].device, self._source.devices[device]
        if known == now:
            return
        self._totals.totals[device].device = now
        facts = {"uuid": now.uuid, "gpu_name": now.gpu_name, "memory_total": now.memory_total}
        self._simulated = self._simulated or now.gpu_name.endswith(SIMULATED)
        self._device_event("identified", device, "name, UUID and memory are known", **facts)
        self._files.write_facts(self._header())
        self._files.write_summary(self._summary(final=False))  # its devices are those of the header

    def _poll_processes(self, device: int) -> None:
        known = self._totals.totals[device].other_processes
        for other in self._run_processes.others(self._source.processes(device)):
            before = known.get(other.pid)
            used = (before.memory_mib if before else None, other.memory_mib)
            known[other.pid] = replace(other, memory_mib=max((mib for mib in used if mib is not None), default=None))
            if before is None:
                what = f"{other.name or 'a process'} (pid {other.pid}) does not belong to this run"
                self._device_event("foreign", device, what)

    def _wait(self, begin: float, due: float) -> bool:
        """Wait for the next tick, calibrating during the first seconds. Return whether to stop."""
        # The calibration reads the first living device as often as possible in the time between ticks.
        while (now := time.monotonic()) < due and self._calibration is not None:
            if now - begin >= CALIBRATION_S:
                self._finish_calibration(self._calibration)
                self._calibration = None
                break
            living = next((at for at in range(len(self._source.devices)) if not self._source.is_lost(at)), 0)
            self._calibration.add(now, self._source.read_timed(living))
            if signal.sigtimedwait(STOP, max(0.0, min(INTERVAL_S, due - time.monotonic()))) is not None:
                return True
        return signal.sigtimedwait(STOP, max(0.0, due - time.monotonic())) is not None

    def _finish_calibration(self, calibration: Calibration) -> None:
        self._result = calibration.result()
        self._files.write_calibration(self._result)
        if warning := rate_warning(self._result, self._hz):
            self._totals.warn(warning)
        known = {name: values["period_ms"] for name, values in self._result.items() if values["period_ms"]}
        periods = ", ".join(f"{name} every {period:g} ms" for name, period in known.items()) or "no value changed"
        self._files.write_event("calibrated", periods)
        self._files.write_summary(self._summary(final=False))

    def _end(self) -> None:
        # An XID error ends a program at once, and with it the recording.
        has_stopped = self._poller.stop()
        if has_stopped:  # otherwise a call hangs in the driver, and the next one would, too
            self._read_limits(time.monotonic())
            self._poller.poll()
            self._report_xids()
        late = self._totals.late
        if late > self._totals.samples * 0.01:
            self._totals.warn(f"{late} ticks were late and skipped")
        self._files.write_event("ended", f"{self._totals.samples} samples, {late} skipped")
        if not self._files.close(lambda: self._summary(final=True)):
            print(f"cannot write {self._dir.gpu_summary}: is the disk full?", file=sys.stderr)
        if has_stopped:
            self._source.close()

    def _device_event(self, event: str, device: int, text: str, **more: float | str | None) -> None:
        """Write an event of a device. more: further keys."""
        known = self._source.devices[device]
        name = f"{known.gpu_name} ({known.uuid or known.gpu_index})"
        self._files.write_event(event, f"{name}: {text}", known.gpu_index, **more)

    def _header(self) -> RecordingHeader:
        return {
            "run_id": self._run_id,
            "started": {"wall": time.time(), "monotonic": time.monotonic()},
            "hz": self._hz,
            "simulated": self._simulated,
            "device_type": self._source.device_type,
            "energy_source": self._source.energy_source,
            "gpus": [
                {
                    "gpu_index": device.gpu_index,
                    "gpu_name": device.gpu_name,
                    "uuid": device.uuid,
                    "rank": device.rank,
                    "memory_total": device.memory_total,
                    "power_limit": self._source.limits(at).power_limit,
                }
                for at, device in enumerate(self._source.devices)
            ],
        }

    def _summary(self, *, final: bool) -> dict[str, Any]:
        about = {
            "run_id": self._run_id,
            "attempt": self._attempt,
            "simulated": self._simulated,
            "device_type": self._source.device_type,
            "hz_asked": self._hz,
            "energy_source": self._source.energy_source,
            "calibration": self._result or {},
        }
        return self._totals.summary(about, final=final)

    def _restore(self) -> None:
        """Continue the totals of an earlier recorder of the run."""
        if not self._dir.gpu_summary.exists() and not self._files.continued:
            return
        if self._files.renamed:
            self._totals.warn(EXCLUDED_ATTEMPT)
            return
        try:
            summary = decode(self._dir.gpu_summary, SummaryFile) if self._dir.gpu_summary.exists() else None
            recording = read_samples(self._dir.gpu_samples) if self._files.continued else None
            self._totals.restore(summary, recording, attempt=self._attempt)
        # A damaged summary: record this attempt, and say that the numbers are partial.
        except (RecordError, ValueError) as error:
            what = error.what if isinstance(error, RecordError) else "its summary does not match"
            self._totals.warn(f"{EXCLUDED_ATTEMPT}: {what}")


def _run_id(run_dir: RunDir) -> str | None:
    record = decode_optional(run_dir.run_json, dict[str, Any])  # the folder need not be a run of ours
    return str((record or {}).get("run_id") or "") or None


class Calibration:
    """Measures the update period and the cost of each metric."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float | None]] = {}  # column -> value, time of its last change
        self._periods: dict[str, list[float]] = {}
        self._costs: dict[str, list[float]] = {}

    def add(self, now: float, taken: Mapping[str, tuple[float, float]]) -> None:
        """Add one read. `now`: monotonic s. `taken`: column -> (value, duration of the call in s)."""
        for name, (value, seconds) in taken.items():
            self._costs.setdefault(name, []).append(seconds)
            if math.isnan(value):
                continue
            before = self._last.get(name)
            if before is None:
                self._last[name] = (value, None)
            elif value != before[0]:
                if before[1] is not None:
                    self._periods.setdefault(name, []).append(now - before[1])
                self._last[name] = (value, now)

    def result(self) -> dict[str, dict[str, float | None]]:
        """Return column -> period_ms and call_us. No period: the value changed too rarely, or at every read."""
        return {
            name: {
                "period_ms": self._period(name),
                "call_us": _median(costs, 1e6, least=1),
            }
            for name, costs in self._costs.items()
        }

    def _period(self, name: str) -> float | None:
        """Return the median time between two changes in ms, or None if it is as short as the interval of the reads."""
        period = _median(self._periods.get(name, []), 1e3, least=3)
        return period if period is not None and period >= 2 * INTERVAL_S * 1e3 else None


def rate_warning(calibration: Calibrated, hz: float) -> str | None:
    """Return a warning if the requested rate is more than twice the update rate of the hardware."""
    periods = [calibration.get(name, {}).get("period_ms") for name in CLOCKED]
    known = [period for period in periods if period]
    if not known or hz * min(known) / 1000 <= 2 * TOLERANCE:
        return None
    rate = 1000 / min(known)
    return f"{hz:g} samples/s requested, but the fastest value changes at {rate:.1f} Hz: {rate * 2:.0f} are enough"


def _median(values: list[float], scale: float, *, least: int) -> float | None:
    return round(statistics.median(values) * scale, 2) if len(values) >= least else None
