"""What depends on the step alone: the learning rate, point by point and as properties, and the seed of dropout."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2.schedule import scale, step_seed

SETTINGS = {"schedule": "cosine", "learning_rate": 1.0, "min_lr": 0.1, "warmup_steps": 0, "max_iters": 11}
SETTINGS |= {"wsd_decay_fraction": 0.36}  # 0.36 x 11 steps: the last 4


def settings(**fields):
    """Return the fields of TrainConfig that determine the rate."""
    return SimpleNamespace(**SETTINGS | fields)


@pytest.mark.parametrize(
    ("fields", "points"),
    [
        ({}, {0: 1.0, 2: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.2)), 5: 0.55, 10: 0.1}),
        ({"schedule": "linear"}, {0: 1.0, 2: 0.82, 5: 0.55, 10: 0.1}),
        ({"schedule": "constant"}, {0: 1.0, 5: 1.0, 10: 1.0}),
        ({"schedule": "wsd"}, {0: 1.0, 6: 1.0, 8: 0.55, 9: 0.325, 10: 0.1}),
        ({"schedule": "wsd", "wsd_decay_fraction": 0.0}, dict.fromkeys(range(11), 1.0)),
        ({"warmup_steps": 4, "max_iters": 100}, {0: 0.2, 1: 0.4, 2: 0.6, 3: 0.8, 4: 1.0}),
    ],
)
def test_the_rate_matches_values_calculated_by_hand(fields, points):
    assert {step: scale(settings(**fields), step) for step in points} == pytest.approx(points)


def test_the_cosine_schedule_matches_nanogpt():
    def nanogpt(step: int) -> float:  # nanoGPT's get_lr with lr_decay_iters at the last step
        if step < 20:
            return 6e-4 * (step + 1) / 21
        ratio = (step - 20) / (200 - 20)
        return 6e-5 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (6e-4 - 6e-5)

    config = settings(learning_rate=6e-4, min_lr=6e-5, warmup_steps=20, max_iters=201)
    rates = [scale(config, step) * 6e-4 for step in range(201)]
    assert rates == pytest.approx([nanogpt(step) for step in range(201)], rel=1e-9)


@given(
    st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    st.floats(0, 1),
    st.integers(0, 60),
    st.integers(1, 80),
    st.floats(0.001, 1),
)
def test_the_rate_rises_to_its_peak_and_then_falls_to_its_minimum(schedule, least, warm_up, steps, decay):
    fields = {"min_lr": least, "warmup_steps": warm_up, "max_iters": steps, "wsd_decay_fraction": decay}
    config = settings(schedule=schedule, **fields)
    rates = [scale(config, step) for step in range(max(steps, warm_up) + 5)]
    assert all(0 < a < b <= 1 for a, b in pairwise(rates[:warm_up]))
    assert all(a >= b - 1e-12 for a, b in pairwise(rates[warm_up:]))
    assert all(least - 1e-12 <= rate <= 1.0 + 1e-12 for rate in rates[warm_up:])
    if schedule != "constant" and warm_up < steps:
        assert rates[steps - 1] == pytest.approx(least)


def test_dropout_differs_between_steps_and_ranks_and_is_otherwise_reproducible():
    seeds = {step_seed(seed, step, rank) for seed in (1, 2) for step in (0, 1) for rank in (0, 1)}
    assert len(seeds) == 8
    assert step_seed(1, 2, 3) == step_seed(1, 2, 3)
