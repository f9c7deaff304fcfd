"""W&B: send a run to its server if an API key is configured, else write files that `make track-sync` uploads later."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kmatrix.gpu.processes import ProcessHandle, processes_with
from kmatrix.records.files import write_bytes
from kmatrix.records.runs import Status, merged_metrics
from kmatrix.redaction.redactor import redact
from kmatrix.text import make_command
from kmatrix.track.feed import means
from kmatrix.track.tracker import (
    NODES,
    DeviceValues,
    MetricPoint,
    StoredRun,
    TrackerAlert,
    TrackerIdentity,
    number_or_text,
)

if TYPE_CHECKING:
    import wandb


INIT_S = 20.0  # timeout for a server that does not answer (W&B: 90 s)
FLUSH_S = 2.0  # until a row is in the file: the most that a kill loses (W&B: 15 s)

QUIET_SERVICE = {  # environment of W&B's package and service: no output, no error reports
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
}

# Metrics whose summary is the best value instead of the last one.
CHOICES: dict[str, Callable[[float, float], float]] = {"min": min, "max": max}
SUMMARY = {"val/loss": "min", "hellaswag/accuracy": "max", "hellaswag/accuracy_norm": "max", "core/metric": "max"}
# What W&B shows as failed, and as killed: its package reports Ctrl+C as 255 (wandb/sdk/lib/exit_hooks.py).
EXIT_CODES = {Status.FAILED: 1, Status.STOPPED: 255}
AXES = ("tokens", "elapsed_s")  # x axes of charts, in addition to the step
WITHOUT_CHART = (*AXES, "attempt")  # W&B draws no chart of these unless asked: a page opens on the losses


class WandbMirror:
    """One run in W&B. Each step is a row, which includes the means of the device samples since the previous row.

    W&B sends a row when the next one begins, or at the end. Until then, values can be added to its step.
    """

    def __init__(self) -> None:
        self._identity: TrackerIdentity | None = None
        self._run: wandb.Run | None = None
        self._before = WandbRun()
        self._config: dict[str, str] = {}  # in addition to that of the identity
        self._since: list[DeviceValues] = []
        self._last: MetricPoint | None = None
        self._summary = RunSummary()
        self._stopped = False

    @property
    def name(self) -> str:
        return "wandb"

    def open(self, run: TrackerIdentity) -> StoredRun:
        """Create or resume the run. Return the steps of the server if online, else those of the local files.

        Offline, an existing run is initialized by the first write, because W&B creates a directory each time.
        Raises any exception of W&B: no connection, an invalid key, a directory that is not writable.
        """
        mode = _prepare(offline=run.config.get("WANDB_OFFLINE") == "y" and os.environ.get("WANDB_MODE") != "online")
        # Disabled, W&B accepts everything and stores nothing: steps would count as sent.
        if mode == "disabled":
            raise ConnectionError("W&B is disabled by WANDB_MODE=disabled")
        # Before the files or the server are read: it may still add rows to them.
        end_orphans(run.dir.path)
        files = WandbFiles(run.dir.path, run.id)
        self._identity, self._run = run, None
        self._before = files.read(run.project, uploaded=mode != "offline")
        self._since, self._last, self._stopped = [], None, False
        self._summary = RunSummary()
        for step, row in _known_rows(run, self._before):
            self._summary.add(step, row)
        stored = StoredRun(steps=self._before.steps, devices_time=self._before.time, alerts=self._before.alerts)
        if mode != "offline":
            return replace(stored, steps=self._on_server(run, self._begun), link=self._begun.url)
        if not self._before.sessions:
            self._begin(run)
        return replace(stored, link=str(files.folder), how=_upload_command(run))

    def configure(self, values: Mapping[str, str]) -> None:
        """Change the configuration; that of a run without new rows stays, because a write makes a directory."""
        self._config |= values
        if self._run is not None:
            self._run.config.update(typed(values), allow_val_change=True)  # type: ignore[no-untyped-call]

    def points(self, points: Sequence[MetricPoint]) -> None:
        """Log rows. The last row stays open for device samples until the next one."""
        for point in points:
            self._row(point)
        if points:
            self._begun.summary.update(self._summary.values())

    def devices(self, devices: Sequence[DeviceValues]) -> None:
        """Keep device samples for the next row."""
        self._since.extend(devices)

    def alert(self, alert: TrackerAlert) -> None:
        """Send an alert. W&B's server forwards it by mail or Slack to users who enabled that."""
        self._begun.alert(title=alert.title, text=alert.text, level=alert.level.name)

    def close(self, status: Status) -> None:
        """Finish the run as finished, failed or killed; `status` in the summary is its own.

        Raises OSError if W&B stopped sending or wrote less than it was given: it reports that only in its own log.
        """
        if self._run is None and self._before.status == status:
            return  # nothing was added
        run, self._run, files = self._begun, None, WandbFiles(self._known.dir.path, self._known.id)
        log = Path(run.settings.log_internal)
        if self._last is not None and self._since:
            self._log(run, self._last, self._since)
        run.summary.update({**self._summary.values(), "status": str(status)})
        run.finish(exit_code=EXIT_CODES.get(status, 0))
        if refusal := fatal_error(log):
            raise ConnectionError(refusal)
        if run.offline:
            self._read_back(files)
        else:
            mark_synced({*self._before.sessions, *files.sessions[-1:]})

    @property
    def _known(self) -> TrackerIdentity:
        if self._identity is None:
            raise RuntimeError("call open() first")
        return self._identity

    @property
    def _begun(self) -> wandb.Run:
        if self._run is None:
            self._run = self._begin(self._known)
        return self._run

    def _begin(self, run: TrackerIdentity) -> wandb.Run:
        import wandb

        keep_logs_private(wandb.Settings)
        self._run = wandb.init(
            project=run.project,
            entity=run.config.get("WANDB_ENTITY") or None,
            id=run.id,
            name=run.name,
            group=run.group,
            job_type=run.job_type,
            tags=run.tags,
            config=typed({**run.config, **self._config}),
            dir=str(run.dir.path),
            # Continue the run if the server has this id, else create it.
            resume="allow",
            settings=_settings(self._note_stop),
        )
        # By default W&B's tables show the last value of a metric.
        for key, summary in SUMMARY.items():
            self._run.define_metric(key, summary=summary)
        for axis in WITHOUT_CHART:
            self._run.define_metric(axis, hidden=True)
        return self._run

    def _row(self, point: MetricPoint) -> None:
        if self._stopped:
            raise ConnectionError("W&B stopped sending: the server rejected a row, or the run was stopped on its page")
        # A batch has the samples of all its points.
        until = [devices for devices in self._since if devices.time <= point.time]
        self._since = self._since[len(until) :]
        self._log(self._begun, point, until)
        self._last = point

    def _log(self, run: wandb.Run, point: MetricPoint, devices: Sequence[DeviceValues]) -> None:
        """Log the row of a step: its metrics, and the means of the device samples since the previous row."""
        values = {**point.values, **means(devices)}
        run.log({**values, "_timestamp": point.time}, step=point.step)
        self._summary.add(point.step, values)

    def _on_server(self, run: TrackerIdentity, begun: wandb.Run) -> dict[int, Mapping[str, float]]:
        """Return the steps that the server has: those below its starting step, which it does not accept again."""
        known = self._before.steps
        # The server does not list its steps, and refuses smaller ones than its last: these count as sent.
        steps = {line.step for line in merged_metrics(run.dir.metrics)} | set(known)
        return {step: known.get(step, {}) for step in steps if step < begun.starting_step}

    def _read_back(self, files: WandbFiles) -> None:
        if self._last is not None and files.is_missing(self._last.step):
            raise OSError(f"step {self._last.step} is missing in {files.folder}: disk full or directory not writable")

    def _note_stop(self) -> None:
        """Remember that W&B stopped sending. The run continues; the next row raises."""
        self._stopped = True


