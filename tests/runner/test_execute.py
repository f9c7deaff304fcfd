"""ON_FINISH: what the command is told, that it is no shell, and that it can hurt nothing."""

from __future__ import annotations

import json
import sys

import pytest

import kmatrix.runner.execute as module
from kmatrix.errors import ConfigError
from kmatrix.runner.execute import command_of, finish
from records_factory import FakeRun, make_matrix

TELL = "import json, os, sys; json.dump([dict(os.environ), sys.argv[1:]], open(sys.argv[1], 'w'))"


@pytest.fixture
def ended(tmp_path):
    return make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="sgd", status="failed", reason="nan")])


def quoted(*arguments):
    return " ".join('"' + word.replace('"', '\\"') + '"' for word in arguments)


def test_the_command_is_told_the_matrix_and_how_it_ended(ended, tmp_path):
    output_file = tmp_path / "answer.json"
    assert finish(ended, quoted(sys.executable, "-c", TELL, str(output_file))) == ""
    environment, _ = json.loads(output_file.read_text())
    told = {name: text for name, text in environment.items() if name.startswith("KMATRIX_") and name != "KMATRIX_ROOT"}
    wanted = {"KMATRIX_MATRIX": str(ended.path), "KMATRIX_STATUS": "finished"}
    assert told.items() >= (wanted | {"KMATRIX_FINISHED": "1", "KMATRIX_FAILED": "1"}).items()


def test_it_is_no_shell(ended, tmp_path):
    output_file = tmp_path / "answer.json"
    finish(ended, quoted(sys.executable, "-c", TELL, str(output_file), "$HOME; rm -rf /", "`id`"))
    assert json.loads(output_file.read_text())[1][1:] == ["$HOME; rm -rf /", "`id`"]


def test_its_failure_is_told(ended, monkeypatch):
    assert finish(ended, quoted(sys.executable, "-c", "raise SystemExit(3)")).endswith("ended with status 3")
    monkeypatch.setattr(module, "FINISH_LIMIT_S", 0.2)
    assert "took longer than 0.2 s" in finish(ended, quoted(sys.executable, "-c", "import time; time.sleep(60)"))
    assert finish(ended, "") == ""


@pytest.mark.parametrize(("text", "why"), [("'half", "invalid ON_FINISH"), ("no-such-program-here x", "not found")])
def test_what_could_not_be_run_in_the_end_is_refused_before_the_beginning(text, why):
    with pytest.raises(ConfigError, match=why):
        command_of(text)
