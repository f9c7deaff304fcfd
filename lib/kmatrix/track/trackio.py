"""Trackio: write points, device samples and alerts to the database of a project, under stable ids.

Trackio's public `init` and `log` are not used: `log` stores the time of a flush, names identify runs, `init` may ask a
server for the user name. The functions below them accept our times and ids, and ignore an id that exists.
"""

from __future__ import annotations

import contextlib
import io
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kmatrix.errors import LaunchError
from kmatrix.hosts import LOOPBACK, guarded_asgi
from kmatrix.records.paths import MATRIX_PREFIX
from kmatrix.records.runs import Status
from kmatrix.text import make_command
from kmatrix.track.feed import without_copies
from kmatrix.track.page import Page, check_guard, free_port
from kmatrix.track.tracker import DeviceValues, MetricPoint, StoredRun, TrackerAlert, TrackerIdentity

NAME = "trackio"
LOCAL = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
REMOTE = ("TRACKIO_DATASET_ID", "TRACKIO_BUCKET_ID", "SPACE_REPO_NAME")  # enable copies on a server
RESERVED = frozenset({"project", "run", "timestamp", "step", "time", "metrics"})  # stored as __time etc.
# The charts of the page, from its top; by default it begins with the metrics without a slash.
PLOT_ORDER = (
    *("train/loss", "val/loss", "train/*", "val/*", "hellaswag/*"),
    *("core/metric", "core/*", "grad/*", "throughput/*"),
    *("sparsity", "tokens", "elapsed_s", "attempt"),
)


def data_dir(tracking: Path) -> Path:
    """Return the directory of Trackio's databases, inside the results directory."""
    return tracking / NAME


def prepare(folder: Path) -> None:
    """Configure Trackio, before its import, to store data in `folder` and not to contact a server.

    Raises LaunchError for a link in the folder: SQLite follows it, and the folder may be somebody else's.
    """
    for path in (folder, *folder.rglob("*")):
        if path.is_symlink():
            raise LaunchError(
                f"{path} is a link to {path.resolve()}",
                why="Trackio would write there, and the folder may be somebody else's",
                hint="replace the link by what it names, or pass another RESULTS_DIR=",
            )
    os.environ.update(LOCAL, TRACKIO_DIR=str(folder))
    # A variable of the user's shell must not copy these runs to a server.
    for name in REMOTE:
        os.environ.pop(name, None)