def _prepare(*, offline: bool) -> str:
    """Configure W&B's package and return its mode: offline if no mode is set and no API key is configured."""
    os.environ.update({**QUIET_SERVICE, "WANDB_MODE": "offline"} if offline else QUIET_SERVICE)
    os.environ.pop("WANDB_SERVICE", None)  # set if a W&B program started this process: do not share its service
    import wandb

    logging.raiseExceptions = False  # on a full disk, W&B's log would print a traceback per line
    with suppress(Exception):  # after a failed try in this process: a dead service, a run that was not initialized
        wandb.teardown()
    mode = os.environ.get("WANDB_MODE")
    if not mode and not wandb.login(prompt=False, verify=False):  # not wandb.setup: it hangs if the service dies early
        wandb.teardown()
        os.environ["WANDB_MODE"] = mode = "offline"
    return "offline" if mode == "dryrun" else mode or "online"


def _upload_command(run: TrackerIdentity) -> str:
    """Return the command that uploads an offline run once a key is configured.

    Not `wandb sync`: it uploads the session of a killed process up to the tear, exits with 0 and appends the same rows
    again at the next try; and it renumbers the steps of the second of two sessions.
    """
    command = make_command("track-sync", TARGET=str(run.dir.path.parent), TRACKER="wandb")
    return f"WANDB_MODE=online {command}" if run.config.get("WANDB_OFFLINE") == "y" else command


