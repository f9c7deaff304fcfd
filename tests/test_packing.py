"""Pack runs on one machine: start order, assigned units, and the bound that listed matrices keep."""

from __future__ import annotations

import itertools
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.packing import Limits, PackedJob, ends, place, startable

UNITS = 4
WIDTHS = st.sampled_from([1, 2, 3, 4])
SECONDS = st.integers(1, 1000).map(float)


def jobs(widths_and_seconds):
    return [PackedJob(name=f"j{i}", width=w, seconds=s) for i, (w, s) in enumerate(widths_and_seconds)]


QUEUES = st.lists(st.tuples(WIDTHS, SECONDS), min_size=1, max_size=14).map(jobs)
LIMITS = st.builds(Limits, jobs=st.integers(0, 5), exclusive=st.booleans())


def start_time(queue, limits=None, running=(), units=UNITS):
    return startable(queue, running, units, limits or Limits())


# Start order


def test_the_longest_job_starts_first():
    assert start_time(jobs([(2, 10), (2, 30), (2, 20)])) == ["j1", "j2"]


def test_a_short_job_is_backfilled_before_one_that_does_not_fit_yet():
    running = [PackedJob(name="r", width=3, seconds=50)]
    assert start_time(jobs([(4, 100), (1, 50), (1, 51)]), running=running) == ["j1"]


def test_a_job_that_does_not_delay_the_head_is_backfilled_however_long():
    running = [PackedJob(name="r", width=2, seconds=50)]
    assert start_time(jobs([(3, 100), (1, 90)]), running=running) == ["j1"]


def test_without_a_known_start_of_the_head_nothing_is_backfilled():
    running = [PackedJob(name="r", width=2)]
    assert start_time(jobs([(4, 100), (1, 1)]), running=running) == []


def test_jobs_of_unknown_duration_start_widest_first():
    queue = [PackedJob(name="a", width=1), PackedJob(name="b", width=4), PackedJob(name="c", width=2)]
    assert start_time(queue) == ["b"]


def test_one_at_a_time_keeps_the_order_of_the_matrix():
    assert start_time(jobs([(1, 10), (4, 99)]), Limits(jobs=1)) == ["j0"]


def test_exclusive_jobs_fill_the_machine_together_and_wait_for_each_other():
    queue = jobs([(1, 40), (2, 30), (2, 29), (1, 20)])
    assert start_time(queue, Limits(exclusive=True)) == ["j0", "j1", "j3"]
    assert start_time(queue, Limits(exclusive=True), running=[PackedJob(name="r", width=1, seconds=1)]) == []


def test_exclusive_jobs_that_cannot_fill_the_machine_fill_as_much_as_possible():
    assert start_time(jobs([(3, 40), (2, 30)]), Limits(exclusive=True)) == ["j0"]


def test_a_job_that_needs_more_units_than_the_machine_has_is_refused():
    with pytest.raises(ValueError, match="needs more than the 4 units"):
        start_time(jobs([(5, 1)]))


@given(QUEUES, LIMITS)
def test_no_unit_is_used_twice_and_limits_are_respected_at_all_times(queue, limits):
    spans = ends(queue, [], UNITS, limits)
    for time, _ in spans.values():
        running = [job for job in queue if spans[job.name][0] <= time < spans[job.name][1]]
        assert sum(job.width for job in running) <= UNITS
        assert not limits.jobs or len(running) <= limits.jobs


@given(QUEUES, LIMITS)
def test_every_job_runs_once_for_its_duration(queue, limits):
    spans = ends(queue, [], UNITS, limits)
    assert {name: end - begin for name, (begin, end) in spans.items()} == pytest.approx(
        {job.name: job.seconds for job in queue}
    )


@given(QUEUES, st.integers(0, 5))
def test_backfilled_jobs_never_delay_the_head_of_the_queue(queue, jobs):
    limits = Limits(jobs=jobs)
    order = queue if jobs == 1 else sorted(queue, key=lambda job: (-job.seconds, -job.width))
    now = startable(queue, [], UNITS, limits)
    head = next((job for job in order if job.name not in now), None)
    if head is None:
        return
    first = [job for job in order[: order.index(head)] if job.name in now]
    expected = ends([head], first, UNITS, limits)[head.name][0]  # as if no job were backfilled
    assert ends(queue, [], UNITS, limits)[head.name][0] <= expected


