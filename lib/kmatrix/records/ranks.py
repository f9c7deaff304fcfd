"""ranks/<r>/state.json: where each rank of a run is and why it failed, and which rank made the others fail."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kmatrix.records.decode import Count, Record, UnixTime, decode_optional
from kmatrix.records.paths import RunDir

# Errors of a rank that lost another one, from gloo and NCCL; the process that ended first has another reason.
LOST_PEER = re.compile(
    r"Connection (?:reset|closed|refused)|Broken pipe|Socket closed|remote process exited|ncclRemoteError"
    r"|Timed out waiting \d+ms|Watchdog caught collective operation timeout|received SIG"
)
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

    @property
    def progress(self) -> tuple[int, int]:
        return self.step, PLACES.index(self.place) if self.place in PLACES else -1

    def failure(self, own_host: str = "") -> str:
        """Return `rank 1: why`, with the host of the rank if that is not `own_host`: `rank 1 on n2: why`."""
        on = f" on {self.host}" if self.host and own_host and self.host != own_host else ""
        return f"rank {self.rank}{on}: {self.reason or self.kind}"


def read_ranks(run: RunDir, attempt: int) -> list[RankState]:
    """Return the newest states of the ranks of an attempt, in the order of ranks."""
    states = [decode_optional(path, RankState) for path in run.rank_states()]
    return sorted((state for state in states if state and state.attempt == attempt), key=lambda state: state.rank)


def first_failure(run: RunDir, attempt: int, own_host: str = "") -> tuple[str, str] | None:
    """Return kind and reason of the rank that made the others fail, None if no rank has failed or hung.

    A rank that failed by itself comes first, then one that hung: the launcher of a rank that fails stops the others,
    which hang without it. Ranks that only lost a peer come last.
    """
    states = read_ranks(run, attempt)
    failed = sorted((state for state in states if state.kind), key=lambda state: state.time)
    own = [state for state in failed if not LOST_PEER.search(state.reason or "")]
    if not own and (reason := describe_hang(states, _stacks(run, attempt, states))):
        return STALL, reason
    first = next(iter((*own, *failed)), None)
    return (first.kind or "error", first.failure(own_host)) if first else None


def describe_hang(states: Sequence[RankState], stacks: dict[int, str]) -> str:
    """Return which ranks have the least progress, and where they are; "" without stacks.

    stacks: those that the ranks left when they hung, by rank.
    """
    if not stacks:
        return ""
    least = min(state.progress for state in states)
    late = [state for state in states if state.progress == least]
    names = ", ".join(str(state.rank) for state in late)
    where = f"{late[0].place or late[0].work} of step {late[0].step}"
    lines = {innermost(stacks[state.rank]): None for state in late if state.rank in stacks}
    text = f"rank {names} is in {where}" if len(late) == 1 else f"ranks {names} are in {where}"
    text += "".join(f" ({line})" for line in lines if line)
    others = ", the others have done more" if len(late) < len(states) else ""
    limit = re.match(r"Timeout \((\S+)\)", next(iter(stacks.values())))
    return f"no progress for {limit[1] if limit else 'too long'}: {text}{others}"


def innermost(stacks: str) -> str:
    """Return the innermost frame of the main thread in a dump of faulthandler, as "file:line in function"."""
    # faulthandler writes the newest thread first, so the main thread is the last one.
    threads = re.split(r"^(?:Current thread|Thread) .*$", stacks, flags=re.MULTILINE)
    found = re.search(r'File "([^"]+)", line (\d+) in (\S+)', threads[-1])
    return f"{Path(found[1]).name}:{found[2]} in {found[3]}" if found else ""


def _stacks(run: RunDir, attempt: int, states: Sequence[RankState]) -> dict[int, str]:
    found = {}
    for state in states:
        with suppress(OSError):  # no stacks: this rank did not hang
            found[state.rank] = run.rank_stacks(state.rank, attempt).read_text(encoding="utf-8", errors="replace")
    return {rank: text for rank, text in found.items() if text}