OWNER = "KMATRIX_WANDB_RUN"  # environment variable that marks W&B's service as that of one run directory
SERVICE = "wandb-core"  # name of that process
ORPHAN_S = 10.0  # for a killed process to exit


def end_orphans(run: Path) -> None:
    """Kill W&B's services of earlier tracker processes of a run, and mark those that this process starts.

    A service has its own session, so it survives the kill of its tracker process for a while, and writes and uploads
    what it has. Raises TimeoutError if one does not exit.
    """
    folder = run.stat()
    # Not the path: a copy of the directory is another run, a renamed one is the same.
    owner = f"{folder.st_dev}:{folder.st_ino}"
    for pid in processes_with(SERVICE, OWNER, owner):
        service = ProcessHandle(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + ORPHAN_S
        while service.is_alive():
            if time.monotonic() > deadline:
                raise TimeoutError(f"W&B's service of an earlier tracker process (pid {pid}) does not exit")
            time.sleep(0.01)
    os.environ[OWNER] = owner


def _settings(stopped: Callable[[], None]) -> wandb.Settings:
    """Return settings with which W&B collects nothing from this machine.

    Command line, packages, code and git remote could contain private data.
    """
    import wandb

    return wandb.Settings(
        init_timeout=INIT_S,
        silent=True,
        console="off",
        disable_code=True,
        save_code=False,
        disable_git=True,
        label_disable=True,
        stop_fn=stopped,
        stop_on_fatal_error=True,
        symlink=False,
        x_disable_machine_info=True,
        x_disable_meta=True,
        x_disable_stats=True,
        # Else its service writes its own summary, with the time of this process as the run's Runtime.
        x_server_side_derived_summary=True,
        x_save_requirements=False,
        x_transaction_log_flush_interval=FLUSH_S,
    )


class RunSummary:
    """The summary of a run: the last value of each metric, the best of some, and the run's own time.

    W&B shows `_wandb.runtime` as the Runtime of a run: https://github.com/wandb/wandb/pull/2457.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._best: dict[str, float] = {}
        self._losses: dict[int, float] = {}  # step -> nats/token

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add values of a step. Steps are added in ascending order."""
        self._last.update(values)
        for key, choose in SUMMARY.items():
            if key in values and not isnan(values[key]):
                self._best[key] = CHOICES[choose](values[key], self._best.get(key, values[key]))
        if "val/loss" in values:
            self._losses[step] = values["val/loss"]

    def values(self) -> dict[str, Any]:
        """Return the summary, as W&B's own would be."""
        best_values = {key: {SUMMARY[key]: value} for key, value in self._best.items()}
        seconds = self._last.get("elapsed_s")
        runtime = {} if seconds is None else {"_runtime": seconds, "_wandb": {"runtime": round(seconds)}}
        return {**self._last, **best_values, **best(self._losses), **runtime}


def _known_rows(run: TrackerIdentity, before: WandbRun) -> Iterator[tuple[int, Mapping[str, float]]]:
    """Yield the rows so far: those that W&B has, completed by the run's own file, in ascending order of steps."""
    own = {
        line.step: {key: v for key, v in line.values.items() if v is not None}
        for line in merged_metrics(run.dir.metrics)
    }
    for step in sorted({*before.steps, *own}):
        row = {key: v for key, v in before.steps.get(step, {}).items() if not key.startswith("_")}
        yield step, {**row, **own.get(step, {})}


def best(losses: Mapping[int, float]) -> dict[str, float]:
    """Return the summary of the validation losses, empty without any. `losses`: step -> nats/token."""
    known = {step: loss for step, loss in losses.items() if not isnan(loss)}
    if not known:
        return {}
    step = min(known, key=known.__getitem__)
    return {"final_val_loss": losses[max(losses)], "best_val_loss": known[step], "best_val_step": step}


def typed(config: Mapping[str, str]) -> dict[str, str | int | float]:
    """Return a configuration with numbers as numbers, so that W&B can sort and plot them. Ids stay text."""
    return {name: number_or_text(text) if name.isupper() or name == NODES else text for name, text in config.items()}


_private_logs: list[Path] = []  # the directory of this process, once it exists


def keep_logs_private(settings: type[wandb.Settings]) -> None:
    """Move W&B's debug logs to a directory that only this user can read, outside the results.

    They have the answers of servers as they came, which may be an echo of the key, and W&B has no setting for their
    place. `publish_logs` copies them without keys; after a SIGKILL, they are in no shared directory.
    """
    if not _private_logs:
        _private_logs.append(Path(tempfile.mkdtemp(prefix="kmatrix-wandb-")))
    folder = _private_logs[0]
    settings.log_dir = property(lambda self: str(folder / Path(self.sync_dir).name))  # type: ignore[assignment]


def publish_logs(run: Path) -> None:
    """Copy W&B's debug logs of this process to their usual place in a run, redacted, and delete the originals."""
    for folder in _private_logs:
        for log in folder.glob("*/*.log"):
            with suppress(OSError):  # a full disk must not keep the process from exiting
                target = run / "wandb" / log.parent.name / "logs" / log.name
                target.parent.mkdir(parents=True, exist_ok=True)
                # surrogateescape: bytes that are not UTF-8 are written back unchanged.
                text = redact(log.read_bytes().decode(errors="surrogateescape"))
                write_bytes(target, text.encode(errors="surrogateescape"))
        shutil.rmtree(folder, ignore_errors=True)
    _private_logs.clear()


READ_S = 120.0  # timeout for one directory; 20,000 rows of 26 values take 11 s on a busy machine
QUIET = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}  # the reader must not contact a server


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbRun:
    """The content of the local files of a W&B run."""

    sessions: Sequence[Path] = ()  # directories, oldest first
    steps: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # step -> metrics
    time: float = 0.0  # Unix s, the newest row
    alerts: int = 0  # number of alerts
    status: str = ""  # the final status of the last session, empty if it was killed


