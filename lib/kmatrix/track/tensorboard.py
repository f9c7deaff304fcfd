"""TensorBoard: write event files in <matrix>/tb/<run>, read them back, and serve their page."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kmatrix.hosts import LOOPBACK, guarded_wsgi
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.track.feed import means, without_copies
from kmatrix.track.page import Page, check_guard, free_port
from kmatrix.track.tracker import (
    DeviceValues,
    MetricPoint,
    StoredRun,
    TrackerAlert,
    TrackerIdentity,
    number_or_text,
)

ALERTS, CONFIG, STATUS = "alerts", "config", "status"  # tags of text summaries
FILES = "*tfevents*"
GPU = ("gpu/", "gpu_")  # prefixes of the tags of device values

# The charts of the tab "Custom scalars": category -> title -> patterns of tags.
LAYOUT: dict[str, dict[str, tuple[str, ...]]] = {
    "loss": {"loss (nats/token)": ("train/loss", "val/loss")},
    "training": {"learning rate": ("train/lr",), "gradient norm": ("grad/norm",)},
    "speed": {"tokens/s": ("throughput/tokens_per_s",), "MFU": ("throughput/mfu",)},
    "devices": {
        "utilization (percent)": (r"gpu/\d+/utilization",),
        "memory (MiB)": (r"gpu/\d+/memory_used",),
        "power (W)": (r"gpu/\d+/power",),
    },
}
# The columns of the tab "HParams", in addition to the axes of the matrix: name -> symbol.
HPARAMS = {
    "optimizer": "GPT2_OPTIMIZER",
    "learning_rate": "GPT2_LEARNING_RATE",
    "weight_decay": "GPT2_WEIGHT_DECAY",
    "batch_size": "GPT2_BATCH_SIZE",
    "max_iters": "GPT2_MAX_ITERS",
    "seed": "GPT2_SEED",
}
RESULTS = {"val/loss": "val loss", "train/loss": "train loss", "throughput/tokens_per_s": "tokens/s"}


class TensorBoardMirror:
    """One run in TensorBoard. Each attempt adds an event file; TensorBoard reads all files of a directory in order.

    Device samples have no step. Their means since the previous point are written at the step of the next point; samples
    after the last point are dropped.
    """

    name = "tensorboard"

    def __init__(self) -> None:
        self._folder = Path()
        self._writer: Any = None
        self._devices: list[DeviceValues] = []
        self._step = 0
        self._run: TrackerIdentity | None = None
        self._table = self._status = ""  # the last configuration and status written

    def open(self, run: TrackerIdentity) -> StoredRun:
        """Return the content of the event files. A new file is created by the first write."""
        self._run, self._folder = run, MatrixDir(run.dir.path.parent).tensorboard / run.name
        self._folder.mkdir(parents=True, exist_ok=True)
        # The configuration once, and not again when an attempt resumes.
        if not any(self._folder.glob(FILES)):
            now, self._table = time.time(), _table(run)
            self._text(CONFIG, self._table, time=now)
            for summary in (_layout(), *_hparams(run, now)):
                self._event(now, 0, summary)
            self._flush()
            return StoredRun(steps={}, link=str(self._folder))
        stored, self._table, self._status = _stored(self._folder)
        self._step = max(stored.steps, default=0)
        return stored

    def configure(self, values: Mapping[str, str]) -> None:
        """Write the configuration again, unless it is the last one that was written."""
        if self._run is None:
            raise RuntimeError("call open() first")
        table = _table(replace(self._run, config={**self._run.config, **values}))
        if table != self._table:
            self._table = table
            self._text(CONFIG, table, time=time.time())

    def points(self, points: Sequence[MetricPoint]) -> None:
        for point in points:
            before = [devices for devices in self._devices if devices.time <= point.time]
            self._devices = self._devices[len(before) :]
            self._step = point.step
            self._write(point.time, point.step, {**point.values, **without_copies(means(before))})
        self._flush()

    def devices(self, devices: Sequence[DeviceValues]) -> None:
        self._devices += devices

    def alert(self, alert: TrackerAlert) -> None:
        self._text(ALERTS, f"**{alert.title}** ({alert.level}): {alert.text}", time=alert.time)

    def close(self, status: Status) -> None:
        if self._status != status:
            self._text(STATUS, str(status), time=time.time())
        # Once: of several, TensorBoard shows the first, and a stopped or failed run may be continued.
        if status is Status.FINISHED and self._status != status:
            self._event(time.time(), self._step, _session_end(time.time()))
        if self._writer is not None:
            self._writer.close()

    def _write(self, time: float, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        self._event(time, step, summary)

    def _text(self, tag: str, text: str, *, time: float) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._event(time, self._step, text_pb(tag, text))
        self._flush()

    def _event(self, time: float, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if self._writer is None:
            self._writer = _writer(self._folder)
        self._writer.write(Event(wall_time=time, step=step, summary=summary).SerializeToString())

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()


def _writer(folder: Path) -> Any:
    """Return the writer of a new event file. Its name sorts last: TensorBoard reads files in order of names."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    number = len(list(folder.glob(FILES)))
    name = f"events.out.tfevents.{int(time.time()):010d}.{number:04d}.{socket.gethostname()}"
    writer = RecordWriter((folder / name).open("xb"))
    # Every event file begins with this record; without it, readers reject the file.
    writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
    writer.flush()
    return writer


