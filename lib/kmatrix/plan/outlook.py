"""What a run will need on a device: memory, time, energy, money, disk; and whether that can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from kmatrix.errors import ConfigError
from kmatrix.plan import BYTES, masks, states
from kmatrix.plan.devices import GIB, Device
from kmatrix.plan.memory import memory
from kmatrix.shapes import ModelShape, by_depth, mfu, peak_tflops

BAND = (0.25, 0.50)  # MFU of GPT-2 training with fused attention, from small models to well fed large ones
UNLIKELY, IMPOSSIBLE = 0.75, 1.0  # MFU that is needed
MIDDLE = math.sqrt(BAND[0] * BAND[1])  # as far from one end of the band as from the other, as a factor
OVERHEAD = GIB  # bytes that CUDA, NCCL and the libraries take on each device before any tensor
TIGHT = 0.9  # of what is left: above this, fragmentation decides
MOST = 1 << 20  # sequences: beyond any micro-batch
Fields = Mapping[str, Any]


class Fit(StrEnum):
    FITS = "fits"
    TIGHT = "tight"
    NOT = "does not fit"
    UNKNOWN = "not known"


class Chance(StrEnum):
    POSSIBLE = "possible"
    UNLIKELY = "unlikely"
    IMPOSSIBLE = "impossible"
    UNKNOWN = "not known"


def fit(needed: float | None, device: Device) -> Fit:
    """Return whether so many bytes fit a device beside what the libraries take."""
    if needed is None or device.memory is None:
        return Fit.UNKNOWN
    room = device.memory - OVERHEAD
    if needed > room:
        return Fit.NOT
    return Fit.TIGHT if needed > TIGHT * room else Fit.FITS


def chance(needed_mfu: float | None) -> Chance:
    """Return whether a speed can be reached. needed_mfu: 0 to 1 and more."""
    if needed_mfu is None:
        return Chance.UNKNOWN
    if needed_mfu > IMPOSSIBLE:
        return Chance.IMPOSSIBLE
    return Chance.UNLIKELY if needed_mfu > UNLIKELY else Chance.POSSIBLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A speed that somebody hopes for. At most one is given. hours: for the whole run."""

    tokens_per_second: float | None = None
    seconds_per_step: float | None = None
    hours: float | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.tokens_per_second, self.seconds_per_step, self.hours)) > 1:
            raise ConfigError("a plan takes one of TOKENS_PER_SECOND, SECONDS_PER_STEP and HOURS")

    def rate(self, tokens_per_step: int, tokens: int | None) -> float | None:
        """Return tokens a second of all ranks together; None where nothing is asked for."""
        if self.seconds_per_step is not None:
            return tokens_per_step / self.seconds_per_step
        if self.hours is not None:
            return None if tokens is None else tokens / (self.hours * 3600)
        return self.tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of a whole run at a rate. mfu: 0 to 1, None where the device's peak is not known."""

    tokens_per_second: float
    seconds: float | None
    mfu: float | None


def peak_of(device: Device, fields: Fields) -> float | None:
    """Return the dense peak of one device in TFLOP/s: as configured, else the table's."""
    if fields["peak_tflops"]:
        return float(fields["peak_tflops"])
    return peak_tflops(device.name, str(fields["dtype"]), tf32=bool(fields["tf32"]))


def at_rate(rate: float, *, shape: ModelShape, fields: Fields, tokens: int | None, device: Device) -> Speed:
    """Return what a rate in tokens a second comes to."""
    used = mfu(rate, shape.flops_per_token, peak_of(device, fields), int(fields["num_gpus"]))
    return Speed(tokens_per_second=rate, seconds=None if tokens is None else tokens / rate, mfu=used)


def at_mfu(share: float, *, shape: ModelShape, fields: Fields, tokens: int | None, device: Device) -> Speed | None:
    """Return the speed at an MFU; None where the device's peak is not known."""
    peak = peak_of(device, fields)
    if peak is None:
        return None
    rate = share * peak * 1e12 * int(fields["num_gpus"]) / shape.flops_per_token
    return at_rate(rate, shape=shape, fields=fields, tokens=tokens, device=device)


