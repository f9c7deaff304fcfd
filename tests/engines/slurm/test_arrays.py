"""Slurm's short forms of tasks and hosts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.engines.slurm.arrays import hosts_of, short_jobs, tasks_of


@given(st.sets(st.integers(0, 5000), min_size=1, max_size=200))
def test_tasks_that_are_shortened_are_read_again(tasks):
    (short,) = short_jobs([f"12_{task}" for task in tasks])

    assert list(tasks_of(short)) == sorted(tasks)


@pytest.mark.parametrize("text", ["", "x", "12_", "12_[", "12_[a-b]", "..."])
def test_a_text_that_is_not_an_id_has_no_tasks(text):
    assert list(tasks_of(text)) == []


def test_steps_are_read():
    assert list(tasks_of("12_[0-8:4]")) == [0, 4, 8]


@pytest.mark.parametrize("text", ["n[", "n]1", "[1-", "n[a-b]", "n[2-1]"])
def test_a_damaged_list_of_hosts_raises_nothing(text):
    hosts_of(text)
