"""The benchmark of optimizer steps prints a line for each optimizer."""

from __future__ import annotations

import subprocess
import sys

import pytest

from factories import ROOT, environment

pytestmark = pytest.mark.nightly


def test_the_benchmark_counts_fewer_operators_on_the_path_of_a_gpu():
    command = [sys.executable, str(ROOT / "bench" / "optimizer_step.py"), "--optimizers", "muon", "soap"]
    small = ("--layers", "1", "--width", "64", "--steps", "1")
    done = subprocess.run(
        [*command, *small], env=environment(), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    muon, soap = (line.split() for line in done.stdout.splitlines()[2:])
    assert int(muon[1]) < int(muon[2])
    assert soap[0] == "soap"
