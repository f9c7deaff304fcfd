"""Energy is exact or unknown: counters before power, no power over gaps, nothing of what is unknown for a part."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.report.gpu.energy import joules_at, joules_within, steps_of
from kmatrix.report.gpu.results import DeviceFacts
from kmatrix.report.gpu.samples import MEASURED, Part, Samples, joined

NAN = math.nan


def samples(times, power=None, energy=None, *, first=0):
    """Return a recording of one device, or of several with a list of values each. times: s. first: index of a GPU."""
    wall = 1e9 + np.array(times, dtype=float)
    known = {"power": power, "energy_j": energy}
    columns = {name: np.array(values, dtype=float).reshape(len(wall), -1) for name, values in known.items() if values}
    count = max(values.shape[1] for values in columns.values())
    unknown = np.full((len(wall), count), NAN)
    raw = {name: list(columns.get(name, unknown).T) for name in MEASURED}
    return Samples(
        devices=tuple(DeviceFacts(gpu_index=first + place, gpu_name="A") for place in range(count)),
        wall=wall,
        parts=(Part(rows=slice(0, len(wall)), places=range(count), raw=raw),),
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
    edges = [0.0, *sorted(cuts), 9.0]
    spans = list(pairwise(edges))
    assert sum(joules_within(one, steps_of(one), [span]) for span in spans) == pytest.approx(675)
    assert joules_within(one, steps_of(one), spans[::2]) + joules_within(one, steps_of(one), spans[1::2]) == (
        pytest.approx(675)
    )


def test_a_span_with_an_unknown_part_is_unknown_and_the_others_are_not():
    one = samples(range(10), [100, 100, 100, NAN, NAN, NAN, 100, 100, 100, 100])
    parts = [joules_within(one, steps_of(one), [span]) for span in ((-5.0, 2.0), (2.5, 4.0), (7.0, 99.0))]
    assert parts == pytest.approx([200, NAN, 200], nan_ok=True)


def at(recordings, times):
    return joules_at(joined(recordings), times).tolist()


def test_the_energy_of_a_run_goes_on_over_its_attempts_and_is_unknown_between_them():
    first, second = samples(range(5), [100] * 5), samples(range(100, 105), [50] * 5)
    found = at([first, second], [1e9, 1e9 + 2.5, 1e9 + 4, 1e9 + 50, 1e9 + 100, 1e9 + 104])
    assert found == pytest.approx([0, 250, 400, NAN, 400, 600], nan_ok=True)


def test_after_an_unknown_amount_the_energy_of_a_run_is_unknown():
    broken = samples(range(10), [100, 100, 100, NAN, NAN, NAN, 100, 100, 100, 100])
    assert at([broken], [1e9 + 2, 1e9 + 8]) == pytest.approx([200, NAN], nan_ok=True)


def test_no_time_of_a_clock_that_was_set_back_is_looked_up():
    back = samples([0, 1, -50, -49], [100] * 4)
    assert at([back], [1e9 + 1]) == pytest.approx([NAN], nan_ok=True)


def test_a_recording_has_no_energy_of_devices_that_are_not_in_it_and_an_unknown_device_makes_the_sum_unknown():
    first, second = samples(range(5), [[100, 50]] * 5), samples(range(100, 105), [100] * 5, first=7)
    assert steps_of(joined([first, second])).sum(axis=0).tolist() == [400, 400, 200]
    unknown = samples(range(5), [[100, NAN]] * 5)
    assert steps_of(joined([unknown, second])).sum(axis=0).tolist() == pytest.approx([400, 400, NAN], nan_ok=True)
