"""The reaction to a bad step, decided from its numbers alone."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import train_fields
from gpt2.stopping import FaultPolicy, NotFiniteError, Policy, not_finite
from kmatrix.records.train_config import TrainConfig


def guard_of(tmp_path, attempt=1, **overrides):
    return FaultPolicy(TrainConfig.from_json(train_fields(tmp_path, "", **overrides)), attempt)


def guard_with_history(tmp_path, policy="record", **overrides):
    """Return a guard that has seen 20 losses of about 3 +- 0.1."""
    guard = guard_of(tmp_path, spike_zscore=6.0, spike_window=20, spike_policy=policy, **overrides)
    draw = random.Random(1)
    for step in range(20):
        assert guard.check(step, draw.gauss(3.0, 0.1), 1.0) is None
    return guard


@pytest.mark.parametrize(
    ("loss", "norm", "text"),
    [
        (3.0, 1.0, ""),
        (math.nan, 1.0, "loss is nan at step 7"),
        (math.inf, math.nan, "loss is inf at step 7"),
        (3.0, math.inf, "gradient norm is inf at step 7"),
    ],
)
def test_a_value_that_is_not_finite_is_reported_with_its_step(loss, norm, text):
    assert not_finite(7, loss, norm) == text


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_the_nan_policy_of_the_run_applies(tmp_path, policy):
    guard = guard_of(tmp_path, nan_policy=policy, bad_steps_limit=3)
    fault = guard.check(5, math.nan, 1.0)
    assert fault
    assert (fault.step, fault.kind, fault.policy) == (5, "nan", Policy(policy))
    assert guard.checks_before_update == (policy == "skip")


def test_a_spike_is_a_loss_far_above_the_previous_ones(tmp_path):
    guard = guard_with_history(tmp_path)
    fault = guard.check(20, 5.0, 1.0)
    assert fault
    assert (fault.kind, fault.policy) == ("spike", Policy.RECORD)
    assert "standard deviations above" in fault.text
    assert guard.check(21, 1.0, 1.0) is None  # a loss far below the others is harmless


def test_no_spike_is_detected_before_the_window_is_full(tmp_path):
    guard = guard_of(tmp_path, spike_zscore=6.0, spike_window=10, spike_policy="record")
    assert [guard.check(step, loss, 1.0) for step, loss in enumerate([3.0] * 9 + [99.0])] == [None] * 10


def test_constant_losses_cause_no_spike(tmp_path):
    guard = guard_of(tmp_path, spike_zscore=6.0, spike_window=10, spike_policy="record")
    assert not any(guard.check(step, 3.0, 1.0) for step in range(30))


def test_a_skipped_spike_is_not_added_to_the_window(tmp_path):
    guard = guard_with_history(tmp_path, "skip", bad_steps_limit=5)
    assert [guard.check(step, 5.0, 1.0) is not None for step in (20, 21)] == [True, True]


def test_too_many_consecutive_skipped_steps_end_the_run(tmp_path):
    guard = guard_of(tmp_path, nan_policy="skip", bad_steps_limit=2)
    for step in range(2):
        guard.check(step, math.nan, 1.0)
    guard.check(2, 3.0, 1.0)
    for step in range(3, 5):
        guard.check(step, math.nan, 1.0)
    with pytest.raises(NotFiniteError, match="loss is nan at step 5: more than 2 bad steps in a row"):
        guard.check(5, math.nan, 1.0)


def test_a_rollback_skips_the_data_up_to_the_bad_step(tmp_path):
    guard = guard_of(tmp_path, nan_policy="rollback", bad_steps_limit=2)
    first = guard.check(17, math.nan, 1.0)
    assert first
    guard.rolled_back(first, 10)
    assert guard.data_ahead == 8  # step 10 reads what step 18 would have read
    second = guard.check(12, math.nan, 1.0)
    assert second
    guard.rolled_back(second, 10)
    assert guard.data_ahead == 11  # step 10 reads the data after that of step 12
    third = guard.check(11, math.nan, 1.0)
    assert third
    with pytest.raises(NotFiniteError, match="loss is nan at step 11, after 2 rollbacks"):
        guard.rolled_back(third, 10)


@given(st.lists(st.floats(0.1, 10) | st.just(math.nan), min_size=12, max_size=40), st.integers(0, 11))
def test_a_restored_guard_decides_like_one_that_never_stopped(losses, cut):
    def new_guard(attempt):
        policies = {"nan_policy": "skip", "spike_policy": "skip", "bad_steps_limit": 99}
        return guard_of("", attempt, spike_zscore=2.0, spike_window=10, **policies)

    uninterrupted, before, after = new_guard(1), new_guard(1), new_guard(2)
    decisions = [uninterrupted.check(step, loss, 1.0) for step, loss in enumerate(losses)]
    first = [before.check(step, loss, 1.0) for step, loss in enumerate(losses[:cut])]
    after.load_state_dict(before.state_dict())
    remaining = [after.check(step, loss, 1.0) for step, loss in enumerate(losses[cut:], start=cut)]
    assert first + remaining == decisions


def test_earlier_rollbacks_are_remembered(tmp_path):
    guard = guard_of(tmp_path, nan_policy="rollback", bad_steps_limit=2)
    saved = guard.state_dict()
    fault = guard.check(3, math.nan, 1.0)
    assert fault
    guard.load_state_dict(saved)
    guard.rolled_back(fault, 2)
    guard.load_state_dict(saved)
    assert guard.data_ahead == 2
