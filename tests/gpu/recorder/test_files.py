"""Export a recording to CSV, npz and Parquet: every sample is read back, and unknown values never become 0."""

import csv
import json
import math
import struct
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gpu_factory import STARTED, FakeGpus, write_samples
from kmatrix.errors import RecordError
from kmatrix.gpu.formats.binary import COLUMNS, TYPES, read_samples
from kmatrix.gpu.recorder.__main__ import main
from kmatrix.gpu.recorder.files import FORMS, export
from kmatrix.records.paths import RunDir
from stats_reader import read_stats

GPUS = FakeGpus(memory=(12_800.0, 9_000.0), power=(150.0, None), samples=9, lost={1: 6})


@pytest.fixture
def run_dir(tmp_path):
    """A recorded run on two GPUs: the power of GPU 1 is unknown, and all its values from sample 6 on."""
    write_samples(tmp_path / "gpu_samples.bin", GPUS, list(GPUS.snapshots()))
    return RunDir(tmp_path)


def test_csv_is_read_back_with_empty_cells_for_unknown_values(run_dir):
    path = export(run_dir, "csv")
    with path.open() as file:
        titles, *rows = csv.reader(file)
    assert titles == ["timestamp", "elapsed_sec", "gpu0_power_w", "gpu0_temp_c", "gpu1_power_w", "gpu1_temp_c"]
    assert rows[0][1:] == ["0.000", "150", "60", "", "61"]
    assert rows[8][1:] == ["8.000", "150", "60", "", ""]
    assert [snapshot.time for snapshot in read_stats(path)] == [STARTED + number for number in range(9)]


def test_npz_has_an_array_of_samples_by_gpus_per_column(run_dir):
    recording = read_samples(run_dir.gpu_samples)
    with np.load(export(run_dir, "npz")) as arrays:
        assert arrays["time"].tolist() == list(recording.times)
        assert arrays["gpu_index"].tolist() == [0, 1]
        assert arrays["uuid"].tolist() == ["GPU-0", "GPU-1"]
        assert json.loads(str(arrays["header"])) == recording.header
        for name in COLUMNS:
            assert arrays[name].shape == (9, 2)
            for gpu, columns in enumerate(recording.columns):
                np.testing.assert_array_equal(arrays[name][:, gpu], np.asarray(columns[name]))
        assert np.isnan(arrays["memory_used"][6:, 1]).all()


def test_parquet_has_a_row_per_gpu_and_sample_and_null_for_unknown_values(run_dir, monkeypatch):
    monkeypatch.setattr("kmatrix.gpu.recorder.files.ROWS", 8)  # several row groups
    recording, table = read_samples(run_dir.gpu_samples), pq.read_table(export(run_dir, "parquet"))
    assert table.num_rows == 18
    assert json.loads(table.schema.metadata[b"kmatrix"]) == recording.header
    rows = table.to_pylist()
    assert [row["gpu_index"] for row in rows] == [0, 1] * 9
    assert [row["time"].timestamp() for row in rows[::2]] == list(recording.times)
    for name in COLUMNS:
        for index, row in enumerate(rows):
            value = recording.columns[index % 2][name][index // 2]
            assert row[name] is None if math.isnan(value) else row[name] == value


@pytest.mark.parametrize("form", FORMS)
def test_the_program_prints_the_output_path_and_leaves_no_other_file(run_dir, capsys, form):
    assert main([str(run_dir.path), "--format", form]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.suffix == f".{form}"
    assert sorted(run_dir.path.iterdir()) == sorted([run_dir.gpu_samples, path])


@pytest.mark.parametrize("form", FORMS)
def test_a_recording_without_a_sample_becomes_an_empty_table(tmp_path, form):
    write_samples(tmp_path / "gpu_samples.bin", GPUS, list(GPUS.snapshots()))
    content = (tmp_path / "gpu_samples.bin").read_bytes()
    record = 24 + 2 * struct.calcsize(f"<{TYPES}")
    (tmp_path / "gpu_samples.bin").write_bytes(content[: -9 * record])
    path = export(RunDir(tmp_path), form)
    if form == "csv":
        assert len(path.read_text().splitlines()) == 1
    elif form == "npz":
        assert np.load(path)["power"].shape == (0, 2)
    else:
        assert pq.read_table(path).num_rows == 0


def test_parquet_without_pyarrow_is_refused_with_an_installation_hint(run_dir, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main([str(run_dir.path), "--format", "parquet"]) == 2
    assert "hint: run `make setup`, or pass --format npz" in capsys.readouterr().err
    assert list(run_dir.path.iterdir()) == [run_dir.gpu_samples]


def test_a_full_disk_leaves_no_partial_file_and_prints_a_message(run_dir, monkeypatch):
    def raise_disk_full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kmatrix.gpu.recorder.files.FORMS", types.MappingProxyType({"npz": raise_disk_full}))
    with pytest.raises(RecordError, match="No space left on device"):
        export(run_dir, "npz")
    assert list(run_dir.path.iterdir()) == [run_dir.gpu_samples]


def test_a_folder_without_a_recording_and_an_unknown_format_are_refused(tmp_path):
    with pytest.raises(RecordError, match="is missing"):
        export(RunDir(tmp_path), "csv")
    command = [sys.executable, "-m", "kmatrix.gpu.recorder", str(tmp_path), "--format", "xlsx"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 2
    assert "invalid choice: 'xlsx'" in completed.stderr
