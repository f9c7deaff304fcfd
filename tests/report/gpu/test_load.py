"""Recordings of every format are read as the same arrays; what cannot be true or be read is one line."""

from __future__ import annotations

import json
import math
from datetime import datetime, timedelta

import numpy as np
import pytest

from gpu_factory import STARTED, FakeGpus, damage, overwrite, write_arrays, write_samples
from kmatrix.errors import RecordError
from kmatrix.gpu.formats.samples import Snapshot, csv_header, csv_row
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.recordings import load
from kmatrix.report.gpu.samples import IMPOSSIBLE, QUANTITIES, SELECTED

START = datetime(2025, 8, 27, 1, 42, 19)


def entry(second, gpu=0, **changed):
    """Return an entry of one GPU as the original project writes it."""
    known = {"utilization": 60 + gpu, "memory_used": 800 + 100 * gpu, "memory_total": 24576, "power": 160}
    stamp = (START + timedelta(seconds=second)).isoformat()
    return {"timestamp": stamp, "gpu_index": gpu, "gpu_name": "NVIDIA A10G", **known, "temperature": 56, **changed}


def several(second, *gpus):
    return {"timestamp": entry(second)["timestamp"], "multi_gpu_data": list(gpus), "aggregate_stats": {}}


def loaded(tmp_path, entries, name="gpu_stats.json", indent=1):
    path = tmp_path / name
    path.write_text(entries if isinstance(entries, str) else json.dumps(entries, indent=indent))
    return load(path)


# ---- formats -----------------------------------------------------------------------------------------------------


def test_our_own_formats_give_the_same_arrays(tmp_path):
    gpus = FakeGpus(lost={1: 40})
    snapshots = list(gpus.snapshots())
    run = RunDir(tmp_path / "run")
    write_arrays(run, snapshots)
    write_samples(run.gpu_samples, gpus, snapshots)
    binary, text = load(run.gpu_samples), load(run.gpu_stats_multi)
    assert binary.wall.tolist() == text.wall.tolist() == [STARTED + number for number in range(60)]
    assert [one.uuid for one in binary.devices] == [one.uuid for one in text.devices] == [f"GPU-{n}" for n in range(4)]
    for quantity in QUANTITIES:
        np.testing.assert_allclose(binary[quantity], text[quantity])
        assert np.isnan(binary[quantity][:, 1]).tolist() == [number >= 40 for number in range(60)]


@pytest.mark.parametrize(
    "gpu",
    [
        {"memory_used": 12800.0, "temperatures": {"GPU": 60, "Memory": 80}, "clocks": {"gpu": 1695}},
        {"memory_mb": 12800.0, "temperature": 60, "clocks": {"sm": 1695}},
        {"memory_used_mb": 12800.0, "temperatures": {"edge": 55, "junction": 60}, "sm_clock": 1695},
        {"memory_used": "12800", "temperature": "60 C", "sm_clock": "1695 MHz"},
    ],
)
@pytest.mark.parametrize("layout", ["single", "multi", "document"])
@pytest.mark.parametrize("indent", [None, 2])
def test_the_layouts_and_keys_of_the_original_project_are_read(tmp_path, gpu, layout, indent):
    gpu = {"gpu_index": 0, "gpu_name": "NVIDIA A10G", "memory_total": 24576.0, **gpu}
    items = [several(k, gpu) if layout == "multi" else {"timestamp": entry(k)["timestamp"], **gpu} for k in range(2)]
    found = loaded(tmp_path, {"gpu": "A10G", "samples": items} if layout == "document" else items, indent=indent)
    assert found.wall[0] == START.timestamp()
    values = [found[name][1, 0] for name in ("memory_used", "temperature", "sm_clock")]
    assert values == [12800.0, 60.0, 1695.0]
    assert found.notes == ()


