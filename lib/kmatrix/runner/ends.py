"""Why an attempt ended: its own result, else what stopped it, else the first rank that failed, else how it exited."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kmatrix.engines.failures import first_failure
from kmatrix.errors import RecordError, is_full
from kmatrix.records.attempts import Attempt, End, Exit
from kmatrix.records.decode import decode, decode_lines, replaced
from kmatrix.records.events import EventLine
from kmatrix.records.files import last_lines
from kmatrix.records.paths import RunDir
from kmatrix.records.ranks import read_ranks
from kmatrix.records.runs import RunResult
from kmatrix.redaction.redactor import redact
from kmatrix.status.fold import (
    DIED,
    DISK,
    ERROR,
    FINISHED,
    GPU_LOST,
    KILLED,
    MISMATCH,
    NCCL,
    PREEMPTED,
    SIGNAL,
    STOPPED,
)
from kmatrix.text import printable

TAIL_LINES, TAIL_CHARS = 20, 300
OWN_FAULT = frozenset({"nan", "oom", "data"})  # kinds of failure that also count while the run is being stopped
OUTSIDE = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM})  # no trainer sends these to itself
HINTS = {
    signal.SIGKILL: "out of memory killer?",
    signal.SIGBUS: "bus error: is /dev/shm full?",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "abort",
}
RANK = re.compile(r"rank (\d+)")
EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$")
# A GPU that fell off the bus, or reports hardware errors. "device-side assert" is a bug in the program (an index out
# of range), and so is an illegal address: they would fail again on any GPU.
LOST_GPU = re.compile(
    r"GPU is lost|fallen off the bus|unspecified launch failure|uncorrectable (?:ECC|NVLink) error"
    r"|CUDA error: (?:hardware stack error|the launch timed out)|GPU requires (?:restart|reset)"
)
NETWORK = re.compile(
    r"NCCL error|ncclSystemError|ncclInternalError|ncclRemoteError|ncclUnhandledCudaError|ncclTimeout"
    r"|Watchdog caught collective operation timeout|NCCL (?:communicator|watchdog)[^\n]*(?:abort|timeout|timed out)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known about an attempt whose ranks have exited."""

    run: Path
    attempt: Attempt  # its `stop` says why its ranks were asked to stop, and its `gpus` which ones they had
    exits: Sequence[Exit] = ()  # in their order
    log_start: int = 0  # bytes of output.log before this attempt
    saved: int = 0  # step of the newest checkpoint
    trouble: tuple[str, str] | None = None  # kind and reason of a node that stopped answering, or of a time limit


def end_of(seen: Evidence) -> End:
    """Return how an attempt ended, without its times."""
    result, damage = _result(seen)
    kind, reason = _kind(seen, result, damage)
    end = End(kind=kind, reason=reason, step=seen.saved, exits=tuple(seen.exits))
    if kind in (FINISHED, STOPPED, SIGNAL, PREEMPTED):
        return end
    lost: tuple[str, ...] = ()
    log = _log(seen)
    if kind in (ERROR, DIED):
        kind, reason, lost = _cause(seen, kind, reason, log)
    return replaced(end, kind=kind, reason=redact(printable(reason)), lost=lost, log_tail=_log_tail(log))


def _kind(seen: Evidence, result: RunResult | None, damage: str) -> tuple[str, str]:
    status, own = (result.status, result.kind or ERROR) if result else (None, "")
    told, _, asked = seen.attempt.stop.partition(": ")
    if status == "finished":
        return FINISHED, ""
    rank, kind, why = first_failure(RunDir(seen.run), seen.attempt.number, seen.attempt.host) or (0, "", "")
    if result and status == "failed":
        if not rank or own == "nan":  # rank 0 often fails only because its peer is gone; all ranks see the same NaN
            kind, why = own, result.reason or own
        if kind in OWN_FAULT or not (told or seen.trouble):
            return kind, why
    if seen.trouble or damage:
        return seen.trouble or (MISMATCH, damage)
    if told:  # a stop hides errors that it causes itself, such as lost connections
        return told, f"{asked or told}, {_saved(seen, result)}"
    if result is not None:  # somebody else asked the ranks to stop
        return PREEMPTED, f"its ranks were asked to stop, {_saved(seen, result)}"
    return (kind, why) if kind else (DIED, _why(seen))


def _saved(seen: Evidence, result: RunResult | None) -> str:
    """Return whether an attempt that was asked to stop has saved its last step: the disk may be full."""
    if result is None or result.status != "stopped":
        return "it ended before it could save"
    if result.step == seen.saved:
        return f"saved step {result.step}"
    return f"step {result.step} was not saved (newest checkpoint: {f'step {seen.saved}' if seen.saved else 'none'})"


