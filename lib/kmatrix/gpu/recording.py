"""The loop of a recorder: the fast values of all devices at every tick, everything else at its own pace.

Every second the slow values, a line of both JSON files and a look for lost devices; every ten seconds the processes
of each GPU, one GPU after the other; every minute the summary.
Ticks lie on a fixed schedule: one that comes too late is left out and counted.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.gpu import calibrate, processes
from kmatrix.gpu.aggregate import Aggregate
from kmatrix.gpu.aside import Aside
from kmatrix.gpu.formats import SIMULATED, read_samples
from kmatrix.gpu.source import UNKNOWN, WIDTH, Slow, Source, snapshot
from kmatrix.gpu.writing import Files
from kmatrix.records import RunDir, read_json

STOP = frozenset({signal.SIGTERM, signal.SIGINT})
SUMMARY_S = 60.0
PROCESSES_S = 10  # between two looks at the processes of one GPU


class Recorder:
    """Records one source into one run directory until it is told to stop."""

    def __init__(self, source: Source, run_dir: RunDir, *, hz: float, parent: int | None, root: int | None) -> None:
        self._source, self._dir, self._hz = source, run_dir, hz
        self._parent = processes.Watched(parent) if parent else None
        self._ours = processes.Ours(root)
        self._aggregate = Aggregate(source.devices)
        self._values = [UNKNOWN] * (WIDTH * len(source.devices))
        self._slow = [Slow()] * len(source.devices)
        self._lost = [False] * len(source.devices)
        self._aside, self._looks = Aside(source), 0
        self._calibration: calibrate.Calibration | None = calibrate.Calibration()
        self._result: dict[str, dict[str, float | None]] | None = None
        self._seconds, self._looked = 0, 0.0  # ticks of the slow set, and when the last one was
        self._simulated = any(device.gpu_name.endswith(SIMULATED) for device in source.devices)
        self._run_id = _run_id(run_dir)
        self._files = Files(run_dir, self._header(), self._aggregate.warn)
        self._restore()
        self._before = (self._aggregate.seconds, self._aggregate.host_joules or 0.0)  # of earlier attempts

    def run(self) -> None:
        """Sample until SIGTERM, SIGINT or the end of the parent; then write the last summary."""
        self._files.event("started", f"{len(self._source.devices)} devices at {self._hz:g} Hz")
        self._aside.start()
        begin = next_slow = next_summary = time.monotonic()
        next_summary += SUMMARY_S
        period, tick = 1.0 / self._hz, 0
        while True:
            now = time.monotonic()
            slow = now >= next_slow
            if slow:
                self._aggregate.fold()
                self._look(now)
                next_slow = max(next_slow + 1.0, now)
            self._sample(now, begin, slow=slow)
            if slow and self._parent is not None and not self._parent.lives():
                break
            if now >= next_summary:
                self._files.summary(self._summary(final=False))
                next_summary = max(next_summary + SUMMARY_S, now)
            tick += 1
            behind = int((time.monotonic() - begin) / period) - tick
            if behind > 0:
                self._aggregate.late += behind
                tick += behind
            if self._wait(begin, begin + tick * period):
                break
        self._end()

    def serve(self, port: int) -> None:
        """Answer Prometheus on this port from now on; where that cannot be, say so and record all the same."""
        from kmatrix.gpu import prometheus

        try:
            prometheus.Server(port, self._metrics)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            text = f"no metrics for Prometheus: port {port} of {prometheus.HOST} cannot be had: {why}"
            self._aggregate.warn(text)
            print(f"kmatrix recorder: {text}: recording goes on", file=sys.stderr)

    def _metrics(self) -> str:
        """Return everything that is known now. Called from the server's thread."""
        from kmatrix.gpu import prometheus

        readings = [
            prometheus.Reading(
                device=totals.device,
                values=prometheus.reading_of(self._values, at),
                slow=self._slow[at],
                extra=self._aside.latest[at],
                lost=self._lost[at],
                joules=totals.joules,
                throttled_s=dict(totals.throttled_s),
                ecc=dict(totals.ecc),
            )
            for at, totals in enumerate(self._aggregate.totals)
        ]
        known, late = self._aggregate.samples, self._aggregate.late
        return prometheus.text_of(prometheus.families(self._dir.name, self._run_id, readings, samples=known, late=late))

    def _sample(self, now: float, begin: float, *, slow: bool) -> None:
        """Read the fast set, and keep it."""
        self._source.read(self._values)
        wall = time.time()
        fell = self._aggregate.add(now, wall, self._values)
        self._aggregate.seconds = self._before[0] + now - begin + 1.0 / self._hz  # a sample stands for one period
        for device in fell:
            self._device_event("counter reset", device, "the energy counter fell: a new base, joules go on from it")
        self._files.sample(wall, self._values)
        if slow:
            latest = snapshot(self._source.devices, self._values, self._slow, wall, self._aside.latest)
            self._files.second(latest)

    def _look(self, now: float) -> None:
        """Read the slow set: lost devices, throttling, the machine's joules, and in turn the processes of a GPU."""
        for device in range(len(self._source.devices)):
            self._look_for(device)
            slow = self._source.slow(device)
            if slow.throttled != self._slow[device].throttled:
                text = ", ".join(sorted(slow.throttled)) or "no more"
                self._device_event("throttle", device, f"clocks are held down: {text}")
            totals = self._aggregate.totals[device].throttled_s
            for reason in slow.throttled & self._slow[device].throttled:
                totals[reason] = totals.get(reason, 0.0) + min(2.0, now - self._looked)
            self._slow[device] = slow
            if (self._seconds - device) % PROCESSES_S == 0:
                self._look_at_processes(device)
        if self._aside.looks != self._looks:
            self._looks = self._aside.looks
            self._take_extras()
        joules = self._source.host_joules()
        if joules is not None:
            self._aggregate.host_joules = self._before[1] + joules
        self._looked = now
        self._seconds += 1

    def _take_extras(self) -> None:
        """Take in what was asked aside; errors of memory that were not corrected are an event."""
        for device, extra in enumerate(self._aside.latest):
            if errors := self._aggregate.totals[device].look(extra):
                self._device_event("ecc", device, f"{errors} errors of its memory could not be corrected")

    def _look_for(self, device: int) -> None:
        if self._source.is_lost(device) and not self._lost[device]:
            self._lost[device] = True
            self._aggregate.totals[device].lost_at = time.time()
            self._device_event("lost", device, "it answers nothing any more: null from here on")
        unseen = self._aggregate.totals[device].samples == 0
        if (self._lost[device] or unseen) and self._source.recover(device) and self._lost[device]:
            self._lost[device] = False
            self._aggregate.totals[device].lost_at = None
            self._device_event("found", device, "it answers again")

    def _look_at_processes(self, device: int) -> None:
        known = self._aggregate.totals[device].foreign
        for foreign in self._ours.foreign(self._source.processes(device)):
            before = known.get(foreign.pid, {})
            most = max((m for m in (before.get("memory_mib"), foreign.memory_mib) if m is not None), default=None)
            known[foreign.pid] = {"pid": foreign.pid, "name": foreign.name, "memory_mib": most}
            if not before:
                what = f"{foreign.name or 'a process'} (pid {foreign.pid}) is no part of this run"
                self._device_event("foreign", device, what)

    def _wait(self, begin: float, due: float) -> bool:
        """Wait for the next tick; return whether to stop. In the first seconds, calibrate meanwhile."""
        while (now := time.monotonic()) < due and self._calibration is not None:
            if now - begin >= calibrate.SECONDS:
                self._calibrated(self._calibration)
                self._calibration = None
                break
            living = next((at for at in range(len(self._source.devices)) if not self._source.is_lost(at)), 0)
            self._calibration.add(now, self._source.timed(living))
            if signal.sigtimedwait(STOP, max(0.0, min(calibrate.INTERVAL_S, due - time.monotonic()))) is not None:
                return True
        return signal.sigtimedwait(STOP, max(0.0, due - time.monotonic())) is not None

    def _calibrated(self, calibration: calibrate.Calibration) -> None:
        self._result = calibration.result()
        self._files.calibrated(self._result)
        if warning := calibrate.warning(self._result, self._hz):
            self._aggregate.warn(warning)
        known = {name: values["period_ms"] for name, values in self._result.items() if values["period_ms"]}
        told = ", ".join(f"{name} every {period:g} ms" for name, period in known.items()) or "no value changed"
        self._files.event("calibrated", told)
        self._files.summary(self._summary(final=False))

    def _end(self) -> None:
        late = self._aggregate.late
        if late > self._aggregate.samples * 0.01:
            self._aggregate.warn(f"{late} ticks came too late and were left out")
        self._files.event("ended", f"{self._aggregate.samples} samples, {late} left out")
        if not self._files.close(lambda: self._summary(final=True)):
            print(f"{self._dir.gpu_summary} could not be written: is the disk full?", file=sys.stderr)
        if self._aside.stop():  # a driver that hangs is left alone
            self._source.close()

    def _device_event(self, event: str, device: int, text: str) -> None:
        known = self._source.devices[device]
        self._files.event(event, f"{known.gpu_name} ({known.uuid or known.gpu_index}): {text}", known.gpu_index)

    def _header(self) -> dict[str, Any]:
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
                    "power_limit": self._source.slow(at).power_limit,
                }
                for at, device in enumerate(self._source.devices)
            ],
        }

    def _summary(self, *, final: bool) -> dict[str, Any]:
        about = {
            "run_id": self._run_id,
            "simulated": self._simulated,
            "device_type": self._source.device_type,
            "hz_asked": self._hz,
            "energy_source": self._source.energy_source,
            "calibration": self._result or {},
        }
        return self._aggregate.summary(about, final=final)

    def _restore(self) -> None:
        """Go on from an earlier attempt of the run."""
        if not self._dir.gpu_summary.exists() and not self._files.continued:
            return
        try:
            summary = read_json(self._dir.gpu_summary) if self._dir.gpu_summary.exists() else None
            recording = read_samples(self._dir.gpu_samples) if self._files.continued else None
            self._aggregate.restore(summary, recording)
        except (RecordError, KeyError, ValueError, TypeError) as error:
            what = error.what if isinstance(error, RecordError) else "its summary does not fit"
            self._aggregate.warn(f"an earlier attempt is not in these numbers: {what}")


def _run_id(run_dir: RunDir) -> str | None:
    try:
        return str(read_json(run_dir.run_json).get("run_id") or "") or None
    except (RecordError, OSError):
        return None  # a folder that is no run of ours is recorded all the same
