"""Classify how an attempt ended, from the files of its run. Exit codes and logs only explain a missing result."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from kmatrix.errors import RecordError
from kmatrix.own_file import open_to_read
from kmatrix.records.decode import decode, decode_lines
from kmatrix.records.files import last_lines
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunResult, Status, read_run_file, read_train_values, read_used_file
from kmatrix.records.states import EventLine, read_rank_errors
from kmatrix.records.train_config import FORMER
from kmatrix.redaction import redact
from kmatrix.status.disk_space import how_full, is_full
from kmatrix.status.state import (
    DIED,
    DISK,
    GPU_LOST,
    KILLED,
    MISMATCH,
    NCCL,
    NOT_STARTED,
    PREEMPTED,
    Attempt,
    JobState,
)
from kmatrix.text import printable

TAIL_LINES = 20
TAIL_CHARS = 300  # longer lines are truncated
TAIL_BYTES = 65536  # of the log that are searched, from its end
AUTO_FIELDS = frozenset({"peak_tflops"})  # null in run.json: the trainer finds the value
OWN_FAULT = frozenset({"nan", "oom", "data"})  # kinds of failure that also count while the run is being stopped
HINTS = {
    signal.SIGKILL: "out of memory killer?",
    signal.SIGBUS: "bus error: is /dev/shm full?",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGABRT: "abort",
}
OUTSIDE = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM})  # no trainer sends these to itself
EXCEPTION = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$")
WORKER_FAILED = re.compile(r"E\d{4} .*torch/distributed/elastic/.* failed \(exitcode: ")  # starts torchrun's report
# One rank in torchrun's report, with the time when torchrun noticed; the last entry is the root cause.
FAILURE = re.compile(r"^ +time +: (\S+)\n +host +: .*\n +rank +: (\d+) .*\n +exitcode +: (-?\d+) ", re.MULTILINE)
PEER_GONE = re.compile(r"Connection (?:reset|closed|refused)|Broken pipe")  # errors of a rank that lost a peer
PEERS_S = 5.0  # a rank fails within this time after its peer was killed, and may be noticed first

# A GPU that fell off the bus, or reports hardware errors. "device-side assert" is a bug in the program (an index out
# of range), and so is an illegal address: they would fail again on any GPU.
LOST = re.compile(
    r"GPU is lost|fallen off the bus|unspecified launch failure|uncorrectable (?:ECC|NVLink) error"
    r"|CUDA error: (?:hardware stack error|the launch timed out)|GPU requires (?:restart|reset)"
)
NETWORK = re.compile(
    r"NCCL error|ncclSystemError|ncclInternalError|ncclRemoteError|ncclUnhandledCudaError|ncclTimeout"
    r"|Watchdog caught collective operation timeout|NCCL (?:communicator|watchdog)[^\n]*(?:abort|timeout|timed out)",
    re.IGNORECASE,
)
TORCHRUN_SIGNALLED = re.compile(r"got signal: \d+|Received \S+ death signal")  # logged if torchrun itself got a signal
RANK = re.compile(r"rank (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How an attempt of a run ended."""

    status: Status
    kind: str | None = None  # failure or stop in one word, None for a finished run
    reason: str = ""
    log_tail: tuple[str, ...] = ()  # last lines of output.log, for a failed run
    result: RunResult | None = None  # of this attempt
    lost: tuple[str, ...] = ()  # UUIDs of lost GPUs


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Why an attempt failed."""

    kind: str  # in one word
    gpus: tuple[str, ...] = ()  # UUIDs of lost GPUs


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that is known about an attempt without processes."""

    run: RunDir
    attempt: Attempt
    job: JobState | None  # the engine's view of the processes, None if the runner died before they did

    @property
    def exit_code(self) -> int | None:
        return self.job.exit_code if self.job else None

    @property
    def is_cancelled(self) -> bool:
        return self.job is not None and self.job.cancelled

    @cached_property
    def log(self) -> str:
        """The end of what this attempt wrote to output.log, without escape codes."""
        begin = self.job.log_start if self.job else 0
        try:
            with open_to_read(self.run.output_log) as file:
                text = "".join(last_lines(file, most_bytes=TAIL_BYTES, start=begin))
        except OSError:
            return ""
        return printable(text)


