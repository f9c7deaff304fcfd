"""The gputop program: its options, its files, and the state of the terminal afterwards."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

import kmatrix.simulate.library as simulate
from gputop_values import ROOT, SCRIPT, Recorder, line_of
from kmatrix.gputop.command import main
from kmatrix.gputop.stats_files import multi_path
from once import session_folder
from skips import require_program
from tmux_screen import Tmux
from waiting import wait_until

pytestmark = pytest.mark.process

# ---- the command -------------------------------------------------------------------------------------------------


def program(*arguments: str, added: dict[str, str] | None = None, **options) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], cwd=ROOT, env=environ | (added or {}),
        capture_output=True, text=True, timeout=240, check=False, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    require_program("gcc")
    return simulate.build(session_folder(tmp_path_factory))


@pytest.fixture
def gpus(library, tmp_path):
    """Return the environment of a process that sees this many simulated GPUs."""

    def make(count: int, *lines: str) -> dict[str, str]:
        scenario = tmp_path / "gpus.scn"
        scenario.write_text("\n".join([f"gpus {count}", "0 * util 95", "0 * power 150", *lines, ""]))
        return simulate.environment(library, scenario)

    return make


def test_without_a_gpu_once_and_json_report_it_and_succeed():
    once = program("--once")
    assert (once.returncode, once.stderr) == (0, "")
    assert once.stdout.startswith("no GPU")
    assert len(once.stdout.splitlines()) == 1
    result = program("--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["multi_gpu_data"] == []
    assert result.stderr.startswith("no GPU")


def test_without_a_terminal_no_escape_code_is_printed(gpus):
    once = program(added=gpus(4))
    assert once.returncode == 0, once.stderr
    assert "\x1b" not in once.stdout
    assert "SIMULATED" in once.stdout
    assert all(line_of(once.stdout, i) for i in range(4))


def test_a_closed_pipe_is_not_an_error(gpus):
    command = f"{sys.executable} {SCRIPT} --once; echo status=$? >&2"
    completed = subprocess.run(
        f"({command}) | true", shell=True, env=os.environ | gpus(2), stderr=subprocess.PIPE, check=False
    )
    assert completed.stderr == b"status=0\n"


def test_json_is_one_snapshot_of_the_selected_gpus(gpus, tmp_path):
    result = program("--json", "--gpus", "0,2", "--stats-file", str(tmp_path / "x.json"), added=gpus(4))
    assert json.loads(multi_path(tmp_path / "x.json").read_text())[0]["aggregate_stats"]["gpu_count"] == 2
    entry = json.loads(result.stdout)
    assert [gpu["gpu_index"] for gpu in entry["multi_gpu_data"]] == [0, 2]
    assert entry["aggregate_stats"]["gpu_count"] == 2
    assert entry["simulated"]


def test_a_simulated_gpu_that_was_lost_from_the_start_is_marked(gpus):
    """It has no name, which would have the mark."""
    driver = gpus(2, "0 1 all !lost")
    once = program("--gpus", "1", "--once", added=driver)
    assert (" SIMULATED " in once.stdout, "1 lost" in once.stdout) == (True, True)


def test_the_python_one_liner_counts_the_gpus(gpus):
    code = "import scripts.gputop; m=scripts.gputop.GPUMonitor(); m.initialize(); print(f'GPUs: {m.gpu_count}')"
    completed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | gpus(3), check=False, capture_output=True, text=True
    )
    assert (completed.stdout, completed.stderr) == ("GPUs: 3\n", "")


def test_without_a_terminal_statistics_are_written_for_the_requested_duration(gpus, tmp_path):
    completed = program("--stats-file", str(tmp_path / "x.json"), "--seconds", "1", "--interval", "0.2", added=gpus(3))
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")
    single = json.loads((tmp_path / "x.json").read_text())
    several = json.loads(multi_path(tmp_path / "x.json").read_text())
    assert 2 <= len(single) == len(several) <= 6  # a busy machine skips some
    assert {len(entry["multi_gpu_data"]) for entry in several} == {3}


def test_a_signal_ends_the_writing_of_statistics_cleanly(gpus, tmp_path):
    path = tmp_path / "x.json"
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--stats-file", str(path), "--interval", "0.05"],
        env=os.environ | gpus(2), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_until(lambda: path.exists() and path.read_text().count("timestamp") > 3)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=240)
    assert (process.returncode, out) == (0, "")
    assert len(json.loads(path.read_text())) > 2


def test_a_recording_is_shown_once_at_its_end_or_at_the_requested_position(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    Recorder(tmp_path / "gpt2_adamw_2gpu").write(101)
    assert main(["--replay", str(tmp_path / "gpt2_adamw_2gpu"), "--once"]) == 0
    text = capsys.readouterr().out
    assert re.match(r"0 +1 .*100%", line_of(text, 0))
    assert "gpt2_adamw_2gpu" in text
    assert main(["--replay", str(tmp_path / "gpt2_adamw_2gpu"), "--once", "--at", "10"]) == 0
    assert " 20%" in line_of(capsys.readouterr().out, 0)


def test_a_wrong_number_is_refused_with_the_permitted_ones(capsys):
    for option, value, expected in (
        ("--hz", "1e-12", "samples per second from 0.001 to 1000"),
        ("--interval", "foo", "seconds from 0.05 to 3600"),
        ("--seconds", "-1", "seconds, at least 0.001"),
        ("--at", "inf", "seconds"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["--csv", "-", f"{option}={value}"])
        assert end.value.code == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == f"gputop: error: argument {option}: expected a number of {expected}, not '{value}'"


# ---- the terminal ------------------------------------------------------------------------------------------------


class Screen:
    """gputop on a pseudo-terminal of this size."""

    def __init__(self, *arguments: str, columns: int, lines: int, **added: str):
        self.parent, self.child = pty.openpty()
        fcntl.ioctl(self.child, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(self.child)
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *arguments], env=environ | {"TERM": "xterm-256color"} | added,
            stdin=self.child, stdout=self.child, stderr=self.child, start_new_session=True,
        )  # fmt: skip
        self.text = ""

    def read(self) -> str:
        while select.select([self.parent], [], [], 0.05)[0]:
            self.text += os.read(self.parent, 65536).decode(errors="replace")
        return self.text

    def wait_until(self, text: str) -> None:
        wait_until(lambda: text in self.read())

    def type(self, keys: str) -> None:
        os.write(self.parent, keys.encode())

    def end(self) -> int:
        """Wait for the process and return its exit status; the terminal must be restored."""
        wait_until(lambda: self.read() is not None and self.process.poll() is not None)
        self.read()
        assert termios.tcgetattr(self.child) == self.before
        assert self.text.count("\x1b[?1049h") == self.text.count("\x1b[?1049l") > 0
        assert self.text.rfind("\x1b[?25h") > self.text.rfind("\x1b[?25l")  # the cursor is visible again
        assert "Traceback" not in self.text
        os.close(self.parent)
        os.close(self.child)
        return self.process.returncode


@pytest.fixture
def recording(tmp_path):
    Recorder(tmp_path / "gpt2_adamw_4gpu", gpus=4, name="NVIDIA A10G (simulated)").write(400)
    return str(tmp_path / "gpt2_adamw_4gpu")


def test_the_key_q_restores_the_terminal(recording):
    screen = Screen("--replay", recording, columns=80, lines=24)
    screen.wait_until("SIMULATED")
    screen.type("q")
    assert screen.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_restores_the_terminal(recording, number):
    screen = Screen("--replay", recording, columns=80, lines=24)
    screen.wait_until("SIMULATED")
    screen.process.send_signal(number)
    assert screen.end() == 0


def test_an_error_restores_the_terminal(tmp_path):
    recorder = Recorder(tmp_path / "run", started=time.time())
    recorder.write(1)
    screen = Screen("--run", str(tmp_path / "run"), columns=80, lines=24)
    screen.wait_until("attached")
    recorder.run.gpu_samples.unlink()
    assert screen.end() == 2
    assert "gpu_samples.bin is missing" in screen.text


def test_ctrl_z_releases_the_terminal_and_fg_restores_the_screen(recording):
    screen = Screen("--replay", recording, "--interval", "60", columns=80, lines=24)
    screen.wait_until("SIMULATED")
    screen.process.send_signal(signal.SIGTSTP)
    screen.wait_until("\x1b[?1049l")
    wait_until(lambda: termios.tcgetattr(screen.child) == screen.before)
    screen.process.send_signal(signal.SIGCONT)
    wait_until(lambda: screen.read().count("\x1b[?1049h") == 2)
    wait_until(lambda: "SIMULATED" in screen.read().rpartition("\x1b[?1049h")[2])  # redrawn at once
    screen.type("q")
    assert screen.end() == 0


@pytest.fixture
def tmux(tmp_path):
    opened = []

    def start(size, environ, *arguments):
        opened.append(Tmux(tmp_path, size, environ, sys.executable, str(SCRIPT), *arguments))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal("kill-server")


def test_a_terminal_resize_is_followed_whatever_the_environment_says(tmux, recording):
    terminal = tmux((80, 24), {"COLUMNS": "80", "LINES": "24"}, "--replay", recording, "--interval", "30")
    wait_until(lambda: "last 2 min" in terminal.screen())
    terminal("resize-window", "-x", "30", "-y", "12")
    wait_until(lambda: "last 2 min" not in terminal.screen() and "SIMULATED" in terminal.screen())
    terminal("resize-window", "-x", "150", "-y", "40")
    wait_until(lambda: "last 2 min" in terminal.screen())
    assert all(line_of(terminal.screen(), i) for i in range(4))
