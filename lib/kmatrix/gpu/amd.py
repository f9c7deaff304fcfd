"""AMD's GPUs as devices, read from the kernel's files (amdgpu): no library is needed."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from kmatrix.gpu.source import AT, UNKNOWN, WIDTH, Device, Extra, Process, Slow

DRM = Path("/sys/class/drm")
AMD = "0x1002"  # the PCI vendor
MIB = 2**20
PWM_MOST = 255  # of a fan, where the kernel names no other
# column -> files, the first that is there counts, and what divides it. power1_average: W / 10^6, as power1_input.
FAST = {
    "utilization": (("gpu_busy_percent",), 1.0),
    "memory_used": (("mem_info_vram_used",), float(MIB)),
    "power": (("hwmon/power1_average", "hwmon/power1_input"), 1e6),
    "power_instant": (("hwmon/power1_input",), 1e6),
    "temperature": (("hwmon/temp1_input",), 1e3),
    "sm_clock": (("hwmon/freq1_input",), 1e6),
}


class _Card:
    """The open files of one card: each is read from its start again, which asks the driver anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, tuple[int, float]] = {}
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
            return int(os.pread(file, 64, 0)) / scale
        except (OSError, ValueError):
            return UNKNOWN

    def fan(self) -> float | None:
        """Return the fan's speed in percent; None for a card without one."""
        now, most = _number(self._fan), _number(self._fan.with_name("pwm1_max")) or PWM_MOST
        return None if now is None else 100.0 * now / most

    @property
    def columns(self) -> list[str]:
        return list(self._files)

    def close(self) -> None:
        for file, _ in self._files.values():
            os.close(file)


class AmdSource:
    """AMD's GPUs. They have no counter of energy here: joules are summed up from power."""

    device_type: ClassVar[str] = "amd"

    def __init__(self, cards: Sequence[tuple[int, Path]], *, ranked: bool = False) -> None:
        """cards: index and folder of each.  ranked: whether the place of one is its rank."""
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
                values[base + AT[name]] = card.column(name)

    def timed(self, device: int) -> Mapping[str, tuple[float, float]]:
        taken = {}
        for name in self._cards[device].columns:
            begin = time.perf_counter()
            value = self._cards[device].column(name)
            taken[name] = (value, time.perf_counter() - begin)
        return taken

    def slow(self, device: int) -> Slow:
        cap = _number(self._cards[device].power_cap)
        return Slow(power_limit=None if cap is None else cap / 1e6)

    def extra(self, device: int) -> Extra:
        return Extra(fan=self._cards[device].fan())

    def processes(self, device: int) -> tuple[Process, ...]:  # noqa: ARG002 (every source has it)
        return ()

    def is_lost(self, device: int) -> bool:
        return not self._cards[device].folder.exists()

    def recover(self, device: int) -> bool:
        if self.is_lost(device):
            return False
        self._cards[device].close()
        self._cards[device] = _Card(self._cards[device].folder)
        return True

    def host_joules(self) -> float | None:
        return None

    def close(self) -> None:
        for card in self._cards:
            card.close()


def open_source(uuids: Sequence[str] = (), root: Path | None = None) -> AmdSource | None:
    """Return AMD's GPUs by their numbers; of those that are named, in this order, the rank of each is its place.

    None where there is none. root: the folder of cards, DRM unless given.
    """
    folders = [path / "device" for path in (root or DRM).glob("card[0-9]*") if path.name[4:].isdecimal()]
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
    """Return the card's unique id, else its place on the PCI bus."""
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
