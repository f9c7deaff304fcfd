"""Impossible runs are refused before anything is created, with the arguments that make them possible."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

import pytest

from factories import train_config
from kmatrix.plan.cpu import CpuSpeed
from kmatrix.plan.feasibility import Fit, GpuModel, by_name, deeper, fit
from kmatrix.plan.memory import memory
from kmatrix.plan.risk import budget_warning, risks, steps_in
from kmatrix.records.train_config import budget_s
from kmatrix.shapes import NAMED, ModelShape
from programs import Program, give_gpus

layers, heads, width = NAMED["124m"]
SHAPE = ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=1024, vocab_size=50257)
TRAIN = train_config(
    model="124m",
    vocab_multiple=64,
    device="cuda",
    dtype="bf16",
    batch_size=8,
    global_batch=480,
    num_gpus=1,
    block_size=1024,
)
A10G = by_name("A10G")
DRY, PLAN, RUN, TRAIN_ONE = "test-matrix-dry-run", "plan", "test-matrix", "train"


@pytest.fixture
def program(tmp_path, monkeypatch):
    give_gpus(monkeypatch, 2)
    made = Program(tmp_path)
    made.check("olddefconfig", f"RESULTS_DIR={tmp_path}/results")
    return made


CPU = CpuSpeed(cores=2, slow=50e9, fast=100e9, source="from 1 earlier run on this machine")


def of(train, *, steps=1000, device=A10G, shape=SHAPE, cpu=CPU):
    return risks(shape, train, steps, device, cpu)


def fixes(text):
    """Return the arguments of a hint: `pass A=1 B=2 or C=3; ...` gives both alternatives."""
    words = text.partition("pass ")[2].partition(";")[0].partition(chr(10))[0]
    return [shlex.split(each) for each in words.replace(", or ", " or ").split(" or ")]


def test_a_run_that_fits_and_has_time_is_possible():
    assert of(replace(TRAIN, max_time=36000.0)) == ()


def test_a_micro_batch_that_does_not_fit_is_an_estimate_and_the_fix_keeps_the_global_batch():
    (risk,) = of(replace(TRAIN, batch_size=240))
    assert not risk.certain
    assert "A10G has 22.4 GiB" in risk.what
    batch = int(dict(word.split("=") for word in risk.fix.split())["BATCH_SIZE"])
    assert 480 % batch == 0
    assert of(replace(TRAIN, batch_size=batch)) == ()


def test_memory_is_refused_only_beyond_the_error_of_the_plan():
    need = memory(SHAPE, TRAIN).total
    device = GpuModel(name="a GPU", memory=need / 1.14, watts=None)
    assert of(TRAIN, device=device) == ()
    (risk,) = of(TRAIN, device=replace(device, memory=need / 1.16))
    assert not risk.certain


def test_weights_that_alone_exceed_the_memory_are_certain():
    big = replace(SHAPE, n_layer=48, n_embd=8000, n_head=50)
    (risk,) = of(TRAIN, shape=big)
    assert risk.certain
    assert risk.fix.startswith("MODEL=")


def test_unknown_memory_or_an_unknown_optimizer_is_not_refused():
    assert of(replace(TRAIN, batch_size=240), device=GpuModel(name="a GPU", memory=None, watts=None)) == ()
    assert of(replace(TRAIN, batch_size=240, optimizer="mine")) == ()


@pytest.mark.parametrize(("seconds", "certain"), [(100.0, True), (300.0, False)])
def test_a_budget_that_ends_before_the_first_evaluation(seconds, certain):
    """1000 steps take 200 s at the peak of an A10G, and 327 s at the highest expected MFU."""
    train = replace(TRAIN, gradient_accumulation=2, global_batch=16, eval_interval=1000, max_time=seconds)
    (risk,) = of(train, steps=4000)
    assert risk.certain is certain
    limit = float(risk.fix.rpartition("MAX_TIME=")[2].removesuffix("s"))
    assert of(replace(train, max_time=limit), steps=4000) == ()


ON_CPU = replace(TRAIN, device="cpu", dtype="fp32", max_time=1000.0, eval_interval=100, global_batch=8)


def test_on_the_cpu_a_budget_is_compared_with_the_speed_of_this_machine():
    """100 steps of 8 x 1024 tokens take 58 minutes at 2 x 100 GFLOP/s, twice as long at the slow end."""
    (risk,) = of(ON_CPU)
    assert not risk.certain
    assert risk.what.endswith(
        "after start-up and 100 steps in at least 58m26s "
        "(2 cores at 50 to 100 GFLOP/s per core, from 1 earlier run on this machine)"
    )
    faster = replace(CPU, fast=400e9)
    assert of(ON_CPU, cpu=faster) == ()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_budget_that_is_shorter_than_the_start_of_a_run_is_an_estimate(device):
    train = replace(TRAIN, device=device, max_time=1.0, eval_interval=1, block_size=8)
    small = replace(SHAPE, n_layer=1, n_head=1, n_embd=8, vocab_size=64, block_size=8)
    (risk,) = of(train, shape=small)
    assert not risk.certain
    assert "after start-up and 1 step in at least" in risk.what
    limit = float(risk.fix.rpartition("MAX_TIME=")[2].removesuffix("s"))
    assert of(replace(train, max_time=limit), shape=small) == ()


def test_no_cpu_is_faster_than_its_matrix_units():
    (risk,) = of(replace(ON_CPU, max_time=20.0))
    assert risk.certain


def test_the_fix_of_a_budget_lets_the_slowest_expected_run_evaluate_in_time():
    (risk,) = of(ON_CPU)
    first, _, second = risk.fix.partition(" or ")
    per_step = ON_CPU.tokens_per_step * SHAPE.flops_per_token / (2 * CPU.slow)
    interval, limit = int(first.removeprefix("EVAL_INTERVAL=")), float(second.removeprefix("MAX_TIME=").rstrip("s"))
    assert interval * per_step < 1000
    assert 100 * per_step < limit
    assert of(replace(ON_CPU, eval_interval=interval)) == of(replace(ON_CPU, max_time=limit)) == ()


def test_the_fix_raises_every_budget_that_is_too_small():
    train = replace(ON_CPU, max_cost=0.01, gpu_hour_price=1.0)
    (risk,) = of(train)
    limits = dict(word.split("=") for word in risk.fix.rpartition(" or ")[2].split())
    raised = {"max_time": float(limits["MAX_TIME"].rstrip("s")), "max_cost": float(limits["MAX_COST"])}
    assert of(replace(train, **raised)) == ()


@pytest.mark.parametrize(("device", "peak"), [(A10G, 7.0), (GpuModel(name="a GPU", memory=1e12, watts=None), 7.0)])
def test_a_refusal_that_rests_on_a_stated_peak_is_an_estimate(device, peak):
    """1000 steps take 200 s at the peak of an A10G in the table, and 2000 s at the stated one."""
    train = replace(TRAIN, gradient_accumulation=2, global_batch=16, eval_interval=1000, max_time=300.0)
    (risk,) = of(replace(train, peak_tflops=peak), steps=4000, device=device)
    assert not risk.certain


def test_a_stated_peak_does_not_weaken_a_certainty():
    train = replace(TRAIN, gradient_accumulation=2, global_batch=16, eval_interval=1000, max_time=100.0)
    (risk,) = of(replace(train, peak_tflops=7.0), steps=4000)
    assert risk.certain


def test_ranks_on_the_cpu_share_its_memory_and_fewer_may_fit():
    need = memory(SHAPE, replace(ON_CPU, batch_size=1)).process
    machine = GpuModel(name="this machine", memory=2.5 * need / 4, watts=None, shared_by=4)
    (risk,) = of(replace(ON_CPU, batch_size=1, num_gpus=4, max_time=None), device=machine)
    assert risk.fix == "NUM_GPUS=2 PARALLEL_BATCH_SIZE=8"
    assert risk.what.endswith(" per rank")


@pytest.mark.parametrize("model", ["124m", "custom", "depth"])
@pytest.mark.parametrize("gib", [0.3, 0.6, 1.2, 3.0])
def test_the_fix_of_memory_fits_also_with_the_accumulation_that_it_causes(model, gib):
    depth = {"depth": 12, "aspect_ratio": 64, "head_dim": 64} if model == "depth" else {}
    train = replace(TRAIN, model=model, batch_size=240, global_batch=240, gradient_accumulation=1, **depth)
    device = GpuModel(name="a GPU", memory=(gib + 1) * 2**30, watts=None)
    (risk,) = of(train, device=device)
    words = dict(word.split("=") for word in risk.fix.split())
    batch = int(words["BATCH_SIZE"])
    shape = replace(SHAPE, block_size=int(words.get("BLOCK_SIZE", SHAPE.block_size)))
    if "MODEL" in words:
        layers, heads, width = NAMED[words["MODEL"]]
        shape = replace(shape, n_layer=layers, n_head=heads, n_embd=width)
    elif layers := words.get("DEPTH", words.get("N_LAYER")):
        shape = deeper(shape, train)(int(layers))
        heads = int(words.get("N_HEAD", shape.n_head))
        shape = replace(shape, n_head=heads, n_embd=int(words.get("N_EMBD", shape.n_embd)))
    fixed = replace(train, batch_size=batch, gradient_accumulation=240 // batch, recompute="RECOMPUTE" in words)
    assert fit(memory(shape, fixed), device) is not Fit.NOT
    assert of(fixed, shape=shape, device=device) == ()


def test_a_budget_in_dollars_is_one_of_time():
    train = replace(TRAIN, max_cost=2.0, gpu_hour_price=4.0, num_gpus=2)
    assert budget_s(train) == 900
    assert budget_s(replace(train, max_time=60.0)) == 60
    assert budget_s(TRAIN) is None


def test_an_unknown_peak_is_not_refused():
    device = GpuModel(name="a GPU", memory=A10G.memory, watts=None)
    assert of(replace(TRAIN, max_time=1.0), device=device) == ()


IMPOSSIBLE = {
    "micro-batch": ("MODEL=124m", "BLOCK_SIZE=1024", "BATCH_SIZE=512", "DEVICE=cuda", "NUM_GPUS=1"),
    "model": ("MODEL=1558m", "DEVICE=cuda", "NUM_GPUS=1", "BATCH_SIZE=64"),
    "layers": ("MODEL=custom", "N_LAYER=256", "N_EMBD=1600", "N_HEAD=25", "DEVICE=cuda", "NUM_GPUS=1"),
    "depth": ("MODEL=depth", "DEPTH=40", "HEAD_DIM=64", "DEVICE=cuda", "NUM_GPUS=1"),
    "budget": ("MODEL=124m", "TIME=10s", "DEVICE=cuda", "NUM_GPUS=1", "BATCH_SIZE=4", "GLOBAL_BATCH=400"),
    "cost": ("MODEL=124m", "COST=0.01", "GPU_HOUR_PRICE=4", "DEVICE=cuda", "NUM_GPUS=2", "GLOBAL_BATCH=240"),
    "both budgets": (
        *("MODEL=124m", "TIME=10s", "COST=0.01", "GPU_HOUR_PRICE=4", "DEVICE=cuda", "NUM_GPUS=2", "GLOBAL_BATCH=240"),
    ),
    "stated peak": (
        *("MODEL=124m", "TIME=5m", "DEVICE=cuda", "NUM_GPUS=1", "BATCH_SIZE=4", "EVAL_INTERVAL=500"),
        "PEAK_TFLOPS=2",
    ),
    "ranks": ("MODEL=350m", "BLOCK_SIZE=1024", "DEVICE=cpu", "NUM_GPUS=64", "BATCH_SIZE=1"),
    "processor": ("MODEL=124m", "TIME=5m", "DEVICE=cpu", "NUM_GPUS=1"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_plan_and_runs_refuse_an_impossible_run_alike_and_create_nothing(program, name):
    messages = {program.refused(command, *IMPOSSIBLE[name]) for command in (PLAN, RUN, TRAIN_ONE)}
    assert len(messages) == 1
    assert next(iter(messages)).startswith("error: impossible: gpt2_adamw_")
    assert not (program.folder / "results").exists()


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_the_dry_run_marks_an_estimate_and_warns_with_the_same_fix(program, name):
    """It may be made on another machine than the run."""
    message = program.refused(PLAN, *IMPOSSIBLE[name])
    result = program(DRY, *IMPOSSIBLE[name])
    assert result.runs[0].endswith("[impossible here]")
    fix = message.partition("hint: pass ")[2].partition(";")[0].strip()
    if "this is an estimate" in message:
        assert result.status == 0
        assert f": pass {fix}" in result.out
    else:
        assert result.status == 2
        assert result.err == message


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_the_fix_in_the_message_makes_the_run_possible(program, name):
    for words in fixes(program.refused(PLAN, *IMPOSSIBLE[name]).partition("hint: ")[2]):
        replaced = {word.partition("=")[0] for word in words}
        aliases = {"MAX_TIME": "TIME", "MAX_COST": "COST", "PARALLEL_BATCH_SIZE": "GLOBAL_BATCH"}
        gone = replaced | {aliases[each] for each in replaced & aliases.keys()}
        kept = [word for word in IMPOSSIBLE[name] if word.partition("=")[0] not in gone]
        program.check(PLAN, *kept, *words)


def test_an_estimate_is_overridden_and_recorded_and_a_certainty_is_not(program):
    result = program.check(PLAN, *IMPOSSIBLE["micro-batch"], "ALLOW_RISK=y")
    assert "warning: ALLOW_RISK=y: gpt2_adamw_1gpu: needs" in result.out
    (planned,) = program.plan(*IMPOSSIBLE["micro-batch"], "ALLOW_RISK=y").runs
    assert planned.values.typed["ALLOW_RISK"] is True
    assert planned.run.run_id == program.plan(*IMPOSSIBLE["micro-batch"]).runs[0].run.run_id
    huge = ("MODEL=depth", "DEPTH=64", "HEAD_DIM=128", "DEVICE=cuda", "NUM_GPUS=1", "BATCH_SIZE=1")
    assert "impossible" in program.refused(DRY, *huge, "ALLOW_RISK=y")


def test_the_possible_runs_of_a_matrix_are_not_named(program):
    message = program.refused(RUN, "MODEL=tiny,1558m", "DEVICE=cuda", "NUM_GPUS=1", "BATCH_SIZE=64")
    assert "model1558m" in message
    assert "modeltiny" not in message


def test_a_speed_above_the_peak_is_refused_by_the_plan(program):
    arguments = ("GPU=A100", "NUM_GPUS=8", "MODEL=1558m", "TOKENIZER=gpt2", "DTYPE=bf16", "BATCH_SIZE=4")
    message = program.refused(PLAN, *arguments, "TOKENS_PER_SECOND=400000")
    assert "400,000 tok/s is above the peak of 8 x A100" in message
    (fix,) = fixes(message.partition("hint: ")[2])
    program.check(PLAN, *arguments, *fix)


@pytest.mark.parametrize("target", ["SECONDS_PER_STEP=0.01", "HOURS=0.001", "TOKENS_PER_SECOND=9e9"])
def test_the_fix_of_an_impossible_target_is_the_same_argument(program, target):
    arguments = ("GPU=A100", "NUM_GPUS=8", "MODEL=1558m", "DTYPE=bf16", "BATCH_SIZE=4", "BLOCK_SIZE=1024")
    (fix,) = fixes(program.refused(PLAN, *arguments, target).partition("hint: ")[2])
    assert fix[0].partition("=")[0] == target.partition("=")[0]
    program.check(PLAN, *arguments, *fix)


def test_a_target_above_a_stated_peak_is_an_estimate(program):
    arguments = ("GPU=A100", "NUM_GPUS=1", "MODEL=124m", "DTYPE=bf16", "PEAK_TFLOPS=1", "TOKENS_PER_SECOND=9999")
    assert "this is an estimate: ALLOW_RISK=y" in program.refused(PLAN, *arguments)
    program.check(PLAN, *arguments, "ALLOW_RISK=y")


def test_all_usable_gpus_are_named_only_if_the_global_batch_allows_it(program, monkeypatch):
    give_gpus(monkeypatch, 3)
    message = program.refused(RUN, "NUM_GPUS=4", "DEVICE=cuda", "GLOBAL_BATCH=48")
    assert message.rstrip().endswith("pass NUM_GPUS=2")
    program.check(PLAN, "NUM_GPUS=2", "DEVICE=cuda", "GLOBAL_BATCH=48", "MODEL=tiny")


def test_runs_that_need_more_gpus_are_marked_by_the_dry_run_and_refused_by_a_run(program):
    mixed = program.check(DRY, "NUM_GPUS=1,4", "DEVICE=cuda", "GLOBAL_BATCH=48")
    one, four = (line for line in mixed.out.splitlines() if line.startswith("run "))
    assert "skipped" not in one
    assert four.endswith("[skipped here: needs 4 GPUs, found 2]")
    assert "warning: 1 of 2 runs cannot run on this machine" in mixed.out
    assert "pass NUM_GPUS=2, or NUM_GPUS=0" in mixed.out


@pytest.mark.parametrize("command", [RUN, TRAIN_ONE])
def test_the_defconfig_for_four_a10g_names_the_numbers_of_gpus_that_work_here(program, command):
    program.check("defconfig-gpt2-finewebedu-a10gx4", "OPTIMIZER=adamw", f"RESULTS_DIR={program.folder}/results")
    assert "pass NUM_GPUS=2, or NUM_GPUS=0 for all usable GPUs" in program.refused(command)
    assert "[skipped here: needs 4 GPUs, found 2]" in program.check(DRY).out
    for count in (2, 0):
        assert "skipped" not in program.check(DRY, f"NUM_GPUS={count}").out
    assert not (program.folder / "results").exists()


MIX = ("DATASET=mix", "DATA_MIX=finewebedu:65 tinystoris:34")


@pytest.mark.parametrize("command", ["defconfig-gpt2-cpu-quick", "olddefconfig", DRY, PLAN, RUN, TRAIN_ONE])
def test_an_unknown_name_in_a_mix_is_refused_by_every_command_with_a_suggestion(program, command):
    message = program.refused(command, *MIX)
    assert "unknown dataset 'tinystoris': did you mean tinystories?" in message
    assert not (program.folder / "results").exists()


def test_a_mix_of_own_data_needs_its_path(program):
    assert "shards needs a path: shards=<folder>:<weight>" in program.refused(
        DRY, "DATASET=mix", "DATA_MIX=shards:1 stdlib:1"
    )
    program.check(DRY, "DATASET=mix", "DATA_MIX=shards=/data/x:1 stdlib:1", "NUM_GPUS=1")


def test_the_nearest_names_of_an_unknown_dataset_in_a_mix_are_listed(program):
    message = program.refused(DRY, "DATASET=mix", "DATA_MIX=fineweb3:1 stdlib:1")
    assert "unknown dataset 'fineweb3': did you mean fineweb or fineweb2 or finewebedu?" in message
    assert "known are stdlib, finewebedu" in program.refused(DRY, "DATASET=mix", "DATA_MIX=qqqq:1 stdlib:1")


def test_a_language_is_part_of_a_mix(program):
    program.check(DRY, "DATASET=mix", "DATA_MIX=fineweb2=deu_Latn:1 finepdfs:1 stdlib:1", "NUM_GPUS=1")
    assert "is not a language" in program.refused(DRY, "DATASET=mix", "DATA_MIX=fineweb2=german:1 stdlib:1")
    assert "is not a language of fineweb2" in program.refused(DRY, "DATASET=fineweb2", "DATA_PATH=german")
    assert "stdlib has no path" in program.refused(DRY, "DATASET=mix", "DATA_MIX=stdlib=x:1 medqa:1")


def test_a_run_longer_than_ten_billion_tokens_of_finewebedu_is_planned_with_the_larger_repository(program):
    arguments = ("DATASET=finewebedu", "TOKENIZER=gpt2", "NUM_GPUS=1")
    assert "of 99 training shards" in program.check(PLAN, *arguments, "MAX_TOKENS=9e9", "MAX_ITERS=0").out
    assert "of 1000 training shards" in program.check(PLAN, *arguments, "MAX_TOKENS=3e10", "MAX_ITERS=0").out


CPU_TRAIN = replace(TRAIN, device="cpu", dtype="fp32", max_time=100.0, schedule="cosine", max_iters=1000)


def warning(train, measured_s=None, devices=(A10G,)):
    return budget_warning(SHAPE, train, devices, CPU, measured_s)


def test_a_budget_that_ends_before_the_schedule_is_a_warning_with_the_measured_share():
    assert warning(CPU_TRAIN, 100 / 0.14).startswith("the budget ends at 14 % of the schedule (MAX_TIME): ")
    assert warning(CPU_TRAIN, 99.0) == ""


def test_without_a_measurement_the_warning_gives_the_range_of_the_expected_speeds():
    per_step = CPU_TRAIN.tokens_per_step * SHAPE.flops_per_token / 2
    budget = 3 + 140 * per_step / 100e9  # 140 steps at the fastest speed, after the fastest start
    text = warning(replace(CPU_TRAIN, max_time=budget))
    assert text.startswith("the budget ends at 7 % to 14 % of the schedule (MAX_TIME): ")
    assert warning(replace(CPU_TRAIN, max_time=10 * budget)) == ""  # the fastest one is fast enough


def test_a_cost_budget_is_named_and_a_constant_rate_misses_no_minimum():
    train = replace(CPU_TRAIN, max_time=None, max_cost=0.1, machine_hour_price=3.6, schedule="constant")
    assert warning(train, 1000.0).startswith("the budget ends at 10 % of the schedule (MAX_COST): its last steps")


def test_a_run_without_a_budget_gives_no_warning():
    assert warning(replace(CPU_TRAIN, max_time=None), 1000.0) == ""


def test_the_steps_that_fit_depend_on_the_slowest_and_the_fastest_speed():
    per_step = CPU_TRAIN.tokens_per_step * SHAPE.flops_per_token / 2
    least, most = steps_in(15 + 100 * per_step / 50e9, SHAPE, CPU_TRAIN, A10G, CPU)
    assert least == 100
    assert most >= 200
    assert steps_in(1.0, SHAPE, CPU_TRAIN, A10G, CPU) == (0, 0)


# -- FP8


@pytest.mark.parametrize(
    "name", ["A100", "A10G", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090", "Tesla V100-PCIE"]
)
def test_fp8_on_a_gpu_without_it_is_impossible(name):
    (risk,) = of(replace(TRAIN, fp8=True), device=GpuModel(name=name, memory=80 * 2**30, watts=None))
    assert (risk.fix, risk.certain) == ("FP8=n", True)
    assert name in risk.what


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA L4", "NVIDIA GeForce RTX 4090", "unheard of"])
def test_fp8_on_other_gpus_is_left_to_the_trainer(name):
    assert of(replace(TRAIN, fp8=True), device=GpuModel(name=name, memory=80 * 2**30, watts=None)) == ()


@pytest.mark.parametrize("command", [PLAN, DRY, RUN])
def test_fp8_on_a_gpu_without_it_is_refused_before_anything_is_created(program, command):
    refused = program(command, "DTYPE=bf16", "FP8=y", *(["GPU=A100"] if command == PLAN else []))
    assert refused.status == 2
    name = "A100" if command == PLAN else "NVIDIA A10G"
    assert f"needs products in FP8, {name} has none\n  hint: pass FP8=n" in refused.err
    assert not (program.folder / "results").exists()


def test_fp8_is_not_forecast_for_a_gpu_without_it(tmp_path, monkeypatch):
    give_gpus(monkeypatch, 0)
    program = Program(tmp_path)
    program.check("defconfig-gpt2-finewebedu-a10gx4", f"RESULTS_DIR={tmp_path}/results")
    printed = program.check(PLAN, "FP8=y").out
    assert re.search(r"^ +A10G +has no products in FP8$", printed, re.M)
    assert re.search(r"^ +L4 +fits, ", printed, re.M)
