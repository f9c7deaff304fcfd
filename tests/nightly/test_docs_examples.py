"""Follow the example of a page literally, in a clone."""

from __future__ import annotations

import pytest

from pages import DOCS, fenced_blocks

pytestmark = pytest.mark.nightly


def test_the_python_example_of_the_page_plans_runs_and_reads_a_matrix(clone):
    lines = fenced_blocks(DOCS / "from-python.md", "python")[0]
    completed = clone.run(clone.python, "-c", lines, PYTHONPATH=f"{clone.root / 'lib'}")
    assert completed.returncode == 0, completed.stderr[-3000:]
    *_, states, adamw, muon = completed.stdout.splitlines()
    assert adamw.split()[:2] == ["gpt2_adamw_1cpu", "finished"]
    assert muon.split()[:2] == ["gpt2_muon_1cpu", "finished"]
    assert all(float(number) > 0 for line in (adamw, muon) for number in line.split()[2:])
    assert states.count("finished") == 2
    (matrix,) = (clone.root / "results").glob("test_matrix_results_*")
    assert (matrix / "gpt2_adamw_1cpu" / "result.json").is_file()
