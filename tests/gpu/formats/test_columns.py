"""Read long recordings as columns with the same result as the entry-by-entry reader, whatever the file contains."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stats_reader as reading
from kmatrix.errors import RecordError
from kmatrix.gpu.formats import columns
from kmatrix.gpu.formats.columns import MEASURED, SampleBlock, block_of, read_columns
from kmatrix.gpu.formats.text import snapshot_of as columns_snapshot_of
from stats_reader import read_stats

ROOT = Path(__file__).resolve().parents[3]
STARTED = datetime(2025, 9, 19, 12, 0, 0, 123456)
NUMBERS = st.none() | st.integers(0, 30_000) | st.floats(0, 1e5)
INSERTED = [b'"', b"{", b"}", b"]", b"[", b",", b"NaN", b"null", b"1e999", b"\xc3", b"9" * 400, b'{"timestamp"', b"\0"]


def entry(number: int, gpus: int = 2, **values) -> dict:
    """Return an entry of the original project's layout for several GPUs."""
    data = [
        {
            "gpu_index": index,
            "gpu_name": "NVIDIA A10G \u00e9",
            "utilization": 80 + index,
            "memory_used": 12_800.25 + number,
            "memory_total": 24_576.0,
            "temperatures": {"GPU": 60 + index},
            "power": 150.5,
            "clocks": {"gpu": 1695, "memory": 6251},
            **values,
        }
        for index in range(gpus)
    ]
    return {"timestamp": stamp(number), "multi_gpu_data": data, "aggregate_stats": {"gpu_count": gpus}}


def stamp(number: int) -> str:
    return (STARTED + timedelta(seconds=number)).isoformat()


def single_gpu(multi_entry: dict) -> dict:
    """Return the entry in the layout for a single GPU."""
    return {"timestamp": multi_entry["timestamp"], **multi_entry["multi_gpu_data"][0]}


def lines(entries: list[dict]) -> str:
    """Return an array as our recorder writes it."""
    return "[\n" + ",\n".join(json.dumps(item, separators=(",", ":")) for item in entries) + "\n]\n"


LAYOUTS = {
    "indented": lambda entries: json.dumps(entries, indent=2, ensure_ascii=False),
    "one line": json.dumps,
    "a line each": lines,
    "samples": lambda entries: json.dumps({"gpu": "A10G", "samples": entries, "end": 1}, indent=2),
    "single": lambda entries: json.dumps([single_gpu(item) for item in entries], indent=2),
}


def content_of(blocks: Iterator[SampleBlock], reader) -> tuple:
    """Return everything that a reader found, in one form."""
    times: list[float] = []
    values: dict[tuple, list] = {}
    for block in blocks:
        for part in block.parts:
            values[part.gpu_index, "last"] = [part.gpu_name, part.uuid, part.memory_total]
            for name in MEASURED:
                column = [None if math.isnan(value) else value for value in part.columns[name]]
                rows = [row + len(times) for row in part.rows]
                values.setdefault((part.gpu_index, name), []).extend(zip(rows, column, strict=True))
        times += block.times
    return times, values, reader.errors


def vectorized(path: Path) -> tuple | str:
    try:
        reader = read_columns(path)
        return content_of(reader, reader)
    except RecordError as error:
        return str(error)


def read_exactly(path: Path) -> tuple | str:
    try:
        reader = read_stats(path)
        snapshots = list(reader)
        return content_of(iter([block_of(snapshots)] if snapshots else []), reader)
    except RecordError as error:
        return str(error)


def same(left: tuple | str, right: tuple | str) -> bool:
    """Return whether both readers found the same. Beyond microseconds one reader rounds and the other truncates."""
    if isinstance(left, str) or isinstance(right, str):
        return left == right
    return left[0] == pytest.approx(right[0], rel=0, abs=1.5e-6) and left[1:] == right[1:]


@pytest.fixture
def small_blocks(monkeypatch):
    """Make both readers split a small file into many blocks, at different positions."""
    monkeypatch.setattr(columns, "CHUNK", 1500)
    monkeypatch.setattr(reading, "CHUNK", 700)