class TrackioMirror:
    """One run in Trackio, with our ids for the run and for its points."""

    name = NAME

    def open(self, run: TrackerIdentity) -> StoredRun:
        """Return the rows of this run in the database. Nothing is written before the first point."""
        folder = data_dir(run.tracking)
        prepare(folder)
        from trackio import fragments, utils
        from trackio.sqlite_storage import SQLiteStorage

        # The package reads its variable once, at import.
        if folder != utils.TRACKIO_DIR:
            raise RuntimeError(f"trackio was imported with TRACKIO_DIR={utils.TRACKIO_DIR}, not {folder}")
        SQLiteStorage.validate_project_name(run.project)
        self._run, self._shown, self._config = run, _full_name(run), _config(run)
        self._last: dict[str, Any] | None = None
        self._status: Status | None = None  # the last status written
        self._waiting: list[dict[str, Any]] = []  # device rows that wait for the first point
        self._writer = fragments.FragmentWriter() if utils.get_storage_mode() == "jsonl" else None
        # On a network file system only the dashboard may open the database: send everything, it ignores known ids.
        stored = StoredRun(steps={}) if self._writer else self._stored()
        how = make_command("trackio-view", PROJECT=run.project, RESULTS_DIR=str(run.tracking))
        return replace(stored, link=str(folder), how=how)

    def _stored(self) -> StoredRun:
        """Read the rows of this run from the database, and its displayed name."""
        from trackio.sqlite_storage import SQLiteStorage

        project, own = self._run.project, self._run.id
        self._shown = _shown_name(self._run, SQLiteStorage.get_run_records(project))
        steps: dict[int, dict[str, float]] = {}
        rows = SQLiteStorage.get_logs(project, run_id=own)
        for row in rows:
            steps.setdefault(int(row["step"]), {}).update(_numbers(row))
        if rows:
            newest = max(rows, key=lambda row: int(row["step"]))
            self._last = self._point(newest["step"], newest["timestamp"], _numbers(newest))
            self._config |= {"_Created": rows[0]["timestamp"]}
        times = [_seconds(row["timestamp"]) for row in SQLiteStorage.get_system_logs(project, run_id=own)]
        alerts = SQLiteStorage.get_alerts(project, run_id=own)
        return StoredRun(steps=steps, devices_time=max(times, default=0.0), alerts=len(alerts))

    def configure(self, values: Mapping[str, str]) -> None:
        """Change the configuration, which is sent with the next point, or at the end."""
        self._config |= values
        self._status = None  # what was sent is outdated

    def points(self, points: Sequence[MetricPoint]) -> None:
        """Store points with their original times."""
        entries = [self._point(one.step, _text(one.time), one.values) for one in points]
        if entries:
            self._config.setdefault("_Created", entries[0]["timestamp"])
            self._send_points(entries, Status.RUNNING)
            self._last = entries[-1]
            self.devices(())

    def devices(self, devices: Sequence[DeviceValues]) -> None:
        """Store device samples as system metrics: `gpu/<i>/...` is one curve per device on Trackio's page.

        They wait for the first point, because Trackio shows no curves for a run without points.
        """
        from trackio.fragments import system_metric_record

        for one in devices:
            row = self._row(
                _text(one.time), metrics=without_copies(one.values), log_id=self._row_id(f"gpu/{one.time:.6f}")
            )
            self._waiting.append(system_metric_record(row))
        if self._last and self._waiting:
            self._send(self._waiting)
            self._waiting = []

    def alert(self, alert: TrackerAlert) -> None:
        """Store an alert at the newest step sent."""
        from trackio.fragments import alert_record

        columns = {"title": alert.title, "text": alert.text, "level": str(alert.level)}
        key = self._row_id(f"{alert.time:.6f}/{alert.title}")
        step = self._last and self._last["step"]
        self._send([alert_record(self._row(_text(alert.time), **columns, step=step, alert_id=key))])

    def close(self, status: Status) -> None:
        """Write the final status to the configuration of the run: Trackio has no field for it."""
        if self._last:  # the configuration is sent with a point: repeat the newest one, Trackio ignores its id
            self._send_points([self._last], status)

    def _row_id(self, key: str) -> str:
        """Return the unique id of a row, the same in every attempt. Trackio ignores rows with a known id."""
        return f"{self._run.id}/{key}"

    def _row(self, timestamp: str, **columns: object) -> dict[str, Any]:
        run = {"project": self._run.project, "run": self._shown, "run_id": self._run.id}
        return {**run, "timestamp": timestamp, **columns}

    def _point(self, step: int, timestamp: str, values: Mapping[str, float]) -> dict[str, Any]:
        """Return the row of a step. A second row of the same step with other keys gets another id."""
        # Not Python's hash, which differs between processes.
        keys = zlib.crc32(" ".join(sorted(values)).encode())
        return self._row(timestamp, step=step, metrics=_renamed(values), log_id=self._row_id(f"{step}/{keys:08x}"))

    def _send_points(self, entries: Sequence[dict[str, Any]], status: Status) -> None:
        """Send points, with the configuration if the status changed."""
        from trackio.fragments import metric_record

        records = [metric_record(entry) for entry in entries]
        if status != self._status:
            records[0]["config"] = {**self._config, "status": str(status)}
        self._send(records)
        self._status = status

    def _send(self, records: list[dict[str, Any]]) -> None:
        """Write records to the database; on a network file system, to a file that the dashboard imports."""
        from trackio.fragments import import_records

        if self._writer:
            self._writer.write_local(records)
        else:
            import_records(records)


