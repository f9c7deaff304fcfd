"""Throttled time is estimated from polls without a bias."""

import random

import pytest

from kmatrix.gpu.throttled import ThrottledTime


def estimated(episodes, begin, seconds, every=1.0):
    """Return the estimate from polls of one reason that is active within these episodes."""
    throttled = ThrottledTime()
    for number in range(int(seconds / every) + 1):
        now = begin + number * every
        active = any(start <= now < end for start, end in episodes)
        throttled.add({"power cap"} if active else (), every if number else 0.0)
    return throttled.seconds.get("power cap", 0.0)


@pytest.mark.parametrize(("on", "off"), [(1.0, 1.0), (0.3, 2.0), (20.0, 10.0), (1.7, 0.6)])
def test_throttled_time_is_right_in_the_mean_of_all_phases_of_the_polls(on, off):
    episodes = [(number * (on + off), number * (on + off) + on) for number in range(200)]
    chance = random.Random(5)
    found = [estimated(episodes, chance.uniform(0, on + off), 60.0) for _ in range(200)]
    assert sum(found) / len(found) == pytest.approx(60 * on / (on + off), rel=0.03)


def test_throttled_time_continues_and_its_reasons_are_independent():
    throttled = ThrottledTime({"power cap": 5.0})
    for reasons in ({"power cap"}, {"power cap", "power brake"}, {"power brake"}, ()):
        throttled.add(reasons, 2.0)
    assert throttled.seconds == {"power cap": 5.0 + 1.0 + 2.0 + 1.0, "power brake": 1.0 + 2.0 + 1.0}