def _result(seen: Evidence) -> tuple[RunResult | None, str]:
    """Return result.json of this attempt, or None and the damage of the file, "" if there is none."""
    try:
        result = decode(seen.run / "result.json", RunResult) if (seen.run / "result.json").exists() else None
    except RecordError as error:
        return None, f"{error.what}: {error.why}"
    return (result if result and result.attempt == seen.attempt.number else None), ""


def _cause(seen: Evidence, kind: str, reason: str, log: str) -> tuple[str, str, tuple[str, ...]]:
    """Return kind, reason and lost GPUs of an attempt that failed without a kind of its own.

    A lost GPU explains all other errors. An NCCL error counts only if no rank failed by itself before: the peers of a
    failed rank lose their connections, too.
    """
    first = next((one for one in seen.exits if one.code), None)
    if first is not None and -first.code in OUTSIDE:
        return KILLED, f"rank {first.rank}{_on(seen, first)} {describe_exit(first.code)}", ()
    errors = {state.rank: state.reason or "" for state in read_ranks(RunDir(seen.run), seen.attempt.number)}
    named = [rank for rank, text in errors.items() if LOST_GPU.search(text)]
    if LOST_GPU.search(reason):
        named.append(int(found[1]) if (found := RANK.match(reason)) else 0)  # rank 0 writes its reason without a rank
    gpus, silent = seen.attempt.gpus, _silent_gpus(seen)
    if silent or named or LOST_GPU.search(log):
        # The recorder knows which GPU is silent; a rank knows only that its own is lost.
        blamed = silent or tuple(gpus[rank] for rank in dict.fromkeys(named) if rank < len(gpus))
        return GPU_LOST, reason, blamed or (gpus if len(gpus) == 1 else ())
    own = reason if kind != DIED else reason + log
    return (NCCL if NETWORK.search(own) else kind), reason, ()


def describe_exit(code: int) -> str:
    """Return the meaning of an exit code; a negative one is a signal."""
    number = -code if code < 0 else code - 128
    if 0 < number < signal.NSIG:
        with suppress(ValueError):
            name = signal.Signals(number)
            return f"killed by signal {number} ({HINTS.get(name, name.name)})"
        return f"killed by signal {number}"
    return f"ended with exit code {code}" + (" and no result.json" if code == 0 else "")


def fills(run: Path, error: OSError) -> End | None:
    """Return the end of an attempt whose record could not be written because the disk is full, else None."""
    return End(kind=DISK, reason=f"the disk of {run} is full: {error.strerror}") if is_full(error) else None


def _on(seen: Evidence, one: Exit) -> str:
    return f" on {one.host}" if seen.attempt.nodes > 1 and one.host else ""


def _why(seen: Evidence) -> str:
    """Return why ranks ended that wrote no reason: from their exits, and the last exception in the log."""
    first = next((one for one in seen.exits if one.code), Exit(rank=0, code=0))
    text = f"rank {first.rank}{_on(seen, first)} {describe_exit(first.code)}"
    lines = _log(seen).split("\n")
    exceptions = [found[1] for line in lines if (found := EXCEPTION.match(line.strip()))]
    return f"{text}: {exceptions[-1]}" if exceptions and first.code >= 0 else text


def _log(seen: Evidence) -> str:
    """Return the end of what this attempt wrote to output.log."""
    try:
        with (seen.run / "output.log").open("rb") as file:
            return "".join(last_lines(file, start=seen.log_start))
    except OSError:
        return ""


def _log_tail(log: str) -> tuple[str, ...]:
    """Return the last lines of a log, without secrets, because reports quote them."""
    # Redact before truncating: a key that is cut in the middle would not be recognized.
    lines = [line for line in redact(log).split("\n") if line.strip()][-TAIL_LINES:]
    return tuple(line if len(line) <= TAIL_CHARS else line[: TAIL_CHARS - 3] + "..." for line in lines)


def _silent_gpus(seen: Evidence) -> tuple[str, ...]:
    """Return the GPUs of the attempt that stopped answering the recorder and did not answer again."""
    silent: dict[str, None] = {}
    for event in decode_lines(seen.run / "gpu_events.jsonl", EventLine):
        for uuid in (uuid for uuid in seen.attempt.gpus if uuid in (event.text or "")):
            if event.event == "lost" and event.time >= seen.attempt.started:
                silent[uuid] = None
            elif event.event == "found":
                silent.pop(uuid, None)
    return tuple(silent)
