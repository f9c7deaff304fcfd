"""What a run failed by where that was not its own doing: a lost GPU, or the network between GPUs. A table of words.

The words are those of CUDA, NCCL and PyTorch, in what a rank left of its error and in the log of the attempt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kmatrix.errors import RecordError
from kmatrix.launch.engine import JobState, RunPlan
from kmatrix.launch.state import GPU_LOST, NCCL
from kmatrix.records import read_json, read_jsonl

# A GPU that fell off the bus, or answers with errors of its hardware. "device-side assert" is a mistake in the
# program (an index out of range), and so is an illegal address: they would fail again anywhere.
LOST = re.compile(
    r"GPU is lost|fallen off the bus|unspecified launch failure|uncorrectable (?:ECC|NVLink) error"
    r"|CUDA error: (?:hardware stack error|the launch timed out)|GPU requires (?:restart|reset)"
)
NETWORK = re.compile(
    r"NCCL error|ncclSystemError|ncclInternalError|ncclRemoteError|ncclUnhandledCudaError|ncclTimeout"
    r"|Watchdog caught collective operation timeout|NCCL (?:communicator|watchdog)[^\n]*(?:abort|timeout|timed out)",
    re.IGNORECASE,
)
WHOLE = re.compile(r"got signal: \d+|Received \S+ death signal")  # torchrun's words when it was asked itself
RANK = re.compile(r"rank (\d+)")


@dataclass(frozen=True, slots=True)
class Cause:
    """kind: in one word.  gpus: UUIDs of those that are to be left out."""

    kind: str
    gpus: tuple[str, ...] = ()


def cause(plan: RunPlan, state: JobState, kind: str, reason: str, log: str) -> Cause:
    """Return what an attempt failed by. kind, reason: of the rank that failed first.  log: the end of this attempt's.

    That a GPU was lost explains whatever the other ranks say; an error of NCCL counts only where no rank failed
    before by itself: then its peers' connections break, too.
    """
    gpus = state.gpus
    lost = _recorded(plan, state)
    errors = {int(rank): text for rank, text in _rank_errors(plan)}
    named = [rank for rank, text in errors.items() if LOST.search(text)]
    if LOST.search(reason):
        named.append(_rank_in(reason))
    if lost or named or LOST.search(log):
        blamed = lost or tuple(gpus[rank] for rank in dict.fromkeys(named) if rank < len(gpus))
        return Cause(GPU_LOST, blamed or (gpus if len(gpus) == 1 else ()))
    own = reason if state.exit_code is None or kind != "died" else reason + log
    return Cause(NCCL if NETWORK.search(own) else kind)


def was_preempted(state: JobState, log: str) -> bool:
    """Whether a run that saved and stopped was asked to by somebody else than its runner, who meant its ranks alone.

    Whoever signals the process that status.json names (pid) ends the run, and torchrun says so: it stays stopped.
    """
    return state.started is not None and not state.cancelled and not WHOLE.search(log)


def _rank_in(reason: str) -> int:
    """The rank that a reason names first; rank 0 writes of itself without one."""
    found = RANK.match(reason)
    return int(found[1]) if found else 0


def _rank_errors(plan: RunPlan) -> Sequence[tuple[int, str]]:
    """Return rank and words of what each rank left in this attempt."""
    found = []
    for path in plan.dir.rank_errors():
        try:
            error = read_json(path)
        except RecordError:
            continue
        if error.get("attempt", plan.attempt) == plan.attempt:
            found.append((int(error.get("rank") or 0), str(error.get("reason") or "")))
    return found


def _recorded(plan: RunPlan, state: JobState) -> tuple[str, ...]:
    """Return the GPUs of the run that its recorder saw fall silent in this attempt, and not answer again."""
    silent: dict[str, None] = {}
    for event in read_jsonl(plan.dir.gpu_events):
        late = float(event.get("time") or 0.0) >= (state.started or 0.0)
        for uuid in (uuid for uuid in state.gpus if late and uuid in str(event.get("text"))):
            if event.get("event") == "lost":
                silent[uuid] = None
            elif event.get("event") == "found":
                silent.pop(uuid, None)
    return tuple(silent)
