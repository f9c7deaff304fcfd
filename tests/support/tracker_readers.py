"""Read what each tracker stored of a run, with the tracker's own public reader."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METADATA_KEYS = ("schema", "step", "time")  # keys of a metrics line that are not metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerContent:
    """The content of one run in one tracker. rows: step and values of each row, in the tracker's order.

    times: step -> Unix seconds.  about: group, tags, config, state, as far as the tracker has them.
    """

    rows: tuple[tuple[int, Mapping[str, float]], ...]
    times: Mapping[int, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        return sorted(step for step, _ in self.rows)

    @property
    def values(self) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        for step, values in self.rows:
            found.setdefault(step, {}).update(values)
        return found


def expected_values(run: Path) -> dict[int, dict[str, float]]:
    """Return the values of each step in metrics.jsonl, without lines that a resume made void."""
    found: dict[int, dict[str, float]] = {}
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line.get("resumed"):
            found = {step: values for step, values in found.items() if step <= line["step"]}
            continue
        numbers = {
            key: value for key, value in line.items() if key not in METADATA_KEYS and isinstance(value, (int, float))
        }
        found.setdefault(line["step"], {}).update(numbers)
    return found


def expected_times(run: Path) -> dict[int, float]:
    """Return the time of the last line of each step in metrics.jsonl, without lines that a resume made void."""
    found: dict[int, float] = {}
    for text in (run / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line.get("resumed"):
            found = {step: time for step, time in found.items() if step <= line["step"]}
        else:
            found[line["step"]] = line["time"]
    return found


def read_wandb(python: str, run: Path) -> TrackerContent:
    """Read the offline runs of a run's folder with `wandb leet inspect --json`."""
    rows, stamps, metadata = [], {}, {}
    for offline_run in sorted((run / "wandb").glob("offline-run-*")):
        completed = subprocess.run(
            [python, "-m", "wandb", "leet", "inspect", "--json", str(offline_run)],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        for text in completed.stdout.splitlines():
            record = json.loads(text)
            if "history" in record:
                item = record["history"]["item"]
                rows.append((int(item["_step"]), _numbers(item)))
                stamps[int(item["_step"])] = item["_timestamp"]
            for kind in ("run", "exit", "summary", "config"):
                if kind in record:
                    metadata[kind] = record[kind]
    return TrackerContent(rows=tuple(rows), times=stamps, about=metadata)


def read_trackio(python: str, results: Path, project: str, run: str) -> TrackerContent:
    """Read a run with `trackio get ... --json`, one metric at a time."""
    query = functools.partial(_trackio, python, results, project, run)
    (listed,) = query(["list", "metrics"])
    metrics = listed["metrics"]
    about, *values = query(["get", "run"], *(["get", "metric", "--metric", metric] for metric in metrics))
    rows, stamps = [], {}
    seen: dict[int, dict[str, float]] = {}
    for metric, found in zip(metrics, values, strict=True):
        for row in found["values"]:
            if metric in seen.get(row["step"], {}):
                rows.append((row["step"], {metric: row["value"]}))  # a step that was stored twice is a row of its own
            seen.setdefault(row["step"], {})[metric] = row["value"]
            stamps[row["step"]] = row["timestamp"]
    rows += list(seen.items())
    return TrackerContent(rows=tuple(rows), about={"run": about, "stamps": stamps})


def read_tensorboard(folder: Path) -> TrackerContent:
    """Read a log directory with TensorBoard's EventAccumulator."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False)
    reader.Reload()
    rows, stamps = [], {}
    seen: dict[int, dict[str, float]] = {}
    for tag in reader.Tags()["scalars"]:
        for event in reader.Scalars(tag):
            if tag in seen.get(event.step, {}):
                rows.append((event.step, {tag: event.value}))  # a step that was stored twice is a row of its own
            seen.setdefault(event.step, {})[tag] = event.value
            if tag == "train/loss":
                stamps[event.step] = event.wall_time
    rows += [(step, values) for step, values in seen.items() if "attempt" in values]
    texts = {
        tag: [e.tensor_proto.string_val[0].decode() for e in reader.Tensors(tag)]
        for tag in reader.Tags()["tensors"]
        if reader.SummaryMetadata(tag).plugin_data.plugin_name == "text"
    }
    return TrackerContent(rows=tuple(rows), times=stamps, about=texts)


# Trackio's own command line, called once per line of arguments: its start takes longer than its answer.
COMMANDS = """
import contextlib, io, json, sys
from trackio.cli import main
for arguments in json.load(sys.stdin):
    sys.argv = ["trackio", *arguments]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main()
    print(json.dumps(json.loads(output.getvalue())))
"""


def _trackio(python: str, results: Path, project: str, run: str, *commands: Sequence[str]) -> list[Any]:
    """Return the answer of each command of Trackio's program."""
    known = ["--project", project, "--run", run, "--json"]
    environment = {**os.environ, "TRACKIO_DIR": str(results / "trackio"), "HF_HUB_OFFLINE": "1"}
    completed = subprocess.run(
        [python, "-c", COMMANDS],
        input=json.dumps([[*command, *known] for command in commands]),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=600,
    )
    assert completed.returncode == 0, completed.stderr
    return [json.loads(line) for line in completed.stdout.splitlines()]


def _numbers(item: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in item.items() if not key.startswith("_") and isinstance(value, (int, float))}
