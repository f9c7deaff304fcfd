"""Follow a matrix in terminals of several sizes, in pipes and logs, with and without color."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from pathlib import Path

import pexpect
import pytest

from kmatrix.records.paths import MatrixDir
from story import load_json
from tmux_screen import Tmux
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]

ESCAPE = "\x1b"
STYLES = re.compile(r"\x1b\[[0-9;]*m")
TINY = (
    *("OPTIMIZER=adamw,sgd", "NUM_GPUS=1", "GLOBAL_BATCH=4", "DEVICE=cpu", "LR=1e-3"),
    *("MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=32", "BLOCK_SIZE=32", "BATCH_SIZE=4"),
    *(
        "EVAL_SAMPLES=8",
        "EVAL_INTERVAL=100000",
        "LOG_INTERVAL=20",
        "CPU_THREADS=1",
        "MACHINE_HOUR_PRICE=1.0",
        "REUSE=n",
    ),
    *("SIMULATE=2", "ALERT_STALL=0"),
)
ENDLESS = "MAX_ITERS=2000000"


@pytest.fixture(autouse=True)
def configured(clone):
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0


@pytest.fixture
def terminal(clone, tmp_path):
    """Run a command of the clone in a terminal of this size."""
    opened = []

    def start(size, *command, **environ):
        folder = tmp_path / f"tmux{len(opened)}"
        folder.mkdir()
        plainly = ("env", "-u", "COLUMNS", "-u", "LINES", "-C", str(clone.root))  # readline sets them in any program
        opened.append(Tmux(folder, size, environ, *plainly, *command))
        return opened[-1]

    yield start
    for child in opened:
        with contextlib.suppress(subprocess.CalledProcessError):  # the command has exited
            child("kill-server")


@pytest.fixture
def running_matrix(clone, tmp_path):
    """A matrix in the background with one running and one pending run; it is stopped after the test."""
    completed = clone.make("test-matrix", *TINY, ENDLESS, f"RESULTS_DIR={tmp_path}", "DETACH=1")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    matrix = newest(tmp_path)
    wait_until(lambda: (status(clone, matrix)["runs"][0]["loss"] or 0) > 0, "it trains", 300)
    # Its recorder is another process, and its pace is known from the second line of its log on.
    wait_until(lambda: is_known_completely(status(clone, matrix)), "its recording and its pace are known", 300)
    yield matrix
    clone.make("stop", f"TARGET={matrix}")


def is_known_completely(value: dict) -> bool:
    first = value["runs"][0]
    return bool(first["memory_mib"] and first["left_s"] is not None and value["gpus"])


def screen_with(terminal: Tmux, *texts: str) -> str:
    """Return the screen of a terminal once it shows all of these texts: it may be read while it is drawn."""
    return wait_until(lambda: next((seen for seen in [terminal.screen()] if all(text in seen for text in texts)), ""))


def newest(folder: Path) -> Path:
    return max(folder.glob("test_matrix_results_*"))


def status(clone, matrix: Path) -> dict:
    return json.loads(clone.kmatrix("status", f"TARGET={matrix}", "JSON=1").stdout)


def command_line(clone, *arguments: str) -> list[str]:
    return ["make", "--no-print-directory", "-C", str(clone.root), *arguments]


def test_make_status_fits_terminals_of_all_sizes_pipes_and_terminals_without_color(clone, terminal, running_matrix):
    for size in ((80, 24), (200, 60), (40, 12)):
        child = terminal(size, *command_line(clone, "status", f"TARGET={running_matrix}"))
        wanted = (running_matrix.name[:30], "running", "planned", "gpt2_", "GPU", "step")
        if_wide = ("memory", "0 NVIDIA A10G (simulated)")  # lines of GPUs, and of runs if there is space
        text = screen_with(child, *wanted, *(if_wide if size[0] >= 80 else ()))
        assert size[0] >= 80 or not [part for part in if_wide if part in text]

    piped = clone.kmatrix("status", f"TARGET={running_matrix}", FORCE_COLOR="1", TERM="xterm-256color")
    assert ESCAPE not in piped.stdout + piped.stderr
    watched = clone.kmatrix(
        "status", f"TARGET={running_matrix}", COLUMNS="60", LINES="20"
    )  # watch sets these variables
    assert max(map(len, watched.stdout.splitlines())) <= 60
    assert len(max(piped.stdout.splitlines(), key=len)) > 60

    for text, styled in (("", True), ("1", False)):
        environ = {**clone.environment, "NO_COLOR": text, "TERM": "xterm-256color"}
        screen = pexpect.spawn(
            str(clone.root / ".venv" / "bin" / "kmatrix"),
            ["status", f"TARGET={running_matrix}"],
            cwd=str(clone.root),
            env=environ,
            dimensions=(24, 80),
            timeout=120,
            encoding="utf-8",
        )
        screen.expect("planned")
        seen = screen.before
        screen.sendintr()
        screen.expect(pexpect.EOF)
        assert bool(STYLES.search(seen + screen.before)) == styled


def test_status_prints_all_facts_as_text_and_as_json(clone, running_matrix):
    value = status(clone, running_matrix)
    first, second = value["runs"]
    assert (value["running"], first["status"], second["status"]) == (True, "running", "planned")
    for name in ("step", "max_iters", "loss", "tokens_per_second", "ranks", "elapsed_s", "left_s", "dollars"):
        assert first[name] is not None, name
    gpus = value["gpus"]
    assert [(gpu["index"], gpu["run"]) for gpu in gpus] == [(0, first["name"]), (1, first["name"])]
    assert all(gpu["utilization"] and gpu["memory_used"] and gpu["power"] for gpu in gpus)
    assert value["ends"] > value["started"]
    assert value["all_dollars"] > value["dollars"]
    text = clone.make("status", f"TARGET={running_matrix}").stdout
    assert "until 20" in text
    assert "cost $" in text


@pytest.mark.parametrize("size", [(80, 24), (50, 12)])
def test_the_live_line_of_a_matrix_fits_its_terminal_and_ctrl_c_ends_it(clone, terminal, tmp_path, size):
    child = terminal(size, *command_line(clone, "test-matrix", *TINY, ENDLESS, f"RESULTS_DIR={tmp_path}"))
    pace = r"left [\d:]+" if size[0] >= 80 else ""
    live = re.compile(rf"^.*run 1/2 \S+  step \d+/2000000.*{pace}.*$", re.MULTILINE)

    def drawn():
        """the live line is on the screen"""
        screen = child.screen()  # once: the next one may be half drawn
        return live.search(screen) if "1 pending" in screen else None

    assert len(wait_until(drawn)[0]) <= size[0]
    child("send-keys", "C-c")  # Ctrl+C also ends the surrounding shell
    matrix = newest(tmp_path)
    wait_until(lambda: not MatrixDir(matrix).is_held(), "it ends")
    assert load_json(matrix / "status.json")["status"] == "stopped"
    check_no_escape_codes(matrix)


def test_output_to_a_pipe_and_all_files_are_free_of_escape_codes(clone, tmp_path):
    broken = ("OPTIMIZER=adamw,sgd", "LR=1e9", "GRAD_CLIP=0", "MAX_ITERS=60")
    arguments = [argument for argument in TINY if not argument.startswith(("OPTIMIZER=", "LR="))]
    environ = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "CLICOLOR_FORCE": "1"}
    completed = clone.make("test-matrix", *arguments, *broken, f"RESULTS_DIR={tmp_path}", **environ)
    assert ESCAPE not in completed.stdout + completed.stderr
    assert "\r" not in completed.stdout
    check_no_escape_codes(newest(tmp_path))
    for target in ("summary", "estimate", "status"):
        assert ESCAPE not in clone.make(target, f"TARGET={newest(tmp_path)}", **environ).stdout
    text = clone.make("status", f"TARGET={newest(tmp_path)}").stdout
    assert re.search(r"gpt2_\S+ failed: loss is nan", text), text


def check_no_escape_codes(matrix: Path) -> None:
    """Check that no text file of a matrix contains an escape code."""
    for path in (path for path in matrix.rglob("*") if path.suffix in (".log", ".txt", ".json", ".jsonl")):
        assert ESCAPE not in path.read_text(encoding="utf-8", errors="replace"), path
