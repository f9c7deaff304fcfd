"""Samples, views and recordings for tests of gputop."""

import json
import re
from pathlib import Path

from kmatrix.gpu.formats.binary import COLUMNS, SampleFile
from kmatrix.gpu.formats.samples import GpuSample, Snapshot
from kmatrix.gputop.terminal.screen import plain, render
from kmatrix.gputop.view import History, ScreenSample, View, rows_of
from kmatrix.records.paths import RunDir

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gputop.py"
T0 = 1_700_000_000.0


def gpu_sample(index: int = 0, *, name: str = "NVIDIA A10G", **known) -> GpuSample:
    values = {
        "utilization": 95.0,
        "memory_used": 12800.0,
        "memory_total": 24576.0,
        "power": 150.0,
        "power_limit": 300.0,
        "temperature": 60.0,
        "sm_clock": 1710.0,
    }
    return GpuSample(gpu_index=index, gpu_name=name, uuid=f"GPU-{index:04}", **values | known)


def view(*samples: GpuSample, throttle=None, ranks=None, **fields) -> View:
    snapshot = Snapshot(time=T0, samples=samples)
    history = History()
    history.add(snapshot)
    rows = rows_of(ScreenSample(snapshot=snapshot, throttle=throttle or {}, ranks=ranks or {}), history, T0)
    return View(**{"rows": rows, "mode": "live", "clock": "12:00:00"} | fields)


def rendered(screen: View, width: int = 120, height: int | None = None) -> str:
    return plain(render(screen, width=width, height=height))


def line_of(text: str, index: int) -> str:
    return next(line for line in text.splitlines() if re.match(rf"{index}\s", line))


class Recorder:
    """Write gpu_samples.bin as a recorder does: sample n is n/hz seconds after the start."""

    def __init__(self, path: Path, *, gpus: int = 2, hz: float = 2.0, started: float = T0, name: str = "NVIDIA A10G"):
        self.run, self.started, self.hz, self.gpus, self.count = RunDir(path), started, hz, gpus, 0
        path.mkdir(parents=True, exist_ok=True)
        header = {
            "run_id": "0123456789",
            "started": {"wall": started, "monotonic": 0.0},
            "hz": hz,
            "simulated": False,
            "device_type": "nvidia",
            "gpus": [
                {"gpu_index": i, "gpu_name": name, "uuid": f"GPU-{i}", "rank": gpus - 1 - i, "memory_total": 24576}
                for i in range(gpus)
            ],
        }
        self._file = SampleFile(self.run.gpu_samples, header)

    @property
    def now(self) -> float:
        """The time of the last sample."""
        return self.started + (self.count - 1) / self.hz

    def write(self, count: int, *, utilization: float | None = None) -> None:
        """Append samples. utilization: by default the number of the sample modulo 101; others: 50 + GPU index."""
        for _ in range(count):
            busy = float(self.count % 101) if utilization is None else utilization
            values = [busy if name == "utilization" else 50.0 + i for i in range(self.gpus) for name in COLUMNS]
            self._file.append(self.started + self.count / self.hz, self.count / self.hz, values)
            self.count += 1


def utilization(sample: ScreenSample) -> float:
    return sample.snapshot.samples[0].utilization


def append_event(run: RunDir, second: float, kind: str, index: int | None = None, text: str = "", **more) -> None:
    line = {"schema": 1, "time": T0 + second, "event": kind, "gpu_index": index, "text": text, **more}
    with run.gpu_events.open("a") as file:
        file.write(json.dumps(line) + "\n")