@given(QUEUES)
def test_every_schedule_is_between_the_lower_bound_and_one_job_at_a_time(queue):
    last = max(end for _, end in ends(queue, [], UNITS, Limits()).values())
    work = sum(job.width * job.seconds for job in queue) / UNITS
    assert max(work, *(job.seconds for job in queue)) <= last + 1e-6
    assert last <= sum(job.seconds for job in queue) + 1e-6


def naive_ends(queue, running, units, limits):
    """Simulate with the scheduler itself, one decision per end of a job."""
    now, waiting = 0.0, list(queue)
    active = {job.name: (job, job.seconds) for job in running}
    known = {name: (0.0, end) for name, (_, end) in active.items()}
    while waiting or active:
        left = [PackedJob(name=job.name, width=job.width, seconds=end - now) for job, end in active.values()]
        names = startable(waiting, left, units, limits)
        for job in (job for job in waiting if job.name in names):
            known[job.name] = (now, now + job.seconds)
            active[job.name] = (job, known[job.name][1])
        waiting = [job for job in waiting if job.name not in names]
        now = min(end for _, end in active.values())
        active = {name: (job, end) for name, (job, end) in active.items() if end > now}
    return known


@given(QUEUES, LIMITS, st.integers(0, 3))
def test_the_simulated_schedule_is_that_of_the_scheduler(queue, limits, running):
    width = UNITS
    begun = []
    while queue and running and queue[0].width <= width and len(begun) < (limits.jobs or 9):
        begun.append(queue.pop(0))
        width, running = width - begun[-1].width, running - 1
    assert ends(queue, begun, UNITS, limits) == naive_ends(queue, begun, UNITS, limits)


@pytest.mark.parametrize("limits", [Limits(), Limits(jobs=1), Limits(exclusive=True)])
def test_the_work_for_a_schedule_does_not_grow_with_the_square_of_its_jobs(limits, monkeypatch):
    """Count the comparisons of jobs: 16 times as many jobs need about 16 times as many."""
    counts = []
    for number in (125, 2000):
        queue = jobs([(1 + i % 4, 10.0 + i * 7 % 1000) for i in range(number)])
        calls = [0]

        def count(frame, event, argument, calls=calls):
            calls[0] += event == "call"

        sys.setprofile(count)
        try:
            ends(queue, [], 8, limits)
        finally:
            sys.setprofile(None)
        counts.append(calls[0])
    assert counts[1] < 40 * counts[0]


def test_an_unknown_duration_makes_the_end_unknown():
    assert ends([PackedJob(name="a", width=1)], [], 4, Limits()) is None


def test_an_overdue_job_is_expected_to_end_soon():
    running = [PackedJob(name="r", width=4, seconds=0.0)]
    assert ends(jobs([(4, 10)]), running, 4, Limits())["j0"] == (0.0, 10.0)


# Placement


@given(st.integers(1, 4), st.sets(st.sampled_from("abcdefgh")))
def test_the_chosen_units_are_free_and_as_many_as_requested(width, free):
    if len(free) < width:
        return
    found = place(width, sorted(free), "abcdefgh")
    assert len(set(found)) == width
    assert free.issuperset(found)


@pytest.mark.parametrize(
    ("width", "free", "units"),
    [(2, "abcd", "ab"), (2, "bcd", "cd"), (1, "acd", "a"), (2, "bc", "bc"), (4, "abcdefgh", "abcd"), (1, "bcdh", "h")],
)
def test_connected_units_are_chosen_to_reduce_fragmentation(width, free, units):
    machine = "abcdefgh" if "h" in free else "abcd"
    assert "".join(place(width, free, machine)) == units


def levels(*groups):
    """Return distances: 0 within the first groups that contain both units, 1 within the next, and so on."""

    def distance(left, right):
        both = {left, right}
        return next((level for level, names in enumerate(groups) if any(both <= set(name) for name in names)), 9)

    return distance


CROSSED = levels(["ac", "bd", "eg", "fh"], ["abcd", "efgh"])  # bridged pairs that are not adjacent


