"""Pages of trackers: one server per directory, known only to its owner."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kmatrix.errors import LaunchError
from kmatrix.records.runs import Status
from kmatrix.track import tensorboard
from kmatrix.track.page import Page, StateFile, free_port
from kmatrix.track.tracker import MetricPoint
from kmatrix.track.trackio import data_dir
from programs import ROOT, Program
from records_factory import FakeRun, make_matrix
from refusing_server import busy_port
from served_page import Served, serve_page, status_for_host
from trackio_filled import identity
from waiting import wait_until

LOOPBACK = "127.0.0.1"
FILL = f"{ROOT}/tests/support/trackio_filled.py"


def environment(**variables: str) -> dict[str, str]:
    lost = ("DISPLAY", "WAYLAND_DISPLAY", "MAKEFLAGS")
    inherited = {name: text for name, text in os.environ.items() if name not in lost}
    return {**inherited, "PYTHONPATH": os.pathsep.join([f"{ROOT}/lib", f"{ROOT}/tests/support"]), **variables}


@pytest.fixture(scope="module")
def trackio_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results directory with two projects in Trackio."""
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, FILL, str(folder), "gpt2-newer", "2e9", "gpt2-older", "1e9"]
    subprocess.run(command, env=environment(), check=True)
    return folder


def serve_command(*arguments: str) -> AbstractContextManager[Served]:
    """Run a command of kmatrix that serves a page."""
    return serve_page([sys.executable, "-m", "kmatrix", *arguments], cwd=ROOT, env=environment())


def get_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=120) as reply:
        return reply.read().decode()


@pytest.fixture
def run_command(tmp_path: Path) -> Program:
    """The program, with a directory without a .config."""
    return Program(tmp_path)


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(url="http://127.0.0.1:7861/", port=7861, pid=os.getpid(), token="secret")


@pytest.mark.process
def test_the_server_of_a_directory_is_known_while_it_lives_and_only_to_its_owner(tmp_path, page):
    state = StateFile(tmp_path)
    assert state.living() is None
    with StateFile(tmp_path).held() as held:
        held.write(page)
        assert state.living() == page
        assert stat.S_IMODE(state.path.stat().st_mode) == 0o600
        with StateFile(tmp_path).held() as second:
            assert second is None
        assert state.living() == page
    assert state.living() is None
    assert not state.path.exists()


def test_the_state_file_of_a_killed_server_is_ignored(tmp_path, page):
    state = StateFile(tmp_path)
    state.path.write_text(json.dumps({"url": page.url, "port": 1, "pid": 1, "token": ""}) + "\n")
    assert state.living() is None
    with state.held() as held:
        assert held
        held.write(page)
        assert StateFile(tmp_path).living() == page


def test_a_directory_that_cannot_be_written_is_an_error_with_the_reason(tmp_path):
    with pytest.raises(LaunchError, match="cannot serve a page") as raised, StateFile(tmp_path / "none").held():
        pass
    assert raised.value.why == "its server needs to write there: No such file or directory"


