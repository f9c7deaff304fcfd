"""Set the wall clock back by a day while a matrix runs: everything finishes, and no duration is negative.

A module patches the wall clock of every Python process; the monotonic clock and the times of files stay real, as on a
machine whose clock is set. The program faketime is not used: with it, time.sleep of Python 3.11 raises EINVAL
(clock_nanosleep with an absolute monotonic time).
"""

from __future__ import annotations

import json
import re

import pytest

from slow_training import SlowTraining
from story import complete_lines, load_json, matrices, only
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]

DAY_S = 86400
TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=1", "N_HEAD=2", "N_EMBD=16", "BLOCK_SIZE=16", "BATCH_SIZE=2"),
    *("GLOBAL_BATCH=2", "EVAL_SAMPLES=4", "EVAL_INTERVAL=100", "LOG_INTERVAL=1", "REUSE=n", "OPTIMIZER=adamw,sgd"),
    *("MAX_ITERS=300", "CHECKPOINT_INTERVAL=50", "NUM_GPUS=1", "GPU_HOUR_PRICE=3.6", "ALERT_STALL=7200"),
)
CLOCK = """
# A wall clock with the offset (s) in a file.
wall, wall_ns = time.time, time.time_ns

def offset():
    with open({clock!r}) as file:
        return int(file.read() or 0)

time.time = lambda: wall() + offset()
time.time_ns = lambda: wall_ns() + offset() * 10**9
"""
# Durations, and numbers that derive from them.
DURATIONS = re.compile(r"(^|_)(seconds|s|ms|elapsed|duration|joules|dollars|cost|took|mfu|tokens_per_second|hours)$")


def negative(value, path="") -> list[str]:
    """Return the paths of the negative durations in a JSON value."""
    if isinstance(value, dict):
        return [found for name, item in value.items() for found in negative(item, f"{path}/{name}")]
    if isinstance(value, list):
        return [found for number, item in enumerate(value) for found in negative(item, f"{path}/{number}")]
    name = path.rpartition("/")[2]
    return [f"{path}: {value}"] if isinstance(value, int | float) and value < 0 and DURATIONS.search(name) else []


def test_a_clock_that_is_set_back_by_a_day_in_mid_run_changes_no_duration(clone, background, tmp_path):
    clock = tmp_path / "clock"
    clock.write_text("0")
    slow = SlowTraining(tmp_path / "slow", "0.2", before=CLOCK.format(clock=str(clock)))
    fake = slow.environment
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    results = tmp_path / "results"
    runner = background("test-matrix", *TINY, f"RESULTS_DIR={results}", **fake)

    def lines() -> int:
        return max((len(complete_lines(path)) for path in results.glob("*/gpt2_*/metrics.jsonl")), default=0)

    wait_until(lambda: lines() > 5, "the first run trains")
    clock.write_text(str(-DAY_S))
    before = lines()
    wait_until(lambda: lines() > before + 3, "it trains on")
    matrix = only(matrices(results))
    now = clone.kmatrix("status", f"TARGET={matrix}", "JSON=1", **fake)
    assert now.returncode == 0, now.stderr
    view = json.loads(now.stdout)
    (training,) = [run for run in view["runs"] if run["status"] == "running"]
    assert 0 < training["elapsed_s"] < DAY_S / 2
    assert 0 < training["left_s"] < DAY_S / 2
    assert negative(view) == []
    estimate = clone.kmatrix("estimate", f"TARGET={matrix}", **fake)
    assert estimate.returncode == 0, estimate.stderr
    assert "-" not in re.sub(r"\d{4}-\d\d-\d\d| - ", "", estimate.stdout.partition("\n")[2])
    slow.free()
    output = (tmp_path / "output_0.txt").read_text
    assert runner.wait(600) == 0, output()

    assert "Traceback" not in output()
    assert "no metrics for" not in output()  # no alert of a stall
    assert not re.search(r"(?<![\w.])-\d", re.sub(r"-\d+(\.\d+)? \(|[-+]\d\.\d{4}", "", output())), output()
    found = [f"{path}: {one}" for path in matrix.rglob("*.json") for one in negative(load_json(path))]
    for path in matrix.rglob("*.jsonl"):
        found += [f"{path}: {one}" for line in complete_lines(path) for one in negative(line)]
    assert found == []
    for path in matrix.glob("gpt2_*/status.json"):
        (attempt,) = load_json(path)["attempts"]
        assert load_json(path)["status"] == "finished"
        assert 1 < attempt["seconds"] < DAY_S / 2
        assert attempt["ended"] >= attempt["started"]
    drawn = clone.kmatrix("update-graphs", f"TARGET={matrix}", **fake)
    assert drawn.returncode == 0, drawn.stdout + drawn.stderr
    summary = clone.kmatrix("summary", f"TARGET={matrix}", **fake)
    assert summary.returncode == 0, summary.stderr