@dataclass(frozen=True, slots=True)
class WandbFiles:
    """The directories of one W&B run, one per session, below the directory of a run."""

    run: Path  # the directory of the run
    id: str | None = None  # of the W&B run; None matches any

    @property
    def folder(self) -> Path:
        return self.run / "wandb"

    @property
    def sessions(self) -> list[Path]:
        """The directories of all sessions, oldest first: offline-run-<date>-<id> and run-<date>-<id>."""
        found = self.folder.glob(f"*run-*-*/run-{self.id or '*'}.wandb")
        return sorted((path.parent for path in found), key=lambda session: session.name.removeprefix("offline-"))

    def read(self, project: str = "", *, uploaded: bool = False) -> WandbRun:
        """Read all sessions, up to the last complete record of each. Later sessions override earlier ones.

        project: only its sessions. uploaded: the content of only those that the server was sent.
        """
        sessions: list[Path] = []
        steps: dict[int, Mapping[str, float]] = {}
        alerts: set[tuple[str, str]] = set()  # an alert of an offline session is sent again by the upload
        status = ""
        for session in self.sessions:
            content = _read_session(session)
            if project and content.project not in ("", project):
                continue
            sessions.append(session)
            if uploaded and not _was_uploaded(session):
                continue
            steps |= {step: {**steps.get(step, {}), **row} for step, row in content.steps.items()}
            alerts |= content.alerts
            status = content.status
        newest = max((row.get("_timestamp", 0.0) for row in steps.values()), default=0.0)
        return WandbRun(
            sessions=sessions, steps=dict(sorted(steps.items())), time=newest, alerts=len(alerts), status=status
        )

    def is_missing(self, step: int) -> bool:
        """Return whether the newest session has no row of a step.

        If W&B cannot write to the directory, it writes to a temporary one without an error.
        """
        newest = records(self.sessions[-1]) if self.sessions else ()
        return all(record["history"]["item"].get("_step") != step for record in newest if "history" in record)


