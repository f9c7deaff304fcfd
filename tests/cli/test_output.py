"""Control characters in files and names do not reach the terminal."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.cli.output import PlainStream, plain_output, terminal_output
from kmatrix.cli.status import drawn, screen
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.status.view.overview import Overview
from kmatrix.text import printable
from programs import run
from records_factory import FakeRun, make_matrix

TITLE = "\x1b]0;owned\x07"
HOSTILE = f"red \x1b[31m{TITLE}\x9b2J\x08\x7f end\u202e"


def is_plain(text):
    return all(char in "\n\t" or not (ord(char) < 32 or 0x7F <= ord(char) < 0xA0 or char == "\u202e") for char in text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07a", "a"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bP1$r\x1b\\a\x1bc\x1b(Bb", "ab"),
        ("10 %\r20 %\r\n", "10 %\n20 %\n"),
        ("\x9b31ma\x08b\x7f", "31mab"),
        ("abc\u202egnp.exe", "abcgnp.exe"),
        ("\udcff", ""),
    ],
)
def test_a_text_loses_what_a_terminal_obeys(text, expected):
    assert printable(text) == expected


@given(st.text(alphabet=st.characters(codec="utf-8") | st.sampled_from("\x1b[]0;m\x07\x9b\\\r")))
def test_a_printable_text_is_plain_and_stays_as_it_is(text):
    found = printable(text)
    assert is_plain(found)
    assert printable(found) == found


@pytest.fixture
def hostile(tmp_path):
    """Return a matrix whose files have control characters wherever a text is shown."""
    runs = [FakeRun(), FakeRun(optimizer="muon", status="failed", reason=HOSTILE, kind="error", log_tail=(HOSTILE,))]
    matrix = make_matrix(tmp_path, runs)
    for folder in matrix.runs():
        record = read_json(folder.run_json)
        train = record["train"] | {"model": HOSTILE, "optimizer": f"{record['train']['optimizer']}{TITLE}"}
        write_json(folder.run_json, record | {"axes": record["axes"] | {"note": HOSTILE}, "train": train})
        status = read_json(folder.status)
        write_json(folder.status, status | {"alerts": [], "log_tail": [HOSTILE]})
    plan = read_json(matrix.matrix_json)
    axis = {"label": HOSTILE, "symbol": "X", "values": [HOSTILE]}
    write_json(
        matrix.matrix_json, plan | {"command": HOSTILE, "axes": [axis], "cuts": [{"count": 1, "reason": HOSTILE}]}
    )
    return MatrixDir(matrix.path.rename(tmp_path / f"test_matrix_results_{TITLE}"))


@pytest.mark.parametrize("command", ["status", "estimate", "summary", "compare", "list-checkpoints", "logs"])
def test_no_command_prints_control_characters_of_a_file_or_a_name(hostile, command):
    names = ("BASE", "NEW") if command == "compare" else ("TARGET",)
    result = run(command, *(f"{name}={hostile.path}" for name in names))
    assert is_plain(result.out + result.err)
    assert result.out + result.err
    assert command != "summary" or is_plain(hostile.summary.read_text())


def test_the_display_of_a_terminal_has_only_its_own_sequences(hostile):
    assert is_plain(drawn(screen(Overview(hostile).poll(), width=100)).plain)


def test_a_display_writes_to_the_terminal_itself(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    with plain_output():
        print("a\x1b[31mb")
        terminal_output().write("\x1b[0m")
        assert isinstance(sys.stdout, PlainStream)
    assert sys.stdout is terminal
    assert terminal.getvalue() == "ab\n\x1b[0m"
