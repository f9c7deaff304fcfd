"""Impossible runs are refused before anything is created, with a hint."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from factories import train_config, with_shape
from kmatrix.plan.cpu import CpuSpeed
from kmatrix.plan.feasibility import GpuModel, by_name
from kmatrix.plan.memory import memory
from kmatrix.plan.risk import budget_warning, risks
from kmatrix.shapes import NAMED, ModelShape
from programs import Program, give_gpus

layers, heads, width = NAMED["124m"]
SHAPE = ModelShape(n_layer=layers, n_head=heads, n_embd=width, block_size=1024, vocab_size=50257)
TRAIN = with_shape(
    train_config(
        **{"vocab_multiple": 64, "device": "cuda", "dtype": "bf16", "batch_size": 8, "global_batch": 480},
        **{"num_gpus": 1, "max_iters": 4000},
    ),
    SHAPE,
)
A10G = by_name("A10G")
UNKNOWN_GPU = GpuModel(name="a GPU", memory=A10G.memory, watts=None)
DRY, PLAN, RUN, TRAIN_ONE = "test-matrix-dry-run", "plan", "test-matrix", "train"
CPU = CpuSpeed(cores=2, slow=50e9, fast=100e9, source="from 1 earlier run on this machine")


@pytest.fixture
def program(tmp_path, monkeypatch):
    give_gpus(monkeypatch, 2)
    made = Program(tmp_path)
    made.check("olddefconfig", f"RESULTS_DIR={tmp_path}/results")
    return made


def of(train, *, device=A10G, cpu=CPU):
    return risks(train, device, cpu if train.device == "cpu" else None)


BIG = replace(TRAIN, n_layer=48, n_embd=8000, n_head=50)
TIMED = replace(TRAIN, gradient_accumulation=2, global_batch=16, eval_interval=1000)
ON_CPU = replace(TRAIN, device="cpu", dtype="fp32", max_time=1000.0, eval_interval=100, global_batch=8)
RISKS = {  # -> whether it is certain, and words of the message and of the hint
    "micro-batch": (replace(TRAIN, batch_size=240), {}, False, "A10G has 22.4 GiB", "pass BATCH_SIZE=40 PARALLEL"),
    "no batch fits": (replace(BIG, n_layer=24, n_embd=2150), {}, False, "A10G has", "or pass RECOMPUTE=y"),
    "states alone": (BIG, {}, True, "A10G has 22.4 GiB", "choose a smaller model"),
    "states on the CPU": (replace(BIG, device="cpu"), {}, True, "A10G has", "choose a smaller model"),
    "expected time": (replace(TIMED, max_time=300.0), {}, False, "ends before the first", "a smaller EVAL_INTERVAL"),
    "cost": (replace(TIMED, max_cost=0.1, gpu_hour_price=1.2), {}, False, "the budget of 5m00s", "a larger MAX_COST"),
    "stated peak": (replace(TIMED, max_time=300.0, peak_tflops=7.0), {}, False, "ends before the first", "MAX_TIME"),
    "stated peak of an unknown GPU": (
        *(replace(TIMED, max_time=300.0, peak_tflops=7.0), {"device": UNKNOWN_GPU}, False, "ends before", "MAX_TIME"),
    ),
    "time on the CPU": (
        *(ON_CPU, {}, False, "and 100 steps in at least 58m26s (2 cores at 50 to 100 GFLOP/s per core, from 1 earlier"),
        "MAX_TIME",
    ),
}


@pytest.mark.parametrize("name", RISKS)
def test_an_impossible_run_has_a_reason_and_a_hint(name):
    train, changes, certain, what, fix = RISKS[name]
    (risk,) = of(train, **changes)
    assert (risk.certain, what in risk.what, fix in risk.fix) == (certain, True, True), risk


@pytest.mark.parametrize(
    ("train", "changes"),
    [
        (replace(TRAIN, max_time=36000.0), {}),
        (replace(TRAIN, batch_size=240), {"device": replace(A10G, memory=None)}),
        (replace(TRAIN, max_time=1.0), {"device": UNKNOWN_GPU}),  # its peak is unknown
        (replace(ON_CPU, batch_size=240), {"cpu": replace(CPU, fast=400e9)}),  # only states are planned on the CPU
    ],
)
def test_a_possible_or_unknown_run_has_no_risk(train, changes):
    assert of(train, **changes) == ()


def test_the_largest_micro_batch_of_the_hint_fits_and_keeps_the_global_batch():
    (risk,) = of(replace(TRAIN, batch_size=240))
    batch = int(re.search(r"BATCH_SIZE=(\d+) PARALLEL_BATCH_SIZE=480", risk.fix)[1])
    assert 480 % batch == 0
    assert of(replace(TRAIN, batch_size=batch, gradient_accumulation=480 // batch)) == ()


def test_memory_is_refused_only_beyond_the_error_of_the_plan():
    need = memory(TRAIN).total
    device = GpuModel(name="a GPU", memory=need / 1.14, watts=None)
    assert of(TRAIN, device=device) == ()
    (risk,) = of(TRAIN, device=replace(device, memory=need / 1.16))
    assert not risk.certain


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_budget_that_is_shorter_than_the_start_of_a_run_is_an_estimate(device):
    small = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 64, "block_size": 8}
    (risk,) = of(replace(TRAIN, device=device, max_time=1.0, eval_interval=1, **small))
    assert not risk.certain
    assert "after start-up and 1 step in at least" in risk.what


MICRO_BATCH = ("MODEL=124m", "BLOCK_SIZE=1024", "BATCH_SIZE=512", "DEVICE=cuda", "NUM_GPUS=1")
CERTAIN = ("MODEL=depth", "DEPTH=64", "HEAD_DIM=128", "DEVICE=cuda", "NUM_GPUS=1", "BATCH_SIZE=1")


@pytest.mark.parametrize("arguments", [MICRO_BATCH, CERTAIN], ids=["estimate", "certain"])
def test_plan_and_runs_refuse_an_impossible_run_alike_and_create_nothing(program, arguments):
    (message,) = {program.refused(command, *arguments) for command in (PLAN, RUN, TRAIN_ONE)}
    assert message.startswith("error: impossible: gpt2_adamw_1gpu: needs ")
    assert not (program.folder / "results").exists()


def test_an_estimate_is_overridden_and_recorded_and_a_certainty_is_not(program):
    result = program.check(PLAN, *MICRO_BATCH, "ALLOW_RISK=y")
    assert "warning: ALLOW_RISK=y: gpt2_adamw_1gpu: needs" in result.out
    (planned,) = program.plan(*MICRO_BATCH, "ALLOW_RISK=y").runs
    assert planned.values["ALLOW_RISK"] == "y"
    assert planned.run_id == program.plan(*MICRO_BATCH).runs[0].run_id
    assert "impossible" in program.refused(PLAN, *CERTAIN, "ALLOW_RISK=y")


def test_the_possible_runs_of_a_matrix_are_not_named(program):
    message = program.refused(RUN, "MODEL=tiny,1558m", "DEVICE=cuda", "NUM_GPUS=1", "BATCH_SIZE=64")
    assert "model1558m" in message
    assert "modeltiny" not in message


def test_all_usable_gpus_are_named_only_if_the_global_batch_allows_it(program, monkeypatch):
    give_gpus(monkeypatch, 3)
    message = program.refused(RUN, "NUM_GPUS=4", "DEVICE=cuda", "GLOBAL_BATCH=48")
    assert message.rstrip().endswith("pass NUM_GPUS=2")
    program.check(PLAN, "NUM_GPUS=2", "DEVICE=cuda", "GLOBAL_BATCH=48", "MODEL=tiny")


MIX = ("DATASET=mix", "DATA_MIX=finewebedu:65 tinystoris:34")


@pytest.mark.parametrize("command", ["olddefconfig", DRY, RUN])
def test_an_unknown_name_in_a_mix_is_refused_by_every_command_with_a_suggestion(program, command):
    message = program.refused(command, *MIX)
    assert "unknown dataset 'tinystoris': did you mean tinystories?" in message
    assert not (program.folder / "results").exists()


def test_a_mix_of_own_data_needs_its_path(program):
    assert "shards needs a path: <folder>" in program.refused(DRY, "DATASET=mix", "DATA_MIX=shards:1 stdlib:1")
    program.check(DRY, "DATASET=mix", "DATA_MIX=shards=/data/x:1 stdlib:1", "NUM_GPUS=1")


def test_a_language_is_part_of_a_mix(program):
    program.check(DRY, "DATASET=mix", "DATA_MIX=fineweb2=deu_Latn:1 finepdfs:1 stdlib:1", "NUM_GPUS=1")
    assert "fineweb2 needs a language" in program.refused(DRY, "DATASET=mix", "DATA_MIX=fineweb2=german:1 stdlib:1")
    assert "DATASET=fineweb2 needs a language" in program.refused(DRY, "DATASET=fineweb2", "DATA_PATH=german")
    assert "stdlib has no path" in program.refused(DRY, "DATASET=mix", "DATA_MIX=stdlib=x:1 medqa:1")


def test_a_run_longer_than_ten_billion_tokens_of_finewebedu_is_planned_with_the_larger_repository(program):
    arguments = ("DATASET=finewebedu", "TOKENIZER=gpt2", "NUM_GPUS=1")
    assert "of 99 training shards" in program.check(PLAN, *arguments, "MAX_TOKENS=9e9", "MAX_ITERS=0").out
    assert "of 1000 training shards" in program.check(PLAN, *arguments, "MAX_TOKENS=3e10", "MAX_ITERS=0").out


CPU_TRAIN = replace(TRAIN, device="cpu", dtype="fp32", max_time=100.0, schedule="cosine", max_iters=1000)


def warning(train, measured_s=None, devices=(A10G,)):
    return budget_warning(train, devices, CPU, measured_s)


def test_a_budget_that_ends_before_the_schedule_is_a_warning_with_the_measured_share():
    assert warning(CPU_TRAIN, 100 / 0.14).startswith("the budget ends at 14 % of the schedule (MAX_TIME): ")
    assert warning(CPU_TRAIN, 99.0) == ""


def test_without_a_measurement_the_warning_is_by_the_highest_expected_speed():
    whole = 3 + CPU_TRAIN.max_iters * CPU_TRAIN.tokens_per_step * SHAPE.flops_per_token / (2 * 100e9)
    text = warning(replace(CPU_TRAIN, max_time=0.14 * whole))
    assert text.startswith("the budget ends at the latest at 14 % of the schedule (MAX_TIME): ")
    assert warning(replace(CPU_TRAIN, max_time=whole)) == ""


def test_a_cost_budget_is_named_and_a_constant_rate_misses_no_minimum():
    train = replace(CPU_TRAIN, max_time=None, max_cost=0.1, machine_hour_price=3.6, schedule="constant")
    assert warning(train, 1000.0).startswith("the budget ends at 10 % of the schedule (MAX_COST): its last steps")


def test_a_run_without_a_budget_gives_no_warning():
    assert warning(replace(CPU_TRAIN, max_time=None), 1000.0) == ""
