"""GPUs that are known by name: how much memory they have and how much power they may draw."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kmatrix.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """memory: bytes, None where it is not known.  watts: the most it draws, None where its maker does not say."""

    name: str
    memory: float | None
    watts: float | None


# Gigabytes (10^9 bytes: the driver reports as many or a few percent more) and watts (thermal design power, of the
# SXM form where there are two), from the makers' data sheets that kmatrix.shapes names beside the peaks.
# GH200: its power is shared with a CPU. A10G: AWS states no power.
KNOWN = tuple(
    Device(name=name, memory=gigabytes * 1e9, watts=watts)
    for name, gigabytes, watts in (
        ("B200", 180, 1000),
        ("GH200", 96, None),
        ("H200", 141, 700),
        ("H100 PCIe", 80, 350),
        ("H100 NVL", 94, 400),
        ("H100", 80, 700),
        ("A100 40GB", 40, 400),
        ("A100", 80, 400),
        ("A10G", 24, None),
        ("A10", 24, 150),
        ("A30", 24, 165),
        ("A40", 48, 300),
        ("L40S", 48, 350),
        ("L40", 48, 300),
        ("L4", 24, 72),
        ("RTX 3090", 24, 350),
        ("RTX 4090", 24, 450),
    )
)


def by_name(asked: str) -> Device:
    """Return the device that GPU= names; case, blanks, dashes and underscores do not count."""
    for device in KNOWN:
        if _letters(device.name) == _letters(asked):
            return device
    raise ConfigError(f"GPU={asked} is not a known GPU", why=f"known are {', '.join(device.name for device in KNOWN)}")


def detected(name: str, memory_mib: float) -> Device:
    """Return the device that the driver calls so: its memory is the driver's, its watts are the table's."""
    words = set(re.split(r"[^A-Za-z0-9]+", name.upper()))
    known = (device for device in KNOWN if set(device.name.upper().split()) <= words)
    watts = next((device.watts for device in known), None)
    return Device(name=name, memory=memory_mib * 2**20, watts=watts)


def _letters(text: str) -> str:
    return re.sub(r"[\s_-]", "", text).upper()
