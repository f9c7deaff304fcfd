"""The text about devices: sections of the summary, the report of a folder, and folders of the original project."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_factory import FakeGpus, record, write_foreign, write_timings
from kmatrix.errors import RecordError
from kmatrix.records.paths import RunDir
from kmatrix.report.analyse import analyse
from kmatrix.report.gpu.folders import find_recorded, read_folder, summarize
from kmatrix.report.gpu.measure import gpu_of
from kmatrix.report.render import TEXT, environment, plain
from kmatrix.report.results import Run
from kmatrix.report.write import summary
from kmatrix.text import WIDTH
from records_factory import FakeRun, make_matrix

ROOT = Path(__file__).resolve().parents[3]


def matrix_of_all_kinds(root):
    """A matrix with two GPU runs, a failed, a simulated and a CPU run, and one without a recording."""
    runs = [
        FakeRun(gpus=4, device="cuda", tokens_per_s=6900.0),
        FakeRun(optimizer="muon", gpus=2, device="cuda", status="failed", reason="out of memory", stop_at=40),
        FakeRun(optimizer="adam", device="cuda"),
        FakeRun(optimizer="sgd", gpus=2),
        FakeRun(optimizer="sgd", device="cuda"),
    ]
    matrix = make_matrix(root, runs)
    failed = FakeGpus(memory=(22_000.0, 17_000.0), power=(150.0, None), utilization=(95.0, 50.0), samples=20)
    simulated = FakeGpus(memory=(9000.0,), power=(100.0,), utilization=(88.0,), name="NVIDIA A10G (simulated)")
    ranks = FakeGpus(
        memory=(812.0, 820.0), power=(None, None), utilization=(99.0, 98.0), device_type="cpu", name="EPYC"
    )
    for run, gpus in zip(runs, (FakeGpus(), failed, simulated, ranks), strict=False):
        record(matrix.run(run.name), gpus)
    write_timings(matrix.run(runs[0].name), [100.0, 100.0, 100.0, 130.0])
    return matrix


def test_the_report_and_the_summary_of_a_matrix(golden, tmp_path):
    matrix = matrix_of_all_kinds(tmp_path)
    golden("consolidated_gpus.txt", summarize(matrix.path))
    golden("summary_gpus.txt", summary(analyse(matrix)).partition("GPUs, or ranks on the CPU")[2])


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 40), st.text("abc_0123456789", min_size=1, max_size=100))
def test_no_line_is_wider_than_a_report(tmp_path_factory, devices, name):
    folder = RunDir(tmp_path_factory.mktemp("run"))
    each = {"memory": (12_800.0,) * devices, "power": (150.0,) * devices, "utilization": (95.0,) * devices}
    record(folder, FakeGpus(**each, samples=2), summary={"warnings": ["a note " * 30]})
    gpu = gpu_of(folder)
    run = Run(name=name, optimizer="adamw", status="finished", gpu=gpu)
    lines = plain(str(environment(TEXT).get_template("gpu.txt.j2").module.consolidated("m", [run]))).splitlines()
    assert max(len(line) for line in lines if line.strip() != name) <= WIDTH


# ---- folders of the original project -----------------------------------------------------------------------------


def foreign_folder(root):
    """Two runs of the original project, one of them failed; the first has two files."""
    folder = root / "test_matrix_results_20250919_120000"
    write_foreign(folder / "gpt2_adamwprune_state_50", FakeGpus())
    write_foreign(folder / "gpt2_adamwprune_state_50", FakeGpus(), layout="single")
    two = FakeGpus(memory=(14_000.0, 10_000.0), power=(150, 90), samples=20)
    write_foreign(folder / "gpt2_adamw_magnitude_50", two)
    results = [
        {"test_id": "gpt2_adamwprune_state_50", "optimizer": "adamwprune", "success": True, "elapsed_time": 60.0},
        {"test_id": "gpt2_adamw_magnitude_50", "optimizer": "adamw", "success": False},
    ]
    (folder / "all_results.json").write_text(json.dumps(results))
    return folder


def test_a_folder_of_the_original_project_is_read(tmp_path):
    _, (failed, finished), _ = read_folder(foreign_folder(tmp_path))
    assert (finished.optimizer, finished.status, len(finished.gpu.gpus)) == ("adamwprune", "finished", 4)
    assert (failed.optimizer, failed.status, failed.gpu.whole.balance["memory_used"].quality) == (
        "adamw",
        "failed",
        "Fair",
    )


@pytest.mark.process
def test_large_recordings_are_read_by_several_processes(tmp_path, monkeypatch):
    folder = foreign_folder(tmp_path)
    expected = read_folder(folder)[:2]
    monkeypatch.setattr("kmatrix.report.read.LARGE", 0)
    assert read_folder(folder)[:2] == expected


def test_a_recording_that_cannot_be_read_is_named_with_the_reason(tmp_path):
    (tmp_path / "gpt2_adamw").mkdir()
    (tmp_path / "gpt2_adamw" / "gpu_metrics.csv").write_text("timestamp,gpu_index,power_W\n")
    text = " ".join(summarize(tmp_path).split())
    assert "gpt2_adamw: gpu_metrics.csv is not a GPU recording: its columns are timestamp, gpu_index, power_W" in text


def test_the_newest_matrix_is_the_default_and_a_missing_directory_is_refused(tmp_path):
    folder = foreign_folder(tmp_path)
    (tmp_path / "test_matrix_results_20990101_000000").mkdir()
    assert find_recorded(None, tmp_path) == folder
    with pytest.raises(RecordError, match="is not a directory"):
        find_recorded(tmp_path / "nothing", tmp_path)
    with pytest.raises(RecordError, match="has a run"):
        find_recorded(None, folder)


@pytest.mark.process
def test_the_script_prints_the_report_of_the_newest_matrix(tmp_path):
    foreign_folder(tmp_path)
    command = [sys.executable, str(ROOT / "scripts" / "generate_consolidated_gpu_summary.py")]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "ADAMWPRUNE Training - Per-GPU Breakdown:\n    GPU 0: 12800.0 MB (±45.0)\n" in result.stdout
    assert "gpt2_adamw_magnitude_50 (failed)" in result.stdout
