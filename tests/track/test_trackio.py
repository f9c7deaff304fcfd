"""Trackio stores the content of metrics.jsonl, each value once, read by its own reader."""

from __future__ import annotations

import json
import math
import os
import resource
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status
from kmatrix.track.tracker import AlertLevel, DeviceValues, MetricPoint, StoredRun, TrackerAlert, TrackerIdentity
from kmatrix.track.trackio import TrackioMirror, data_dir
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
START_TIME = 1_790_000_000.25  # Unix seconds
LAST_STEP = 9


@pytest.fixture(scope="module")
def results_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A results directory for the module, because Trackio reads its data directory once per process."""

    def forget() -> None:
        for name in [name for name in sys.modules if name == "trackio" or name.startswith("trackio.")]:
            del sys.modules[name]

    forget()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRACKIO_DIR", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
            patch.setenv(name, os.environ.get(name, ""))
        results = tmp_path_factory.mktemp("results")
        # From the start: the first test of a worker may import Trackio's reader before a mirror sets it.
        patch.setenv("TRACKIO_DIR", str(data_dir(results)))
        yield results
    forget()


@pytest.fixture
def identity(results_dir: Path, request: pytest.FixtureRequest) -> TrackerIdentity:
    """Return the identity of a run in a project of this test."""
    matrix = "test_matrix_results_20261120_120000"
    return TrackerIdentity(
        dir=RunDir(results_dir / matrix / "gpt2_adamw_2gpu"),
        project="gpt2-" + "".join(letter for letter in request.node.name if letter.isalnum()).lower(),
        name="gpt2_adamw_2gpu",
        id="a1b2c3d4-20261120120000",
        group=matrix,
        tags=("optimizer=adamw", "num_gpus=2"),
        config={"CONFIG_GPT2_MAX_ITERS": "10", "run_id": "a1b2c3d4", "matrix": matrix, "_hidden": "y"},
        tracking=results_dir,
    )


def point(step: int, **more: float) -> MetricPoint:
    return MetricPoint(
        step=step, time=START_TIME + step, values={"train/loss": 4.0 - step / 10, "train/lr": 6e-4, **more}
    )


def devices(second: int) -> DeviceValues:
    values = {"gpu/0/power": 250.0 + second, "gpu/1/power": 240.0, "gpu_load_balance_cv": 2.0 + second}
    return DeviceValues(time=START_TIME + second, values={**values, "gpu_0_memory": 1.0, "gpu_total_memory": 900.0})


def send_run(run: TrackerIdentity, status: Status = Status.FINISHED) -> StoredRun:
    """Send a whole run, and return what the store had before."""
    mirror = TrackioMirror()
    stored = mirror.open(run)
    mirror.points([point(step) for step in range(LAST_STEP + 1)])
    mirror.devices([devices(0), devices(1)])
    mirror.close(status)
    return stored


def trackio(run: TrackerIdentity, *arguments: str) -> Any:
    """Run Trackio's own program."""
    completed = subprocess.run(
        [sys.executable, "-m", "trackio.cli", *arguments, "--json"],
        env={**os.environ, "TRACKIO_DIR": str(data_dir(run.tracking))},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(completed.stdout)


def config(run: TrackerIdentity) -> Mapping[str, Any]:
    from trackio.api import Api

    return next(stored for stored in Api().runs(run.project) if stored.id == run.id).config


def names(run: TrackerIdentity) -> list[str]:
    from trackio.api import Api

    return [stored.name for stored in Api().runs(run.project)]


@pytest.mark.nightly
def test_each_step_is_stored_once_with_its_values_and_time(identity):
    send_run(identity)
    stored = trackio(
        identity, "get", "metric", "--project", identity.project, "--run", identity.name, "--metric", "train/loss"
    )
    assert [(row["step"], row["value"]) for row in stored["values"]] == [
        (s, 4.0 - s / 10) for s in range(LAST_STEP + 1)
    ]
    stamps = [row["timestamp"] for row in stored["values"]]
    assert stamps[:2] == ["2026-09-21T14:13:20.250000+00:00", "2026-09-21T14:13:21.250000+00:00"]


@pytest.mark.nightly
def test_devices_are_system_metrics_with_a_name_per_gpu_and_the_balance_over_time(identity):
    send_run(identity)
    stored = trackio(identity, "get", "system-metric", "--project", identity.project, "--run", identity.name)
    rows = stored["system_metrics"]
    assert [(row["gpu/0/power"], row["gpu/1/power"], row["gpu_load_balance_cv"]) for row in rows] == [
        (250.0, 240.0, 2.0),
        (251.0, 240.0, 3.0),
    ]
    assert all("gpu_0_memory" not in row for row in rows)


def test_the_configuration_has_group_tags_and_the_final_status(identity):
    send_run(identity)
    stored = config(identity)
    assert stored["CONFIG_GPT2_MAX_ITERS"] == "10"
    assert stored["run_id"] == "a1b2c3d4"
    assert stored["tags"] == ["optimizer=adamw", "num_gpus=2"]
    assert stored["_Group"] == "test_matrix_results_20261120_120000"
    assert stored["status"] == "finished"
    assert stored["hidden"] == "y"  # names that start with an underscore belong to Trackio


def test_the_configuration_has_the_nodes_of_the_last_attempt(identity):
    mirror = TrackioMirror()
    for step, hosts in enumerate(("n1, n2", "n3, n2")):
        mirror.open(identity)
        mirror.configure({"nodes": "2", "hosts": hosts})
        mirror.points([point(step)])
        assert (config(identity)["nodes"], config(identity)["hosts"]) == ("2", hosts)
    mirror.configure({"nodes": "2", "hosts": "n4, n5"})
    mirror.close(Status.FINISHED)
    assert (config(identity)["hosts"], config(identity)["CONFIG_GPT2_MAX_ITERS"]) == ("n4, n5", "10")


def test_a_resumed_run_is_running_until_it_ends(identity):
    mirror = TrackioMirror()
    mirror.open(identity)
    mirror.points([point(0)])
    assert config(identity)["status"] == "running"
    mirror.close(Status.STOPPED)
    assert config(identity)["status"] == "stopped"
    mirror.open(identity)
    mirror.points([point(1)])
    assert config(identity)["status"] == "running"


def test_stored_steps_are_reported_when_the_run_is_reopened(identity):
    how = f"make trackio-view PROJECT={identity.project} RESULTS_DIR={identity.tracking}"
    assert send_run(identity) == StoredRun(steps={}, link=str(data_dir(identity.tracking)), how=how)
    stored = TrackioMirror().open(identity)
    assert stored.steps == {step: point(step).values for step in range(LAST_STEP + 1)}
    assert stored.devices_time == START_TIME + 1


@pytest.mark.nightly
def test_a_run_sent_twice_is_stored_once(identity):
    send_run(identity)
    before = config(identity)
    send_run(identity)
    assert names(identity) == [identity.name]
    assert (
        trackio(identity, "get", "run", "--project", identity.project, "--run", identity.name)["num_logs"]
        == LAST_STEP + 1
    )
    assert config(identity) == before


def test_a_row_sent_again_keeps_the_values_sent_first(identity):
    send_run(identity)
    mirror = TrackioMirror()
    mirror.open(identity)
    mirror.points([MetricPoint(step=3, time=START_TIME + 99, values={"train/lr": 1.0, "train/loss": 7.0})])
    assert TrackioMirror().open(identity).steps[3] == point(3).values


@pytest.mark.nightly
def test_missing_values_can_be_added_to_a_step(identity):
    send_run(identity)
    mirror = TrackioMirror()
    mirror.open(identity)
    mirror.points([MetricPoint(step=LAST_STEP, time=START_TIME + 99, values={"val/loss": 3.5})])
    mirror.close(Status.FINISHED)
    assert TrackioMirror().open(identity).steps[LAST_STEP] == {**point(LAST_STEP).values, "val/loss": 3.5}
    assert (
        trackio(identity, "get", "run", "--project", identity.project, "--run", identity.name)["num_logs"]
        == LAST_STEP + 2
    )


def test_a_finished_run_can_be_closed_again_without_new_points(identity):
    send_run(identity, Status.STOPPED)
    mirror = TrackioMirror()
    mirror.open(identity)
    mirror.close(Status.FINISHED)
    assert config(identity)["status"] == "finished"
    assert len(TrackioMirror().open(identity).steps) == LAST_STEP + 1


@pytest.mark.nightly
def test_device_values_wait_for_the_first_point(identity):
    mirror = TrackioMirror()
    mirror.open(identity)
    mirror.devices([devices(0)])
    mirror.points([point(0)])
    mirror.devices([devices(1)])
    assert TrackioMirror().open(identity).devices_time == START_TIME + 1
    stored = trackio(identity, "get", "system-metric", "--project", identity.project, "--run", identity.name)
    assert [row["gpu/0/power"] for row in stored["system_metrics"]] == [250.0, 251.0]


def test_a_run_without_points_leaves_no_files(identity):
    mirror = TrackioMirror()
    mirror.open(identity)
    mirror.devices([devices(0)])
    mirror.close(Status.FAILED)
    assert not (data_dir(identity.tracking) / f"{identity.project}.db").exists()


def test_two_matrices_in_one_project_keep_two_runs_of_the_same_name(identity):
    send_run(identity)
    later = replace(identity, id="a1b2c3d4-20261121093000", group="test_matrix_results_20261121_093000")
    assert send_run(later).steps == {}
    assert names(identity) == [identity.name, f"{identity.name}-20261121_093000"]
    assert TrackioMirror().open(later).steps.keys() == TrackioMirror().open(identity).steps.keys()
    send_run(later)
    assert len(names(identity)) == 2


def test_alerts_are_stored_once_with_time_and_step(identity):
    from trackio.api import Api

    sent_alert = TrackerAlert(time=START_TIME + 5, title="loss is NaN", text="at step 5", level=AlertLevel.ERROR)
    for _ in range(2):
        mirror = TrackioMirror()
        mirror.open(identity)
        mirror.points([point(5)])
        mirror.alert(sent_alert)
    (alert,) = Api().alerts(identity.project)
    assert (alert["title"], alert["text"], alert["level"], alert["step"]) == ("loss is NaN", "at step 5", "error", 5)
    assert alert["timestamp"] == "2026-09-21T14:13:25.250000+00:00"
    assert TrackioMirror().open(identity).alerts == 1


def test_nan_values_and_reserved_names_survive_a_round_trip(identity):
    mirror = TrackioMirror()
    mirror.open(identity)
    sent = {"train/loss": math.nan, "grad/norm": math.inf, "time": 3.0, "__odd": 1.0}
    mirror.points([MetricPoint(step=0, time=START_TIME, values=sent)])
    stored = TrackioMirror().open(identity).steps[0]
    assert math.isnan(stored.pop("train/loss"))
    assert stored == {"grad/norm": math.inf, "time": 3.0, "__odd": 1.0}


def test_a_project_name_that_trackio_cannot_store_is_refused(identity):
    with pytest.raises(ValueError, match="not allowed"):
        TrackioMirror().open(replace(identity, project="gpt2_system"))


def test_the_database_is_next_to_the_results(identity):
    send_run(identity)
    assert (identity.tracking / "trackio" / f"{identity.project}.db").is_file()


def test_on_a_network_disk_rows_are_written_to_files_that_the_dashboard_imports(identity, monkeypatch):
    from trackio.fragments import import_inbox_dir

    monkeypatch.setenv("TRACKIO_STORAGE_MODE", "jsonl")
    for _ in range(2):
        send_run(identity)
    database = data_dir(identity.tracking) / f"{identity.project}.db"
    assert not database.exists()
    import_inbox_dir()
    assert names(identity) == [f"{identity.name}-20261120_120000"]
    monkeypatch.delenv("TRACKIO_STORAGE_MODE")
    assert len(TrackioMirror().open(identity).steps) == LAST_STEP + 1


SEND_PROGRAM = """
    import sys
    seen = []
    reached = ("socket.connect", "socket.getaddrinfo")
    sys.addaudithook(lambda event, args: event in reached and seen.append((event, args[-1])))
    from pathlib import Path
    from kmatrix.records.paths import RunDir; from kmatrix.records.runs import Status
    from kmatrix.track.trackio import TrackioMirror
    from kmatrix.track.tracker import DeviceValues, MetricPoint, TrackerAlert, TrackerIdentity
    home, number, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    run = TrackerIdentity(dir=RunDir(home / "m" / f"run{number}"), project="gpt2-many", name=f"run{number}",
                          id=f"{number}-1", group="m", tags=(), config={}, tracking=home)
    mirror = TrackioMirror()
    known = mirror.open(run).steps
    for step in range(steps):
        if step not in known:
            values = {f"key{i}": float(step) for i in range(400)}
            mirror.points([MetricPoint(step=step, time=1e9 + step, values=values)])
    mirror.devices([DeviceValues(time=1e9, values={"gpu/0/power": 1.0})])
    mirror.alert(TrackerAlert(time=1e9, title="t", text="x"))
    mirror.close(Status.FINISHED)
    print(seen)
"""


@pytest.fixture
def send_in_process(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Send a run from another process, with a Hugging Face token in its environment."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("HF_", "TRACKIO_"))}
    begun = []

    def start(number: int, steps: int, **known: Any) -> subprocess.Popen[str]:
        begun.append(
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(SEND_PROGRAM), str(tmp_path), str(number), str(steps)],
                env={**environ, "PYTHONPATH": f"{ROOT}/lib", "HOME": str(tmp_path), "HF_TOKEN": "hf_" + "x" * 34},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                **known,
            )
        )
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def rows(home: Path) -> list[tuple[str, int, int]]:
    """Return each run of the project: name, number of rows, number of steps."""
    database = home / "trackio" / "gpt2-many.db"
    if not database.exists():
        return []
    with closing(sqlite3.connect(database)) as opened:
        select = "select run_name, count(*), count(distinct step) from metrics group by run_id order by run_name"
        try:
            return opened.execute(select).fetchall()
        except sqlite3.OperationalError:  # the file is being created
            return []