def classify(run: RunDir, attempt: Attempt, job: JobState | None) -> RunEnd:
    """Return how an attempt without processes ended.

    job: the engine's view of the processes, None if the runner died before they did.
    """
    seen = Evidence(run=run, attempt=attempt, job=job)
    result, damage = _result(seen)
    status = result.status if result else None
    kind = (result.kind or "error") if result else ""
    # A finished run counts only if it trained what was planned.
    if status == Status.FINISHED:
        kind, reason = MISMATCH, mismatch(run, attempt.micro_batch)
        if not reason:
            return RunEnd(status=Status.FINISHED, result=result)
    # The engine ended the attempt, or could not start it: it knows why.
    elif job is not None and job.reason:
        kind, reason = job.kind or NOT_STARTED, job.reason
    # A stop hides errors that it causes itself, such as lost connections, but not the run's own failures.
    elif status == Status.STOPPED or (seen.is_cancelled and kind not in OWN_FAULT):
        kind = PREEMPTED if was_preempted(seen) else "signal"
        return RunEnd(status=Status.STOPPED, kind=kind, reason=_stop_reason(seen, result), result=result)
    elif result is not None:
        reason = result.reason or result.kind or "failed without a reason"
    else:
        kind, reason = (DIED, damage) if damage else _without_result(seen)
    # On a full disk anything can fail first: a log line, a checkpoint, the result itself.
    if kind in ("error", DIED, NOT_STARTED) and is_full(run.path):
        kind, reason = DISK, f"the disk is full: {how_full(run.path)} ({reason})"
    gpus: tuple[str, ...] = ()
    if kind in ("error", DIED):
        # A killed rank comes first: the reason is then only that its peers lost the connection.
        if killed := _killed(seen, reason):
            kind, reason = KILLED, killed
        else:
            cause = failure_cause(seen, kind, reason)
            kind, gpus = cause.kind, cause.gpus
    return RunEnd(
        status=Status.FAILED,
        kind=kind,
        reason=redact(printable(reason)),
        log_tail=_log_tail(seen.log),
        result=result,
        lost=gpus,
    )


def mismatch(run: RunDir, micro_batch: int | None = None) -> str:
    """Return how the configuration that ran differs from the requested one, "" if it does not.

    A difference is allowed if `adjusted` of run_used.json lists it with the value that was used.
    micro_batch: requested by the attempt, None for that of run.json.
    """
    try:
        asked, ran = read_train_values(run), read_used_file(run)
    except RecordError as error:
        return f"cannot check the configuration: {error.what}"
    if micro_batch is not None:
        asked = {**asked, "batch_size": micro_batch}
    adjusted = {change.name: change.used for change in ran.adjusted}
    differences = []
    for name in sorted({*asked, *ran.train} - FORMER):
        was, used = asked.get(name), ran.train.get(name)
        if was == used or (name in AUTO_FIELDS and was is None):
            continue
        if name not in adjusted or adjusted[name] != used:
            differences.append(f"{name} requested {_value(was)}, used {_value(used)}")
    return f"configuration mismatch: {'; '.join(differences)}" if differences else ""


def describe_exit(code: int | None) -> str:
    """Return the meaning of an exit code: -9 and 137 are both signal 9."""
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


def without_report(lines: list[str]) -> list[str]:
    """Return the lines before torchrun's failure report, which hides the last lines of the failed worker."""
    first = next((number for number, line in enumerate(lines) if WORKER_FAILED.match(line)), None)
    # A log that begins with the report has no other lines to show.
    return lines if not first else lines[: first + 1]


def failure_cause(seen: Evidence, kind: str, reason: str) -> FailureCause:
    """Return why an attempt failed. kind, reason: of the rank that failed first.

    A lost GPU explains all other errors. An NCCL error counts only if no rank failed by itself before: the peers of a
    failed rank lose their connections, too.
    """
    gpus = seen.attempt.gpus
    lost = _silent_gpus(seen)
    errors = dict(_rank_errors(seen))
    named = [rank for rank, text in errors.items() if LOST.search(text)]
    if LOST.search(reason):
        named.append(_rank_in(reason))
    if lost or named or LOST.search(seen.log):
        # The recorder knows which GPU is silent; a rank knows only that its own is lost. A single GPU leaves no doubt.
        blamed = lost or tuple(gpus[rank] for rank in dict.fromkeys(named) if rank < len(gpus))
        return FailureCause(GPU_LOST, blamed or (gpus if len(gpus) == 1 else ()))
    # The log counts only if there is no reason of a rank: it also has the errors of peers that failed later.
    own = reason if seen.exit_code is None or kind != DIED else reason + seen.log
    return FailureCause(NCCL if NETWORK.search(own) else kind)


def was_preempted(seen: Evidence) -> bool:
    """Return whether another program than the runner stopped the ranks, and meant to stop the ranks alone.

    A signal to the process in status.json (pid) reaches torchrun, which logs it: such a run stays stopped. None of
    this is known if the runner died.
    """
    if seen.job is None or seen.job.started is None or seen.job.cancelled:
        return False
    return not TORCHRUN_SIGNALLED.search(seen.log)


def _result(seen: Evidence) -> tuple[RunResult | None, str]:
    """Return result.json of this attempt, or None and the damage of the file, "" if there is none."""
    if not seen.run.result.exists():
        return None, ""
    try:
        result = decode(seen.run.result, RunResult)
        run_id = read_run_file(seen.run).run_id
    except RecordError as error:
        return None, f"{error.what}: {error.why}"
    if not result.belongs_to(run_id, seen.attempt.number):
        return None, ""  # of an earlier attempt, or of another configuration
    if result.status not in (Status.FINISHED, Status.FAILED, Status.STOPPED):
        return None, f"result.json has no final status: {result.status!r}"
    return result, ""


