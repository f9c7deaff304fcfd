"""Every command ends cleanly if its output cannot be written: a full disk, a closed pipe, no stdout at all."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from kmatrix import ROOT
from kmatrix.cli.commands import COMMANDS, main
from kmatrix.errors import LaunchError
from kmatrix.experiment.create import check_place
from kmatrix.output import run_program
from kmatrix.records.paths import program_environment
from programs import Program
from records_factory import FakeRun, make_matrix

SENTENCE = "error: cannot write the output: "
REFUSED = ("NOSUCH=1",)  # of commands that would train or download
PRINTING = {"status", "estimate", "logs", "summary", "update-graphs", "compare", "list-checkpoints", "plan", "doctor"}
WORDS = {
    **dict.fromkeys(("quickstart", "prepare-data", "test-matrix", "train", "add"), REFUSED),
    "test-rerun": ("OPTIMIZER=nosuch",),
    "wandb-test": ("PROJECT=../x",),
    "trackio-test": ("PROJECT=../x",),
    "gpu-exporter": ("PORT=x",),  # it would serve until it is ended
    "defconfig": ("DEFCONFIG=gpt2-cpu-quick",),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return the text of a .config, and a matrix that nothing changes."""
    for module in sorted({command.handler.partition(":")[0] for command in COMMANDS.values()}):
        importlib.import_module(module)  # once, not in each child
    folder = tmp_path_factory.mktemp("prepared")
    Program(folder).check("defconfig-gpt2-cpu-quick")
    matrix = make_matrix(folder, [FakeRun(), FakeRun(optimizer="muon", status="failed", reason="x", kind="error")])
    return folder, matrix


def status_with(output, words, error):
    """Run a command in a child process; return its exit status. output: the descriptor of stdout, None: closed."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 99
    try:  # a copy of the test process: it may not return to pytest
        signal.alarm(60)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        if output is None:
            os.close(1)
            sys.stdout = None
        else:
            os.dup2(output, 1)
            sys.stdout = os.fdopen(1, "w", closefd=False)
        status = run_program(lambda: main(words))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        status = 120
    finally:
        os._exit(status)


@pytest.mark.parametrize("target", COMMANDS)
def test_a_command_whose_output_cannot_be_written_ends_cleanly(target, prepared, tmp_path, monkeypatch):
    folder, matrix = prepared
    monkeypatch.setattr("kmatrix.cli.machine.torch", lambda *_: [])  # it starts a process that imports torch
    monkeypatch.setattr("kmatrix.cli.results.draw_graphs", lambda numbers: ([tmp_path / "loss.png"], []))
    (tmp_path / ".config").write_bytes((folder / ".config").read_bytes())
    monkeypatch.chdir(tmp_path)
    takes = COMMANDS[target].takes
    places = {"TARGET": matrix.path, "RESULTS_DIR": tmp_path, "BASE": matrix.path, "NEW": matrix.path}
    words = [target, f"O={tmp_path}", *(f"{name}={path}" for name, path in places.items() if name in takes)]
    words += WORDS.get(target, ())
    error = tmp_path / "error"

    def ends(output):
        return status_with(output, words, error), error.read_text() if error.is_file() else ""

    own, _ = ends(None)
    assert own in (0, 1, 2)
    reader, closed = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    found, message = ends(full)
    printed = SENTENCE in message
    assert (found, "Traceback" in message) == (1 if printed else own, False), message
    assert printed or target not in PRINTING
    found, message = ends(closed)
    assert (found, "Traceback" in message) == (0 if printed else own, False), message
    for number in (closed, full):
        os.close(number)


def test_an_error_that_cannot_be_written_keeps_its_status(tmp_path):
    null = os.open(os.devnull, os.O_WRONLY)
    assert status_with(null, ["status", f"RESULTS_DIR={tmp_path}"], "/dev/full") == 2


def test_the_program_itself_ends_with_a_sentence_on_a_full_disk():
    command = [sys.executable, "-m", "kmatrix", "help"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=program_environment(), check=False)
    assert ended.returncode == 1
    assert ended.stderr == f"{SENTENCE}No space left on device\n".encode()


def test_a_path_that_this_user_cannot_use_is_an_error_of_two_lines(capsys):
    def refuse():
        raise PermissionError(errno.EACCES, "Permission denied", "/root/checkpoint.pt")

    assert run_program(refuse) == 2
    assert capsys.readouterr().err.splitlines()[0] == "error: Permission denied: /root/checkpoint.pt"


def test_a_terminal_without_a_character_shows_its_number(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert run_program(lambda: print("23 \N{DEGREE SIGN}C") or 0) == 0
    assert written.getvalue() == b"23 \\xb0C\n"


def test_programs_of_the_trainer_that_print_end_cleanly_too():
    for path in (ROOT / "gpt2" / "inference").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert ("__main__" in text) == ("sys.exit(run_program(main))" in text), path


def test_a_results_folder_that_cannot_be_read_is_not_called_empty(tmp_path, monkeypatch, capsys):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert main(["status", f"RESULTS_DIR={tmp_path}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: Permission denied: {tmp_path}\n")


def test_a_checkpoint_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot make checkpoints in .*file"):
        check_place(tmp_path, tmp_path / "file")