def test_an_array_is_read_in_pieces_and_one_in_another_style_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("kmatrix.report.gpu.arrays.CHUNK", 2000)
    # The GPUs of the second one have a timestamp of their own: a piece could begin at each of them.
    plain = [several(k, {"gpu_index": 0, "power": 100 + k}) for k in range(50)]
    nested = [several(k, *({**entry(k, gpu), "power": 100 + k} for gpu in range(2))) for k in range(50)]
    for entries, indent in ((plain, 2), (plain, None), (nested, 2), (nested, None)):
        found = loaded(tmp_path, entries, indent=indent)
        assert found["power"][:, 0].tolist() == [100 + k for k in range(50)]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_truncated_array_gives_its_complete_samples(tmp_path, indent):
    text = json.dumps([several(k, entry(k), entry(k, 1)) for k in range(30)], indent=indent)
    for length in (1, 2, 50, 300, len(text) // 2):
        found = loaded(tmp_path, text[:-length])
        count = len(found)
        assert found["power"].shape == (count, 2)
        assert 29 - length * 30 // len(text) <= count <= 30
        assert found.notes == (f"gpu_stats.json: truncated: {count} complete samples",)


def test_nan_and_infinity_in_json_are_unknown(tmp_path):
    text = json.dumps([entry(0), entry(1, power=math.nan), entry(2, power=math.inf)])
    assert np.isnan(loaded(tmp_path, text)["power"][:, 0]).tolist() == [False, True, True]


@pytest.mark.parametrize(
    "text",
    ["", "{}", "hello", '{"samples": 5}', "5", "[]", '[{"timestamp": 1, "power": [1]}]', '[{"timestamp": 1.7e12}]'],
)
def test_a_file_without_a_sample_is_one_error_that_names_it(tmp_path, text):
    with pytest.raises(RecordError, match=r"gpu_stats\.json (is not a GPU recording|contains no sample|is damaged)"):
        loaded(tmp_path, text)


def test_a_damaged_entry_is_an_error_that_names_its_field(tmp_path):
    with pytest.raises(RecordError) as caught:
        loaded(tmp_path, [entry(0), entry(1, power={"W": 5})])
    assert "$[1].power" in caught.value.why


def table(snapshots):
    lines = [csv_header(range(2)), *(csv_row(one, one.time - snapshots[0].time) for one in snapshots)]
    return "\n".join(",".join(cells) for cells in lines) + "\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])  # a spreadsheet begins with a BOM
def test_a_table_is_read(tmp_path, encoding):
    snapshots = list(FakeGpus(memory=(1.0, 2.0), power=(150.0, None), utilization=(1.0, 1.0), samples=9).snapshots())
    path = tmp_path / "gpu_metrics_x.csv"
    path.write_text(table(snapshots) + "2026-11-20T05:2", encoding=encoding)
    found = load(path)
    assert found.wall.tolist() == [one.time for one in snapshots]
    assert found["power"][:, 0].tolist() == [150.0] * 9
    assert np.isnan(found["power"][:, 1]).all()
    assert found.notes == ("gpu_metrics_x.csv: 1 incomplete line left out",)


def test_a_table_with_a_row_per_gpu_is_refused_with_both_headers(tmp_path):
    with pytest.raises(RecordError) as caught:
        loaded(tmp_path, "timestamp,gpu_index,power_W\n2025-08-27T01:42:19,0,370\n", "gpu_metrics.csv")
    assert "its columns are timestamp, gpu_index, power_W; expected timestamp, elapsed_sec, gpu0_power_w" in str(
        caught.value.why
    )


# ---- what cannot be true -----------------------------------------------------------------------------------------


def test_only_the_selected_gpu_is_in_each_entry(tmp_path):
    found = loaded(tmp_path, [entry(k, 0 if k < 30 else 1) for k in range(60)])
    (note,) = found.notes
    assert note.endswith("GPU 0 is in 30, GPU 1 is in 30 of 60 entries: this file has the selected GPU only")
    assert found.doubt == SELECTED


def test_a_failed_reading_is_unknown_and_not_zero(tmp_path):
    failed = {"utilization": 0, "memory_used": 0, "memory_total": 0, "power": 0}
    found = loaded(tmp_path, [entry(k, **(failed if 20 <= k < 40 else {})) for k in range(60)])
    assert found.notes == ("gpu_stats.json: 20 entries of failed queries (memory_total is 0): unknown",)
    for quantity, value in (("memory_used", 800.0), ("power", 160.0)):
        assert np.unique(found[quantity][~np.isnan(found[quantity])]).tolist() == [value]
    assert found.doubt == IMPOSSIBLE


def test_values_that_are_no_numbers_are_counted(tmp_path):
    found = loaded(tmp_path, [entry(k, memory_used="a lot") for k in range(30)])
    assert found.notes == ("gpu_stats.json: 30 values that cannot be true, unknown instead: 30 of memory_used",)


@pytest.mark.parametrize("time", [1.7e12, 0, 12.5])  # milliseconds, a clock that was never set
def test_times_that_cannot_be_true_are_named(tmp_path, time):
    stamps = [time if k == 3 else START.timestamp() + k for k in range(9)]
    found = loaded(tmp_path, [{**entry(k), "timestamp": stamp} for k, stamp in enumerate(stamps)])
    assert len(found) == 8
    assert found.notes[0].startswith("gpu_stats.json: 1 time that cannot be true, such as ")
    csv = "timestamp,elapsed_sec,gpu0_power_w\n" + "".join(f"{stamp},0,5\n" for stamp in [*stamps, "inf"])
    assert "2 times that cannot be true" in loaded(tmp_path, csv, "gpu_metrics.csv").notes[0]


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"memory_used": -1.0}, "1 value that cannot be true, unknown instead: 1 of memory_used"),
        ({"memory_used": 24_577.0}, "1 of memory_used"),
        ({"power": 1e308}, "1 of power"),
        ({"temperature": -5000.0}, "1 of temperature"),
        ({"gpu_index": 0}, "an entry has the same GPU several times: only the last one is counted"),
        ({"gpu_name": "NVIDIA L4"}, "GPU 1 is NVIDIA A10G, NVIDIA L4: the order of the GPUs changed"),
    ],
)
def test_what_no_gpu_has_is_unknown_and_leaves_no_comparison(tmp_path, change, note):
    entries = [several(k, entry(k), entry(k, 1, **(change if k == 5 else {}))) for k in range(9)]
    found = loaded(tmp_path, entries)
    assert note in found.notes[0]
    assert found.doubt == IMPOSSIBLE