@pytest.mark.nightly
def test_four_processes_share_one_project_and_open_no_connection(tmp_path, send_in_process):
    running = [send_in_process(number, 40) for number in range(4)]
    assert [process.communicate(timeout=240)[0].strip() for process in running] == ["[]"] * 4
    assert [process.returncode for process in running] == [0] * 4
    assert rows(tmp_path) == [(f"run{number}", 40, 40) for number in range(4)]


@pytest.mark.nightly
def test_a_process_killed_while_sending_can_be_continued(tmp_path, send_in_process):
    first = send_in_process(0, 100_000)
    wait_until(lambda: rows(tmp_path) and rows(tmp_path)[0][1] > 20)
    first.kill()
    first.communicate()
    stored = rows(tmp_path)[0][1]
    assert send_in_process(0, stored + 20).wait(timeout=240) == 0
    assert rows(tmp_path) == [("run0", stored + 20, stored + 20)]


@pytest.mark.nightly
def test_a_full_disk_is_an_error_and_stored_steps_are_kept(tmp_path, send_in_process):
    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (800_000, 800_000))

    process = send_in_process(0, 100_000, preexec_fn=small_disk)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "sqlite3.OperationalError" in errors.splitlines()[-1]
    ((_, stored, steps),) = rows(tmp_path)
    assert stored == steps > 0
    assert send_in_process(0, steps + 20).wait(timeout=240) == 0
    assert rows(tmp_path) == [("run0", steps + 20, steps + 20)]
