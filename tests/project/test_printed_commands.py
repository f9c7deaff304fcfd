"""Commands that kmatrix prints work when they are pasted: with the results elsewhere and blanks in their path."""

from __future__ import annotations

import ast
import re
import shlex

import pytest

from kmatrix.cli.commands import parse
from kmatrix.cli.status import plain
from kmatrix.cli.targets import find_target
from kmatrix.errors import LaunchError
from kmatrix.records.lock import held, in_use
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.records.tracking import SyncState, SyncStatus, pending_messages
from kmatrix.runner.loop import EXIT_STOPPED, Outcome
from kmatrix.status.disk_space import what_to_do
from kmatrix.status.overview import Overview
from kmatrix.text import make_command
from programs import ROOT, Program
from records_factory import FakeRun, make_matrix

# Commands of one matrix: printed with its path, never by name or without.
OF_A_MATRIX = "continue|status|logs|stop|track-sync|summary|test-rerun|update-graphs|estimate"


@pytest.fixture
def matrix(tmp_path):
    """A matrix below a directory that .config does not name, with a blank in its path."""
    folder = tmp_path / "my results"
    folder.mkdir()
    runs = [FakeRun(status="stopped", optimizer="adamw"), FakeRun(status="finished", optimizer="muon")]
    return make_matrix(folder, runs)


def resolved(text, tmp_path):
    """Return the matrices that the commands in a text act on, as a shell and kmatrix read them."""
    program = Program(tmp_path)
    program.write("CONFIG_GPT2_DEVICE_CPU=y")
    found = []
    for printed in commands(text):
        _, target, *words = shlex.split(printed)
        _, arguments = parse(target, [*words, f"O={tmp_path}"])
        found.append(find_target(arguments).path.resolve())
    return found


def commands(text):
    """Return the make commands with arguments in a text, up to the quote that closes their last argument."""
    return re.findall(r"make [a-z][\w-]*(?: [A-Z_]+=(?:[^\s'`;]|'[^']*')+)+", text)


def test_the_quotes_of_a_command_survive_a_shell(matrix):
    words = shlex.split(make_command("continue", matrix.path, RETRY_FAILED="1"))
    assert words[:2] == ["make", "continue"]
    assert words[2:] == [f"TARGET={matrix.path}", "RETRY_FAILED=1"]


def printed_by_status(matrix, capsys):
    return "\n".join(plain(Overview(matrix).poll()))


def printed_by_the_end(matrix, capsys):
    from kmatrix.cli.run import _print_next_steps

    _print_next_steps(matrix, Outcome(exit_code=EXIT_STOPPED, counts={Status.STOPPED: 1}, disk_full=False))
    _print_next_steps(matrix, Outcome(exit_code=1, counts={Status.FAILED: 1}, disk_full=False))
    return capsys.readouterr().out


def printed_by_the_lock(matrix, capsys):
    with held(matrix):
        return str(in_use(matrix))


def printed_for_a_full_disk(matrix, capsys):
    return what_to_do(matrix.path)


def printed_for_pending_steps(matrix, capsys):
    waiting = SyncStatus(tracker="wandb", state=SyncState.FAILED, error="no connection")
    return "\n".join(pending_messages([("a", waiting)], matrix.path))


@pytest.mark.parametrize(
    "printed",
    [
        printed_by_status,
        printed_by_the_end,
        printed_by_the_lock,
        printed_for_a_full_disk,
        printed_for_pending_steps,
    ],
)
def test_a_printed_command_finds_the_matrix_that_it_was_printed_for(printed, matrix, tmp_path, capsys):
    text = printed(matrix, capsys)
    found = resolved(text, tmp_path)
    assert found, text
    assert set(found) == {matrix.path.resolve()}


def test_commands_of_a_matrix_have_one_owner():
    """A literal such as `make continue TARGET=...` would miss quotes, or name the matrix only."""
    written = re.compile(rf"make (?:{OF_A_MATRIX}) TARGET=(?!<)")
    found = []
    for path in sorted((ROOT / "lib").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and written.search(node.value):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    # text.py has an example in a docstring; wandb.py quotes the path itself.
    assert [
        place for place in found if not place.startswith(("lib/kmatrix/text.py", "lib/kmatrix/track/wandb.py"))
    ] == []


def test_the_error_of_a_running_matrix_is_a_launch_error(matrix):
    with held(matrix):
        assert isinstance(in_use(MatrixDir(matrix.path)), LaunchError)
