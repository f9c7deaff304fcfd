"""The pending runs of a matrix are cut into jobs: equal shapes and times are one array, the widest first."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kmatrix.engines.base import JobRules
from kmatrix.records.paths import RunDir
from kmatrix.runner.shares import parallel_notes, rounded_up, submissions_of, time_notes
from kmatrix.status.state import RunPlan

RULES = JobRules(
    most_tasks=1000,
    cpus_per_gpu=4,
    cpus_per_node=16,
    gpus_per_node=4,
    has_times=True,
    around_s=720,
    most_seconds=172800,
)


def plan(name, ranks=1, nodes=1, *, cuda=True, threads=1, seconds=None):
    return RunPlan(
        name=name,
        run_id=name,
        dir=RunDir(Path("/m") / name),
        ranks=ranks,
        nodes=nodes,
        cuda=cuda,
        cpu_threads=threads,
        expected_s=seconds,
    )


def rules(**changes):
    return JobRules(**{name: getattr(RULES, name) for name in RULES.__slots__} | changes)


def names(submissions):
    return [[share.runs for share in one.shares] for one in submissions]


def test_equal_runs_are_one_array_and_wider_ones_come_first():
    found = submissions_of([plan("a"), plan("b"), plan("wide", 8, 2), plan("c")], RULES)

    assert names(found) == [[("wide",)], [("a",), ("b",), ("c",)]]
    assert (found[0].shape.nodes, found[0].shape.gpus_per_node, found[0].shape.cpus_per_node) == (2, 4, 16)
    assert [share.task for share in found[1].shares] == [0, 1, 2]


def test_an_array_has_as_many_tasks_as_the_cluster_allows():
    found = submissions_of([plan(str(number)) for number in range(2500)], RULES)

    assert [len(one.shares) for one in found] == [1000, 1000, 500]
    assert [share.task for share in found[2].shares][:2] == [0, 1]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.none() | st.floats(1, 1e6)), max_size=60),
    st.booleans(),
    st.integers(1, 9),
)
def test_every_run_is_in_exactly_one_share_that_has_room_for_it(runs, pack, most):
    plans = [plan(f"r{i}", ranks, cuda=cuda, seconds=s) for i, (ranks, cuda, s) in enumerate(runs)]
    by_name = {one.name: one for one in plans}

    found = submissions_of(plans, rules(pack=pack, most_tasks=most, whole_nodes=pack))

    listed = [name for one in found for share in one.shares for name in share.runs]
    assert sorted(listed) == sorted(by_name)
    for one in found:
        assert len(one.shares) <= most
        for share in one.shares:
            assert sum(by_name[name].ranks for name in share.runs if by_name[name].cuda) <= one.shape.gpus_per_node
            assert sum(by_name[name].ranks for name in share.runs if not by_name[name].cuda) <= one.shape.cpus_per_node
            assert one.shape.seconds is not None


def test_a_time_limit_is_the_estimate_with_a_margin_and_time_to_start_and_save():
    (found,) = submissions_of([plan("a", seconds=3600)], RULES)

    assert found.shape.seconds == rounded_up(3600 * 1.5 + 720) == 7200


def test_a_time_limit_is_never_above_that_of_the_partition():
    (found,) = submissions_of([plan("a", seconds=1e7)], RULES)

    assert found.shape.seconds == 172800


def test_a_run_without_an_estimate_gets_the_limit_of_the_partition_and_a_note():
    (found,) = submissions_of([plan("a")], RULES)

    assert found.shape.seconds == 172800
    assert time_notes([plan("a")], RULES) == [
        "1 run with the limit of the partition, 2d00h, because no run like it was measured: "
        "pass SLURM_TIME=<time> to start earlier"
    ]


def test_a_configured_time_is_used_as_it_is():
    (found,) = submissions_of([plan("a", seconds=10), plan("b")], rules(seconds=1234))

    assert found.shape.seconds == 1234
    assert time_notes([plan("a", seconds=10), plan("b")], rules(seconds=1234)) == []


def test_a_run_that_is_longer_than_its_jobs_is_noted():
    (note,) = time_notes([plan("a", seconds=9000)], rules(seconds=1800))

    assert note == "1 run of about 2h30m in jobs of 30m00s: a run saves at the time limit, and its job starts again"


def test_similar_times_share_an_array():
    found = submissions_of([plan(f"r{s}", seconds=s) for s in range(3000, 3100, 10)], RULES)

    assert len(found) == 1


def test_a_run_on_the_cpu_has_a_cpu_for_each_thread_of_its_ranks():
    (found,) = submissions_of([plan("a", 4, 2, cuda=False, threads=3)], RULES)

    assert (found.shape.gpus_per_node, found.shape.ranks_per_node, found.shape.cpus_per_node) == (0, 2, 6)


def test_whole_nodes_have_all_their_cpus():
    (found,) = submissions_of([plan("a")], rules(whole_nodes=True))

    assert found.shape.cpus_per_node == 16
    (found,) = submissions_of([plan("a", cuda=False, threads=32)], rules(whole_nodes=True))
    assert found.shape.cpus_per_node == 32  # more than a node has: it is refused, not cut


def test_a_limit_of_parallel_jobs_is_that_of_each_array():
    found = submissions_of([plan("a", 2), plan("b", 2), plan("c", 2), plan("d", 4)], rules())

    (note,) = parallel_notes(found, 2)

    assert note.startswith("PARALLEL_JOBS=2 limits each of 2 submissions by itself: up to 3 jobs may run ")
    assert not parallel_notes(found, 0)
    assert not parallel_notes(found[:1], 2)


def test_small_runs_are_packed_into_whole_nodes_with_runs_of_similar_length():
    plans = [
        plan("a", 2, seconds=100),
        plan("b", 2, seconds=9000),
        plan("c", 2, seconds=8900),
        plan("d", 2, seconds=90),
    ]

    found = submissions_of([*plans, plan("full", 4), plan("two", 8, 2)], rules(pack=True, whole_nodes=True))

    packed = [one for one in found if len(one.shares[0].runs) > 1]
    assert sorted(share.runs for one in packed for share in one.shares) == [("a", "d"), ("b", "c")]
    assert {(one.shape.gpus_per_node, one.shape.cpus_per_node) for one in packed} == {(4, 16)}


def test_runs_of_different_sizes_share_a_node():
    plans = [plan("four", 4), plan("three", 3), plan("two", 2), plan("one", 1), plan("1", 1), plan("another", 1)]

    found = submissions_of(plans, rules(pack=True, whole_nodes=True))

    assert names(found) == [[("four",), ("three", "one"), ("two", "1", "another")]]  # one array of whole nodes
    assert (found[0].shape.gpus_per_node, found[0].shape.cpus_per_node) == (4, 16)