@pytest.mark.parametrize(
    ("width", "free", "units"),
    [
        (2, "abcdefgh", "ac"),  # a bridge is preferred to the order
        (2, "bcdefgh", "bd"),
        (2, "bcfg", "bc"),  # no bridge is free: one board is preferred to two
        (4, "abcdefgh", "abcd"),
        (4, "bcdefgh", "efgh"),
        (1, "abd", "a"),  # a remaining half of a pair is used before a complete pair
        (3, "abdefgh", "abd"),  # b and d are bridged, a is on their board
    ],
)
def test_bridged_units_are_preferred_to_one_board_and_one_board_to_the_rest(width, free, units):
    assert "".join(place(width, free, "abcdefgh", CROSSED)) == units


def test_sixteen_units_are_placed_quickly_and_correctly():
    units = "abcdefghijklmnop"
    halves = levels([], ["acegikmo", "bdfhjlnp"])
    assert "".join(place(8, units, units, halves)) == "acegikmo"
    assert "".join(place(8, "bdfhjlnpa", units, halves)) == "bdfhjlnp"


@given(st.integers(1, 4), st.sets(st.sampled_from("abcdefgh"), min_size=4), st.randoms())
def test_no_other_choice_of_units_is_better_connected(width, free, random):
    order = sorted(free)
    chosen = place(width, order, "abcdefgh", CROSSED)

    def within(units):
        return sum(CROSSED(left, right) for left, right in itertools.combinations(units, 2))

    assert within(chosen) <= within(random.sample(order, width))


# The bound


# A run of 500 steps takes 15 minutes on 4 GPUs; efficiency and the spread between optimizers are assumed.
EFFICIENCY = {1: 1.0, 2: 0.93, 4: 0.85, 8: 0.78}
GPU_SECONDS, START_S, SPREAD = 15 * 60 * 4 * EFFICIENCY[4], 60.0, 0.08


def matrix(optimizers, widths, seeds=1, sizes=(1.0,)):
    """Return the runs of a matrix of optimizers x GPU counts x seeds x sizes of the model."""
    return [
        PackedJob(
            name=f"{optimizer}_{width}_{size:g}_{seed}",
            width=width,
            seconds=START_S
            + GPU_SECONDS
            * size
            * (1 + SPREAD * (optimizer / max(1, optimizers - 1) - 0.5))
            / (width * EFFICIENCY[width]),
        )
        for optimizer, width, size, seed in itertools.product(range(optimizers), widths, sizes, range(seeds))
    ]


CASES = [  # GPUs of the node, runs
    *((4, matrix(3, [4])), (4, matrix(6, [1, 2, 4], 3)), (4, matrix(6, [1], 6)), (4, matrix(6, [1, 2], 3))),
    *((4, matrix(3, [2, 4], sizes=(1.0, 2.6))), (8, matrix(3, [8])), (8, matrix(6, [1, 2, 4, 8], 3))),
    *((8, matrix(12, [2, 4], 3)), (8, matrix(6, [1, 8], 4))),
]
SMALL = [  # whose gaps no order can fill
    *((4, matrix(3, [1, 2, 4])), (4, matrix(1, [1, 2, 4], 5)), (4, matrix(5, [1])), (8, matrix(3, [1, 2, 4, 8]))),
]


def makespan(runs, units, limits=None):
    """Return the seconds until the last run has ended."""
    return max(end for _, end in ends(runs, [], units, limits or Limits()).values())


@pytest.mark.parametrize(("units", "runs"), CASES)
def test_a_matrix_ends_within_six_percent_of_the_lower_bound(units, runs):
    """The longest run, or the work divided by the GPUs: no schedule is faster."""
    bound = max(*(run.seconds for run in runs), sum(run.width * run.seconds for run in runs) / units)
    assert makespan(runs, units) <= 1.06 * bound


def test_a_matrix_is_never_slower_than_in_groups_or_one_at_a_time():
    for units, runs in [*CASES, *SMALL]:
        packed = makespan(runs, units)
        assert packed <= makespan(runs, units, Limits(exclusive=True)) + 1e-6
        assert packed <= sum(run.seconds for run in runs) + 1e-6


def test_54_runs_of_1_2_and_4_gpus_take_the_hours_of_the_documentation():
    runs = matrix(6, [1, 2, 4], 3)
    hours = [sum(run.seconds for run in runs), makespan(runs, 4, Limits(exclusive=True)), makespan(runs, 4)]
    assert [round(seconds / 3600, 1) for seconds in hours] == [28.9, 13.4, 13.0]