@pytest.mark.parametrize(
    ("seconds", "note"), [((0, 1, 1, 2), "does not go on 1 time"), ((0, 2, 1, 3), "does not go on 1 time")]
)
def test_times_that_repeat_or_go_back_count_as_no_time(tmp_path, seconds, note):
    found = loaded(tmp_path, [entry(k) for k in seconds])
    assert note in found.notes[0]
    assert (np.diff(found.time) >= 0).all()


def test_a_uuid_identifies_a_gpu_whose_index_changes(tmp_path):
    def of(second, places):
        gpus = [{**entry(second, 0, power=power), "gpu_index": at, "uuid": uuid} for at, (uuid, power) in places]
        return several(second, *gpus)

    a, b = ("GPU-a", 100), ("GPU-b", 300)
    found = loaded(tmp_path, [of(k, enumerate((a, b) if k < 5 else (b, a))) for k in range(10)])
    assert {one.uuid: found["power"][:, place].tolist() for place, one in enumerate(found.devices)} == {
        "GPU-a": [100.0] * 10,
        "GPU-b": [300.0] * 10,
    }
    assert found.notes == ()


# ---- our own recording -------------------------------------------------------------------------------------------


def recorded(tmp_path, **changes):
    gpus = FakeGpus(counter=True, **changes)
    path = tmp_path / "gpu_samples.bin"
    write_samples(path, gpus, list(gpus.snapshots()))
    return path


def test_records_that_a_power_loss_replaced_by_zeros_are_a_hole(tmp_path):
    path = recorded(tmp_path)
    damage(path, 28, 4)
    found = load(path)
    assert (len(found), found.time[-1], np.diff(found.time).max()) == (56, 59.0, 5.0)
    assert found.notes == ("gpu_samples.bin is damaged: 4 samples left out",)
    assert found.doubt == ""


@pytest.mark.parametrize(("column", "value"), [("memory_used", math.inf), ("power", -5000.0), ("energy_j", math.inf)])
def test_impossible_values_of_a_binary_recording_are_unknown(tmp_path, column, value):
    path = recorded(tmp_path)
    overwrite(path, 30, column, value)
    found = load(path)
    assert np.argwhere(np.isnan(found[column])).tolist() == [[30, 0]]
    assert found.notes == (f"gpu_samples.bin: 1 value that cannot be true, unknown instead: 1 of {column}",)


@pytest.mark.parametrize("data", [b"", b"garbage", b"KMXGPU3\n\xff"])
def test_an_unreadable_recording_is_an_error(tmp_path, data):
    (tmp_path / "gpu_samples.bin").write_bytes(data)
    with pytest.raises(RecordError, match=r"gpu_samples\.bin"):
        load(tmp_path / "gpu_samples.bin")


def test_both_clocks_find_a_time_whatever_happened_to_one_of_them(tmp_path):
    snapshots = list(FakeGpus(samples=100).snapshots())
    # The clock of the machine is set back by a day after 40 s, and the machine boots after 80 s.
    changed = [
        Snapshot(
            time=one.time - (86_400 if number >= 40 else 0),
            monotonic=500.0 + number - (550 if number >= 80 else 0),
            samples=one.samples,
        )
        for number, one in enumerate(snapshots)
    ]
    path = tmp_path / "gpu_samples.bin"
    write_samples(path, FakeGpus(), changed)
    found = load(path)
    assert found.time.tolist() == [float(number) for number in range(100)]
    for number in (10, 60, 90):
        assert found.at(changed[number].time + 0.5, changed[number].monotonic + 0.5) == pytest.approx(number + 0.5)
