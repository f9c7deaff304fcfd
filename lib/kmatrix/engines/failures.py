"""Which rank of a run made the others fail, or where ranks hang, from what they left behind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kmatrix.records.paths import RunDir
from kmatrix.records.ranks import PLACES, STALL, RankState, read_ranks

# Errors of a rank that lost another one, from gloo and NCCL; the process that ended first has another reason.
LOST_PEER = re.compile(
    r"Connection (?:reset|closed|refused)|Broken pipe|Socket closed|remote process exited|ncclRemoteError"
    r"|Timed out waiting \d+ms|Watchdog caught collective operation timeout|received SIG"
)


def first_failure(run: RunDir, attempt: int, own_host: str = "") -> tuple[int, str, str] | None:
    """Return the rank that made the others fail, kind and reason; -1 of ranks that hung; None if none did.

    A rank that failed by itself comes first, then one that hung: the others hang without it. Ranks that only lost a
    peer come last.
    """
    states = read_ranks(run, attempt)
    failed = sorted((state for state in states if state.kind), key=lambda state: state.time)
    own = [state for state in failed if not LOST_PEER.search(state.reason or "")]
    if not own and (reason := describe_hang(states, _stacks(run, attempt, states))):
        return -1, STALL, reason
    for first in (*own, *failed):
        on = f" on {first.host}" if first.host and own_host and first.host != own_host else ""
        return first.rank, first.kind or "error", f"rank {first.rank}{on}: {first.reason or first.kind}"
    return None


def only_lost_peers(run: RunDir, attempt: int) -> bool:
    """Return whether ranks failed, and each of them only because it had lost another one."""
    reasons = [state.reason or "" for state in read_ranks(run, attempt) if state.kind]
    return bool(reasons) and all(LOST_PEER.search(reason) for reason in reasons)


def describe_hang(states: Sequence[RankState], stacks: dict[int, str]) -> str:
    """Return which ranks have the least progress, and where they are; "" without stacks, which ranks that hung left."""
    if not stacks:
        return ""
    least = min(_progress(state) for state in states)
    late = [state for state in states if _progress(state) == least]
    names = ", ".join(str(state.rank) for state in late)
    where = f"{late[0].place or late[0].work} of step {late[0].step}"
    lines = {innermost(stacks[state.rank]): None for state in late if state.rank in stacks}
    text = f"rank {names} is in {where}" if len(late) == 1 else f"ranks {names} are in {where}"
    text += "".join(f" ({line})" for line in lines if line)
    others = ", the others have done more" if len(late) < len(states) else ""
    limit = re.match(r"Timeout \((\S+)\)", next(iter(stacks.values())))
    return f"no progress for {limit[1] if limit else 'too long'}: {text}{others}"


def _progress(state: RankState) -> tuple[int, int]:
    return state.step, PLACES.index(state.place) if state.place in PLACES else -1


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
            path = run.rank(state.rank) / f"stacks_{attempt}.txt"
            found[state.rank] = path.read_text(encoding="utf-8", errors="replace")
    return {rank: text for rank, text in found.items() if text}