def fail_if_called(*_arguments, **_more):
    raise AssertionError("an entry was read by itself")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_complete_file_is_decoded_in_blocks_and_never_entry_by_entry(tmp_path, small_blocks, monkeypatch, layout):
    path = tmp_path / "g.json"
    path.write_text(LAYOUTS[layout]([entry(number) for number in range(20)]))
    expected = read_exactly(path)
    # The vectorized reader must not fall back to single entries.
    if layout != "samples":  # its last block has more text after the array
        monkeypatch.setattr(columns, "snapshot_of", fail_if_called)
    assert same(vectorized(path), expected)
    assert len(expected[0]) == 20
    assert expected[2] is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_truncated_at_any_byte_gives_the_result_of_the_exact_reader(tmp_path, small_blocks, layout):
    path = tmp_path / "g.json"
    text = LAYOUTS[layout]([entry(number, gpus=1) for number in range(4)]).encode()
    for length in range(1, len(text), 11):
        path.write_bytes(text[:length])
        assert same(vectorized(path), read_exactly(path))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_damage_anywhere_gives_the_result_of_the_exact_reader(tmp_path_factory, data):
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    entries = [entry(number, data.draw(st.integers(1, 2))) for number in range(data.draw(st.integers(1, 8)))]
    text = bytearray(LAYOUTS[layout](entries).encode())
    begin = 40 if layout == "samples" else 0  # a small block must contain the name of the array
    position = data.draw(st.integers(begin, len(text) - 1))
    end = min(len(text), position + data.draw(st.sampled_from([0, 1, 30, 300])))
    text[position:end] = data.draw(st.sampled_from([*INSERTED, b"", bytes(text[position : position + 250])]))
    path = tmp_path_factory.mktemp("damage") / "g.json"
    path.write_bytes(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "CHUNK", data.draw(st.sampled_from([400, 1500, 1 << 20])))
        patch.setattr(columns, "MAX_PENDING", data.draw(st.sampled_from([400, 4000, 1 << 22])))
        patch.setattr(reading, "CHUNK", data.draw(st.sampled_from([300, 1 << 18])))
        assert same(vectorized(path), read_exactly(path))


@given(st.lists(st.tuples(*[NUMBERS] * 5), min_size=1, max_size=12), st.sampled_from(sorted(LAYOUTS)))
@settings(max_examples=30, deadline=None)
def test_any_numbers_are_read_as_by_the_exact_reader(tmp_path_factory, rows, layout):
    names = ("memory_used", "utilization", "power", "temperature", "energy_j")
    entries = [entry(number, **dict(zip(names, row, strict=True))) for number, row in enumerate(rows)]
    path = tmp_path_factory.mktemp("numbers") / "g.json"
    path.write_text(LAYOUTS[layout](entries))
    found = vectorized(path)
    assert same(found, read_exactly(path))
    assert [value for _, value in found[1][0, "power"]] == [row[2] for row in rows]


@pytest.mark.parametrize(
    "values",
    [
        {"temperatures": {"edge": 50, "junction": 65, "memory": None}},
        {"temperatures": {}, "clocks": {"sm": 1410}},
        {"temperatures": None, "clocks": None, "sm_clock": 1500, "temperature": 70},
        {"memory_used_mb": 77.0},
        {"gpu_index": "0"},
        {"gpu_index": None},
        {"gpu_index": 5},
        {"utilization": True},
        {"power": float("nan")},
        {"power": 10**400},
        {"gpu_name": None, "uuid": "GPU-1"},
        {"memory_total": "24 GB"},
        {"clocks": [1, 2]},
    ],
)
def test_files_of_other_recorders_are_read_as_by_the_exact_reader(tmp_path, small_blocks, values):
    path = tmp_path / "g.json"
    entries = [entry(number, **(values if number % 7 else {})) for number in range(12)]
    for gpu in (gpu for item in entries for gpu in item["multi_gpu_data"] if "memory_used_mb" in gpu):
        del gpu["memory_used"]
    path.write_text(json.dumps(entries, indent=2))
    assert same(vectorized(path), read_exactly(path))


def test_damage_in_the_middle_costs_one_entry_and_the_rest_is_decoded_in_blocks(tmp_path, small_blocks, monkeypatch):
    text = json.dumps([entry(number) for number in range(60)], indent=2)
    position = text.index(":", text.index(stamp(30)) + 40)
    path = tmp_path / "g.json"
    path.write_text(text[:position] + "?" + text[position + 1 :])
    read = []
    one_by_one = columns_snapshot_of
    monkeypatch.setattr(columns, "snapshot_of", lambda value: read.append(value) or one_by_one(value))
    times, _, loss = vectorized(path)
    expected = [(STARTED + timedelta(seconds=number)).timestamp() for number in range(60) if number != 30]
    assert times == expected
    assert (loss.complete, loss.damaged) == (59, 1)
    assert 0 < len(read) < 6


@pytest.mark.process
def test_the_recorder_imports_neither_numpy_nor_msgspec():
    code = "import sys, kmatrix.gpu.recorder; print(*({'numpy', 'msgspec'} & sys.modules.keys()))"
    output = subprocess.check_output(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "lib")}, text=True, timeout=60
    )
    assert output.strip() == ""
