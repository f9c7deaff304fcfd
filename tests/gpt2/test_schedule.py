"""The learning rate schedule, point by point and as properties."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2.schedule import scale


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The fields of TrainConfig that determine the rate."""

    schedule: str = "cosine"
    learning_rate: float = 1.0
    min_lr: float = 0.1
    warmup_steps: int = 0
    max_iters: int = 11
    wsd_decay_fraction: float | None = None


@st.composite
def settings(draw: st.DrawFn) -> Settings:
    peak = draw(st.floats(1e-6, 10))
    return Settings(
        schedule=draw(st.sampled_from(["cosine", "linear", "constant", "wsd"])),
        learning_rate=peak,
        min_lr=peak * draw(st.floats(0, 1)),
        warmup_steps=draw(st.integers(0, 60)),
        max_iters=draw(st.integers(1, 80)),
        wsd_decay_fraction=draw(st.floats(0.001, 1)),
    )


def test_warm_up_rises_linearly_and_is_never_zero():
    config = Settings(warmup_steps=4, max_iters=100)
    assert [scale(config, step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        ("cosine", {0: 1.0, 5: 0.55, 10: 0.1}),
        ("cosine", {2: 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.2))}),
        ("linear", {0: 1.0, 2: 0.82, 5: 0.55, 10: 0.1}),
        ("constant", {0: 1.0, 5: 1.0, 10: 1.0}),
        ("wsd", {0: 1.0, 6: 1.0, 8: 0.55, 9: 0.325, 10: 0.1}),
    ],
)
def test_the_rate_matches_values_calculated_by_hand(schedule, points):
    config = Settings(schedule=schedule, wsd_decay_fraction=0.36)  # 0.36 x 11 steps: the last 4
    assert {step: scale(config, step) for step in points} == pytest.approx(points)


def test_the_cosine_schedule_matches_nanogpt():
    config = Settings(learning_rate=6e-4, min_lr=6e-5, warmup_steps=20, max_iters=201)

    def nanogpt(step: int) -> float:  # nanoGPT's get_lr with lr_decay_iters at the last step
        if step < 20:
            return 6e-4 * (step + 1) / 21
        ratio = (step - 20) / (200 - 20)
        return 6e-5 + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (6e-4 - 6e-5)

    rates = [scale(config, step) * 6e-4 for step in range(201)]
    assert rates == pytest.approx([nanogpt(step) for step in range(201)], rel=1e-9)


@given(settings())
def test_the_last_step_has_the_minimum_rate(config):
    if config.schedule != "constant" and config.warmup_steps < config.max_iters:
        assert scale(config, config.max_iters - 1) == pytest.approx(config.min_lr / config.learning_rate)


@given(settings(), st.integers(0, 200))
def test_after_warm_up_the_rate_is_between_its_minimum_and_its_peak(config, beyond):
    minimum = config.min_lr / config.learning_rate
    assert minimum - 1e-12 <= scale(config, config.warmup_steps + beyond) <= 1.0 + 1e-12


@given(settings())
def test_the_rate_rises_until_the_end_of_warm_up_and_never_again(config):
    rates = [scale(config, step) for step in range(max(config.max_iters, config.warmup_steps) + 5)]
    rise, rest = rates[: config.warmup_steps], rates[config.warmup_steps :]
    assert all(a < b for a, b in pairwise(rise))
    assert all(a >= b - 1e-12 for a, b in pairwise(rest))


def test_a_wsd_that_never_decays_is_constant():
    config = Settings(schedule="wsd", wsd_decay_fraction=0.0)
    assert {scale(config, step) for step in range(11)} == {1.0}