@dataclass(slots=True)
class _Session:
    """The content of one session."""

    project: str = ""  # empty if its process was killed before it was written
    steps: dict[int, dict[str, float]] = field(default_factory=dict)  # step -> metrics
    alerts: set[tuple[str, str]] = field(default_factory=set)  # title and text
    status: str = ""  # the final status, empty if its process was killed


def _read_session(session: Path) -> _Session:
    found = _Session()
    for record in records(session):
        if "run" in record:
            found.project = str(record["run"].get("project", ""))
        elif "history" in record:
            row = numbers(record["history"].get("item", {}))
            if "_step" in row:
                found.steps.setdefault(int(row.pop("_step")), {}).update(row)
        elif "alert" in record:
            found.alerts.add((str(record["alert"].get("title")), str(record["alert"].get("text"))))
        elif "summary" in record:
            found.status = str(record["summary"].get("update", {}).get("status") or found.status)
    return found


def _was_uploaded(session: Path) -> bool:
    """Return whether the server was sent a session: while it was written, or later."""
    return not session.name.startswith("offline-") or any(session.glob("*.synced"))


def mark_synced(sessions: Iterable[Path]) -> None:
    """Mark sessions as synced, so that `wandb sync` skips them: the server has their content."""
    for session in sessions:
        for path in session.glob("run-*.wandb"):
            path.with_name(f"{path.name}.synced").touch()


def records(session: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of one session, as printed by `wandb leet inspect --json`.

    Raises TimeoutError after READ_S.
    """
    began = time.monotonic()
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(session)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env={**os.environ, **QUIET}, **pipes) as reader:
        # Reading a pipe has no timeout: the timer ends it by killing the writer.
        limit = threading.Timer(READ_S, reader.kill)
        limit.start()
        try:
            for line in reader.stdout or ():
                yield json.loads(line)
        finally:
            limit.cancel()
            reader.kill()
    if time.monotonic() - began >= READ_S:
        raise TimeoutError(f"{session} was not read within {READ_S:.0f} s")


def fatal_error(log: Path) -> str:
    """Return the fatal error in the log of W&B's service, empty if there is none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = [line for line in lines if '"msg":"' in line and "fatal error: " in line]
    return str(json.loads(found[0])["msg"]).partition("fatal error: ")[2] if found else ""


def numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row. W&B writes non-finite ones as the strings NaN, Infinity and -Infinity."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[key] = value
        elif value in ("NaN", "Infinity", "-Infinity"):
            found[key] = float(value)
    return found
