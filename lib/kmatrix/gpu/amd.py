"""AMD GPUs as devices, read from sysfs files of the amdgpu driver. No library is needed.

Source: Linux documentation, gpu/amdgpu/thermal.rst and gpu/amdgpu/driver-misc.rst.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from kmatrix.gpu.devices import (
    COLUMN_INDEX,
    UNKNOWN,
    WIDTH,
    Device,
    DeviceLimits,
    DeviceProcess,
    ExtraMetrics,
    ProcessShare,
)

DRM = Path("/sys/class/drm")
AMD = "0x1002"  # PCI vendor id
MIB = 2**20
PWM_MAX = 255  # maximum PWM value of a fan, if pwm1_max is missing


# column -> candidate files (the first existing one is used), divisor. The driver reports power in uW, temperature in
# millidegrees and the clock in Hz. Some cards have only one of the two power files.
FAST = {
    "utilization": (("gpu_busy_percent",), 1.0),
    "memory_used": (("mem_info_vram_used",), float(MIB)),
    "power": (("hwmon/power1_average", "hwmon/power1_input"), 1e6),
    "power_instant": (("hwmon/power1_input",), 1e6),
    "temperature": (("hwmon/temp1_input",), 1e3),
    "sm_clock": (("hwmon/freq1_input",), 1e6),
}


class _Card:
    """The open sysfs files of one card. Each read from offset 0 returns a fresh value of the driver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, tuple[int, float]] = {}
        # The number of hwmonN is assigned at boot, so the directory is searched for.
        hwmon = next(iter(sorted((folder / "hwmon").glob("hwmon*"))), folder / "hwmon" / "none")
        for column, (names, scale) in FAST.items():
            for name in names:
                path = hwmon / name.removeprefix("hwmon/") if name.startswith("hwmon/") else folder / name
                try:
                    self._files[column] = (os.open(path, os.O_RDONLY | os.O_CLOEXEC), scale)
                except OSError:
                    continue
                break
        self.power_cap, self._fan = hwmon / "power1_cap", hwmon / "pwm1"

    def column(self, name: str) -> float:
        if name not in self._files:
            return UNKNOWN
        file, scale = self._files[name]
        try:
            # One system call on an open file: opening it again for each sample would cost three.
            return int(os.pread(file, 64, 0)) / scale
        except (OSError, ValueError):  # the driver refuses reads while it resets the GPU
            return UNKNOWN

    def fan(self) -> float | None:
        """Return the fan speed in percent, or None for a card without a fan."""
        now, maximum = _number(self._fan), _number(self._fan.with_name("pwm1_max")) or PWM_MAX
        return None if now is None else 100.0 * now / maximum

    @property
    def columns(self) -> list[str]:
        return list(self._files)

    def close(self) -> None:
        for file, _ in self._files.values():
            os.close(file)


class AmdSource:
    """AMD GPUs. They have no energy counter in sysfs: joules are integrated from power."""

    device_type: ClassVar[str] = "amd"

    def __init__(self, cards: Sequence[tuple[int, Path]], *, ranked: bool = False) -> None:
        """Open the cards, given as index and sysfs directory. `ranked`: the position of a card is its rank."""
        self._cards = [_Card(folder) for _, folder in cards]
        self.devices = tuple(
            _device(index, folder, rank if ranked else None) for rank, (index, folder) in enumerate(cards)
        )

    @property
    def energy_source(self) -> str | None:
        return "power" if any("power" in card.columns for card in self._cards) else None

    def read(self, values: list[float]) -> None:
        for position, card in enumerate(self._cards):
            base = position * WIDTH
            values[base : base + WIDTH] = [UNKNOWN] * WIDTH
            for name in card.columns:
                values[base + COLUMN_INDEX[name]] = card.column(name)

    def read_timed(self, device: int) -> Mapping[str, tuple[float, float]]:
        taken = {}
        for name in self._cards[device].columns:
            begin = time.perf_counter()
            value = self._cards[device].column(name)
            taken[name] = (value, time.perf_counter() - begin)
        return taken

    def limits(self, device: int) -> DeviceLimits:
        cap = _number(self._cards[device].power_cap)
        return DeviceLimits(power_limit=None if cap is None else cap / 1e6)

    def extra_metrics(self, device: int) -> ExtraMetrics:
        return ExtraMetrics(fan=self._cards[device].fan())

    def processes(self, device: int) -> tuple[DeviceProcess, ...]:  # noqa: ARG002 (every source has it)
        return ()

    def process_shares(self, device: int) -> Mapping[int, ProcessShare]:  # noqa: ARG002 (every source has it)
        return {}

    def is_lost(self, device: int) -> bool:
        return not self._cards[device].folder.exists()

    def failure(self, device: int) -> str:
        return "its files in /sys are gone" if self.is_lost(device) else ""

    def recover(self, device: int) -> bool:
        if self.is_lost(device):
            return False
        # After a reset the old descriptors refer to removed files, although the paths exist again.
        self._cards[device].close()
        self._cards[device] = _Card(self._cards[device].folder)
        return True

    def host_joules(self) -> float | None:
        return None

    def close(self) -> None:
        for card in self._cards:
            card.close()


def open_source(uuids: Sequence[str] = (), root: Path | None = None) -> AmdSource | None:
    """Return the AMD GPUs in order of card numbers, or None if there are none.

    With `uuids`: those GPUs in this order, which is the order of ranks. `root`: replaces DRM.
    """
    # card0, card1, ... without connectors such as card0-DP-1.
    folders = [path / "device" for path in (root or DRM).glob("card[0-9]*") if path.name[4:].isdecimal()]
    # By number, not by name: card10 comes after card2.
    folders.sort(key=lambda folder: int(folder.parent.name[4:]))
    cards = list(enumerate(folder for folder in folders if _text(folder / "vendor") == AMD))
    if uuids:
        by_uuid = {_uuid(folder): (index, folder) for index, folder in cards}
        cards = [by_uuid[uuid] for uuid in uuids if uuid in by_uuid]
    return AmdSource(cards, ranked=bool(uuids)) if cards else None


def _device(index: int, folder: Path, rank: int | None) -> Device:
    total = _number(folder / "mem_info_vram_total")
    return Device(
        gpu_index=index,
        rank=rank,
        gpu_name=_text(folder / "product_name") or "AMD GPU",
        uuid=_uuid(folder),
        memory_total=None if total is None else total / MIB,
    )


def _uuid(folder: Path) -> str:
    """Return the unique id of a card, or its PCI address if it has none."""
    return _text(folder / "unique_id") or folder.resolve().name


def _number(path: Path) -> int | None:
    try:
        return int(_text(path))
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