def _log_tail(log: str) -> tuple[str, ...]:
    """Return the last lines of a log, without secrets, because reports quote them."""
    # Redact before truncating: a key that is cut in the middle would not be recognized.
    lines = without_report([line for line in redact(log).split("\n") if line.strip()])[-TAIL_LINES:]
    return tuple(line if len(line) <= TAIL_CHARS else line[: TAIL_CHARS - 3] + "..." for line in lines)


def _stop_reason(seen: Evidence, result: RunResult | None) -> str:
    if result is None:
        saved = "the disk was full" if is_full(seen.run.path) else "killed before it could save"
        return f"asked to stop, and {saved}"
    return "asked to stop" if seen.is_cancelled else result.reason or "asked to stop"


def _without_result(seen: Evidence) -> tuple[str, str]:
    """Return kind and reason of an attempt without result.json: from a rank, else from the log and the exit code."""
    kind, reason = _first_rank_error(seen)
    return (kind, reason) if reason else (DIED, _why_no_result(seen))


def _first_rank_error(seen: Evidence) -> tuple[str, str]:
    """Return kind and reason of the rank that failed first, which made the others fail; "" if no rank wrote an error.

    A file without attempt and time is dated by its modification time.
    """
    started = seen.attempt.started or 0.0
    errors = []
    for written, error in read_rank_errors(seen.run):
        late = written >= started - 0.05  # file systems stamp with the kernel's tick, a few ms late
        if late if error.attempt is None else error.attempt == seen.attempt.number:
            reason = f"rank {error.rank}: {error.reason or error.kind}"
            errors.append((error.time or written, error.kind or "error", reason))
    # The earliest error is the cause: its peers lose their connections afterwards.
    return min(errors)[1:] if errors else ("", "")


def _killed(seen: Evidence, reason: str) -> str:
    """Return which process a signal from outside ended, "" if none.

    If the runner died, the exit code is unknown, and torchrun, which ended with it, reports nothing. A rank that
    reports a lost connection and nothing else then had a peer that was killed.
    """
    who, code = _first_to_end(seen)
    number = -code if code < 0 else code - 128
    if not who and seen.exit_code is None and PEER_GONE.search(reason):
        return f"killed with its runner: {reason}"
    return who + describe_exit(code) if number in OUTSIDE else ""


def _first_to_end(seen: Evidence) -> tuple[str, int]:
    """Return "rank r " and its exit code from torchrun's report, else "" and the exit code of torchrun.

    torchrun polls its workers in the order of ranks: it may notice a rank that failed because its peer was killed
    before that peer. So a kill at about that time is preferred to any exit code.
    """
    failures = [(_unix(when), rank, int(code)) for when, rank, code in FAILURE.findall(seen.log)]
    if not failures:
        return "", seen.exit_code or 0
    root = failures[-1]
    # SIGKILL only: a rank never sends it to itself, and its peers die of other signals or exit codes.
    killed = [one for one in failures if one[2] == -signal.SIGKILL and abs(one[0] - root[0]) <= PEERS_S]
    _, rank, code = root if root[2] < 0 or not killed else killed[0]
    return f"rank {rank} ", code


def _unix(when: str) -> float:
    """Return a time in torchrun's format as Unix seconds, 0 for another format."""
    try:
        return datetime.strptime(when, "%Y-%m-%d_%H:%M:%S").timestamp()
    except ValueError:
        return 0.0


def _why_no_result(seen: Evidence) -> str:
    """Return the reason from exit codes and the log. torchrun always exits with 1, but logs the worker's code."""
    who, code = _first_to_end(seen)
    exit_text = who + describe_exit(code if who else seen.exit_code)
    if who and code < 0:
        return exit_text
    exceptions = [found[1] for line in seen.log.split("\n") if (found := EXCEPTION.match(line.strip()))]
    # torchrun's own exception only says that a worker failed.
    exceptions = [text for text in exceptions if "ChildFailedError" not in text]
    return f"{exit_text}: {exceptions[-1][:TAIL_CHARS]}" if exceptions else exit_text


def _value(value: object) -> str:
    return "not set" if value is None else str(value)


def _rank_in(reason: str) -> int:
    """Return the rank that a reason starts with; rank 0 writes its reason without a rank."""
    found = RANK.match(reason)
    return int(found[1]) if found else 0


def _rank_errors(seen: Evidence) -> Sequence[tuple[int, str]]:
    """Return rank and reason of each error file of this attempt."""
    return [
        (error.rank, error.reason or "")
        for _, error in read_rank_errors(seen.run)
        if error.attempt in (None, seen.attempt.number)
    ]


def _silent_gpus(seen: Evidence) -> tuple[str, ...]:
    """Return the GPUs of the attempt that stopped answering the recorder and did not answer again."""
    started = seen.attempt.started or 0.0
    silent: dict[str, None] = {}
    for event in decode_lines(seen.run.gpu_events, EventLine):
        late = event.time >= started
        for uuid in (uuid for uuid in seen.attempt.gpus if late and uuid in (event.text or "")):
            if event.event == "lost":
                silent[uuid] = None
            elif event.event == "found":
                silent.pop(uuid, None)
    return tuple(silent)
