"""Classify how an attempt ended, from the files of its run. Exit codes and logs only explain a missing result."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from functools import cached_property

from kmatrix.errors import RecordError
from kmatrix.records.decode import decode, decode_lines
from kmatrix.records.jobs.paths import NodeDir
from kmatrix.records.jobs.ranks import first_failure, read_ranks
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import (
    RunResult,
    Status,
    read_run_file,
    read_train_values,
    read_used_file,
    read_used_file_or_empty,
)
from kmatrix.records.states import EventLine
from kmatrix.redaction.redactor import redact
from kmatrix.status.disk_space import how_full, is_full
from kmatrix.status.node_ends import (
    WORKER_FAILED,
    NodeEvidence,
    first_node,
    host_of_first,
    other_nodes,
    rank_exits,
    tail_of,
)
from kmatrix.status.state import (
    DIED,
    DISK,
    ELSEWHERE,
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
PEER_GONE = re.compile(r"Connection (?:reset|closed|refused)|Broken pipe")  # errors of a rank that lost a peer

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
        return tail_of(self.run.output_log, self.job.log_start if self.job else 0)

    @cached_property
    def nodes(self) -> tuple[NodeEvidence, ...]:
        """The evidence of each node about this attempt. A run on one node has one, without a host."""
        others = other_nodes(self.run, self.attempt.number)
        host = host_of_first(self.run, self.attempt.number) if others else ""
        first = NodeEvidence(
            node=0, host=host, log=self.log, exits=rank_exits(self.log), started=self.attempt.started or 0.0
        )
        return (first, *others)

    @cached_property
    def logs(self) -> str:
        """The ends of the logs of all nodes."""
        return "".join(node.log for node in self.nodes)

    @cached_property
    def log_of_cause(self) -> str:
        """The end of the log of the node where a rank failed first; that of node 0 if it is not known."""
        found = first_node(self.nodes)
        return found[0].log if found else self.log

    @cached_property
    def gpus(self) -> tuple[str, ...]:
        """The UUIDs of the ranks' GPUs. Over several nodes only the trainer knows all of them."""
        if len(self.nodes) == 1:
            return self.attempt.gpus
        used = read_used_file_or_empty(self.run)
        known = used.attempt == self.attempt.number and used.gpus
        return tuple(gpu.uuid for gpu in used.gpus) if known else self.attempt.gpus


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
    # The place of the run came to its end, not the run itself.
    elif job is not None and job.kind in ELSEWHERE and kind not in OWN_FAULT:
        reason = redact(printable(job.reason or job.kind))
        return RunEnd(status=Status.STOPPED, kind=job.kind, reason=reason, result=result)
    # The engine ended the attempt, or could not start it: it knows why.
    elif job is not None and job.reason and job.kind not in ELSEWHERE:
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
        log_tail=_log_tail(seen.log_of_cause),
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
    for name in sorted({*asked, *ran.train}):
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
    gpus = seen.gpus
    lost = _silent_gpus(seen)
    errors = {state.rank: state.reason or "" for state in read_ranks(seen.run, seen.attempt.number) if state.kind}
    named = [rank for rank, text in errors.items() if LOST.search(text)]
    if LOST.search(reason):
        named.append(_rank_in(reason))
    if lost or named or LOST.search(seen.logs):
        # The recorder knows which GPU is silent; a rank knows only that its own is lost. A single GPU leaves no doubt.
        blamed = lost or tuple(gpus[rank] for rank in dict.fromkeys(named) if rank < len(gpus))
        return FailureCause(GPU_LOST, blamed or (gpus if len(gpus) == 1 else ()))
    # The log counts only if there is no reason of a rank: it also has the errors of peers that failed later.
    own = reason if seen.exit_code is None or kind != DIED else reason + seen.logs
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
        if not read_ranks(seen.run, seen.attempt.number):
            return "asked to stop, and its trainer had not begun"
        saved = "the disk was full" if is_full(seen.run.path) else "it was killed before it could save"
        return f"asked to stop, and {saved}"
    reason = result.reason or "asked to stop"
    signalled = [f"{node.host} got {node.signals[0]}" for node in seen.nodes if node.signals]
    return "asked to stop" if seen.is_cancelled else ": ".join([reason, *signalled[:1]])


def _without_result(seen: Evidence) -> tuple[str, str]:
    """Return kind and reason of an attempt without result.json: from a rank, else from the log and the exit code."""
    return first_failure(seen.run, seen.attempt.number, seen.nodes[0].host) or (DIED, _why_no_result(seen))


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

    Of several nodes, the host is named too: "rank r on n2 ".
    """
    found = first_node(seen.nodes)
    if found is None:
        return "", seen.exit_code or 0
    node, exit_ = found
    on = f"on {node.host or f'node {node.node}'} " if len(seen.nodes) > 1 else ""
    return f"rank {exit_.rank} {on}", exit_.exit_code


def _why_no_result(seen: Evidence) -> str:
    """Return the reason from exit codes and the log. torchrun always exits with 1, but logs the worker's code."""
    who, code = _first_to_end(seen)
    exit_text = who + describe_exit(code if who else seen.exit_code)
    if who and code < 0:
        return exit_text
    exceptions = [found[1] for line in seen.log_of_cause.split("\n") if (found := EXCEPTION.match(line.strip()))]
    # torchrun's own exception only says that a worker failed.
    exceptions = [text for text in exceptions if "ChildFailedError" not in text]
    return f"{exit_text}: {exceptions[-1][:TAIL_CHARS]}" if exceptions else exit_text


def _value(value: object) -> str:
    return "not set" if value is None else str(value)


def _rank_in(reason: str) -> int:
    """Return the rank that a reason starts with; rank 0 writes its reason without a rank."""
    found = RANK.match(reason)
    return int(found[1]) if found else 0


def _silent_gpus(seen: Evidence) -> tuple[str, ...]:
    """Return the GPUs of the attempt that stopped answering the recorder and did not answer again."""
    silent: dict[str, None] = {}
    for node in seen.nodes:
        if node.started is None:
            continue
        # Recorder and attempt have the clock of the same node.
        for event in decode_lines(NodeDir(seen.run, node.node).recording.gpu_events, EventLine):
            late = event.time >= node.started
            for uuid in (uuid for uuid in seen.gpus if late and uuid in (event.text or "")):
                if event.event == "lost":
                    silent[uuid] = None
                elif event.event == "found":
                    silent.pop(uuid, None)
    return tuple(silent)
