"""`bench/halving.py` prints a row per plan, and its exit status says whether the bound of 5 % holds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from factories import ROOT, environment

sys.path.insert(0, str(ROOT / "bench"))
import halving


def test_the_command_prints_a_row_per_plan_seeds_and_correlation():
    done = subprocess.run(
        [sys.executable, "bench/halving.py", "--count", "20"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr  # of 20 matrices, the bound says little
    about, head, _, *rows = done.stdout.splitlines()
    assert about.startswith("20 matrices per row; ")
    columns = len(head.split("|"))
    assert [row.split("|")[1:5] for row in rows] == [
        [f" {configurations} ", f" {rungs[-1].keep} ", f" {seeds} ", f" {correlation} "]
        for configurations, rungs in halving.PLANS.items()
        for seeds in halving.SEEDS
        for correlation in halving.CORRELATIONS
    ]
    assert {len(row.split("|")) for row in rows} == {columns}


@pytest.mark.parametrize(
    ("shares", "status"),
    [((0.05, 0.2, 0.05, 0.2), 0), ((0.2, 0.05, 0.05, 0.05), 1), ((0.05, 0.05, 0.2, 0.05), 1)],
    ids=["as without halving", "better", "below"],
)
def test_the_exit_status_tells_whether_the_bound_holds(monkeypatch, shares, status):
    monkeypatch.setattr(halving, "false_results", lambda *_, **__: shares)
    assert halving.main(["--count", "400"]) == status
    assert halving.main(["--count", "400", "--seed", "2"]) == status


def test_wrong_arguments_are_one_error():
    with pytest.raises(SystemExit) as ended:
        halving.main(["--count", "many"])
    assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        halving.main(["--count", "0"])
    assert ended.value.code == 2
