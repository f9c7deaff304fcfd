"""What a run may cost: its time and cost budgets in seconds."""

from __future__ import annotations

from kmatrix.records.train_config import TrainConfig


def dollars_per_hour(train: TrainConfig) -> float | None:
    """Return the price of what an attempt holds: of its GPUs, or on the CPU of the machine; None without a price."""
    if train.device == "cpu":
        return train.machine_hour_price or None
    return (train.gpu_hour_price or 0.0) * (train.num_gpus or 1) or None


def cost_limit_s(train: TrainConfig) -> float | None:
    """Return the time (s) that the cost budget of a run pays for, None without a budget or a price."""
    price = dollars_per_hour(train)
    return None if train.max_cost is None or price is None else 3600 * train.max_cost / price


def budget_s(train: TrainConfig) -> float | None:
    """Return the time (s) that the time and cost budgets of a run allow, None without a budget."""
    limits = (train.max_time, cost_limit_s(train))
    return min((limit for limit in limits if limit is not None), default=None)
