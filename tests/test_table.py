"""Tables that fit: every width is kept, what is worth most stays, names stay told apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix.cli.table import Column, fitted, joined, shortened, wrapped

COLUMNS = (
    Column(title="run", words=True),
    Column(title="status", words=True),
    Column(title="loss", worth=2),
    Column(title="MFU", worth=1),
    Column(title="left", worth=3),
)
ROWS = [
    ("gpt2_adamw_seed1_lr6e-4_4gpu", "running", "3.412", "41.2%", "1:02:03"),
    ("gpt2_muon_seed1_lr6e-4_4gpu", "planned", "-", "-", "-"),
]


def titles(width, rows=ROWS):
    return [cell.strip() for cell in fitted(COLUMNS, rows, width)[0]]


@pytest.mark.parametrize(
    ("width", "left"),
    [
        (None, ["run", "status", "loss", "MFU", "left"]),
        (80, ["run", "status", "loss", "MFU", "left"]),
        (58, ["run", "status", "loss", "left"]),
        (48, ["run", "status", "left"]),
        (40, ["run", "status"]),
        (5, ["run", "status"]),
    ],
)
def test_columns_leave_in_the_order_of_their_worth(width, left):
    assert titles(width) == left


def test_a_column_in_which_nothing_is_known_leaves_first():
    rows = [(name, status, loss, mfu, "-") for name, status, loss, mfu, _ in ROWS]
    assert titles(52, rows) == ["run", "status", "loss", "MFU"]


def test_columns_stand_below_each_other_words_left_and_numbers_right():
    lines = [joined(row) for row in fitted(COLUMNS, ROWS, None)]
    assert lines[0] == "run                           status    loss    MFU     left"
    assert lines[2] == "gpt2_muon_seed1_lr6e-4_4gpu   planned      -      -        -"


@given(
    st.integers(24, 120),
    st.lists(st.tuples(*[st.text("abc_", max_size=40)] + [st.text("0123456789", max_size=9)] * 4), max_size=5),
)
def test_no_line_is_wider_than_the_screen(width, rows):
    assert all(len(joined(row)) <= max(width, 14 + 2 + 9) for row in fitted(COLUMNS, rows, width))


def test_a_short_name_keeps_its_beginning_and_its_end():
    assert shortened("gpt2_adamw_seed1_4gpu", 12) == "gpt2_…1_4gpu"
    assert shortened("short", 12) == "short"


@given(st.text(max_size=60), st.integers(1, 60))
def test_a_shortened_name_is_never_too_long(text, width):
    assert len(shortened(text, width)) <= width


def test_a_sentence_is_wrapped_with_its_rest_indented():
    assert wrapped("one two three four five six", 20) == ["one two three four", "    five six"]
    assert wrapped("one two three", None) == ["one two three"]
