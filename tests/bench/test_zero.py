"""The benchmark of sharded optimizer states trains with both ways and compares them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from factories import ROOT, environment

pytestmark = pytest.mark.nightly

SMALL = ("--layers", "1", "--width", "64", "--block", "16", "--batch", "1", "--vocab", "256", "--steps", "2")


def test_the_benchmark_prints_a_line_for_each_way_and_finds_equal_numbers():
    command = [sys.executable, str(ROOT / "bench" / "zero.py"), "--optimizer", "adamw", "muon", *SMALL]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [row[:2] for row in rows] == [[name, way] for name in ("adamw", "muon") for way in ("DDP", "ZERO_STAGE=1")]
    assert {row[-1] for row in rows} == {"yes"}
    for plain, sharded in zip(rows[::2], rows[1::2], strict=True):
        whole, part = (int(row[6].replace(",", "")) for row in (plain, sharded))
        assert 0.45 * whole < part < 0.6 * whole
