"""The benchmarks of the model run and print their measurements as tables."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from factories import ROOT, environment

sys.path.insert(0, str(ROOT / "bench"))
import gpu_table

pytestmark = pytest.mark.nightly


def bench(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


SETTING = gpu_table.Setting(model="124m", batch=32, compile=True, steps=80, device="cuda")


def test_a_row_has_speed_mfu_and_ratio_and_na_for_unknown_values():
    flops = SETTING.shape.flops_per_token
    row = gpu_table.row(SETTING, 200_000.0, 160_000.0, 989.0)
    ours, peer = (f"{100 * speed * flops / 989e12:.1f} %" for speed in (200_000, 160_000))
    assert row == f"| 124m | 32 | yes | 200,000 | {ours} | 160,000 | {peer} | 1.25 |"
    assert gpu_table.row(SETTING, 200_000.0, None, None) == "| 124m | 32 | yes | 200,000 | n/a | n/a | n/a | n/a |"


def test_the_speed_is_that_of_the_median_step_after_warm_up():
    times = [9000.0] * gpu_table.WARMING_UP + [100.0, 200.0, 300.0]
    assert gpu_table.speed(times, SETTING) == pytest.approx(32 * 1024 / 0.2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_table_is_refused_with_the_reason():
    completed = bench("bench/gpu_table.py")
    assert completed.returncode == 2
    assert "PyTorch finds no GPU" in completed.stderr


def test_the_complete_table_runs_on_the_cpu():
    sizes = ("--device", "cpu", "--models", "tiny", "--steps", "22", "--block", "32", "--compile", "no")
    completed = bench("bench/gpu_table.py", *sizes)
    assert completed.returncode == 0, completed.stderr
    rows = [line for line in completed.stdout.splitlines() if line.startswith("| tiny ")]
    assert len(rows) == 1
    assert all(" n/a |" in row for row in rows)


def test_the_memory_options_are_measured_and_their_losses_agree():
    sizes = ("--layers", "2", "--width", "64", "--block", "128", "--batch", "4", "--vocab", "8000", "--steps", "1")
    completed = bench("bench/memory_options.py", *sizes)
    assert completed.returncode == 0, completed.stderr
    rows = [line.split() for line in completed.stdout.splitlines()[2:]]
    assert len(rows) == 5
    losses = [float(row[-1]) for row in rows]
    assert max(losses) - min(losses) < 1e-4
