"""Export a recording to CSV: every sample is read back, and unknown values never become 0."""

import csv
from pathlib import Path

import pytest

from gpu_factory import STARTED, FakeGpus, write_samples
from kmatrix.errors import RecordError
from kmatrix.gpu.recorder.__main__ import main
from kmatrix.gpu.recorder.files import export
from kmatrix.records.paths import RunDir
from kmatrix.report.gpu.recordings import load

GPUS = FakeGpus(memory=(12_800.0, 9_000.0), power=(150.0, None), samples=9, lost={1: 6})


@pytest.fixture
def run_dir(tmp_path):
    """A recorded run on two GPUs: the power of GPU 1 is unknown, and all its values from sample 6 on."""
    write_samples(tmp_path / "gpu_samples.bin", GPUS, list(GPUS.snapshots()))
    return RunDir(tmp_path)


def test_csv_is_read_back_with_empty_cells_for_unknown_values(run_dir, capsys):
    assert main([str(run_dir.path), "--format", "csv"]) == 0
    path = Path(capsys.readouterr().out.strip())
    with path.open() as file:
        titles, *rows = csv.reader(file)
    assert titles == ["timestamp", "elapsed_sec", "gpu0_power_w", "gpu0_temp_c", "gpu1_power_w", "gpu1_temp_c"]
    assert rows[0][1:] == ["0.000", "150", "60", "", "61"]
    assert rows[8][1:] == ["8.000", "150", "60", "", ""]
    assert load(path).wall.tolist() == [STARTED + number for number in range(9)]
    assert sorted(run_dir.path.iterdir()) == sorted([run_dir.gpu_samples, path])


def test_a_full_disk_leaves_no_partial_file_and_prints_a_message(run_dir, monkeypatch):
    def raise_disk_full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kmatrix.gpu.recorder.files._write_csv", raise_disk_full)
    with pytest.raises(RecordError, match="No space left on device"):
        export(run_dir)
    assert list(run_dir.path.iterdir()) == [run_dir.gpu_samples]


def test_a_folder_without_a_recording_is_refused(tmp_path):
    with pytest.raises(RecordError, match="is missing"):
        export(RunDir(tmp_path))
