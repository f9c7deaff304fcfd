"""W&B stores each value of a run once, read by its own reader and by a server on loopback."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from psutil import STATUS_ZOMBIE, NoSuchProcess, Process, process_iter

from kmatrix.track.wandb import OWNER, WandbFiles, _upload_command, best, end_orphans, numbers, typed
from once import make_once
from skips import require_program
from waiting import wait_until
from wandb_drive import CONFIG, EPOCH, RUN, drive, identity, point, start_driver
from wandb_server import KEY, ServerRun, WandbServer

SECRET = "Xq" * 25  # in the environment

pytestmark = [
    pytest.mark.nightly,  # W&B starts a service for each process: 20 tests took 58 s
    pytest.mark.skipif(find_spec("wandb") is None, reason="make setup-trackers installs it"),
]


@functools.cache  # runs are never written to a directory that a test has read
def inspect(piece: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the output of `wandb leet inspect` for a directory."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *arguments, str(piece)]
    text = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240).stdout
    return [json.loads(text)] if arguments else [json.loads(line) for line in text.splitlines()]


MOVED = {"nodes": "2", "hosts": "n3, n2"}  # where the second attempt of a run trains


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[WandbFiles, list[dict[str, Any]]]:
    """A run whose first process was killed at step 25, whose second ended, and which was sent once more."""

    def record(folder: Path) -> list[dict[str, Any]]:
        matrix = folder / "matrix"
        return [
            drive(
                matrix,
                ["open"],
                ["configure", {"nodes": "2", "hosts": "n1, n2"}],
                ["points", 0, 26],
                ["alert", "loss spike"],
                ["wait for", 20],
                ["kill"],
                environ={"SOME_TOKEN": SECRET},
            ),
            drive(
                matrix,
                ["open"],
                ["configure", MOVED],
                ["devices", EPOCH + 39, 7.0],
                ["points", 0, 40],
                ["close", "finished"],
            ),
            drive(matrix, ["open"], ["configure", MOVED], ["points", 0, 40], ["close", "finished"]),
        ]

    folder, outputs = make_once(tmp_path_factory, "wandb-offline", record)
    return WandbFiles(folder / "matrix" / RUN, "cafe-1"), outputs


def rows(files: WandbFiles) -> list[dict[str, Any]]:
    return [record["history"]["item"] for piece in files.sessions for record in inspect(piece) if "history" in record]


def test_a_run_without_a_key_is_kept_in_its_own_directory_and_can_be_sent_later(offline_run):
    files, outputs = offline_run
    assert outputs[0]["link"] == str(files.folder)
    assert outputs[0]["how"] == f"make track-sync TARGET={files.run.parent} TRACKER=wandb"
    assert all(piece.name.startswith("offline-run-") for piece in files.sessions)


def test_each_step_is_stored_once_with_its_values_and_time_after_a_kill(offline_run):
    files, outputs = offline_run
    assert outputs[0]["code"] < 0  # it was killed
    found = rows(files)
    assert [row["_step"] for row in found] == list(range(40))
    for row in found:
        given = point(row["_step"])
        assert {key: row[key] for key in given.values} == pytest.approx(dict(given.values))
        assert row["_timestamp"] == given.time


def test_stored_steps_are_reported_when_the_run_is_reopened(offline_run):
    _, outputs = offline_run
    assert set(range(21)) <= set(outputs[1]["steps"]) <= set(range(26))
    assert outputs[1]["alerts"] == 1
    assert outputs[2]["steps"] == list(range(40))
    assert outputs[2]["devices_time"] == EPOCH + 39


def test_sending_again_writes_nothing(offline_run):
    files, _ = offline_run
    assert len(files.sessions) == 2


def test_a_run_has_name_group_tags_and_symbols_with_numeric_types(offline_run):
    files, _ = offline_run
    run = inspect(files.sessions[0])[1]["run"]
    assert (run["display_name"], run["run_group"], run["job_type"]) == (RUN, "matrix", "train")
    assert (run["run_id"], run["project"], run["tags"]) == ("cafe-1", "gpt2-abcde", ["optimizer=adamw"])
    config = {key: value for key, value in run["config"]["update"].items() if key != "_wandb"}
    assert config == {**CONFIG, "GPT2_LEARNING_RATE": 6e-4, "GPT2_MAX_ITERS": 40}


def test_the_configuration_has_the_nodes_of_each_attempt(offline_run):
    files, _ = offline_run
    changes = [record["config"]["update"] for record in inspect(files.sessions[0]) if "config" in record]
    assert {"nodes": 2, "hosts": "n1, n2"} in changes
    config = inspect(files.sessions[1])[1]["run"]["config"]["update"]
    assert (config["nodes"], config["hosts"]) == (2, "n3, n2")


def test_the_summary_has_the_best_loss_of_all_attempts_and_the_final_status(offline_run):
    files, _ = offline_run
    [summary] = inspect(files.sessions[-1], "--summary")
    assert (summary["state"], summary["exit_code"], summary["summary"]["status"]) == ("finished", 0, "finished")
    assert summary["summary"]["best_val_loss"] == pytest.approx(point(30).values["val/loss"])
    assert summary["summary"]["best_val_step"] == 30


def test_an_alert_is_stored_with_its_level(offline_run):
    files, _ = offline_run
    [alert] = [record["alert"] for record in inspect(files.sessions[0]) if record["type"] == "alert"]
    assert (alert["title"], alert["level"]) == ("loss spike", "WARN")


def test_gpu_values_since_the_previous_row_are_averaged_into_the_row(tmp_path):
    folder = tmp_path / "matrix"
    drive(
        folder,
        ["open"],
        ["points", 0, 1],
        ["devices", EPOCH, 10.0],
        ["devices", EPOCH + 1, 30.0],
        ["points", 1, 2],
        ["points", 2, 3],
        ["devices", EPOCH + 3, 50.0],  # after the last row: it takes the values, because no later row can
        ["close", "stopped"],
    )
    assert [row.get("gpu_total_memory") for row in rows(WandbFiles(folder / RUN))] == [None, 20.0, 50.0]
    [summary] = inspect(WandbFiles(folder / RUN).sessions[0], "--summary")
    assert (summary["exit_code"], summary["summary"]["status"]) == (255, "stopped")  # killed, as after Ctrl+C


def test_device_samples_of_a_batch_belong_to_the_rows_after_them(tmp_path):
    """An upload after the run sends hundreds of rows at once, with all samples of their time."""
    folder = tmp_path / "matrix"
    samples = [["devices", EPOCH + second, float(second)] for second in (1, 2, 4)]
    drive(folder, ["open"], *samples, ["points", 0, 5], ["close", "finished"])
    found = rows(WandbFiles(folder / RUN))
    assert [row.get("gpu_total_memory") for row in found] == [None, 1.0, 2.0, None, 4.0]


RUNTIME = round(point(19).values["elapsed_s"])


def runtime(files: WandbFiles) -> int:
    """Return the Runtime of a run as W&B shows it."""
    updates = [record["summary"]["update"] for record in inspect(files.sessions[-1]) if record["type"] == "summary"]
    return [update["_wandb"]["runtime"] for update in updates if "_wandb" in update][-1]


def test_the_runtime_of_an_upload_after_the_end_is_that_of_the_run(tmp_path):
    folder = tmp_path / "matrix"
    with WandbServer() as server:
        for variables in ({}, server.environment, server.environment):  # offline, then uploaded twice
            drive(folder, ["open"], ["points", 0, 20], ["close", "finished"], environ=variables)
            if not variables:
                assert runtime(WandbFiles(folder / RUN)) == RUNTIME
        summary = server.runs["cafe-1"].summary
    assert summary["_wandb"]["runtime"] == RUNTIME
    assert summary["val/loss"] == {"min": point(10).values["val/loss"]}
    assert summary["train/loss"] == point(19).values["train/loss"]


def test_files_contain_no_command_line_packages_or_environment(offline_run):
    files = [path for path in offline_run[0].folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not any(path.name == "requirements.txt" for path in files)
    for path in files:
        data = path.read_bytes()
        assert SECRET.encode() not in data
        assert b"wandb_drive.py" not in data


@pytest.fixture(scope="module")
def online_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WandbServer, Path, list[dict[str, Any]]]]:
    """A run on a server that was killed, continued, and sent once more."""
    folder = tmp_path_factory.mktemp("online") / "matrix"
    with WandbServer() as server:
        outputs = [
            drive(folder, ["open"], ["points", 0, 20], ["close", "stopped"], environ=server.environment),
            drive(folder, ["open"], ["points", 0, 30], ["kill"], environ=server.environment),
            drive(folder, ["open"], ["points", 0, 40], ["close", "finished"], environ=server.environment),
            drive(folder, ["open"], ["points", 0, 40], ["close", "finished"], environ=server.environment),
        ]
        yield server, folder, outputs


def test_with_a_key_each_step_is_on_the_server_once_after_a_stop_and_a_kill_and_no_file_has_the_key(online_run):
    server, folder, outputs = online_run
    # Not in a test of its own: with several workers, the fixture would run twice, for ten seconds each.
    assert [path for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()] == []
    kept = server.runs["cafe-1"]
    assert kept.steps == list(range(40))
    for line in kept.lines:
        assert line["train/loss"] == pytest.approx(point(line["_step"]).values["train/loss"])
        assert line["_timestamp"] == point(line["_step"]).time
    assert outputs[1]["steps"] == list(range(20))
    assert outputs[0]["link"].startswith(server.root)
    assert outputs[0]["how"] is None


def test_the_server_has_name_group_tags_configuration_and_status_of_the_run(online_run):
    kept: ServerRun = online_run[0].runs["cafe-1"]
    assert (kept.first("displayName"), kept.first("groupName"), kept.first("jobType")) == (RUN, "matrix", "train")
    assert (kept.first("project"), kept.first("tags")) == ("gpt2-abcde", ["optimizer=adamw"])
    assert kept.config["GPT2_MAX_ITERS"] == 40
    assert (kept.exit_code, kept.summary["status"]) == (0, "finished")
    assert kept.summary["best_val_step"] == 30


@pytest.mark.nightly
def test_an_offline_run_is_uploaded_with_its_alerts_and_devices_and_to_another_project(tmp_path):
    folder = tmp_path / "matrix"
    everything = [["open"], ["devices", EPOCH, 10.0], ["alert", "spike"], ["points", 0, 5], ["close", "finished"]]
    drive(folder, *everything)
    drive(folder, *everything, project="other")
    files = WandbFiles(folder / RUN, "cafe-1")
    assert [row["_step"] for row in rows(files)] == [*range(5), *range(5)]  # one session per project
    with WandbServer() as server:
        for _ in range(2):
            output = drive(folder, ["open"], ["points", 0, 5], ["close", "finished"], environ=server.environment)
            kept = server.runs["cafe-1"]
            assert kept.steps == list(range(5))
        assert output["devices_time"] == EPOCH + 4  # known after the upload
        with_alert = drive(folder, *everything, environ=server.environment)
    assert with_alert["steps"] == list(range(5))
    first, second, *online = files.sessions
    assert [bool(list(session.glob("*.synced"))) for session in (first, second, online[0])] == [True, False, True]


@pytest.mark.nightly
def test_a_server_that_refuses_rows_is_an_error_and_the_rows_are_sent_later(tmp_path):
    folder = tmp_path / "matrix"
    with WandbServer() as server:
        server.refuse["file_stream"] = 401
        outputs = drive(folder, ["open"], ["points", 0, 5], ["close", "finished"], environ=server.environment)
        assert outputs["code"] == 1
        assert "401 Unauthorized" in outputs["stderr"].splitlines()[-1]
        server.refuse.clear()
        drive(folder, ["open"], ["points", 0, 5], ["close", "finished"], environ=server.environment)
        assert server.runs["cafe-1"].steps == [0, 1, 2, 3, 4]


@pytest.mark.nightly
def test_after_the_wandb_service_dies_the_run_continues_in_the_same_process(tmp_path):
    folder = tmp_path / "matrix"
    died = [["open"], ["points", 0, 9], ["wait for", 7], ["kill core"], ["new mirror"]]
    drive(folder, *died, ["open"], ["points", 0, 20], ["close", "finished"])
    files = WandbFiles(folder / RUN, "cafe-1")
    assert [row["_step"] for row in rows(files)] == list(range(20))
    assert len(files.sessions) == 2


@pytest.mark.nightly
def test_a_service_that_dies_at_startup_is_an_error_instead_of_a_hang(tmp_path):
    process = start_driver(tmp_path / "matrix", ["open"], ["points", 0, 5], ["close", "finished"])

    def service() -> Process | None:
        with suppress(NoSuchProcess):  # another child of it has ended just now
            return next(
                (one for one in Process(process.pid).children(recursive=True) if "wandb-core" in one.name()), None
            )
        return None

    wait_until(service).kill()
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 1
    assert "Error" in stderr.splitlines()[-1]


@pytest.mark.nightly
def test_offline_no_process_connects_to_another_machine(tmp_path):
    trace = tmp_path / "connections"
    below = [str(require_program("strace")), "-f", "-qq", "-e", "trace=connect", "-o", str(trace)]
    completed = drive(
        tmp_path / "matrix", ["open"], ["points", 0, 20], ["alert", "spike"], ["close", "finished"], below=below
    )
    assert completed["code"] == 0
    assert "connect(" in trace.read_text()  # to W&B's own service
    addresses = re.findall(r'inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)"', trace.read_text())
    assert {v4 or v6 for v4, v6 in addresses} <= {"127.0.0.1", "::1"}


def test_the_service_of_a_killed_process_is_ended_before_its_files_are_read(tmp_path):
    """It survives in a session of its own. Here it is paused, so that it cannot exit before the next process opens."""
    folder = tmp_path / "matrix"
    first = start_driver(folder, ["open"], ["points", 0, 10], ["wait for", 8], ["points", 10, 12], ["pause core"])
    assert first.wait(timeout=240) < 0
    [paused] = [process for process in process_iter(["name", "environ"]) if is_service_of(process, folder / RUN)]
    try:
        drive(folder, ["open"], ["points", 0, 20], ["close", "finished"])
        with suppress(NoSuchProcess):
            assert not paused.is_running() or paused.status() == STATUS_ZOMBIE
    finally:
        with suppress(NoSuchProcess):
            paused.kill()
    assert [row["_step"] for row in rows(WandbFiles(folder / RUN, "cafe-1"))] == list(range(20))


def is_service_of(process: Process, run: Path) -> bool:
    owner = f"{run.stat().st_dev}:{run.stat().st_ino}"
    return process.info["name"] == "wandb-core" and (process.info["environ"] or {}).get("KMATRIX_WANDB_RUN") == owner


def test_the_service_of_a_copied_run_is_not_ended(tmp_path, monkeypatch):
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    copy.mkdir()
    monkeypatch.delenv("KMATRIX_WANDB_RUN", raising=False)
    end_orphans(run)
    assert os.environ[OWNER]  # marks the services that this process starts
    folder = run.stat()
    marked = os.environ | {OWNER: f"{folder.st_dev}:{folder.st_ino}"}
    program = tmp_path / "wandb-core"
    program.symlink_to(shutil.which("sleep"))
    with subprocess.Popen([program, "300"], env=marked) as service:
        try:
            # In the middle of exec, a process has its name, and no variables yet.
            wait_until(lambda: Process(service.pid).name() == "wandb-core" and OWNER in Process(service.pid).environ())
            end_orphans(copy)
            assert service.poll() is None
            end_orphans(run)
            assert service.wait(timeout=240) == -signal.SIGKILL
        finally:
            service.kill()


def test_the_upload_of_a_run_that_is_kept_offline_names_the_argument_that_permits_it(tmp_path):
    run = identity(tmp_path)
    kept = replace(run, config={**run.config, "WANDB_OFFLINE": "y"})
    assert _upload_command(kept) == f"WANDB_MODE=online make track-sync TARGET={tmp_path} TRACKER=wandb"


def test_without_any_offline_run_every_step_is_pending(tmp_path):
    assert WandbFiles(tmp_path, "cafe-1").is_missing(0)


@pytest.mark.parametrize(
    ("text", "value"),
    [("12", 12), ("-3", -3), ("6e-4", 6e-4), ("0.5", 0.5)]
    + [(text, text) for text in ("y", "0.9,0.95", "", "007", "1_000", "nan", "1e999", "0x10")],
)
def test_numeric_symbols_are_sent_as_numbers(text, value):
    found = typed({"GPT2_X": text})["GPT2_X"]
    assert found == value
    assert type(found) is type(value)


def test_the_id_of_a_run_is_a_string_even_if_all_digits():
    assert typed({"run_id": "12345e6789"}) == {"run_id": "12345e6789"}


def test_a_nan_loss_is_never_the_best():
    assert best({0: 4.0, 10: float("nan"), 20: 5.0}) == {
        "final_val_loss": 5.0,
        "best_val_loss": 4.0,
        "best_val_step": 0,
    }
    assert best({0: float("nan")}) == {}


def test_nan_and_infinity_strings_are_parsed_and_other_strings_ignored():
    found = numbers({"a": 1, "b": "NaN", "c": "-Infinity", "d": "text", "e": True})
    assert found.keys() == {"a", "b", "c"}
    assert found["c"] == float("-inf")


@pytest.mark.parametrize("size", [0, 5, 7, 100, 900])
def test_a_truncated_file_is_read_up_to_the_last_complete_record(offline_run, tmp_path, size):
    files, _ = offline_run
    file = next(files.sessions[-1].glob("*.wandb"))
    piece = tmp_path / "wandb" / files.sessions[-1].name
    piece.mkdir(parents=True)
    (piece / file.name).write_bytes(file.read_bytes()[:-size] if size == 900 else file.read_bytes()[:size])
    found = WandbFiles(tmp_path, "cafe-1").read()
    assert set(found.steps) < set(range(40))
    assert bool(found.steps) == (size == 900)