def expected_seconds(*, shape: ModelShape, fields: Fields, tokens: int | None, device: Device) -> float | None:
    """Return the seconds that a run is expected to take before anything is measured: at the middle of the band.

    None where the device's peak or the length is not known. The truth may lie a factor of 1.4 off, and evaluations
    and checkpoints come on top.
    """
    speed = at_mfu(MIDDLE, shape=shape, fields=fields, tokens=tokens, device=device)
    return None if speed is None else speed.seconds


def kilowatt_hours(seconds: float, device: Device, devices: int) -> float | None:
    """Return the energy of devices that draw all they may; None where that is not known."""
    return None if device.watts is None else device.watts * devices * seconds / 3.6e6


def money(seconds: float, fields: Fields) -> float | None:
    """Return dollars at GPU_HOUR_PRICE; None without a price, or on the CPU."""
    price = fields["gpu_hour_price"]
    if price is None or fields["device"] == "cpu":
        return None
    return float(price) * int(fields["num_gpus"]) * seconds / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """each: bytes of one checkpoint.  files: the most there are at once."""

    each: float
    files: int


def disk(shape: ModelShape, fields: Fields, steps: int | None) -> Disk | None:
    """Return what the checkpoints of a run take; None where the optimizer, or how many there will be, is not known."""
    kept = states(shape, fields)
    if kept is None or steps is None:
        return None
    judged = shape.params if fields["optimizer"] == "schedulefree" else 0
    return Disk(each=BYTES * (shape.params + judged + kept + masks(shape, fields)), files=_files(fields, steps))


def _files(fields: Fields, steps: int) -> int:
    """Return the most checkpoints at once: rolling ones, those kept for good, the best and the final one."""
    every, for_good = int(fields["checkpoint_interval"]), int(fields["keep_every"])
    periodic = (steps - 1) // every if every else 0
    kept = sum(1 for step in range(every, steps, every) if step % for_good == 0) if every and for_good else 0
    rolling = min(periodic - kept, int(fields["keep_checkpoints"]))
    best = min(1, (steps - 1) // int(fields["eval_interval"])) if fields["save_best"] else 0
    return rolling + kept + best + (1 if fields["save_checkpoint"] else 0)


def largest_batch(shape: ModelShape, fields: Fields, device: Device) -> int | None:
    """Return the most sequences of a micro-batch that fit; 0 where not one does, None where it is not known."""
    return _largest(lambda batch: fit(memory(shape, {**fields, "batch_size": batch}).total, device))


def largest_depth(fields: Fields, device: Device, shape_at: Callable[[int], ModelShape]) -> int | None:
    """Return the most layers that fit at the run's micro-batch. shape_at: the shape of a depth."""
    return _largest(lambda depth: fit(memory(shape_at(depth), fields).total, device))


def deeper(shape: ModelShape, fields: Fields) -> Callable[[int], ModelShape]:
    """Return how a run's shape follows from its number of layers: the width with it where it is given by depth."""

    def at(depth: int) -> ModelShape:
        if fields["model"] != "depth":
            return replace(shape, n_layer=depth)
        layers, heads, width = by_depth(depth, fields["aspect_ratio"], fields["head_dim"])
        return replace(shape, n_layer=layers, n_head=heads, n_embd=width)

    return at


def _largest(fits: Callable[[int], Fit]) -> int | None:
    """Return the greatest number that fits, by doubling and halving; 0 where 1 does not."""
    if fits(1) is Fit.UNKNOWN:
        return None
    low, high = 0, 1
    while high < MOST and fits(high) is not Fit.NOT:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) is not Fit.NOT else (low, middle)
    return low


def other_counts(fields: Fields, global_batch: int) -> dict[int, int | None]:
    """Return for 1, 2, 4 and 8 ranks the accumulation that keeps the global batch, None where none does."""
    micro = int(fields["batch_size"])
    return {
        ranks: global_batch // (micro * ranks) if global_batch % (micro * ranks) == 0 else None
        for ranks in (1, 2, 4, 8)
        if ranks != int(fields["num_gpus"])
    }
