"""Pack runs on one machine: start order, assigned units, and the bound that listed matrices keep."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.engines.packing import place
from kmatrix.packing import PackedJob, ends

UNITS = 4
WIDTHS = st.sampled_from([1, 2, 3, 4])
SECONDS = st.integers(1, 1000).map(float)


def jobs(widths_and_seconds):
    return [PackedJob(name=f"j{i}", width=w, seconds=s) for i, (w, s) in enumerate(widths_and_seconds)]


QUEUES = st.lists(st.tuples(WIDTHS, SECONDS), min_size=1, max_size=14).map(jobs)


@pytest.mark.parametrize(
    ("queue", "most", "starts"),
    [
        ([(1, 9), (4, 5), (2, 7)], 0, {"j1": 0, "j2": 5, "j0": 5}),  # the widest
        ([(2, 10), (2, 30), (2, 20)], 0, {"j1": 0, "j2": 0, "j0": 20}),  # then the longest
        ([(3, 10), (2, 5), (1, 5)], 0, {"j0": 0, "j2": 0, "j1": 10}),  # one that does not fit keeps nobody waiting
        ([(1, 10), (4, 99)], 1, {"j0": 0, "j1": 10}),  # one at a time: in the order of the matrix
        ([(1, 3), (1, 2), (1, 1)], 2, {"j0": 0, "j1": 0, "j2": 2}),
    ],
)
def test_what_starts_first(queue, most, starts):
    assert {name: start for name, (start, _) in ends(jobs(queue), [], UNITS, most).items()} == starts


@given(QUEUES, st.integers(0, 5))
def test_no_unit_is_used_twice_and_every_job_runs_once_for_its_duration(queue, most):
    known = ends(queue, [], UNITS, most)
    assert all(known[job.name][1] - known[job.name][0] == pytest.approx(job.seconds) for job in queue)
    for start, _ in known.values():
        active = [job for job in queue if known[job.name][0] <= start < known[job.name][1]]
        assert sum(job.width for job in active) <= UNITS
        assert len(active) <= (most or len(queue))


def test_a_running_job_keeps_its_units_and_an_unknown_duration_makes_the_end_unknown():
    running = [PackedJob(name="r", width=3, seconds=50)]
    assert ends(jobs([(2, 10)]), running, UNITS) == {"r": (0.0, 50.0), "j0": (50.0, 60.0)}
    assert ends([PackedJob(name="a", width=1)], running, UNITS) is None
    assert ends(jobs([(5, 1)]), [], UNITS) is None


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


def makespan(runs, units, most=0):
    """Return the seconds until the last run has ended."""
    return max(end for _, end in ends(runs, [], units, most).values())


@pytest.mark.parametrize(("units", "runs"), CASES)
def test_a_matrix_ends_within_six_percent_of_the_lower_bound(units, runs):
    """The longest run, or the work divided by the GPUs: no schedule is faster."""
    bound = max(*(run.seconds for run in runs), sum(run.width * run.seconds for run in runs) / units)
    assert makespan(runs, units) <= 1.06 * bound


def test_54_runs_of_1_2_and_4_gpus_take_the_hours_of_the_documentation():
    runs = matrix(6, [1, 2, 4], 3)
    assert [round(makespan(runs, 4, most) / 3600, 1) for most in (1, 0)] == [28.9, 13.4]
