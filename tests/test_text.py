"""One format per kind of quantity, and tables that fit the width."""

from __future__ import annotations

import doctest
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmatrix import text
from kmatrix.text import (
    WIDTH,
    Column,
    columns,
    count,
    disk_size,
    duration,
    flop_count,
    memory_size,
    money,
    plural,
    section,
    shortened,
    shortened_names,
    shown,
    table,
    time_of_day,
    wrap,
)

COLUMNS = (
    Column(title="run", words=True),
    Column(title="status", words=True),
    Column(title="loss", worth=2),
    Column(title="MFU", worth=1),
    Column(title="left", worth=3),
)
ROWS = [
    ("gpt2_adamw_seed1_lr6e-4_4gpu", "running", "3.412", "41.2%", "100d02h"),
    ("gpt2_muon_seed1_lr6e-4_4gpu", "planned", "-", "-", "-"),
]


def test_the_docstring_examples_are_correct():
    assert doctest.testmod(text).failed == 0


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, "-"),
        (0, "0.0s"),
        (4.21, "4.2s"),
        (59.94, "59.9s"),
        (59.96, "1m00s"),
        (723, "12m03s"),
        (3599.6, "1h00m"),
        (3725, "1h02m"),
        (86_340, "23h59m"),
        (86_399, "1d00h"),
        (108_301, "1d06h"),
        (86_400_000, "1,000d00h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, expected):
    assert duration(seconds) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "2026-11-20 06:23:07"),
        ({"date": False}, "06:23:07"),
        ({"utc": True}, "2026-11-20 05:23:07 UTC"),
        ({"date": False, "utc": True}, "05:23:07 UTC"),
    ],
)
def test_a_time_of_day_is_local_unless_utc_is_named(options, expected, monkeypatch):
    monkeypatch.setenv("TZ", "CET-1")
    time.tzset()
    try:
        assert time_of_day(1_795_152_187.4, **options) == expected
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (None, "-"),
        (0, "0.0 MiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (512 * 2**20, "512 MiB"),
        (2**30, "1.0 GiB"),
        (23.96 * 2**30, "24.0 GiB"),
        (141 * 2**30, "141 GiB"),
    ],
)
def test_memory_is_measured_in_binary_units(size, expected):
    assert memory_size(size) == expected


def test_used_and_total_memory_have_the_same_unit():
    assert memory_size(512 * 2**20, 24 * 2**30) == "0.5 of 24.0 GiB"
    assert memory_size(12 * 2**20, 64 * 2**20) == "12.0 of 64.0 MiB"


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (None, "-"),
        (0, "0 B"),
        (41_000, "41 kB"),
        (20e6, "20 MB"),
        (999.6e6, "1 GB"),
        (1.494e9, "1.49 GB"),
        (3.2e12, "3.2 TB"),
    ],
)
def test_disks_are_measured_in_decimal_units(size, expected):
    assert disk_size(size) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (None, "-"),
        (0, "0"),
        (0.25, "0.25"),
        (12.34, "12.3"),
        (512, "512"),
        (999.6, "1.00k"),
        (41_234, "41.2k"),
        (102_400, "102k"),
        (1_024_000, "1.02M"),
        (10**10, "10.0B"),
        (2e15, "2000T"),
        (-4120, "-4.12k"),
    ],
)
def test_a_count_has_three_digits(number, expected):
    assert count(number) == expected


@given(st.floats(1, 9.99e14))
def test_a_count_is_exact_to_three_digits(number):
    text = count(number)
    factor = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert float(text.rstrip("kMBT")) * factor == pytest.approx(number, rel=0.005)


@pytest.mark.parametrize(
    ("number", "expected"), [(None, "-"), (12, "12 FLOP"), (8.59e8, "859 MFLOP"), (2.1e15, "2.10 PFLOP")]
)
def test_operations_have_si_prefixes(number, expected):
    assert flop_count(number) == expected


@pytest.mark.parametrize(("number", "expected"), [(0, "0 runs"), (1, "1 run"), (2, "2 runs"), (1200, "1,200 runs")])
def test_only_one_is_singular(number, expected):
    assert plural(number, "run") == expected


@pytest.mark.parametrize(
    ("dollars", "expected"),
    [(None, "-"), (0, "$0.00"), (0.00123, "$0.0012"), (0.01, "$0.01"), (12.3456, "$12.35"), (1200, "$1,200.00")],
)
def test_money_keeps_two_digits(dollars, expected):
    assert money(dollars) == expected


