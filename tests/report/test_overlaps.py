"""Runs that trained at the same time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.records.runs import Status
from kmatrix.records.states import AttemptRecord
from kmatrix.report.numbers import RunNumbers
from kmatrix.report.summary import MIN_OVERLAP, overlap_lines, overlaps

DAY = 86_400
spans = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=3)


def run_of(name, pairs):
    attempts = tuple(AttemptRecord(started=float(begin), ended=float(begin + length)) for begin, length in pairs)
    known = {"run_id": name, "axes": {}, "reason": "", "optimizer": "adamw", "model": "tiny", "device": "gpu"}
    return RunNumbers(name=name, status=Status.FINISHED, attempts=attempts, **known)


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


def on_hosts(name, **hosts):
    return replace(run_of(name, [(0, 100)]), on_hosts={host: [(float(a), float(b))] for host, (a, b) in hosts.items()})


def test_only_runs_with_a_host_in_common_share_it():
    runs = [on_hosts("a", n1=(0, 100)), on_hosts("b", n2=(0, 100)), on_hosts("c", n2=(60, 160), n3=(0, 100))]
    assert [(one.run, one.others, one.share) for one in overlaps(runs)] == [("b", ("c",), 0.4), ("c", ("b",), 0.4)]


def test_times_of_two_hosts_are_never_compared():
    # The clock of n2 is a day fast: both runs used n2 one after the other.
    runs = [on_hosts("a", n1=(0, 100), n2=(DAY, DAY + 100)), on_hosts("b", n2=(DAY + 100, DAY + 200))]
    assert overlaps(runs) == []
    assert overlaps([runs[0], on_hosts("c", n2=(0, 100))]) == []


def test_the_remedy_is_that_of_the_cluster():
    runs = [on_hosts("a", n1=(0, 100)), on_hosts("b", n1=(0, 100))]
    assert "SLURM_EXCLUSIVE=y" in overlap_lines(runs, "slurm")[-1]
    assert overlap_lines(runs, "kubernetes")[-1].endswith("depend on each other")
    assert overlap_lines([run_of("a", [(0, 10)]), run_of("b", [(0, 10)])])[-1].endswith(
        "PARALLEL_JOBS=1 separates them"
    )
