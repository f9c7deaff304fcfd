"""`make plan`: memory, speed, cost and disk, and four published claims about such runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from factories import train_config
from kmatrix.errors import ConfigError
from kmatrix.experiment.inputs.data import PREBUILT, to_fetch
from kmatrix.plan.feasibility import (
    HOPPER,
    KNOWN,
    OTHER,
    OVERHEAD,
    PUBLISHED,
    RTX,
    Feasibility,
    Fit,
    GpuModel,
    Target,
    _files,
    at_mfu,
    by_name,
    detected,
    disk,
    expected_seconds,
    family_of,
    feasibility,
    fit,
    largest_batch,
    mfu_band,
    middle_mfu,
)
from kmatrix.plan.memory import memory
from kmatrix.shapes import NAMED, ModelShape, peak_tflops
from kmatrix.text import duration
from programs import Program, give_gpus

layers, heads, width = NAMED["124m"]
SMALL = ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=1024, vocab_size=50257)
TRAIN = train_config(vocab_multiple=64, device="cuda", batch_size=8, dtype="bf16")


@pytest.fixture
def program(tmp_path, monkeypatch):
    give_gpus(monkeypatch, 0)
    made = Program(tmp_path)
    made.check("defconfig")
    return made


def values_of(result, label):
    """Return the values of the plan on the lines with this label."""
    return [line[13:] for line in result.out.splitlines() if line.startswith(f"  {label:11}")]


DEPTH = ("MODEL=depth", "HEAD_DIM=128", "BIAS=n", "WEIGHT_TYING=n", "DTYPE=bf16", "BLOCK_SIZE=2048")


def test_two_h100_at_depth_16_train_a_third_of_a_billion_parameters(program):
    vocabulary = ("TOKENIZER=bpe", "BPE_VOCAB_SIZE=65536")
    batch = ("BATCH_SIZE=8", "PARALLEL_BATCH_SIZE=256", "MAX_ITERS=12800", "TOKENS_PER_SECOND=430600")
    result = program.check("plan", "GPU=H100", "NUM_GPUS=2", "DEPTH=16", *DEPTH, *vocabulary, *batch)
    assert "337,675,264 parameters" in values_of(result, "model")[0]
    assert "20 per parameter: 335,544,320 parameters" in values_of(result, "length")[0]
    assert values_of(result, "fit")[0].startswith("fits on H100")
    assert values_of(result, "target") == ["430,600 tok/s, 4h20m, MFU 43.8 %: possible"]
    assert "1 GPU: accumulation 32" in values_of(result, "GPUs")[0]


def test_depth_64_does_not_fit_into_80_gb_and_takes_48_hours(program):
    batch = ("BATCH_SIZE=4", "MAX_ITERS=35541", "SECONDS_PER_STEP=4.9315", "GPU_HOUR_PRICE=4")
    result = program("plan", "GPU=h100_pcie", "NUM_GPUS=8", "DEPTH=64", *DEPTH, *batch)
    assert result.status == 2
    assert values_of(result, "fit")[0].startswith("does not fit on H100 PCIe")
    assert values_of(result, "largest")[0].startswith("not one sequence fits; 38 layers would")
    assert "2d01h" in values_of(result, "target")[0]
    assert values_of(result, "cost") == ["$1,557.96 at $4 per GPU hour"]


def test_the_days_on_one_gpu_and_on_four_follow_from_their_steps(program):
    arguments = ("GPU=A100", "MODEL=124m", "TOKENIZER=gpt2", "BATCH_SIZE=16", "PARALLEL_BATCH_SIZE=512", "DTYPE=bf16")
    one_gpu, four_gpus = (
        program.check("plan", *arguments, f"NUM_GPUS={ranks}", "MAX_ITERS=95365", f"SECONDS_PER_STEP={seconds}")
        for ranks, seconds in ((1, 37.5), (4, 9.4))
    )
    assert "124,439,808 parameters" in values_of(one_gpu, "model")[0]
    assert "13,981 tok/s, 41d09h" in values_of(one_gpu, "target")[0]
    assert "55,775 tok/s, 10d09h" in values_of(four_gpus, "target")[0]


def test_an_impossible_speed_of_400000_tokens_per_second_has_no_cost(program):
    arguments = ("MODEL=1558m", "TOKENIZER=gpt2", "BLOCK_SIZE=2048", "BATCH_SIZE=4", "PARALLEL_BATCH_SIZE=256")
    budget = ("DTYPE=bf16", "MAX_TOKENS=100000000000", "GPU_HOUR_PRICE=1", "TOKENS_PER_SECOND=400000")
    result = program("plan", "GPU=A100", "NUM_GPUS=8", *arguments, *budget)
    assert result.status == 2
    assert values_of(result, "target")[0].endswith(": impossible")
    assert " to " in values_of(result, "cost")[0]  # of the range, not of the target


def test_without_a_gpu_all_known_gpus_are_planned(program):
    result = program.check("plan", "DEVICE=cuda", "NUM_GPUS=1", "MODEL=124m")
    for device in KNOWN:
        assert values_of(result, device.name), device.name


def test_detected_gpus_are_planned_with_the_memory_of_the_driver(program, monkeypatch):
    give_gpus(monkeypatch, 2)
    result = program.check("plan", "NUM_GPUS=2", "MODEL=124m")
    assert "on NVIDIA A10G: " in values_of(result, "fit")[0]
    assert "22.5 GiB" in values_of(result, "fit")[0]
    assert not values_of(result, "energy")  # its data sheet states no power


def test_the_duration_on_the_cpu_is_an_assumption_until_a_run_was_measured(program):
    result = program.check("plan", "DEVICE=cpu", "MODEL=tiny", "NUM_GPUS=1", f"RESULTS_DIR={program.folder}")
    assert values_of(result, "fit")[0].startswith("fits on this machine")
    (time,) = values_of(result, "time")
    assert "at 25 to 300 GFLOP/s per core, assumed: no run like it was measured on this machine" in time


@pytest.mark.parametrize(("budget", "seconds"), [("MAX_TIME=600s", 600), ("MAX_COST=1", 1800)])
def test_a_budget_limits_time_and_cost(program, budget, seconds):
    arguments = ("GPU=A100", "NUM_GPUS=1", "MODEL=124m", "DTYPE=bf16", "GPU_HOUR_PRICE=2", "EVAL_INTERVAL=10")
    result = program.check("plan", *arguments, "MAX_ITERS=100000", budget)
    assert values_of(result, "cost") == [f"${seconds / 1800:.2f} at $2 per GPU hour"]
    (time,) = values_of(result, "time")
    assert time.endswith(f"; its budget ends it after {duration(seconds)}")
    train = replace(TRAIN, max_time=float(seconds))
    assert expected_seconds(shape=SMALL, train=train, tokens=10**12, device=by_name("A100")) == seconds


def test_runs_with_the_same_needs_are_listed_once(program):
    result = program.check("plan", "GPU=A100", "NUM_GPUS=1", "SEED=1,2,3")
    assert len(values_of(result, "model")) == 1
    assert sum(line.startswith("gpt2_") for line in result.out.splitlines()) == 3


def test_epochs_of_missing_data_leave_time_and_cost_unknown(program, tmp_path):
    result = program.check("plan", f"DATA_DIR={tmp_path}", "GPU=A100", "NUM_GPUS=1", "MAX_EPOCHS=2", "GPU_HOUR_PRICE=1")
    assert values_of(result, "time") == ["unknown until the data are prepared"]
    assert not values_of(result, "cost")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["GPU=H1000"], "GPU=H1000: unknown GPU model"),
        (["HOURS=-1"], "HOURS=-1 is not a number above 0"),
        (["SECONDS_PER_STEP=nan"], "SECONDS_PER_STEP=nan is not a number above 0"),
        (["HOURS=1", "SECONDS_PER_STEP=1"], "pass only one of"),
    ],
)
def test_an_invalid_request_is_refused(program, arguments, message):
    assert message in program.refused("plan", *arguments)


@pytest.mark.parametrize("device", KNOWN, ids=lambda device: device.name)
def test_every_known_gpu_has_a_peak_and_is_found_by_name(device):
    assert peak_tflops(device.name, "bf16")
    assert by_name(device.name.lower().replace(" ", "-")) == device


@pytest.mark.parametrize(
    ("name", "watts"),
    [("NVIDIA H100 PCIe", 350), ("NVIDIA H100 80GB HBM3", 700), ("NVIDIA A100-SXM4-40GB", 400), ("Tesla T4", None)],
)
def test_a_detected_gpu_has_the_power_of_its_data_sheet(name, watts):
    assert detected(name, 1024).watts == watts


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown GPU model") as raised:
        by_name("T4")
    assert "RTX 4090" in raised.value.why


def test_the_largest_micro_batch_fits_and_one_more_does_not():
    device = by_name("A10G")
    largest = largest_batch(SMALL, TRAIN, device)
    needed = [memory(SMALL, replace(TRAIN, batch_size=batch)) for batch in (largest, largest + 1)]
    assert [fit(need, device) for need in needed] == [Fit.TIGHT, Fit.NOT]


@pytest.mark.parametrize(("share", "verdict"), [(0.89, Fit.FITS), (0.91, Fit.TIGHT), (1.01, Fit.NOT)])
def test_the_memory_available_to_a_run_excludes_that_of_the_libraries(share, verdict):
    need = memory(SMALL, TRAIN)
    device = GpuModel(name="a GPU", memory=need.total / share + OVERHEAD, watts=None)
    assert fit(need, device) is verdict


@pytest.mark.parametrize(
    ("mfu", "verdict"),
    [
        (0.85, Feasibility.POSSIBLE),
        (0.86, Feasibility.UNLIKELY),
        (1.01, Feasibility.IMPOSSIBLE),
        (None, Feasibility.UNKNOWN),
    ],
)
def test_a_speed_is_classified_by_the_mfu_it_needs(mfu, verdict):
    assert feasibility(mfu) is verdict


def test_a_time_budget_gives_a_rate_once_the_length_is_known():
    assert Target(hours=1).rate(100, 7200) == 2
    assert Target(hours=1).rate(100, None) is None


@pytest.mark.parametrize(
    ("changes", "files"),
    [({}, 5), ({"save_best": False}, 4), ({"save_checkpoint": False}, 4), ({"keep_every": 200}, 9)],
)
def test_the_disk_space_covers_rolling_permanent_best_and_final_checkpoints(changes, files):
    """Of 1000 steps with one checkpoint per 100, three rolling ones are kept, and one per 200 steps permanently."""
    config = train_config(checkpoint_interval=100, keep_checkpoints=3, keep_every=0, eval_interval=100)
    assert _files(replace(config, **changes), 1000) == files


def test_the_disk_space_covers_checkpoints_by_time_and_kept_weights():
    """By time, the window may be full whatever the steps are; weights stay at each multiple that is not permanent."""
    config = train_config(checkpoint_interval=0, keep_checkpoints=3, keep_every=0, eval_interval=100)
    assert _files(config, 1000) == 2
    assert _files(replace(config, checkpoint_minutes=60.0), 1000) == 5
    weights = replace(config, keep_weights_every=100, keep_every=200)
    assert _files(weights, 1001) == 3 + 5 + 2
    kept = disk(config.shape, weights, 1001)
    assert kept is not None
    assert (kept.weights, kept.weights_each) == (5, 4 * config.shape.params)
    assert kept.bytes == kept.files * kept.each + 5 * kept.weights_each


def test_an_embedding_lookup_costs_no_operations():
    tied, untied = (
        ModelShape(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=300, weight_tying=tying)
        for tying in (True, False)
    )
    assert tied.flops_per_token == untied.flops_per_token


def test_the_expected_time_is_in_the_middle_of_its_range():
    shape, device = SMALL, by_name("A100")
    train = replace(TRAIN, num_gpus=4)
    found = expected_seconds(shape=shape, train=train, tokens=10**9, device=device)
    low, high = mfu_band(shape, train, device)
    fast, slow = (at_mfu(share, shape=shape, train=train, tokens=10**9, device=device).seconds for share in (high, low))
    assert fast < found < slow
    assert slow / found == pytest.approx(math.sqrt(1.5 / 1.2) * PUBLISHED.spread)
    unknown = detected("a card", 1000.0)
    assert expected_seconds(shape=shape, train=train, tokens=10**9, device=unknown) is None


@pytest.mark.parametrize(
    ("tokens", "shards", "size"),
    [
        (1, 1, 400_002_048),
        (99_999_744, 1, 400_002_048),  # 97,656 sequences of 1024 tokens
        (99_999_745, 2, 600_003_072),
        (0, 99, 19_908_081_088),
        (10**12, 99, 19_908_081_088),
    ],
)
def test_as_many_prebuilt_shards_are_fetched_as_contain_the_tokens(tokens, shards, size):
    found = to_fetch(PREBUILT["finewebedu"], tokens, 1024)
    assert (found.shards, found.bytes) == (shards, size)


def test_all_tokens_of_a_dataset_are_those_of_its_shards():
    assert PREBUILT["finewebedu"].tokens == 9_853_989_344
    assert PREBUILT["fineweb"].tokens is None


def test_compiled_runs_are_expected_to_be_faster_and_small_models_slower():
    device = by_name("H100")
    eager, compiled = (mfu_band(SMALL, replace(TRAIN, compile=compiled), device) for compiled in (False, True))
    assert eager[0] < compiled[0]
    assert eager[1] < compiled[1]
    smaller, tiny = (replace(SMALL, n_layer=4, n_embd=width, n_head=4, vocab_size=257) for width in (512, 128))
    assert mfu_band(smaller, TRAIN, device)[0] < eager[0]
    assert mfu_band(smaller, TRAIN, device)[1] < eager[1]
    # Below the published sizes, more is possible.
    assert mfu_band(tiny, TRAIN, device)[1] > mfu_band(smaller, TRAIN, device)[1]


@pytest.mark.parametrize(
    ("name", "family"), [("NVIDIA H100 80GB HBM3", HOPPER), ("NVIDIA GeForce RTX 5090", RTX), ("NVIDIA A10G", OTHER)]
)
def test_the_expected_mfu_depends_on_the_family_of_the_gpu(name, family):
    assert family_of(detected(name, 1024)) == family
    middle = middle_mfu(SMALL, replace(TRAIN, compile=True), detected(name, 1024))
    assert middle == pytest.approx(PUBLISHED.middle[family] * SMALL.params / (SMALL.params + PUBLISHED.size))


def test_compilation_saves_the_copies_of_the_logits():
    plain, compiled = (memory(SMALL, replace(TRAIN, compile=compiled)) for compiled in (False, True))
    assert compiled.logits == plain.logits * 2.5 / 12
    assert compiled.activations == plain.activations


def test_a_process_on_the_cpu_takes_more_than_its_tensors_and_recomputation_saves_less():
    train = replace(TRAIN, device="cpu", dtype="fp32")
    need, recomputing = (memory(SMALL, replace(train, recompute=recompute)) for recompute in (False, True))
    assert need.process > 1.3 * need.total
    assert recomputing.total < recomputing.process < need.process
    assert need.process - recomputing.process < need.total - recomputing.total
    on_gpu = memory(SMALL, TRAIN)
    assert on_gpu.process == on_gpu.total
