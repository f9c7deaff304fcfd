"""The numbers of a run's devices -> the object "gpu" of results.json."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kmatrix.report.gpu_values import DeviceNumbers, GpuNumbers, RankNumbers, Spread

QUANTITIES = ("memory_used", "utilization", "power", "temperature", "sm_clock")


def gpu_object(gpu: GpuNumbers) -> dict[str, Any]:
    """Return what results.json says of a run's devices: the names of gpu_summary.json, unknown is None."""
    return {
        "evidence": gpu.evidence or None,
        "device_type": gpu.device_type or None,
        "simulated": gpu.simulated,
        "final": gpu.final,
        "samples": gpu.samples,
        "seconds": gpu.seconds,
        "hz_reached": gpu.hz,
        "energy_source": gpu.energy_source,
        "gpus": [_device(device) for device in gpu.devices],
        "totals": {
            "memory_used_mean": gpu.total_mean,
            "memory_used_max": gpu.total_high,
            "mean_power": gpu.mean_power,
            "joules": gpu.joules,
            "joules_per_token": gpu.joules_per_token,
            "tokens_per_joule": gpu.tokens_per_joule,
            "mfu": gpu.mfu,
            **asdict(gpu.cost),
        },
        "factors": asdict(gpu.factors),
        "phases": _phases(gpu),
        "balance": {
            name: asdict(balance) if (balance := gpu.balance(quantity)) else None
            for name, quantity in (("memory", "memory_used"), ("utilization", "utilization"), ("power", "power"))
        },
        "ranks": _ranks(gpu.ranks) if gpu.ranks else None,
        "notes": list(gpu.notes),
    }


def _phases(gpu: GpuNumbers) -> dict[str, Any]:
    """Return seconds and joules of each kind of phase."""
    kinds = dict.fromkeys(phase.name for phase in gpu.phases)
    return {kind: {"seconds": gpu.phase_seconds(kind), "joules": gpu.phase_joules(kind)} for kind in kinds}


def _device(device: DeviceNumbers) -> dict[str, Any]:
    return {
        "gpu_index": device.gpu_index,
        "gpu_name": device.gpu_name,
        "uuid": device.uuid or None,
        "rank": device.rank,
        "samples": device.samples,
        "lost_at": device.lost_at,
        "memory_total": device.memory_total,
        **{name: _spread(getattr(device, name)) for name in QUANTITIES},
        "joules": device.joules,
        "throttled_s": dict(device.throttled_s),
        "foreign": list(device.foreign),
        "ecc_uncorrected": device.ecc_uncorrected,
        **device.extras,
    }


def _spread(spread: Spread | None) -> dict[str, float | None] | None:
    if spread is None:
        return None
    return {"mean": spread.mean, "deviation": spread.deviation, "min": spread.low, "max": spread.high}


def _ranks(ranks: RankNumbers) -> dict[str, Any]:
    return {
        "compute_ms": {str(rank): value for rank, value in ranks.compute_ms},
        "step_ms": ranks.step_ms,
        "steps": ranks.steps,
        "load_balance_efficiency": ranks.efficiency,
        "straggler_time_share": ranks.waiting,
        "slowest_rank": ranks.slowest,
        "slowest_share": ranks.slowest_share,
    }