def _stored(folder: Path) -> tuple[StoredRun, str, str]:
    """Return the content of a directory as TensorBoard reads it, the last configuration and the last status written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0: all values, not a sample of them. Nothing is purged if a resumed attempt starts at a lower step.
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False)
    reader.Reload()
    tags = reader.Tags()
    steps: dict[int, dict[str, float]] = {}
    devices_time = 0.0
    for tag in tags["scalars"]:
        for event in reader.Scalars(tag):
            if tag.startswith(GPU):
                devices_time = max(devices_time, event.wall_time)
            else:
                steps.setdefault(event.step, {})[tag] = event.value
    alerts, tables, statuses = ([_content(event) for event in _texts(reader, tag)] for tag in (ALERTS, CONFIG, STATUS))
    stored = StoredRun(steps=steps, devices_time=devices_time, alerts=len(alerts), link=str(folder))
    return stored, tables[-1] if tables else "", statuses[-1] if statuses else ""


def _texts(reader: Any, tag: str) -> Sequence[Any]:
    return reader.Tensors(tag) if tag in reader.Tags()["tensors"] else []


def _content(event: Any) -> str:
    return str(event.tensor_proto.string_val[0].decode())


def _table(run: TrackerIdentity) -> str:
    """Return the identity and configuration of a run as a Markdown table."""
    rows = [("project", run.project), ("group", run.group), ("id", run.id), ("tags", ", ".join(run.tags))]
    return "\n".join(["| symbol | value |", "|---|---|", *_rows([*rows, *sorted(run.config.items())])])


def _rows(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    for name, text in pairs:
        yield f"| {name} | {json.dumps(text)[1:-1].replace('|', chr(92) + '|')} |"


def _layout() -> Any:
    """Return the summary with the charts of the tab "Custom scalars"."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    # Its patterns match the start of a tag.
    categories = [
        layout_pb2.Category(
            title=category,
            chart=[
                layout_pb2.Chart(
                    title=title, multiline=layout_pb2.MultilineChartContent(tag=[f"{tag}$" for tag in tags])
                )
                for title, tags in charts.items()
            ],
        )
        for category, charts in LAYOUT.items()
    ]
    tensor = make_tensor_proto(layout_pb2.Layout(category=categories).SerializeToString())
    value = Summary.Value(tag=metadata.CONFIG_SUMMARY_TAG, metadata=metadata.create_summary_metadata(), tensor=tensor)
    return Summary(value=[value])


def _hparams(run: TrackerIdentity, started: float) -> list[Any]:
    """Return the summaries of the tab "HParams": its columns, and the values of this run. started: Unix s."""
    from tensorboard.plugins.hparams import summary_v2 as hp

    axes = dict(tag.partition("=")[::2] for tag in run.tags)
    symbols = {name: run.config[symbol] for name, symbol in HPARAMS.items() if run.config.get(symbol)}
    values = {name: number_or_text(text) for name, text in {**symbols, **axes}.items()}
    metrics = [hp.Metric(tag, display_name=title) for tag, title in RESULTS.items()]
    return [
        hp.hparams_config_pb([hp.HParam(name) for name in values], metrics, time_created_secs=started),
        hp.hparams_pb(values, trial_id=run.name, start_time_secs=started),
    ]


def _session_end(ended: float) -> Any:
    """Return the summary of a finished run for the tab "HParams". ended: Unix s."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=ended)
    about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end))
    value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about, tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])


RELOAD_S = 5.0  # between two reads of the event files by the server


def recorded(folder: Path) -> bool:
    """Return whether there is an event file below a directory."""
    return any(folder.glob("**/events.out.tfevents.*"))


def opening(page: Page) -> str:
    """Return the address that opens the page with the losses at its top, not smoothed."""
    cards = json.dumps([{"plugin": "scalars", "tag": tag} for tag in ("train/loss", "val/loss")], separators=(",", ":"))
    return f"{page.url}?smoothing=0&pinnedCards={quote(cards)}#timeseries"


def serve(folder: Path, port: int) -> Page:
    """Serve the page on the first free port from `port` upward, until this process exits."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from tensorboard import default, program

    found = free_port(port)
    board = program.TensorBoard(
        default.get_plugins(),
        server_class=lambda app, flags: program.create_port_scanning_werkzeug_server(guarded_wsgi(app), flags),
    )
    # "fast" starts another process, which would survive a kill of this one, and prints that it is experimental
    board.configure(logdir=str(folder), host=LOOPBACK[0], port=found, reload_interval=RELOAD_S, load_fast="false")
    board.launch()
    check_guard(found)
    return Page(url=f"http://{LOOPBACK[0]}:{found}/", port=found, pid=os.getpid())
