"""How a run ended, read from its own files. Exit codes and logs only explain a missing result."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.launch.causes import cause, was_preempted
from kmatrix.launch.engine import JobState, RunPlan
from kmatrix.launch.room import how_full, is_full
from kmatrix.launch.state import DIED, DISK, KILLED, MISMATCH, NOT_STARTED, PREEMPTED
from kmatrix.records import RunDir, Status, read_json
from kmatrix.redaction import redact

TAIL_LINES = 20
TAIL_CHARS = 300  # a longer line is cut
TAIL_BYTES = 65536  # how far back the end of a log is looked at
AUTO_FIELDS = frozenset({"peak_tflops"})  # null in run.json: the trainer finds the value
OWN_FAULT = frozenset({"nan", "oom", "data"})  # a run that is being stopped can still fail by these
HINTS = {
    signal.SIGKILL: "out of memory killer?",
    signal.SIGBUS: "bus error: is /dev/shm full?",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "abort",
}
OUTSIDE = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM})  # nothing a trainer does to itself
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$")
WORKER_FAILED = re.compile(r"E\d{4} .*torch/distributed/elastic/.* failed \(exitcode: ")  # begins torchrun's report
FAILURE = (
    re.compile(  # one rank in torchrun's last words, with the time at which it was seen; the last is the root cause
        r"^ +time +: (\S+)\n +host +: .*\n +rank +: (\d+) .*\n +exitcode +: (-?\d+) ", re.MULTILINE
    )
)
PEER_GONE = re.compile(r"Connection (?:reset|closed|refused)|Broken pipe")  # what the first rank to fail says then
PEERS_S = 5.0  # a rank whose peer was killed fails by it within seconds, and may be seen before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How an attempt of a run ended. kind: what it failed by, or what stopped it, in one word; None when it finished.

    log_tail: the last lines of its log, only when it failed.  lost: UUIDs of GPUs that are to be left out.
    """

    status: Status
    kind: str | None = None
    reason: str = ""
    log_tail: tuple[str, ...] = ()
    result: Mapping[str, Any] | None = None
    lost: tuple[str, ...] = ()


def judge(plan: RunPlan, state: JobState) -> Verdict:
    """Say how a run ended whose processes have."""
    result, doubt = _result(plan)
    status = Status(result["status"]) if result else None
    kind = str(result.get("kind") or "error") if result else ""
    if status is Status.FINISHED:
        kind, reason = MISMATCH, mismatch(plan.dir, plan.micro_batch)
        if not reason:
            return Verdict(status=Status.FINISHED, result=result)
    elif state.reason:
        kind, reason = state.kind or NOT_STARTED, state.reason
    elif status is Status.STOPPED or (state.cancelled and kind not in OWN_FAULT):
        kind = PREEMPTED if was_preempted(state, log_end(plan, state)) else "signal"
        return Verdict(status=Status.STOPPED, kind=kind, reason=_asked(state, result), result=result)
    elif result is not None:
        reason = str(result.get("reason") or result.get("kind") or "failed without a reason")
    else:
        kind, reason = (DIED, doubt) if doubt else _without_result(plan, state)
    if kind in ("error", DIED, NOT_STARTED) and is_full(plan.dir.path):
        kind, reason = DISK, f"the disk is full: {how_full(plan.dir.path)} ({reason})"
    if kind in ("error", DIED) and (
        killed := _killed(plan, state, reason)
    ):  # the other ranks then say that they lost a peer
        kind, reason = KILLED, killed
    elif kind in ("error", DIED):
        found = cause(plan, state, kind, reason, log_end(plan, state))
        return replace(_failed(plan, state, found.kind, reason, result), lost=found.gpus)
    return _failed(plan, state, kind, reason, result)


def mismatch(run: RunDir, micro_batch: int | None = None) -> str:
    """Return how what ran differs from what was asked, or "".

    Each difference must stand in `adjusted` of run_used.json with the value that was used.
    micro_batch: what the attempt was told to use in the place of run.json's.
    """
    try:
        asked, record = read_json(run.run_json).get("train", {}), read_json(run.run_used)
    except RecordError as error:
        return f"cannot tell what ran: {error.what}"
    if micro_batch is not None:
        asked = {**asked, "batch_size": micro_batch}
    used = record.get("train", {})
    adjusted = {str(entry.get("field")): entry for entry in record.get("adjusted", []) if isinstance(entry, Mapping)}
    differences = []
    for name in sorted({*asked, *used}):
        was, ran = asked.get(name), used.get(name)
        if was == ran or (name in AUTO_FIELDS and was is None):
            continue
        if name not in adjusted or adjusted[name].get("to") != ran:
            differences.append(f"{name} was {_shown(was)}, ran {_shown(ran)}")
    return f"did not run what was asked: {'; '.join(differences)}" if differences else ""


def exit_in_words(code: int | None) -> str:
    """Say what an exit code means: -9 and 137 are both signal 9."""
    if code is None:
        return "ended without an exit code"
    number = -code if code < 0 else code - 128
    if 0 < number < signal.NSIG:
        try:
            name = signal.Signals(number)
        except ValueError:
            return f"killed by signal {number}"
        return f"killed by signal {number} ({HINTS.get(name, name.name)})"
    return f"ended with exit code {code}" + (" and no result.json" if code == 0 else "")


