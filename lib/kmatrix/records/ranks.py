"""ranks/<r>/state.json: where each rank of a run is, and why it failed."""

from __future__ import annotations

from kmatrix.records.decode import Count, Record, UnixTime, decode_optional
from kmatrix.records.files import names
from kmatrix.records.paths import RunDir

STALL = "stall"  # kind of failure: a rank hung
DATA, FORWARD, BACKWARD, UPDATE, NUMBERS = PLACES = ("data", "forward", "backward", "update", "numbers")  # in a step


class RankState(Record, frozen=True, kw_only=True):
    """ranks/<r>/state.json: the position of a rank, rewritten each second, and why it failed."""

    attempt: Count
    rank: Count = 0
    host: str = ""
    time: UnixTime = 0.0
    step: Count = 0
    work: str = ""  # kind of work
    place: str = ""  # within a step
    kind: str | None = None  # of the failure
    reason: str | None = None


def read_ranks(run: RunDir, attempt: int) -> list[RankState]:
    """Return the newest states of the ranks of an attempt, in the order of ranks."""
    ranks = [name for name in names(run.path / "ranks") if name.isdecimal()]
    states = [decode_optional(run.rank(int(name)) / "state.json", RankState) for name in ranks]
    return sorted((state for state in states if state and state.attempt == attempt), key=lambda state: state.rank)