def _config(run: TrackerIdentity) -> dict[str, object]:
    """Return the configuration of a run. Keys with a leading underscore are reserved by Trackio."""
    symbols = {key.lstrip("_") or key: text for key, text in run.config.items()}
    more = {"id": run.id, "job_type": run.job_type, "tags": list(run.tags)}
    return {**symbols, **more, "_Group": run.group, "_Username": None}


def _shown_name(run: TrackerIdentity, known: Sequence[Mapping[str, str | None]]) -> str:
    """Return the displayed name: the run's name, with the matrix's timestamp if another run already has that name."""
    for record in known:
        if record["id"] == run.id:
            return str(record["name"])
    return _full_name(run) if any(record["name"] == run.name for record in known) else run.name


def _full_name(run: TrackerIdentity) -> str:
    return f"{run.name}-{run.group.removeprefix(MATRIX_PREFIX)}"


def _renamed(values: Mapping[str, float]) -> dict[str, float]:
    """Return values with reserved names prefixed by `__`, as Trackio itself does."""
    return {f"__{key}" if key in RESERVED or key.startswith("__") else key: value for key, value in values.items()}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a row under their original names."""
    values = {key: value for key, value in row.items() if key not in RESERVED and isinstance(value, int | float)}
    return {key.removeprefix("__"): float(value) for key, value in values.items()}


def _text(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="microseconds")


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def known_projects(folder: Path) -> list[str]:
    """Return the projects with a database, ordered by their newest point."""
    return [path.stem for path in sorted(folder.glob("*.db"), key=_newest)]


def import_inbox(folder: Path) -> None:
    """Import files that runs wrote on a network file system into the databases. A running server does so as well."""
    if any(folder.glob("inbox/*/*.jsonl")):
        prepare(folder)
        from trackio.fragments import import_inbox_dir

        import_inbox_dir()


@contextlib.contextmanager
def served(folder: Path, port: int) -> Iterator[Page]:
    """Serve the page on the first free port from `port` upward, until the context exits."""
    prepare(folder)
    os.environ.setdefault("TRACKIO_PLOT_ORDER", ",".join(PLOT_ORDER))
    os.environ["GRADIO_SERVER_PORT"] = str(free_port(port))  # Gradio tries the following ports itself
    import trackio

    try:
        with _guarded(trackio), contextlib.redirect_stdout(io.StringIO()):  # its output contains the token
            server, url, _, _ = trackio.show(
                open_browser=False, block_thread=False, host=LOOPBACK[0], share=False, mcp_server=False
            )
    except (OSError, RuntimeError, sqlite3.Error) as error:
        raise LaunchError(
            f"cannot serve a page of {folder}",
            why=f"Trackio: {error}",
            hint="move a damaged database away and run make track-sync TRACKER=trackio TARGET=<matrix>",
        ) from None
    try:
        found = urlsplit(url).port or port
        check_guard(found)
        yield Page(url=f"http://{LOOPBACK[0]}:{found}/", port=found, pid=os.getpid(), token=server.write_token)
    finally:
        server.close()


@contextlib.contextmanager
def _guarded(trackio: Any) -> Iterator[None]:
    """Check the Host header in front of the page, which runs read-only SQL without a token."""
    launch = trackio.launch_trackio_dashboard  # Trackio has no setting for accepted hosts

    def guarded(app: Any, **options: Any) -> Any:
        return launch(guarded_asgi(app), **options)

    trackio.launch_trackio_dashboard = guarded
    try:
        yield
    finally:
        trackio.launch_trackio_dashboard = launch


def _newest(database: Path) -> tuple[str, str]:
    """Return the time of the newest point of a project, and its name.

    The file's modification time does not help: a server touches every file when it starts.
    """
    try:
        # Read-only: the default mode creates a missing database.
        with contextlib.closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as opened:
            row = opened.execute("SELECT timestamp FROM metrics ORDER BY id DESC LIMIT 1").fetchone()
    except sqlite3.Error:
        row = None
    return (row[0] if row else "", database.stem)
