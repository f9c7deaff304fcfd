"""Energy is exact or unknown: counters before power, no power over gaps, nothing of what is unknown for a part."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.report.gpu.energy import between, joules_at, steps_of
from kmatrix.report.gpu.recordings import Recording
from kmatrix.report.gpu.samples import DeviceFacts, Samples

NAN = math.nan


def samples(times, power=None, energy=None, *, wall=1e9):
    """Return a recording of one device, or of several with a list of values each. times: s."""
    time = np.array(times, dtype=float)
    known = power if energy is None else energy
    count = np.atleast_1d(known[0]).size
    columns = {
        name: np.array([np.atleast_1d(value) for value in values or [[NAN] * count] * len(known)], dtype=float)
        for name, values in (("power", power), ("energy_j", energy))
    }
    return Samples(
        devices=tuple(DeviceFacts(index=place, name="A") for place in range(count)),
        time=time - time[0],
        wall=time + wall,
        monotonic=None,
        values=columns,
        device_type="nvidia",
        simulated=False,
        energy_source=None,
    )


def joules(*args, **kwargs):
    return float(steps_of(samples(*args, **kwargs)).sum())


@pytest.mark.parametrize(
    ("times", "power", "energy", "expected"),
    [
        (range(5), [100, 200, 200, 100, 100], None, 150 + 200 + 150 + 100),  # trapezoids
        (range(5), [1] * 5, [1000, 1100, 1200, 1300, 1400], 400),  # the counter comes first
        (range(4), None, [1000, 1100, 30, 80], 150),  # one that fell was reset
        (range(5), [1] * 5, [NAN, 1100, NAN, NAN, 1400], 300),  # it goes on after values that are missing
        ([0, 1, 2, 3600, 3601], [100] * 5, None, 300),  # no power over a gap
        ([0, 1, 2, 3600, 3601], None, [0, 100, 200, 5000, 5100], 5100),  # a counter goes on over a gap
        ([0, 1, 2, 3600, 3601], None, [0, 100, 200, 50, 150], NAN),  # nobody knows what a reset in a gap lost
        (range(6), [100, 100, NAN, 100, 100, 100], None, 500),  # a failed query: 2 s between two values
        (range(6), [100, 100, NAN, NAN, NAN, 100], None, NAN),
        (range(6), [100, 100, 100, NAN, NAN, NAN], None, NAN),  # a lost GPU
        (range(6), [1] * 6, [0, 100, 200, NAN, NAN, NAN], NAN),
        (range(0, 75, 15), [100] * 5, None, 6000),  # at 15 s per sample, 15 s are no gap
        (range(0, 400, 100), [100] * 4, None, 0),  # but never more than 60 s
        (range(3), [NAN] * 3, None, NAN),
    ],
)
def test_energy_by_the_one_rule(times, power, energy, expected):
    assert joules(list(times), power, energy) == pytest.approx(expected, nan_ok=True)


def test_the_energy_of_some_devices_is_not_that_of_all():
    assert math.isnan(joules(range(5), [[100, NAN]] * 5))
    assert joules(range(5), [[100, 50]] * 5) == 600


@given(st.lists(st.floats(0, 9), min_size=1, max_size=6))
def test_spans_that_follow_each_other_add_up(cuts):
    one = samples(range(10), [100, 50, 100, 50, 100, 50, 100, 50, 100, 50])
    edges = np.array([0.0, *sorted(cuts), 9.0])
    parts = between(one.time, steps_of(one), edges[:-1], edges[1:])
    assert parts.sum() == pytest.approx(675)


def test_a_span_with_an_unknown_part_is_unknown_and_the_others_are_not():
    one = samples(range(10), [100, 100, 100, NAN, NAN, NAN, 100, 100, 100, 100])
    parts = between(one.time, steps_of(one), np.array([0.0, 2.5, 7.0]), np.array([2.0, 4.0, 99.0]))
    assert parts[:, 0].tolist() == pytest.approx([200, NAN, 200], nan_ok=True)


def at(recordings, times):
    recorded = [Recording(evidence="", samples=one, node=node) for node, one in recordings]
    return joules_at(recorded, times).tolist()


def test_the_energy_of_a_run_goes_on_over_its_attempts_and_is_unknown_between_them():
    first, second = samples(range(5), [100] * 5), samples(range(100, 105), [50] * 5)
    found = at([(0, first), (0, second)], [1e9, 1e9 + 2.5, 1e9 + 4, 1e9 + 50, 1e9 + 100, 1e9 + 104])
    assert found == pytest.approx([0, 250, 400, NAN, 400, 600], nan_ok=True)


def test_after_an_unknown_amount_the_energy_of_a_run_is_unknown():
    broken = samples(range(10), [100, 100, 100, NAN, NAN, NAN, 100, 100, 100, 100])
    assert at([(0, broken)], [1e9 + 2, 1e9 + 8]) == pytest.approx([200, NAN], nan_ok=True)


def test_no_time_of_one_clock_is_looked_up_in_another():
    one = samples(range(5), [100] * 5)
    assert at([(0, one), (1, one)], [1e9 + 2]) == pytest.approx([NAN], nan_ok=True)
    back = samples([0, 1, -50, -49], [100] * 4)
    assert at([(0, back)], [1e9 + 1]) == pytest.approx([NAN], nan_ok=True)
