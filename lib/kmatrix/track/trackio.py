"""Trackio: points, devices and alerts of a run in its project's database, under ids of ours, so that none is twice.

Trackio's own `init` and `log` are not used: `log` stamps the time of a flush, names are its identities, and `init` may
ask a server who the user is. What they are built on takes our times and ids, and ignores an id that it has.
"""

from __future__ import annotations

import os
import re
import shlex
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kmatrix.records import MATRIX_PREFIX, Status
from kmatrix.track.values import Alert, Devices, Identity, Point, Stored

NAME = "trackio"
LOCAL = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
REMOTE = ("TRACKIO_DATASET_ID", "TRACKIO_BUCKET_ID", "SPACE_REPO_NAME")  # copies on a server, kept up by every write
RESERVED = frozenset({"project", "run", "timestamp", "step", "time", "metrics"})  # Trackio calls ours __time and so on
FLAT = re.compile(r"gpu_\d+_memory")  # the same as gpu/<i>/..., for trackers without a view of devices


def data_dir(tracking: Path) -> Path:
    """Return where Trackio keeps every project of a folder of results: it moves with them."""
    return tracking / NAME


def prepare(folder: Path) -> None:
    """Let Trackio, which is imported after this, keep its data in `folder`, and reach no other machine."""
    os.environ.update(LOCAL, TRACKIO_DIR=str(folder))
    for name in REMOTE:
        os.environ.pop(name, None)


class Mirror:
    """One run in Trackio. Its id there is ours, and so are those of its points."""

    name = NAME

    def open(self, run: Identity) -> Stored:
        """Find what the database holds of this run. Nothing is written before the first point."""
        folder = data_dir(run.tracking)
        prepare(folder)
        from trackio import fragments, utils
        from trackio.sqlite_storage import SQLiteStorage

        if folder != utils.TRACKIO_DIR:
            raise RuntimeError(f"this process has imported trackio for {utils.TRACKIO_DIR}")
        SQLiteStorage.validate_project_name(run.project)
        self._run, self._shown, self._config = run, _full_name(run), _config(run)
        self._last: dict[str, Any] | None = None
        self._told: Status | None = None
        self._waiting: list[dict[str, Any]] = []  # devices
        self._writer = fragments.FragmentWriter() if utils.get_storage_mode() == "jsonl" else None
        # On a network's disk only a dashboard may touch the database: all goes again, and it sorts out what it has.
        stored = Stored(steps={}) if self._writer else self._stored()
        how = f"make trackio-view PROJECT={run.project} RESULTS_DIR={shlex.quote(str(run.tracking))}"
        return replace(stored, link=str(folder), how=how)

    def _stored(self) -> Stored:
        """Read what the database holds of this run, and under which name."""
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
        return Stored(steps=steps, devices_time=max(times, default=0.0), alerts=len(alerts))

    def points(self, points: Sequence[Point]) -> None:
        """Store points under their own times."""
        entries = [self._point(one.step, _text(one.time), one.values) for one in points]
        if entries:
            self._config.setdefault("_Created", entries[0]["timestamp"])
            self._send_points(entries, Status.RUNNING)
            self._last = entries[-1]
            self.devices(())

    def devices(self, devices: Sequence[Devices]) -> None:
        """Store what the GPUs did as system metrics: `gpu/<i>/...` is a line for each device on Trackio's page.

        Before the first point they are kept back: a run is its points there, and a page without one shows no curves.
        """
        from trackio.fragments import system_metric_record

        for one in devices:
            kept = {key: value for key, value in one.values.items() if not FLAT.fullmatch(key)}
            row = self._row(_text(one.time), metrics=kept, log_id=self._own(f"gpu/{one.time:.6f}"))
            self._waiting.append(system_metric_record(row))
        if self._last and self._waiting:
            self._send(self._waiting)
            self._waiting = []

    def alert(self, alert: Alert) -> None:
        """Store an alert, at the newest step that was sent."""
        from trackio.fragments import alert_record

        said = {"title": alert.title, "text": alert.text, "level": str(alert.level)}
        key = self._own(f"{alert.time:.6f}/{alert.title}")
        step = self._last and self._last["step"]
        self._send([alert_record(self._row(_text(alert.time), **said, step=step, alert_id=key))])

    def close(self, status: Status) -> None:
        """Write how the run ended into its configuration: Trackio has no other place for it."""
        if self._last:  # a configuration comes with a point: the newest once more, which is ignored
            self._send_points([self._last], status)

    def _own(self, key: str) -> str:
        """Return an id that this row alone has, in every attempt: Trackio ignores a row whose id it has."""
        return f"{self._run.id}/{key}"

    def _row(self, timestamp: str, **columns: object) -> dict[str, Any]:
        run = {"project": self._run.project, "run": self._shown, "run_id": self._run.id}
        return {**run, "timestamp": timestamp, **columns}

    def _point(self, step: int, timestamp: str, values: Mapping[str, float]) -> dict[str, Any]:
        """Return the row of a step; a further row of it, with other keys, is another."""
        keys = zlib.crc32(" ".join(sorted(values)).encode())
        return self._row(timestamp, step=step, metrics=_renamed(values), log_id=self._own(f"{step}/{keys:08x}"))

    def _send_points(self, entries: Sequence[dict[str, Any]], status: Status) -> None:
        """Send points; where the status is a new one, with the configuration that says it."""
        from trackio.fragments import metric_record

        records = [metric_record(entry) for entry in entries]
        if status != self._told:
            records[0]["config"] = {**self._config, "status": str(status)}
        self._send(records)
        self._told = status

    def _send(self, records: list[dict[str, Any]]) -> None:
        """Put records into the database; on a network's disk, into a file of our own that a dashboard takes in."""
        from trackio.fragments import import_records

        if self._writer:
            self._writer.write_local(records)
        else:
            import_records(records)


def _config(run: Identity) -> dict[str, object]:
    """Return what Trackio groups and compares runs by. Keys with a leading underscore are its own."""
    ours = {key.lstrip("_") or key: text for key, text in run.config.items()}
    more = {"id": run.id, "job_type": run.job_type, "tags": list(run.tags)}
    return {**ours, **more, "_Group": run.group, "_Username": None}


def _shown_name(run: Identity, known: Sequence[Mapping[str, str | None]]) -> str:
    """Return the run's name on the page: its directory's, with the matrix's time where another run has that already."""
    for record in known:
        if record["id"] == run.id:
            return str(record["name"])
    return _full_name(run) if any(record["name"] == run.name for record in known) else run.name


def _full_name(run: Identity) -> str:
    return f"{run.name}-{run.group.removeprefix(MATRIX_PREFIX)}"


def _renamed(values: Mapping[str, float]) -> dict[str, float]:
    """Return values under names that Trackio leaves alone, renamed as it does it itself."""
    return {f"__{key}" if key in RESERVED or key.startswith("__") else key: value for key, value in values.items()}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the values of a row under our names."""
    values = {key: value for key, value in row.items() if key not in RESERVED and isinstance(value, int | float)}
    return {key.removeprefix("__"): float(value) for key, value in values.items()}


def _text(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="microseconds")


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
