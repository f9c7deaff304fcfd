"""ON_FINISH: the variables of the command, no shell, and failures without effect on the matrix."""

from __future__ import annotations

import json
import os
import sys

import pytest

import kmatrix.runner.execute as module
from kmatrix.errors import ConfigError
from kmatrix.runner.execute import command_of, finish
from records_factory import FakeRun, make_matrix

RECORD_CALL = "import json, os, sys; json.dump([dict(os.environ), sys.argv[1:]], open(sys.argv[1], 'w'))"


@pytest.fixture
def finished_matrix(tmp_path):
    return make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="sgd", status="failed", reason="nan")])


def quoted(*arguments):
    return " ".join('"' + argument.replace('"', '\\"') + '"' for argument in arguments)


@pytest.mark.process
def test_the_on_finish_command_receives_the_matrix_and_its_outcome(finished_matrix, tmp_path):
    output_file = tmp_path / "answer.json"
    assert finish(finished_matrix, quoted(sys.executable, "-c", RECORD_CALL, str(output_file))) == ""
    environment, _ = json.loads(output_file.read_text())
    variables = {
        name: text for name, text in environment.items() if name.startswith("KMATRIX_") and name != "KMATRIX_ROOT"
    }
    expected = {"KMATRIX_MATRIX": str(finished_matrix.path), "KMATRIX_STATUS": "finished"}
    assert variables.items() >= (expected | {"KMATRIX_FINISHED": "1", "KMATRIX_FAILED": "1"}).items()


@pytest.mark.process
def test_the_command_does_not_run_in_a_shell(finished_matrix, tmp_path):
    output_file = tmp_path / "answer.json"
    finish(finished_matrix, quoted(sys.executable, "-c", RECORD_CALL, str(output_file), "$HOME; rm -rf /", "`id`"))
    assert json.loads(output_file.read_text())[1][1:] == ["$HOME; rm -rf /", "`id`"]


@pytest.mark.process
def test_a_failure_of_the_command_is_reported(finished_matrix, monkeypatch):
    assert finish(finished_matrix, quoted(sys.executable, "-c", "raise SystemExit(3)")).endswith("ended with status 3")
    monkeypatch.setattr(module, "FINISH_LIMIT_S", 0.2)
    assert "took longer than 0.2 s" in finish(
        finished_matrix, quoted(sys.executable, "-c", "import time; time.sleep(60)")
    )
    assert finish(finished_matrix, "") == ""


def test_the_command_of_a_matrix_of_another_user_is_not_run(finished_matrix, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: finished_matrix.path.stat().st_uid + 1)
    text = quoted("touch", str(tmp_path / "ran"))
    assert (
        finish(finished_matrix, text) == f"ON_FINISH={text} was not run: {finished_matrix.name} belongs to another user"
    )
    assert not (tmp_path / "ran").exists()
    assert finish(finished_matrix, "") == ""


@pytest.mark.parametrize(("text", "reason"), [("'half", "invalid ON_FINISH"), ("no-such-program-here x", "not found")])
def test_a_command_that_cannot_run_is_refused_before_the_first_run(text, reason):
    with pytest.raises(ConfigError, match=reason):
        command_of(text)