@pytest.mark.nightly
def test_a_damaged_database_is_an_error_with_its_path(tmp_path):
    folder = data_dir(tmp_path)
    folder.mkdir()
    (folder / "gpt2-torn.db").write_bytes(b"no database" * 100)
    completed = subprocess.run(
        [sys.executable, "-m", "kmatrix", "trackio-view", f"RESULTS_DIR={tmp_path}", f"O={tmp_path}"],
        env=environment(),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert completed.returncode == 2
    assert "Could not migrate project 'gpt2-torn'" in completed.stderr
    assert "Traceback" not in completed.stderr
    assert not list(folder.glob(".page-*"))


@pytest.mark.process
def test_the_next_free_port_is_used_if_one_is_busy():
    with busy_port() as port:
        assert free_port(port) > port


@pytest.mark.process
def test_no_free_port_is_an_error_that_lists_the_tried_ones(monkeypatch):
    # Try one port only; otherwise the next free port would be used.
    monkeypatch.setattr("kmatrix.track.page.PORTS", 1)
    with busy_port() as port, pytest.raises(LaunchError, match=f"no free port from {port} to {port}"):
        free_port(port)


@pytest.mark.process
def test_trackio_web_starts_nothing_and_prints_where_the_page_would_be(trackio_results, tmp_path, run_command):
    result = run_command("trackio-web", f"RESULTS_DIR={trackio_results}")
    assert result.status == 0
    assert result.out.startswith("URL: http://localhost:7860/?project=gpt2-newer\nnot running: ")
    assert "/?project=mine\n" in run_command("trackio-web", f"RESULTS_DIR={tmp_path}", "PROJECT=mine").out
    assert not data_dir(tmp_path).exists()


@pytest.mark.process
def test_an_unknown_project_is_refused_with_the_known_ones(trackio_results, tmp_path, run_command):
    result = run_command("trackio-view", f"RESULTS_DIR={trackio_results}", "PROJECT=gpt2-other")
    assert result.status == 2
    assert "known projects, newest last: gpt2-older, gpt2-newer" in result.err


def test_a_folder_without_a_project_is_refused(tmp_path, run_command):
    result = run_command("trackio-view", f"RESULTS_DIR={tmp_path}")
    assert result.status == 2
    assert "no Trackio project in" in result.err
    assert not data_dir(tmp_path).exists()


@pytest.mark.nightly
def test_trackio_view_serves_on_loopback_prints_the_real_port_and_runs_once(trackio_results, tmp_path, run_command):
    with (
        busy_port() as taken,
        serve_command("trackio-view", f"RESULTS_DIR={trackio_results}", f"PORT={taken}", f"O={tmp_path}") as served,
    ):
        assert f"(port {taken} is in use)" in served.output
        assert f"ssh -L {port_of(served.url)}:{LOOPBACK}:{port_of(served.url)} " in served.output
        assert served.url.startswith(f"http://{LOOPBACK}:{port_of(served.url)}/?project=gpt2-newer")
        assert json.loads(get_text(f"http://{LOOPBACK}:{port_of(served.url)}/version"))["api_transport"] == "http"
        with pytest.raises(ConnectionError):  # a server on all interfaces would reply here too
            socket.create_connection(("127.0.0.2", port_of(served.url)), timeout=5).close()

        port = port_of(served.url)
        query = json.dumps({"project": "gpt2-newer", "query": "SELECT COUNT(*) FROM metrics"})
        for path, body in (("/", None), ("/version", None), ("/api/query_project", query)):
            assert status_for_host(port, path, f"localhost:{port}", body) == 200
            assert status_for_host(port, path, f"rebinding.invalid:{port}", body) == 421
        assert status_for_host(port, "/version", "localhost:80") == 200  # a forwarded port

        second = run_command("trackio-view", f"RESULTS_DIR={trackio_results}", "PROJECT=gpt2-older", "PORT=1")
        assert second.status == 0
        expected = [f"URL: {served.url.replace('newer', 'older')}", f"running (pid {served.process.pid})"]
        assert second.out.splitlines()[:2] == expected
        assert "note: PORT=1 ignored: the page is served already" in second.out
        assert "write_token" not in second.out

        served.process.send_signal(signal.SIGINT)
        rest, _ = served.process.communicate(timeout=240)
        assert rest == "\nstopped Trackio\n"
        assert served.process.returncode == 0


@pytest.mark.nightly
def test_a_killed_server_does_not_block_the_next_one(trackio_results, tmp_path, run_command):
    arguments = (
        "trackio-view",
        f"RESULTS_DIR={trackio_results}",
        f"PORT={free_port(21_860)}",
        f"O={tmp_path}",
    )
    with serve_command(*arguments) as served:
        served.process.kill()
    with serve_command(*arguments) as served:
        assert get_text(served.url)


def test_tensorboard_refuses_a_matrix_without_logs(tmp_path, run_command):
    matrix = make_matrix(tmp_path, [FakeRun()])
    result = run_command("tensorboard", f"TARGET={matrix.path}")
    assert result.status == 2
    assert "no TensorBoard data in" in result.err


@pytest.mark.nightly
def test_tensorboard_serves_the_runs_of_a_matrix(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun()])
    mirror = tensorboard.TensorBoardMirror()
    mirror.open(identity(tmp_path, "gpt2-x", matrix.name))
    mirror.points([MetricPoint(step=s, time=1e9 + s, values={"train/loss": 4 - s / 10}) for s in range(10)])
    mirror.close(Status.FINISHED)
    with busy_port() as taken, serve_command("tensorboard", f"TARGET={matrix.path}", f"PORT={taken}") as served:
        assert f"(port {taken} is in use)" in served.output
        api = f"{served.base}data/plugin/scalars"
        wait_until(lambda: "gpt2_adamw_1cpu" in json.loads(get_text(f"{api}/tags")))
        points = json.loads(get_text(f"{api}/scalars?tag=train%2Floss&run=gpt2_adamw_1cpu"))
        assert [(step, round(value, 4)) for _, step, value in points] == [(s, round(4 - s / 10, 4)) for s in range(10)]
        port = port_of(served.url)
        for path in ("/", "/data/runs"):
            assert status_for_host(port, path, f"localhost:{port}") == 200
            assert status_for_host(port, path, f"rebinding.invalid:{port}") == 421
        served.process.send_signal(signal.SIGINT)
        assert served.process.communicate(timeout=240)[0] == "\nstopped TensorBoard\n"
        assert served.process.returncode == 0


def port_of(url: str) -> int:
    return int(url.split("/")[2].partition(":")[2])
