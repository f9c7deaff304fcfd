"""`bench/report_page.py` measures the reports of a large matrix; a small one is measured here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from factories import ROOT, environment

pytestmark = pytest.mark.nightly


def test_the_cost_of_each_report_is_printed_with_and_without_curves(tmp_path):
    words = ["--runs=5", "--lines=300", "--gpus=2", "--rounds=1", "--uncached", f"--keep={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "bench/report_page.py", *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    costs = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [line[0] for line in costs] == ["summary", "report", "report"]
    assert all("MB of 4" in " ".join(line) for line in costs[1:])
    (matrix,) = tmp_path.glob("test_matrix_results_*")
    assert len(list(matrix.glob("*/curves.json"))) == 5  # made again by the report without them
