"""One format per kind of quantity, and tables that fit the width."""

from __future__ import annotations

import doctest
import shlex
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
    make_command,
    memory_size,
    money,
    plural,
    printable,
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
QUANTITIES = {
    duration: {
        **{None: "-", 0: "0.0s", 4.21: "4.2s", 59.94: "59.9s", 59.96: "1m00s", 723: "12m03s", 3599.6: "1h00m"},
        **{3725: "1h02m", 86_340: "23h59m", 86_399: "1d00h", 108_301: "1d06h", 86_400_000: "1,000d00h"},
    },
    memory_size: {
        **{None: "-", 0: "0.0 MiB", 1.5 * 2**20: "1.5 MiB", 512 * 2**20: "512 MiB", 2**30: "1.0 GiB"},
        **{23.96 * 2**30: "24.0 GiB", 141 * 2**30: "141 GiB"},
    },
    disk_size: {
        **{None: "-", 0: "0 B", 41_000: "41 kB", 20e6: "20 MB", 999.6e6: "1 GB", 1.494e9: "1.49 GB", 3.2e12: "3.2 TB"},
    },
    count: {
        **{None: "-", 0: "0", 0.25: "0.25", 12.34: "12.3", 512: "512", 999.6: "1.00k", 41_234: "41.2k"},
        **{102_400: "102k", 1_024_000: "1.02M", 10**10: "10.0B", 2e15: "2000T", -4120: "-4.12k"},
    },
    money: {None: "-", 0: "$0.00", 0.00123: "$0.0012", 0.01: "$0.01", 12.3456: "$12.35", 1200: "$1,200.00"},
    lambda number: plural(number, "run"): {0: "0 runs", 1: "1 run", 2: "2 runs", 1200: "1,200 runs"},
}


def test_each_kind_of_quantity_has_one_format():
    assert doctest.testmod(text).failed == 0
    for format_, examples in QUANTITIES.items():
        assert {number: format_(number) for number in examples} == examples
    assert memory_size(512 * 2**20, 24 * 2**30) == "0.5 of 24.0 GiB"  # used and total have the same unit
    assert memory_size(12 * 2**20, 64 * 2**20) == "12.0 of 64.0 MiB"


@given(st.floats(1, 9.99e14))
def test_a_count_is_exact_to_three_digits(number):
    text = count(number)
    factor = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    assert float(text.rstrip("kMBT")) * factor == pytest.approx(number, rel=0.005)


def test_a_time_of_day_is_local_unless_utc_is_named(monkeypatch):
    moment = 1_795_152_187.4
    monkeypatch.setenv("TZ", "CET-1")
    time.tzset()
    try:
        assert time_of_day(moment) == "2026-11-20 06:23:07"
        assert time_of_day(moment, date=False) == "06:23:07"
        assert time_of_day(moment, utc=True) == "2026-11-20 05:23:07 UTC"
        assert time_of_day(moment, date=False, utc=True) == "05:23:07 UTC"
    finally:
        monkeypatch.undo()
        time.tzset()


@given(st.text(max_size=60), st.integers(1, 60))
def test_a_long_name_is_shortened_in_the_middle(name, width):
    assert len(shortened(name, width)) <= width
    assert shortened("short", 12) == "short"
    assert shortened("gpt2_adamw_seed1_4gpu", 12) == "gpt2_…1_4gpu"
    assert shortened("abc", 1) == "…"


def test_shortened_names_of_a_list_differ():
    for names, width, expected in (
        (["gpt2_adamw_1gpu", "gpt2_muon_1gpu"], 20, ["gpt2_adamw_1gpu", "gpt2_muon_1gpu"]),
        (["adamw_lr1_wd1_4gpu", "adamw_lr2_wd2_4gpu"], 9, ["…lr1_wd1", "…lr2_wd2"]),
        (["long_lr1_wd1_to_the_end", "long_lr2_wd0_1_to_the_end"], 11, ["…lr1_wd1", "…lr2_wd0_1"]),
        (["adamw, depth 4, with a long end", "adamw, depth 8, with a long end"], 10, ["…depth 4", "…depth 8"]),
    ):
        assert shortened_names(names, width) == expected


def test_a_path_below_the_current_directory_is_relative(tmp_path, monkeypatch):
    assert shown(tmp_path) == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    for path, expected in (("a/b", "a/b"), ("/x/y", "/x/y"), (".", ".")):
        assert shown(tmp_path / path) == expected


def titles(width, rows=ROWS):
    return table(COLUMNS, rows, width)[0].split()


def test_columns_are_dropped_from_the_least_important_and_those_without_values_first():
    for width in (None, 80):
        assert titles(width) == ["run", "status", "loss", "MFU", "left"]
    assert titles(58) == ["run", "status", "loss", "left"]
    assert titles(48) == ["run", "status", "left"]
    for width in (40, 5):
        assert titles(width) == ["run", "status"]
    assert titles(52, [(*cells, "-") for *cells, _ in ROWS]) == ["run", "status", "loss", "MFU"]


def test_text_is_aligned_left_and_numbers_right():
    lines = table(COLUMNS, ROWS)
    assert lines[0] == "run                           status    loss    MFU     left"
    assert lines[2] == "gpt2_muon_seed1_lr6e-4_4gpu   planned      -      -        -"
    assert table(columns(["a", "b"]), [["x", "10"]], rule=True) == ["a   b", "-  --", "x  10"]
    assert table(columns(["", ""], words=(0, 1)), [["ok", "12"], ["warning", "3"]]) == ["ok       12", "warning  3"]
    assert wrap("one two three four five six", width=20) == ["one two three four", "  five six"]
    assert wrap("one two three", width=None) == ["one two three"]


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07a", "a"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("10 %\r20 %\r\n", "10 %\n20 %\n"),
        ("\x9b31ma\x08b\x7f", "31mab"),
        ("abc\u202egnp.exe", "abcgnp.exe"),
        ("\udcff", ""),
    ],
)
def test_a_printable_text_has_nothing_that_a_terminal_obeys(text, expected):
    assert printable(text) == expected


def test_the_quotes_of_a_printed_command_survive_a_shell():
    words = shlex.split(make_command("continue", Path("/my results/it's"), RETRY_FAILED="1"))
    assert words == ["make", "continue", "TARGET=/my results/it's", "RETRY_FAILED=1"]
