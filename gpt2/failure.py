"""How a run fails: the kind and the line that say why, found where the failure began."""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

import torch

from gpt2 import dist
from gpt2.log import RunLog
from kmatrix.errors import DataError, KmatrixError, is_full
from kmatrix.records import read_json, write_json

MEMORY_WORDS = ("DefaultCPUAllocator", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # of errors without a type


def kind_of(error: BaseException) -> str:
    """Return the kind of a failure as result.json names it."""
    if isinstance(error, DataError):
        return "data"
    if is_full(error):
        return "disk"
    memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    memory = memory or (isinstance(error, RuntimeError) and any(words in str(error) for words in MEMORY_WORDS))
    return "oom" if memory else "error"


def last_line(error: BaseException) -> str:
    """Return the failure in one line."""
    if isinstance(error, KmatrixError):
        return f"{error.what}: {error.why}" if error.why else error.what
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[0]


def in_words(error: BaseException, log: RunLog) -> str:
    """Return the failure in one line, with what it hung on where that is known."""
    line = last_line(error)
    if kind_of(error) != "oom" or log.config is None:
        return line
    return f"out of memory with micro-batches of {log.config.batch_size}: {line}"


def record(log: RunLog, rank: int, kind: str, reason: str) -> None:
    """Write why this rank failed. Rank 0 names the rank that failed first, where one left word of it."""
    if rank != 0:
        write_json(
            log.dir.rank_error(rank),
            {"rank": rank, "attempt": log.attempt, "time": time.time(), "kind": kind, "reason": reason},
        )
        return
    if first := first_error(log):
        kind, reason = str(first["kind"]), f"rank {first['rank']}: {first['reason']}"
    with suppress(OSError):  # on a full disk the result may still find room
        log.event(log.step, "failed", reason)
    log.end("failed", kind, reason)


def first_error(log: RunLog) -> dict[str, Any] | None:
    """Return the earliest error of another rank in this attempt; it is written before the peers can notice."""
    errors = [read_json(path) for path in (log.dir.path / "ranks").glob("*/error.json")]
    return min((e for e in errors if e["attempt"] == log.attempt), key=lambda e: float(e["time"]), default=None)


def give_up(log: RunLog, rank: int, name: str) -> NoReturn:
    """End a rank that was asked to stop and does not come back from where it is: nothing can be saved any more."""
    if rank == 0 and not first_error(log):
        log.event(log.step, "stop", f"{name} came, and step {log.step} did not end")
        log.end("stopped", "signal", f"stopped by {name} at step {log.step}, which did not end: no checkpoint")
    else:
        record(log, rank, "error", f"{name} came, and step {log.step} did not end")
    dist.leave(dist.EXIT_FAILED if rank else dist.EXIT_STOPPED)


def stalled(log: RunLog, rank: int, reason: str) -> NoReturn:
    """End a run that stands still. Rank 0 writes the result; another rank does what it can where rank 0 does not."""
    if rank == 0:
        log.event(log.step, "stall", f"{reason}; the stacks of all ranks are in {log.dir.path / 'ranks'}")
        log.end("failed", "stall", reason)
    else:
        record(log, rank, "stall", reason)
    dist.leave(dist.EXIT_FAILED)
