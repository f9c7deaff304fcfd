"""Painting: the terminal shows the lines, and only what changed is written."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kmatrix.gputop.terminal.paint import CLOSE, OPEN, Painter

WIDTH, HEIGHT = 20, 4
SEQUENCE = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])")


class Terminal:
    """What a terminal shows, from the sequences that the painter writes."""

    def __init__(self, width=WIDTH, height=HEIGHT):
        self.width, self.rows = width, [[" "] * width for _ in range(height)]
        self.line = self.column = 0

    def write(self, text):
        while text:
            if found := SEQUENCE.match(text):
                self._apply(found[1], found[2])
                text = text[found.end() :]
            else:
                self._put(text[0])
                text = text[1:]

    def _apply(self, numbers, letter):
        values = [int(word or 1) for word in numbers.lstrip("?").split(";")]
        if letter == "H":
            self.line, self.column = values[0] - 1, values[1] - 1
        elif letter == "G":
            self.column = values[0] - 1
        elif letter == "B":
            self.line += values[0]
        elif letter == "C":
            self.column += values[0]
        elif letter == "K":
            self.rows[self.line][self.column :] = [" "] * (self.width - self.column)
        elif letter == "J":
            self.rows = [[" "] * self.width for _ in self.rows]
        else:
            assert letter in "mhl", f"unexpected {letter}"

    def _put(self, character):
        if character == "\b":
            self.column -= 1
            return
        size = cell_len(character)
        if not size:
            self.rows[self.line][self.column - 1] += character
            return
        self.rows[self.line][self.column : self.column + size] = [character, *[""] * (size - 1)]
        self.column += size

    def text(self):
        return ["".join(row).rstrip() for row in self.rows]


def painter(**options):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=WIDTH, **options)
    return Painter(console), file


def written(file):
    text = file.getvalue()
    file.seek(0)
    file.truncate()
    return text


characters = st.sampled_from(["a", "b", "0", " ", " ", "█", "中", "é", "e\u0301"])
lines = st.lists(characters, max_size=WIDTH + 3).map("".join)
pictures = st.lists(st.lists(lines, max_size=HEIGHT + 1), min_size=1, max_size=5)


def cut(text):
    """Return what of a text fits into the width of the terminal."""
    kept = ""
    for character in text:
        if cell_len(kept + character) > WIDTH:
            break
        kept += character
    return kept.rstrip()


@settings(max_examples=100, deadline=None)
@given(pictures)
def test_the_terminal_shows_each_picture_whatever_was_there_before(shown):
    paint, file = painter()
    terminal = Terminal()
    for picture in shown:
        paint.paint([Text(line) for line in picture], WIDTH, HEIGHT)
        terminal.write(written(file))
        expected = [cut(line) for line in picture[:HEIGHT]]
        assert terminal.text() == expected + [""] * (HEIGHT - len(expected))


def test_an_equal_picture_writes_nothing():
    paint, file = painter()
    for _ in range(2):
        paint.paint([Text("one", style="red"), Text("two")], WIDTH, HEIGHT)
    first = written(file)
    paint.paint([Text("one", style="red"), Text("two")], WIDTH, HEIGHT)
    assert "one" in first
    assert written(file) == ""


def test_without_colours_no_colour_is_written():
    paint, file = painter(no_color=True)
    paint.paint([Text("88C", style="bold red")], WIDTH, HEIGHT)
    assert "31m" not in written(file)


@pytest.mark.parametrize("change", ["resized", "forgotten"])
def test_after_a_change_of_the_terminal_everything_is_painted(change):
    paint, file = painter()
    terminal = Terminal(WIDTH + 1, HEIGHT)
    paint.paint([Text("one"), Text("two")], WIDTH, HEIGHT)
    written(file)
    if change == "forgotten":
        paint.forget()
    paint.paint([Text("one"), Text("two")], WIDTH + (change == "resized"), HEIGHT)
    terminal.write(written(file))
    assert terminal.text() == ["one", "two", "", ""]


def test_the_screen_is_opened_and_closed_with_the_cursor():
    paint, file = painter()
    paint.start()
    assert written(file) == OPEN
    paint.stop()
    assert written(file) == CLOSE
    for number in re.findall(r"\?(\d+)h", OPEN):
        assert f"?{number}l" in CLOSE
    assert "?25l" in OPEN
    assert "?25h" in CLOSE
