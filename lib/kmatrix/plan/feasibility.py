"""Forecast the time, energy, cost and disk space of a run, and whether it fits a device."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, replace
from enum import StrEnum

from kmatrix.errors import ConfigError
from kmatrix.plan.cpu import CpuSpeed
from kmatrix.plan.memory import BYTES, MemoryNeed, masks, memory, states
from kmatrix.records.train_config import TrainConfig
from kmatrix.rules import budget_s, dollars_per_hour
from kmatrix.shapes import DEVICES, peak_tflops
from kmatrix.text import GIB, memory_size

# Without torch.compile: it makes training with fused attention 20 to 50 % faster (16 % for Llama 8B in torchtitan's
# docs/performance.md, 85 % in nanoGPT's README, early in 2023).
EAGER = (1 / 1.5, 1 / 1.2)
OVERHEAD = GIB  # bytes that CUDA, NCCL and libraries use per device before any tensor is allocated
TIGHT = 0.9  # fraction of the rest; above it, fragmentation can cause out-of-memory errors
MOST = 1 << 20  # upper bound of the search for the largest micro-batch
# The MFU of GPT-2 training with torch.compile and fused attention is m N / (N + HALF) for N parameters, because the
# kernels of small models are too short to fill a GPU. Fitted to the published runs (tests/fixtures/published.toml).
HALF = 75e6  # parameters of a model that reaches half of the MFU of a large one
SPREAD = 1.74  # a run may be faster or slower by this factor
HIGHEST = 0.85  # MFU of a plan; the highest of the published runs is 0.80
SMALLEST = 10e6  # parameters of the smallest published run: smaller models are planned with its MFU
# m by words of the GPU's name: newer GPUs have a higher peak for the same memory bandwidth, and consumer GPUs run above
# the clock of their data sheet.
LARGE_MFU = ((("H100", "H200", "GH200", "B200", "GB200", "B300", "GB300"), 0.53), (("RTX",), 0.91))
OTHER_MFU = 0.71  # that of the A100; no run on another GPU of the rest is published


class Fit(StrEnum):
    FITS = "fits"
    TIGHT = "tight"
    NOT = "does not fit"
    UNKNOWN = "unknown"


def fit(need: MemoryNeed, device: GpuModel) -> Fit:
    """Return whether a run fits a GPU, next to its libraries."""
    if device.memory is None:
        return Fit.UNKNOWN
    room = device.memory - OVERHEAD
    if need.total > room:
        return Fit.NOT
    return Fit.TIGHT if need.total > TIGHT * room else Fit.FITS


def peak_of(device: GpuModel, train: TrainConfig) -> float | None:
    """Return the dense peak of one device in TFLOP/s: PEAK_TFLOPS, else from the data sheet; None if it is unknown."""
    return train.peak_tflops or peak_tflops(device.name, train.dtype)


def large_mfu(device: GpuModel) -> float:
    """Return the MFU of a large model on a GPU."""
    words = set(device.name.upper().replace("-", " ").split())
    return next((mfu for names, mfu in LARGE_MFU if not words.isdisjoint(names)), OTHER_MFU)


def mfu_band(train: TrainConfig, device: GpuModel) -> tuple[float, float]:
    """Return the lowest and the highest MFU that a run is expected to reach, 0 to 1."""
    params = train.shape.params
    low = _compiled_mfu(params, device) / SPREAD
    # Smaller models than the published ones can be faster, with many tokens per step.
    most = params if params >= SMALLEST else 10 * SMALLEST
    high = min(_compiled_mfu(most, device) * SPREAD, HIGHEST)
    return (low, high) if train.compile else (low * EAGER[0], high * EAGER[1])


def middle_mfu(train: TrainConfig, device: GpuModel) -> float:
    """Return the expected MFU: half of the published runs were faster, half slower."""
    expected = _compiled_mfu(train.shape.params, device)
    return expected if train.compile else expected * math.sqrt(EAGER[0] * EAGER[1])


def _compiled_mfu(params: float, device: GpuModel) -> float:
    params = max(params, SMALLEST)
    return large_mfu(device) * params / (params + HALF)


def rate_at(share: float, train: TrainConfig, device: GpuModel) -> float | None:
    """Return the tokens/s of all GPUs at an MFU, None if the peak of the device is unknown."""
    peak = peak_of(device, train)
    return None if peak is None else share * peak * 1e12 * train.num_gpus / train.shape.flops_per_token


def rates(train: TrainConfig, device: GpuModel, cpu: CpuSpeed | None) -> tuple[float, float] | None:
    """Return the lowest and the highest expected tokens/s of all ranks, None if the peak of the device is unknown.

    cpu: the speed of a run on the CPU.
    """
    if cpu is not None:
        per_token = train.shape.flops_per_token
        return cpu.slow * cpu.cores / per_token, cpu.fast * cpu.cores / per_token
    low, high = (rate_at(share, train, device) for share in mfu_band(train, device))
    return None if low is None or high is None else (low, high)


def expected_seconds(train: TrainConfig, device: GpuModel) -> float | None:
    """Return the expected time of a run in seconds before anything is measured, at the expected MFU.

    None if the peak of the device is unknown. The actual time can differ by a factor of two;
    evaluations and checkpoints are not included. It is at most the budget of the run.
    """
    rate = rate_at(middle_mfu(train, device), train, device)
    return None if rate is None else within_budget(train.max_iters * train.tokens_per_step / rate, train)


def within_budget(seconds: float, train: TrainConfig) -> float:
    """Return the time of a run that would take some seconds without its budget."""
    budget = budget_s(train)
    return seconds if budget is None else min(seconds, budget)


def kilowatt_hours(seconds: float, device: GpuModel, devices: int) -> float | None:
    """Return the energy of devices at their maximum power in kWh, None if that power is unknown."""
    return None if device.watts is None else device.watts * devices * seconds / 3.6e6


def gpu_cost(seconds: float, train: TrainConfig) -> float | None:
    """Return the cost of a run in dollars, None without a price."""
    price = dollars_per_hour(train)
    return None if price is None else price * seconds / 3600


def disk(train: TrainConfig) -> tuple[int, float]:
    """Return the maximum number of checkpoints at the same time (rolling, best and final), and the bytes of each."""
    last = train.max_iters - 1  # the last step writes the final checkpoint instead of a periodic one
    periodic = last // train.checkpoint_interval if train.checkpoint_interval else 0
    best = min(1, last // train.eval_interval) if train.save_best else 0
    files = min(periodic, train.keep_checkpoints) + best + (1 if train.save_checkpoint else 0)
    # Schedule-Free trains on one set of weights and evaluates another; a checkpoint contains both.
    shape, copies = train.shape, 2 if train.optimizer == "schedulefree" else 1
    return files, BYTES * (copies * shape.params + states(shape, train) + masks(shape, train))


def largest_batch(train: TrainConfig, device: GpuModel) -> int | None:
    """Return the largest micro-batch that fits in sequences, 0 if none fits, None if unknown."""

    def fits(batch: int) -> Fit:
        return fit(memory(replace(train, batch_size=batch)), device)

    if fits(1) is Fit.UNKNOWN:
        return None
    # Double until it does not fit, then bisect: low always fits, high never does.
    low, high = 0, 1
    while high < MOST and fits(high) is not Fit.NOT:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) is not Fit.NOT else (low, middle)
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """A GPU model with its memory and power."""

    name: str
    memory: float | None  # bytes, None if unknown; of one rank
    watts: float | None  # maximum power, None if the manufacturer does not publish it
    shared_by: int = 1  # ranks that share the memory of the machine, on the CPU

    @property
    def room(self) -> str:
        """The memory as text: "23.6 GiB", "11.8 GiB per rank"."""
        size = "unknown" if self.memory is None else memory_size(self.memory)
        return f"{size} per rank" if self.shared_by > 1 else size


KNOWN = tuple(
    GpuModel(name=device.name, memory=device.memory, watts=device.watts) for device in DEVICES if device.memory
)


def model_of(name: str) -> GpuModel | None:
    """Return the GPU model that a user, a driver or a scheduler names, None if it is not a known one.

    >>> [found.name if (found := model_of(name)) else None for name in ("A100-SXM4", "h100_80gb", "rtx4090", "v100")]
    ['A100', 'H100', 'RTX 4090', None]
    """
    # All letters and numbers of a model must occur. The table lists "H100 PCIe" before "H100", which would match, too.
    return next((device for device in KNOWN if _parts(device.name) <= _parts(name)), None)


def _parts(name: str) -> set[str]:
    return set(re.findall(r"[A-Z]+|[0-9]+", name.upper()))


def by_name(asked: str) -> GpuModel:
    """Return the GPU model of GPU=. Raises ConfigError if it is unknown."""
    if found := model_of(asked):
        return found
    why = f"known models: {', '.join(device.name for device in KNOWN)}"
    raise ConfigError(f"GPU={asked}: unknown GPU model", why=why)


def detected(name: str, memory_mib: float) -> GpuModel:
    """Return the GPU model of a name from the driver, with the memory from the driver and the power from the table."""
    known = model_of(name)
    return GpuModel(name=name, memory=memory_mib * 2**20, watts=known.watts if known else None)


def this_machine(ranks: int) -> GpuModel:
    """Return the CPU of this machine as a device: its ranks share the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return GpuModel(name="this machine", memory=memory / ranks, watts=None, shared_by=ranks)
