"""Runs that trained at the same time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.records.attempts import Attempt, End
from kmatrix.records.runs import Status
from kmatrix.report.numbers import RunNumbers
from kmatrix.report.summary import MIN_OVERLAP, overlap_lines, overlaps

spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=3)


def run_of(name, pairs, host="n1"):
    made = (
        Attempt(host=host, started=float(begin), end=End(kind="finished", seconds=float(length)))
        for begin, length in pairs
    )
    known = {"run_id": name, "axes": {}, "reason": "", "optimizer": "adamw", "model": "tiny", "device": "gpu"}
    return RunNumbers(name=name, status=Status.FINISHED, attempts=tuple(made), **known)


def seconds_of(pairs):
    """Return the whole seconds that these spans contain."""
    return {second for begin, length in pairs for second in range(begin, begin + length)}


@given(st.lists(spans, max_size=6))
def test_overlaps_are_those_of_every_pair(matrix):
    runs = [run_of(f"run{place}", pairs) for place, pairs in enumerate(matrix)]
    expected = []
    for place, own in enumerate(matrix):
        time = sum(length for _, length in own)
        common = {other: seconds_of(own) & seconds_of(pairs) for other, pairs in enumerate(matrix) if other != place}
        others = [other for other, seconds in common.items() if seconds and len(seconds) >= MIN_OVERLAP * time]
        if others:
            share = len(set.union(*(common[other] for other in others))) / time
            expected.append((f"run{place}", tuple(f"run{other}" for other in others), pytest.approx(share)))
    assert [(one.run, one.others, one.share) for one in overlaps(runs)] == expected


def test_only_runs_on_one_host_share_it_because_its_clock_is_theirs():
    runs = [run_of("a", [(0, 100)]), run_of("b", [(0, 100)], "n2"), run_of("c", [(60, 100)], "n2")]
    assert [(one.run, one.others, one.share) for one in overlaps(runs)] == [("b", ("c",), 0.4), ("c", ("b",), 0.4)]
    assert overlap_lines(runs)[-1].endswith("PARALLEL_JOBS=1 separates them")
