"""Which rank made the others fail: by its own error, or by hanging."""

from __future__ import annotations

import pytest

from kmatrix.records.decode import as_json
from kmatrix.records.files import write_json
from kmatrix.records.jobs.ranks import RankState, describe_hang, first_failure, innermost
from kmatrix.records.paths import RunDir

LOST = ("error", "RuntimeError: Connection closed by peer")
OWN = ("error", "ValueError: no data")
STACKS = """Timeout (0:05:00)!
Thread 0x7f01 (most recent call first):
  File "/x/watchdog.py", line 5 in _watch

Thread 0x7f00 (most recent call first):
  File "/x/gpt2.py", line 70 in forward
  File "/x/train.py", line 9 in train
"""
HUNG = "hung"  # this rank left its stacks


def write_ranks(tmp_path, *failures, attempt=2):
    """Write the state of each rank: None, HUNG, or kind and reason. Later ranks fail earlier."""
    run = RunDir(tmp_path)
    for rank, failure in enumerate(failures):
        run.rank(rank).mkdir(parents=True)
        kind, reason = failure if isinstance(failure, tuple) else (None, None)
        state = RankState(attempt=attempt, rank=rank, host=f"n{rank}", time=100.0 - rank, kind=kind, reason=reason)
        write_json(run.rank_state(rank), as_json(state))
        run.rank_stacks(rank, attempt).write_text(STACKS if failure == HUNG else "")
    return run


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ((None, None), None),
        ((None, OWN), ("error", "rank 1 on n1: ValueError: no data")),
        ((OWN, LOST), ("error", "rank 0: ValueError: no data")),
        ((OWN, ("data", "why")), ("data", "rank 1 on n1: why")),
        ((OWN, HUNG), ("error", "rank 0: ValueError: no data")),
        ((LOST, HUNG), ("stall", "no progress for 0:05:00: ranks 0, 1 are in  of step 0 (gpt2.py:70 in forward)")),
        ((None, LOST), ("error", "rank 1 on n1: RuntimeError: Connection closed by peer")),
    ],
)
def test_a_rank_that_failed_by_itself_comes_before_one_that_hung_or_lost_its_peer(tmp_path, failures, expected):
    run = write_ranks(tmp_path, *failures)
    assert first_failure(run, 2, "n0") == expected
    assert first_failure(run, 3) is None  # the files are of an earlier attempt


def rank(number, step, place, work="step"):
    return RankState(attempt=1, rank=number, step=step, work=work, place=place)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([rank(0, 4, "backward"), rank(1, 4, "forward")], "rank 1 is in forward of step 4, the others have done more"),
        ([rank(0, 5, "data"), rank(1, 4, "numbers")], "rank 1 is in numbers of step 4, the others have done more"),
        (
            [rank(0, 4, "backward"), rank(1, 4, "backward")],
            "ranks 0, 1 are in backward of step 4 (gpt2.py:70 in forward)",
        ),
        ([rank(0, 4, "", "evaluation")], "rank 0 is in evaluation of step 4 (gpt2.py:70 in forward)"),
    ],
)
def test_the_rank_with_the_least_progress_is_named_with_its_place(states, expected):
    assert describe_hang(states, {0: STACKS}) == f"no progress for 0:05:00: {expected}"


def test_the_innermost_line_is_that_of_the_main_thread():
    assert innermost(STACKS) == "gpt2.py:70 in forward"
    assert innermost("") == ""
