"""The meaning of the symbols of a run: resolved fields, devices, ranks and rules that Kconfig cannot express."""

from __future__ import annotations

import pytest

from kmatrix import config
from programs import Program, give_gpus

DRY = "test-matrix-dry-run"


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


def runs(program, *arguments):
    """Return the resolved configurations of the runs of .config with these assignments."""
    return list(program.plan(*arguments).configs.values())


def fields(program, *arguments):
    (only,) = runs(program, *arguments)
    return only.train


@pytest.mark.parametrize(
    ("gpus", "arguments", "expected"),
    [
        (0, [], ("cpu", 1)),
        (1, [], ("cuda", 1)),
        (4, [], ("cuda", 4)),
        (4, ["NUM_GPUS=2"], ("cuda", 2)),
        (4, ["USE_DDP=n"], ("cuda", 1)),
        (0, ["NUM_GPUS=1"], ("cpu", 1)),
        (0, ["NUM_GPUS=4"], ("cuda", 4)),
        (0, ["DDP_BACKEND=nccl", "NUM_GPUS=1"], ("cuda", 1)),
        (4, ["DEVICE=cpu"], ("cpu", 1)),
        (4, ["DEVICE=cpu", "NUM_GPUS=3"], ("cpu", 3)),
        (4, ["GPUS=0,2"], ("cuda", 2)),
    ],
)
def test_device_and_ranks_are_resolved_before_expansion(program, monkeypatch, gpus, arguments, expected):
    give_gpus(monkeypatch, gpus)
    program.write("")

    found = fields(program, *arguments)

    assert (found.device, found.num_gpus) == expected
    assert found.ddp_backend == (None if "USE_DDP=n" in arguments else "nccl" if expected[0] == "cuda" else "gloo")


def test_an_axis_of_gpu_counts_selects_the_device_for_all_runs(program, monkeypatch):
    give_gpus(monkeypatch, 0)
    program.write("")

    assert {run.train.device for run in runs(program, "NUM_GPUS=1,2")} == {"cuda"}
    assert {run.train.device for run in runs(program, "NUM_GPUS=0,1")} == {"cpu"}


def test_cuda_visible_devices_limits_the_gpus(program, monkeypatch):
    give_gpus(monkeypatch, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    program.write("")

    assert fields(program).num_gpus == 2


def test_a_gpu_matrix_without_gpus_is_refused_early_in_one_clear_sentence(program, monkeypatch):
    give_gpus(monkeypatch, 0)
    program.check("defconfig-gpt2-finewebedu-a10gx4")

    message = program.refused("test-matrix", f"RESULTS_DIR={program.folder}")

    assert (
        "no run of this matrix can run on this machine: the smallest needs 4 GPUs, and no NVIDIA GPUs are usable"
        in message
    )
    assert not list(program.folder.glob("test_matrix_results_*"))


def test_the_global_batch_is_micro_batch_times_accumulation_times_ranks(program):
    program.write("CONFIG_GPT2_DEVICE_CPU=y")

    run = runs(program, "BATCH_SIZE=3", "GRADIENT_ACCUMULATION=5", "NUM_GPUS=2", "BLOCK_SIZE=64")[0]

    assert run.train.global_batch == 30
    assert run.train.tokens_per_step == 30 * 64
    assert run.tokens == 30 * 64 * run.train.max_iters


def test_a_fixed_global_batch_is_kept_for_all_gpu_counts_by_changing_accumulation(program):
    program.write("CONFIG_GPT2_DEVICE_CPU=y")

    found = runs(program, "BATCH_SIZE=3", "GLOBAL_BATCH=24", "NUM_GPUS=1,2,4,8")

    assert [run.train.gradient_accumulation for run in found] == [8, 4, 2, 1]
    assert {run.train.global_batch for run in found} == {24}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [([], 6e-5), (["LR=1e-2"], 1e-3), (["MIN_LR=1e-6"], 1e-6), (["SCHEDULE=constant"], 6e-4), (["MIN_LR=0"], 0.0)],
)
def test_the_default_minimum_rate_is_a_tenth_of_the_peak(program, arguments, expected):
    program.write("CONFIG_GPT2_DEVICE_CPU=y")

    assert fields(program, *arguments).min_lr == pytest.approx(expected)


@pytest.mark.parametrize(
    ("arguments", "steps"), [([], 100), (["WARMUP_FRACTION=0.25"], 50), (["WARMUP_FRACTION=0"], 0)]
)
def test_a_warm_up_fraction_replaces_a_number_of_steps(program, arguments, steps):
    program.write("CONFIG_GPT2_DEVICE_CPU=y")

    assert fields(program, "MAX_ITERS=200", *arguments).warmup_steps == steps


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["MODEL=124m"], (12, 12, 768)),
        (["MODEL=1558m"], (48, 25, 1600)),
        (["MODEL=tiny"], (4, 4, 128)),
        (["MODEL=depth", "DEPTH=6"], (6, 6, 384)),
        (["MODEL=custom", "N_LAYER=2", "N_HEAD=4", "N_EMBD=64"], (2, 4, 64)),
    ],
)
def test_layers_heads_and_width_are_numbers_for_every_model(program, arguments, sizes):
    program.write("CONFIG_GPT2_DEVICE_CPU=y")

    found = fields(program, *arguments)

    assert (found.n_layer, found.n_head, found.n_embd) == sizes


