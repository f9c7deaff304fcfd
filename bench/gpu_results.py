"""The measurements of `make bench PART=`: a JSON line each, on which machine it was made, and what is still left."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "lib"), str(ROOT)]

from gpt2.machine import software
from kmatrix.records.files import append_jsonl, read_jsonl
from kmatrix.shapes import peak_tflops

QUERY = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")
FP8_RATIO = 2.0  # dense FP8 peak relative to bfloat16, of Hopper and Ada: NVIDIA H100 data sheet
LEAST_S = 60.0  # seconds that must be left to start a measurement that trains
ALMOST_ALL = 0.9  # of the time of a call

Values = dict[str, Any]
Measure = Callable[[], Values]


class FailedError(Exception):
    """A measurement that is not possible here, with its reason."""


class OutOfTimeError(Exception):
    """A measurement that did not end before the end of the call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The device of a call, with the sizes that suit it."""

    device: str  # cuda or cpu
    tiny: bool  # shapes of the check on the CPU
    name: str  # of the device
    gpus: int  # that PyTorch finds

    @property
    def peak(self) -> float | None:
        """FLOP/s of dense bfloat16; None if the device is not in kmatrix.shapes."""
        tera = peak_tflops(self.name, "bf16")
        return None if tera is None else tera * 1e12


def scale_of(device: str) -> Scale:
    """Return the sizes for a device."""
    if device == "cpu":
        return Scale(device="cpu", tiny=True, name="CPU", gpus=0)
    return Scale(device="cuda", tiny=False, name=torch.cuda.get_device_name(), gpus=torch.cuda.device_count())


def machine(scale: Scale) -> dict[str, Any]:
    """Return device, driver, clocks, power and versions, as strings; None if unknown.

    Clocks and power are those of this instant: a measurement records them again at its end.
    """
    found: dict[str, Any] = {"device": scale.name, "gpus": scale.gpus, **software()}
    return found | (sensors() if scale.device == "cuda" else dict.fromkeys(QUERY))


def sensors() -> dict[str, str | None]:
    """Return driver, clocks, power and temperature of PyTorch's first GPU with their units, from nvidia-smi."""
    # By UUID: CUDA_VISIBLE_DEVICES may hide or reorder GPUs for PyTorch, and does not for nvidia-smi.
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader", f"--id={uuid}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return dict.fromkeys(QUERY)
    values = [value.strip() for value in done.stdout.split("\n")[0].split(",")]
    return dict(zip(QUERY, values, strict=False))


def headline(about: Mapping[str, Any]) -> list[str]:
    """Return the lines that state the machine, for the terminal and the report."""

    def of(name: str) -> str:
        return str(about.get(name) or "n/a")

    known = peak_tflops(str(about["device"]), "bf16")
    return [
        f"{of('device')} x {about.get('gpus') or 1}" + ("" if known else " (peak unknown: no MFU)"),
        f"driver {of('driver_version')}, clock {of('clocks.sm')} of {of('clocks.max.sm')}, memory {of('clocks.mem')}, "
        f"power {of('power.draw')} of {of('power.limit')}, {of('temperature.gpu')} C",
        f"torch {of('torch')}, CUDA {of('cuda')}, cuDNN {of('cudnn')}, NCCL {of('nccl')}",
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One measurement that a part makes."""

    name: str  # unique within its part
    measure: Measure
    least_s: float = 0.0  # seconds that must be left for it to start


@dataclass(slots=True, kw_only=True)
class Results:
    """The file of the measurements, and the time that is left in this call."""

    path: Path
    scale: Scale
    end: float = float("inf")  # of this call, on time.monotonic's clock
    limit_s: float = float("inf")  # of this call
    about: dict[str, Any] = field(default_factory=dict)

    def lines(self, part: str) -> dict[str, Values]:
        """Return the newest measurement of each name in a part, made on this kind of device."""
        found: dict[str, Values] = {}
        for line in read_jsonl(self.path):
            if line.get("part") == part and line.get("machine", {}).get("device") == self.scale.name:
                found[line["name"]] = line
        return found

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    def run(self, part: str, items: Iterable[Item], show: Callable[[str, Values], str]) -> int:
        """Make the measurements of a part that are not in the file yet, and return how many are left.

        show: a line for the terminal, from a name and its values.
        """
        known, left = self.lines(part), 0
        for item in items:
            if item.name in known:
                self._print(part, item.name, known[item.name], show, "earlier")
                continue
            if left or self.left_s < item.least_s:  # in order: later ones need the earlier ones for comparison
                left += 1
                continue
            started = time.monotonic()
            try:
                values = item.measure()
            except FailedError as error:
                values = {"failed": str(error)}
            except OutOfTimeError:
                if time.monotonic() - started < ALMOST_ALL * self.limit_s:
                    left += 1
                    continue
                # It had the whole call: it would not end in the next one either.
                values = {"failed": f"did not end within {self.limit_s / 60:.0f} minutes"}
            seconds = time.monotonic() - started
            line = {"part": part, "name": item.name, **values, "took_s": round(seconds, 1), "time": time.time()}
            after = sensors() if self.scale.device == "cuda" else {}
            append_jsonl(self.path, line | {"machine": self.about, "after": after})
            self._print(part, item.name, line, show, f"{seconds:.0f} s")
        return left

    def _print(self, part: str, name: str, line: Values, show: Callable[[str, Values], str], note: str) -> None:
        text = f"not measured: {line['failed']}" if "failed" in line else show(name, line)
        print(f"{part}  {name:42} {text}  ({note})", flush=True)
