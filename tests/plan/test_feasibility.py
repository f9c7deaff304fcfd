"""`make plan`: memory, speed, cost and disk."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from factories import train_config, with_shape
from kmatrix.errors import ConfigError
from kmatrix.plan.feasibility import (
    KNOWN,
    OVERHEAD,
    SPREAD,
    Fit,
    GpuModel,
    by_name,
    detected,
    disk,
    expected_seconds,
    fit,
    largest_batch,
    mfu_band,
    rate_at,
)
from kmatrix.plan.memory import memory
from kmatrix.shapes import NAMED, ModelShape, peak_tflops
from kmatrix.text import duration
from programs import Program, give_gpus

layers, heads, width = NAMED["124m"]
SMALL = ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=1024, vocab_size=50257)
TRAIN = with_shape(train_config(vocab_multiple=64, device="cuda", batch_size=8, dtype="bf16", max_iters=1000), SMALL)


@pytest.fixture
def program(tmp_path, monkeypatch):
    give_gpus(monkeypatch, 0)
    made = Program(tmp_path)
    made.check("defconfig")
    return made


def row_of(result, device):
    """Return the cells of the row of a device, without its name."""
    (line,) = (line for line in result.out.splitlines() if line.startswith(f"  {device}  "))
    return re.split(r"  +", line.strip())[1:]


def detail_of(result, label):
    """Return the detail of a plan with this label, "" without one."""
    return next((line[13:] for line in result.out.splitlines() if line.startswith(f"  {label:11}")), "")


DEPTH = ("MODEL=depth", "HEAD_DIM=128", "BIAS=n", "WEIGHT_TYING=n", "DTYPE=bf16", "BLOCK_SIZE=2048")


def test_a_row_has_the_exact_sizes_and_the_expected_memory_time_and_cost(program):
    batch = ("TOKENIZER=bpe", "BPE_VOCAB_SIZE=65536", "BATCH_SIZE=8", "PARALLEL_BATCH_SIZE=256", "MAX_ITERS=12800")
    result = program.check("plan", "GPU=H100", "NUM_GPUS=2", "DEPTH=16", *DEPTH, *batch, "GPU_HOUR_PRICE=4")
    assert row_of(result, "H100") == [
        *("337,675,264", "12,800", "6.71B", "26.8 of 79.2 GiB", "fits", "58"),
        *("3h01m to 11h25m", "4.22 to 16 kWh", "$24.13 to $91.32", "8.1 GB"),
    ]
    assert "6,710,886,400 tokens, 19.9 per parameter" in detail_of(result, "length")


def test_a_run_that_does_not_fit_has_its_row_before_the_error(program):
    result = program("plan", "GPU=h100_pcie", "NUM_GPUS=8", "DEPTH=64", *DEPTH, "BATCH_SIZE=4")
    assert result.status == 2
    assert row_of(result, "H100 PCIe")[3:6] == ["289 of 79.2 GiB", "does not fit", "0"]


def test_without_a_gpu_all_known_gpus_are_planned(program):
    result = program.check("plan", "DEVICE=cuda", "NUM_GPUS=1", "MODEL=124m")
    for device in KNOWN:
        assert row_of(result, device.name), device.name


def test_detected_gpus_are_planned_with_the_memory_of_the_driver(program, monkeypatch):
    give_gpus(monkeypatch, 2)
    result = program.check("plan", "NUM_GPUS=2", "MODEL=124m")
    assert row_of(result, "NVIDIA A10G")[3].endswith(" of 22.5 GiB")
    assert row_of(result, "NVIDIA A10G")[7] == "-"  # its data sheet states no power


def test_the_duration_on_the_cpu_is_an_assumption_until_a_run_was_measured(program):
    result = program.check("plan", "DEVICE=cpu", "MODEL=tiny", "NUM_GPUS=1", f"RESULTS_DIR={program.folder}")
    assert row_of(result, "this machine")[3].startswith("over ")  # weights, gradients and states
    expected = "at 25 to 300 GFLOP/s per core, assumed: no run like it was measured on this machine"
    assert expected in detail_of(result, "time")


@pytest.mark.parametrize(("budget", "seconds"), [("MAX_TIME=600s", 600), ("MAX_COST=1", 1800)])
def test_a_budget_limits_time_and_cost(program, budget, seconds):
    arguments = ("GPU=A100", "NUM_GPUS=1", "MODEL=124m", "DTYPE=bf16", "GPU_HOUR_PRICE=2", "EVAL_INTERVAL=10")
    result = program.check("plan", *arguments, "MAX_ITERS=100000", budget)
    assert row_of(result, "A100")[6:9:2] == [duration(seconds), f"${seconds / 1800:.2f}"]
    assert detail_of(result, "time").endswith(f"; at most {duration(seconds)}, its budget")
    train = replace(TRAIN, max_time=float(seconds), max_iters=10**8)
    assert expected_seconds(train, by_name("A100")) == seconds


def test_runs_with_the_same_needs_are_listed_once(program):
    result = program.check("plan", "GPU=A100", "NUM_GPUS=1", "SEED=1,2,3")
    assert result.out.count("  model  ") == 1
    assert sum(line.startswith("gpt2_") for line in result.out.splitlines()) == 3


def test_every_known_gpu_has_a_peak_and_is_found_by_name():
    for device in KNOWN:
        assert peak_tflops(device.name, "bf16")
        assert by_name(device.name.lower().replace(" ", "-")) == device


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown GPU model") as raised:
        by_name("T4")
    assert "RTX 4090" in raised.value.why


@pytest.mark.parametrize(("share", "verdict"), [(0.89, Fit.FITS), (0.91, Fit.TIGHT), (1.01, Fit.NOT)])
def test_the_memory_available_to_a_run_excludes_that_of_the_libraries(share, verdict):
    need = memory(TRAIN)
    device = GpuModel(name="a GPU", memory=need.total / share + OVERHEAD, watts=None)
    assert fit(need, device) is verdict


@pytest.mark.parametrize(
    ("changes", "files"),
    [({}, 5), ({"save_best": False}, 4), ({"save_checkpoint": False}, 4)],
)
def test_the_disk_space_covers_rolling_best_and_final_checkpoints(changes, files):
    """Of 1000 steps with one checkpoint per 100, three rolling ones are kept."""
    config = train_config(checkpoint_interval=100, keep_checkpoints=3, eval_interval=100, max_iters=1000)
    assert disk(replace(config, **changes))[0] == files


def test_the_expected_time_is_in_the_middle_of_its_range():
    train, device = replace(TRAIN, num_gpus=4), by_name("A100")
    found = expected_seconds(train, device)
    low, high = mfu_band(train, device)
    tokens = train.max_iters * train.tokens_per_step
    fast, slow = (tokens / rate_at(share, train, device) for share in (high, low))
    assert fast < found < slow
    assert slow / found == pytest.approx(math.sqrt(1.5 / 1.2) * SPREAD)
    assert expected_seconds(train, detected("a card", 1000.0)) is None


def test_compiled_runs_are_expected_to_be_faster_and_small_models_slower():
    device = by_name("H100")
    eager, compiled = (mfu_band(replace(TRAIN, compile=compiled), device) for compiled in (False, True))
    assert eager[0] < compiled[0]
    assert eager[1] < compiled[1]
    smaller, tiny = (replace(TRAIN, n_layer=4, n_embd=width, n_head=4, vocab_size=257) for width in (512, 128))
    assert mfu_band(smaller, device)[0] < eager[0]
    assert mfu_band(smaller, device)[1] < eager[1]
    # Below the published sizes, more is possible.
    assert mfu_band(tiny, device)[1] > mfu_band(smaller, device)[1]


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    device = by_name("A10G")
    largest = largest_batch(TRAIN, device)
    needed = [memory(replace(TRAIN, batch_size=batch)) for batch in (largest, largest + 1)]
    assert [fit(need, device) for need in needed] == [Fit.TIGHT, Fit.NOT]