def log_end(plan: RunPlan, state: JobState) -> str:
    """The end of what this attempt wrote to output.log, without escape codes."""
    try:
        with plan.dir.output_log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(state.log_start, size - TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def without_report(lines: list[str]) -> list[str]:
    """Leave out torchrun's own report of a worker that failed, which hides what the worker said before it died."""
    first = next((number for number, line in enumerate(lines) if WORKER_FAILED.match(line)), None)
    return lines if not first else lines[: first + 1]


def _result(plan: RunPlan) -> tuple[Mapping[str, Any] | None, str]:
    """Return this attempt's result.json, or None and what is wrong with it; "" when there is none."""
    if not plan.dir.result.exists():
        return None, ""
    try:
        result = read_json(plan.dir.result)
    except RecordError as error:
        return None, error.what
    if result.get("run_id") != plan.run_id or result.get("attempt") != plan.attempt:
        return None, ""  # of an earlier attempt, or of another configuration
    if result.get("status") not in (Status.FINISHED, Status.FAILED, Status.STOPPED):
        return None, f"result.json has no status that ends a run: {result.get('status')!r}"
    return result, ""


def _failed(plan: RunPlan, state: JobState, kind: str, reason: str, result: Mapping[str, Any] | None) -> Verdict:
    end = redact(log_end(plan, state))  # reports quote it
    lines = without_report([line for line in end.split("\n") if line.strip()])[-TAIL_LINES:]
    tail = tuple(line if len(line) <= TAIL_CHARS else line[: TAIL_CHARS - 3] + "..." for line in lines)
    return Verdict(
        status=Status.FAILED, kind=kind, reason=redact(ESCAPES.sub("", reason)), log_tail=tail, result=result
    )


def _asked(state: JobState, result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "asked to stop, and killed before it could save"
    return "asked to stop" if state.cancelled else str(result.get("reason") or "asked to stop")


def _without_result(plan: RunPlan, state: JobState) -> tuple[str, str]:
    """Kind and words of an attempt that left no result: from a rank, else from the log and the exit code."""
    kind, reason = _rank_error(plan, state)
    return (kind, reason) if reason else (DIED, _why_no_result(plan, state))


def _rank_error(plan: RunPlan, state: JobState) -> tuple[str, str]:
    """Kind and words of the rank that failed first in this attempt: the others fail because it did. "" for none.

    A file that names no attempt and no time is judged by when it was written.
    """
    errors = []
    for path in plan.dir.rank_errors():
        try:
            written, error = path.stat().st_mtime, read_json(path)
        except (OSError, RecordError):
            continue
        late = written >= (state.started or 0.0) - 0.05  # file systems stamp with the kernel's tick, a few ms late
        if error["attempt"] == plan.attempt if "attempt" in error else late:
            reason = f"rank {error.get('rank')}: {error.get('reason') or error.get('kind')}"
            errors.append((float(error.get("time") or written), str(error.get("kind") or "error"), reason))
    return min(errors)[1:] if errors else ("", "")


def _killed(plan: RunPlan, state: JobState, reason: str) -> str:
    """Say which process a signal from outside ended, "" for none.

    Where the runner died, nobody has the exit code, and torchrun, which was stopped with it, reports nothing: a peer
    that was gone without a word of its own was killed then, or ended with the rest.
    """
    who, code = _first_to_end(plan, state)
    number = -code if code < 0 else code - 128
    if not who and state.exit_code is None and PEER_GONE.search(reason):
        return f"killed with its runner: {reason}"
    return who + exit_in_words(code) if number in OUTSIDE else ""


def _first_to_end(plan: RunPlan, state: JobState) -> tuple[str, int]:
    """Return "rank r " and its exit code from torchrun's last words, else "" and that of the whole.

    torchrun looks at its workers at intervals, in the order of ranks: a rank that failed because its peer was killed
    can be seen first. So a kill at that time comes before any exit code.
    """
    failures = [(_seconds(when), rank, int(code)) for when, rank, code in FAILURE.findall(log_end(plan, state))]
    if not failures:
        return "", state.exit_code or 0
    root = failures[-1]
    killed = [one for one in failures if one[2] == -signal.SIGKILL and abs(one[0] - root[0]) <= PEERS_S]
    _, rank, code = root if root[2] < 0 or not killed else killed[0]
    return f"rank {rank} ", code


def _seconds(when: str) -> float:
    """Return a time of torchrun's as Unix seconds; 0 where it is written in another way."""
    try:
        return datetime.strptime(when, "%Y-%m-%d_%H:%M:%S").timestamp()
    except ValueError:
        return 0.0


def _why_no_result(plan: RunPlan, state: JobState) -> str:
    """Explain from exit codes and the log. torchrun ends with 1 whatever the worker did, but logs the truth."""
    end = log_end(plan, state)
    who, code = _first_to_end(plan, state)
    words = who + exit_in_words(code if who else state.exit_code)
    if who and code < 0:
        return words
    exceptions = [found[1] for line in end.split("\n") if (found := EXCEPTION.match(line.strip()))]
    exceptions = [text for text in exceptions if "ChildFailedError" not in text]
    return f"{words}: {exceptions[-1][:TAIL_CHARS]}" if exceptions else words


def _shown(value: object) -> str:
    return "not set" if value is None else str(value)