@pytest.mark.parametrize(
    ("name", "width", "expected"),
    [("short", 12, "short"), ("gpt2_adamw_seed1_4gpu", 12, "gpt2_…1_4gpu"), ("abc", 1, "…")],
)
def test_a_long_name_is_shortened_in_the_middle(name, width, expected):
    assert shortened(name, width) == expected


@pytest.mark.parametrize(
    ("names", "width", "expected"),
    [
        (["gpt2_adamw_1gpu", "gpt2_muon_1gpu"], 20, ["gpt2_adamw_1gpu", "gpt2_muon_1gpu"]),
        (["adamw_lr1_wd1_4gpu", "adamw_lr2_wd2_4gpu"], 9, ["…lr1_wd1…", "…lr2_wd2…"]),
        (["a_x1_2_the_end_is_equal", "a_x2_1_the_end_is_equal"], 8, ["…x1_2…", "…x2_1…"]),
        (["long_lr1_wd1_to_the_end", "long_lr2_wd0_1_to_the_end"], 11, ["…lr1_wd1…", "…lr2_wd0_1…"]),
        (["adamw, depth 4, with a long end", "adamw, depth 8, with a long end"], 10, ["…depth 4…", "…depth 8…"]),
    ],
)
def test_shortened_names_of_a_list_differ(names, width, expected):
    assert shortened_names(names, width) == expected


@given(st.text(max_size=60), st.integers(1, 60))
def test_a_shortened_name_is_never_too_long(name, width):
    assert len(shortened(name, width)) <= width


@pytest.mark.parametrize(("path", "expected"), [("a/b", "a/b"), ("/x/y", "/x/y"), (".", ".")])
def test_a_path_below_the_current_directory_is_relative(path, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown(tmp_path / path) == expected


def titles(width, rows=ROWS):
    return table(COLUMNS, rows, width)[0].split()


@pytest.mark.parametrize(
    ("width", "remaining"),
    [
        (None, ["run", "status", "loss", "MFU", "left"]),
        (80, ["run", "status", "loss", "MFU", "left"]),
        (58, ["run", "status", "loss", "left"]),
        (48, ["run", "status", "left"]),
        (40, ["run", "status"]),
        (5, ["run", "status"]),
    ],
)
def test_columns_are_dropped_from_the_least_important(width, remaining):
    assert titles(width) == remaining


def test_a_column_without_values_is_dropped_first():
    rows = [(name, status, loss, mfu, "-") for name, status, loss, mfu, _ in ROWS]
    assert titles(52, rows) == ["run", "status", "loss", "MFU"]


def test_text_is_aligned_left_and_numbers_right():
    lines = table(COLUMNS, ROWS)
    assert lines[0] == "run                           status    loss    MFU     left"
    assert lines[2] == "gpt2_muon_seed1_lr6e-4_4gpu   planned      -      -        -"


def test_titles_may_be_underlined_or_absent():
    assert table(columns(["a", "b"]), [["x", "10"]], rule=True) == ["a   b", "-  --", "x  10"]
    assert table(columns(["", ""], words=(0, 1)), [["ok", "12"], ["warning", "3"]]) == ["ok       12", "warning  3"]


@given(
    st.integers(24, 120),
    st.lists(st.tuples(*[st.text("abc_", max_size=40)] + [st.text("0123456789", max_size=9)] * 4), max_size=5),
)
def test_no_line_is_wider_than_the_screen(width, rows):
    assert all(len(line) <= max(width, 14 + 2 + 9) for line in table(COLUMNS, rows, width))


@given(st.lists(st.tuples(st.text("abc", min_size=1, max_size=150), st.text("0123456789", max_size=9)), max_size=5))
def test_a_name_that_is_too_long_gets_its_own_line(rows):
    lines = table(columns(["name", "number"]), rows, WIDTH)
    assert all(any(line.startswith(name) for line in lines) for name, _ in rows)
    assert all(len(line) <= WIDTH for line in lines if line not in {name for name, _ in rows})


def test_a_section_title_is_underlined():
    assert section("Runs", ["adamw"]) == ["Runs", "----", "adamw"]


def test_text_is_wrapped_with_a_hanging_indent():
    assert wrap("one two three four five six", width=20) == ["one two three four", "  five six"]
    assert wrap("one two three", width=None) == ["one two three"]


def test_a_path_outside_the_current_directory_is_absolute(tmp_path):
    assert Path(shown(tmp_path)).is_absolute()
