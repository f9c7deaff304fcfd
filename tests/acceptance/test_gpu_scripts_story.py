"""Run the two scripts of the original project on its recordings: terms, classes, files and grids are the same."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pytest
from PIL import Image

from gpu_factory import FakeGpus, write_foreign

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

GRIDS = {2: (1, 2), 9: (3, 3)}
SPINE = 0x88  # grey of the axes lines below and next to a panel


def write_runs(folder: Path, count: int) -> Path:
    """Write two runs of the original project with this number of GPUs."""
    for optimizer, least in (("adamwprune", 12_800.0), ("adamw", 14_100.0)):
        gpus = FakeGpus(
            memory=tuple(least + 25.0 * index for index in range(count)),
            power=(150.0,) * count,
            utilization=(95.0,) * count,
            spread=45.2,
        )
        write_foreign(folder / f"gpt2_{optimizer}_state_50", gpus)
    return folder


def count_panels(path: Path) -> tuple[int, int]:
    """Return the number of rows and columns of panels in a picture, found by the grey axes lines."""
    with Image.open(path) as picture:
        grey = picture.convert("RGB")
        width, height = grey.size
        pixels = grey.load()
    rows = []
    for y in range(height):
        runs = [
            (is_line, len(list(run))) for is_line, run in groupby(pixels[x, y] == (SPINE,) * 3 for x in range(width))
        ]
        rows.append(sum(is_line and length > width / 12 for is_line, length in runs))
    bands = [max(band) for is_panel, band in ((key, list(band)) for key, band in groupby(rows, key=bool)) if is_panel]
    return len(bands), max(bands)


@pytest.mark.parametrize("count", GRIDS)
def test_a_folder_of_the_original_project_is_summarized_and_drawn(clone, tmp_path, count):
    folder = write_runs(tmp_path / "test_matrix_results_20250115_103000", count)
    summary = clone.run(clone.python, "scripts/generate_consolidated_gpu_summary.py", str(folder))
    assert summary.returncode == 0, summary.stderr
    lines = summary.stdout.splitlines()
    begin = lines.index("ADAMWPRUNE Training - Per-GPU Breakdown:")
    assert lines[begin + 1 : begin + 1 + count] == [
        f"    GPU {index}: {12_800 + 25 * index:.1f} MB (±45.2)" for index in range(count)
    ]
    assert lines[begin + 1 + count] == f"    Total:  {sum(12_800 + 25 * index for index in range(count)):.1f} MB"
    assert re.fullmatch(r"    Balance: CV = 0\.\d% \(Excellent\)", lines[begin + 2 + count])

    comparison = clone.run(
        clone.python, "scripts/generate_gpu_memory_comparison.py", str(folder), "--output", str(tmp_path / "out")
    )
    assert comparison.returncode == 0, comparison.stderr
    made = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert made == [
        "gpu_load_balance_analysis.png",
        "gpu_memory_comparison.png",
        "gpu_memory_timeline.png",
        "per_gpu_memory_breakdown.png",
    ]
    assert count_panels(tmp_path / "out" / "per_gpu_memory_breakdown.png") == GRIDS[count]


def test_one_gpu_and_a_missing_folder_are_handled(clone, tmp_path):
    single = FakeGpus(memory=(12_800.0,), power=(150.0,), utilization=(95.0,))
    write_foreign(tmp_path / "gpt2_adamw_state_50", single)
    summary = clone.run(clone.python, "scripts/generate_consolidated_gpu_summary.py", str(tmp_path))
    assert "Balance: n/a (one GPU)" in summary.stdout
    for script in ("generate_consolidated_gpu_summary", "generate_gpu_memory_comparison"):
        refused = clone.run(clone.python, f"scripts/{script}.py", str(tmp_path / "none"))
        assert refused.returncode == 2
        assert refused.stderr.startswith("error: ")
        assert "Traceback" not in refused.stderr