@pytest.mark.parametrize(
    ("requested", "device", "cores", "ranks", "threads"),
    [(0, "cpu", 8, 2, 4), (0, "cpu", 2, 4, 1), (3, "cpu", 8, 2, 3), (0, "cuda", 64, 4, 8), (0, "cuda", 8, 4, 2)],
)
def test_each_rank_has_an_equal_share_of_the_cores(requested, device, cores, ranks, threads):
    assert config.cpu_threads(requested, device=device, cores=cores, ranks=ranks) == threads


NANOCHAT = ("ARCH=nanochat", "BLOCK_SIZE=2048", "TOKENIZER=bpe", "BPE_VOCAB_SIZE=32768", "NUM_GPUS=1")
BY_SIZE = (*NANOCHAT, "PARALLEL_BATCH_SIZE=-1", "BATCH_SIZE=4")


@pytest.mark.parametrize(("depth", "sequences"), [(4, 128), (12, 256), (24, 512)])
def test_a_global_batch_by_size_is_that_of_the_depth_rule(program, depth, sequences):
    program.write("")

    found = fields(program, *BY_SIZE, f"DEPTH={depth}")

    assert (found.global_batch, found.gradient_accumulation) == (sequences, sequences // 4)


def test_ranks_that_cannot_share_a_batch_by_size_are_refused_with_the_largest_micro_batch(program):
    program.write("")
    out = program.refused(DRY, *NANOCHAT, "PARALLEL_BATCH_SIZE=-1", "BATCH_SIZE=12")

    assert "PARALLEL_BATCH_SIZE=-1 makes 256 sequences, not a multiple of BATCH_SIZE=12 x NUM_GPUS=1" in out
    assert "pass BATCH_SIZE=8" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["HELLASWAG=x.jsonl", "TOKENIZER=char"], "TOKENIZER=char cannot encode them"),
        (["CORE=x.zip", "TOKENIZER=char"], "TOKENIZER=char cannot encode them"),
        (["CORE=x.zip", "CORE_EXAMPLES=10"], "CORE_EXAMPLES=10 is too few"),
    ],
)
def test_a_benchmark_that_cannot_be_asked_is_refused_before_a_run_begins(program, arguments, reason):
    program.write("")
    assert reason in program.refused(DRY, *arguments)


@pytest.mark.parametrize("arch", ["nanochat", "nanochat2025"])
def test_tokens_per_parameter_count_those_of_the_architectures_rule(program, arch):
    program.write("")
    arguments = [f"ARCH={arch}" if word.startswith("ARCH=") else word for word in BY_SIZE]
    found = fields(program, *arguments, "DEPTH=12", "TOKENS_PER_PARAM=12", "MAX_ITERS=0")

    counted = found.shape.scaling_params if arch == "nanochat" else found.shape.params
    assert found.max_iters == 12 * counted // found.tokens_per_step


@pytest.mark.parametrize(
    ("optimizer", "least", "expected"),
    [
        ("adamw", 0.1, (100, 1.0, "cosine")),
        ("muon-nanochat", 0.05, (39, 0, "wsd")),
        ("muon-nanochat2025", 0, (0, 0, "wsd")),
    ],
)
def test_the_presets_have_the_schedule_of_their_public_code(program, optimizer, least, expected):
    program.write("")

    found = fields(program, *NANOCHAT, f"OPTIMIZER={optimizer}")

    assert found.min_lr == pytest.approx(least * found.learning_rate)
    assert (found.warmup_steps, found.grad_clip, found.schedule) == expected


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["DROPOUT=0.1"], "ARCH=nanochat has no dropout"),
        (["N_KV_HEAD=4"], "N_KV_HEAD=4 does not divide the 6 attention heads"),
        (["WINDOW_PATTERN=SSX"], "expected a letter L or S per layer"),
        (["MODEL=custom", "N_EMBD=16", "N_HEAD=2"], "needs a width of at least 24"),
        (["MODEL=custom", "N_EMBD=45", "N_HEAD=5"], "needs an even width per head, not 45 over 5 heads"),
        (["BIAS=y"], "nanochat's models have no biases"),
        (["WEIGHT_TYING=y"], "an output layer of their own"),
    ],
)
def test_parts_that_nanochat_does_not_have_are_refused(program, arguments, reason):
    program.write("")

    assert reason in program.refused(DRY, *NANOCHAT, *arguments)


def test_requesting_all_gpus_without_any_is_refused(program, monkeypatch):
    give_gpus(monkeypatch, 0)
    program.write("")

    assert "NUM_GPUS=0 selects all GPUs, but no GPU was found" in program.refused(DRY, "DEVICE=cuda")


def test_a_long_warm_up_gives_a_warning(program):
    program.write("CONFIG_GPT2_DEVICE_CPU=y")

    assert "warning: warm-up takes 100 of 200 steps" in program.check("plan", "MAX_ITERS=200").out
    assert "warning" not in program.check("plan", "MAX_ITERS=400").out
