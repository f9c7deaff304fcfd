"""The length of a run: steps from tokens and parameters, time notations, and equal runs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from factories import list_runs, make_run, note_end, train_config
from kmatrix.config import length, with_vocabulary
from kmatrix.experiment.plan import equal_budget
from kmatrix.forms import seconds
from kmatrix.packing import usable_cores
from kmatrix.plan.cpu import cpu_speed
from kmatrix.plan.risk import START_S
from kmatrix.records.files import read_json, write_json
from kmatrix.shapes import cpu_name
from programs import Program

DRY = "test-matrix-dry-run"
QUICK = "CONFIG_GPT2_DEVICE_CPU=y\nCONFIG_GPT2_MODEL_TINY=y\nCONFIG_GPT2_BLOCK_SIZE=256\n"
STEP = 12 * 256  # tokens: 12 sequences is the default


@pytest.fixture
def program(tmp_path):
    program = Program(tmp_path)
    program.write(QUICK)
    return program


def configs(program, *arguments):
    return program.plan(*arguments).configs


def config(program, *arguments):
    (only,) = configs(program, *arguments).values()
    return only


def bounds(**fields):
    return train_config(**{"max_iters": 0} | fields).to_json()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        ("90s", 90),
        ("15m", 900),
        ("1h30m", 5400),
        ("2.5h", 9000),
        ("1d12h", 129600),
        ("0.5", 0.5),
        *((invalid, None) for invalid in ("", "0", "0h", "1h30", "30m1h", "1h1h", "-5", "5x", "1 h", "1e3", "h")),
    ],
)
def test_a_time_is_a_number_of_seconds_or_a_sum_of_parts_with_units(text, expected):
    assert seconds(text) == expected


@given(st.integers(0, 9), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_a_time_equals_the_sum_of_its_parts(days, hours, minutes, rest):
    text = f"{days}d{hours}h{minutes}m{rest}s"
    assert seconds(text) == ((days * 24 + hours) * 60 + minutes) * 60 + rest


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (bounds(max_iters=500), (500, "max_iters")),
        (bounds(max_tokens=1000.0), (10, "max_tokens")),
        (bounds(max_tokens=1099.0), (10, "max_tokens")),
        (bounds(max_tokens=1.0), (1, "max_tokens")),
        (bounds(max_iters=9, max_tokens=1000.0), (9, "max_iters")),
        (bounds(tokens_per_param=20.0, max_iters=9999), (60, "tokens_per_param")),
        (bounds(max_time=60.0), (0, "")),
    ],
)
def test_the_first_limit_decides_and_is_never_exceeded(fields, expected):
    assert length(fields, params=300, tokens_per_step=100) == expected


@given(st.floats(1, 1e12), st.integers(1, 10**7))
def test_a_token_budget_is_rounded_down_to_a_step(tokens, tokens_per_step):
    steps = length(bounds(max_tokens=tokens), params=1, tokens_per_step=tokens_per_step)[0]
    assert steps
    assert steps == 1 or steps * tokens_per_step <= tokens * (1 + 1e-8)
    assert (steps + 1) * tokens_per_step > tokens


def test_steps_follow_from_tokens_unless_both_are_given(program):
    assert config(program).train.max_iters == 10000
    assert config(program, "MAX_TOKENS=3.1e6").train.max_iters == int(3.1e6 / STEP)
    assert config(program, "MAX_TOKENS=3.1e6", "MAX_ITERS=5").bound == "max_iters"
    assert config(program, "TOKENS_PER_PARAM=20").tokens == pytest.approx(
        20 * config(program).train.shape.params, abs=STEP
    )


def test_the_length_and_the_warm_up_of_a_token_budget_follow_the_vocabulary_of_the_data(program):
    before = config(program, "TOKENS_PER_PARAM=20", "WARMUP_FRACTION=0.1")
    after = with_vocabulary(before, 50_000)
    assert after.tokens == pytest.approx(20 * after.train.shape.params, abs=STEP)
    assert after.train.max_iters > before.train.max_iters
    assert after.train.warmup_steps == round(0.1 * after.train.max_iters)
    assert with_vocabulary(config(program, "MAX_ITERS=50"), 50_000).train.max_iters == 50


@pytest.mark.parametrize("arguments", [("MAX_TIME=1h30m",), ("MAX_TIME=5400",)])
def test_a_time_limit_is_seconds_or_parts_with_units(program, arguments):
    assert config(program, *arguments).train.max_time == 5400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MAX_TIME=soon"], "expected a duration above zero: 90, 90s, 15m, 1h30m, 2.5h, 2d"),
        ([f"MAX_TIME={'9' * 400}h"], "at most 10000d"),
        (["BUDGET_DOLLARS=5", "GPU_HOUR_PRICE=1", "DEVICE=cpu"], "BUDGET_DOLLARS needs a MACHINE_HOUR_PRICE above 0"),
        (["MAX_ITERS=0"], "MAX_ITERS=0 needs MAX_TOKENS, TOKENS_PER_PARAM, MAX_TIME or MAX_COST"),
        (["MAX_COST=5", "GPU_HOUR_PRICE=1", "DEVICE=cpu"], "MAX_COST needs a MACHINE_HOUR_PRICE above 0 on the CPU"),
        (["PROFILE=5:5"], "PROFILE=5:5 is not a range of steps"),
        (["PROFILE=x"], "PROFILE=x is not a range of steps"),
        (["EARLY_STOPPING_MIN_DELTA=0.1"], "depends on GPT2_EARLY_STOPPING_PATIENCE != 0"),
    ],
)
def test_an_invalid_budget_is_refused(program, arguments, message):
    assert message in program.refused(DRY, *arguments)


BUDGET_ALONE = ("MAX_ITERS=0", "MAX_TIME=1h", "CPU_THREADS=1")


def test_a_budget_without_steps_is_refused_with_the_steps_of_the_plan(program, tmp_path):
    message = program.refused(DRY, *BUDGET_ALONE, f"RESULTS_DIR={tmp_path}/results")
    assert "gpt2_adamw_1cpu has a budget of 1h00m and no number of steps" in message
    shape = config(program, "CPU_THREADS=1").train.shape
    lowest = cpu_speed(config(program, "CPU_THREADS=1").train).slow / shape.flops_per_token
    steps = math.floor((3600 - START_S["cpu"]) * lowest / STEP)
    assert f"hint: pass MAX_ITERS={steps}, which fits at {lowest:,.0f} tokens/s, the lowest that is expected" in message
    assert program.refused("plan", "MAX_ITERS=0", "MAX_COST=1", "MACHINE_HOUR_PRICE=2").count("no number of steps") == 1


def test_a_budget_without_steps_is_refused_with_the_steps_of_the_newest_run_like_it(program, tmp_path):
    folder = tmp_path / "results" / "test_matrix_results_20260101_000000"
    for name, rate in (("old", 10.0), ("other", 99.0), ("unfinished", 77.0)):
        run = make_run(
            folder if name == "old" else folder.with_name(f"test_matrix_results_2027_{name}"), data_path=tmp_path
        )
        about = read_json(run.run_json)
        about["train"] = config(program, "CPU_THREADS=1").train.to_json() | ({"n_layer": 1} if name == "other" else {})
        about["provenance"] |= {"cpu": cpu_name(), "cores": usable_cores(), "gpus": []}
        write_json(run.run_json, about)
        status = "failed" if name == "unfinished" else "finished"
        list_runs(run.path.parent)
        note_end(run, status)
        write_json(
            run.result,
            {"run_id": about["run_id"], "attempt": 1, "status": status, "step": 12, "tokens_per_second": rate * STEP},
        )
    message = program.refused(DRY, *BUDGET_ALONE, f"RESULTS_DIR={tmp_path}/results")
    assert f"hint: pass MAX_ITERS=35850, which fits at 30,720 tokens/s, measured in {folder.name}/" in message


def test_the_dry_run_prints_what_limits_a_run(program):
    output = program.check(DRY, "MAX_TOKENS=3.1e6", "MAX_TIME=2m", "MAX_COST=1.5", "MACHINE_HOUR_PRICE=2").out
    assert "1,009 steps (MAX_TOKENS), 3.10M tokens, at most 2m00s, at most $1.5" in output


@pytest.mark.parametrize(
    ("shared", "arguments", "expected"),
    [
        ("any", ["NUM_GPUS=1,2"], ""),
        ("steps", ["NUM_GPUS=1,2"], "steps: 10,000 steps"),
        ("tokens", ["NUM_GPUS=1,2", "GLOBAL_BATCH=24"], "tokens: 61,440,000 tokens, up to one step"),
        ("tokens", ["NUM_GPUS=1,2,4", "MAX_TOKENS=1e6"], "tokens: 998,400 tokens, up to one step"),
        ("time", ["NUM_GPUS=1,2", "MAX_TIME=60"], "time: 60 s at most"),
    ],
)
def test_settings_that_all_runs_share_are_printed(program, shared, arguments, expected):
    assert equal_budget(shared, configs(program, "DEVICE=cpu", *arguments)) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["MATRIX_EQUAL=tokens", "NUM_GPUS=1,2"], "MATRIX_EQUAL=tokens does not hold"),
        (["MATRIX_EQUAL=steps", "MAX_ITERS=10,20"], "has 20"),
        (["MATRIX_EQUAL=time", "NUM_GPUS=1,2"], "pass MAX_TIME=<time>"),
        (["MATRIX_EQUAL=steps", "NUM_GPUS=1,2", "MAX_TIME=60"], "MATRIX_EQUAL=steps conflicts with MAX_TIME"),
        (["MATRIX_EQUAL=energy", "NUM_GPUS=1,2"], "expected one of any, steps, tokens, time"),
    ],
)
def test_a_promise_that_does_not_hold_is_refused(program, arguments, message):
    assert message in program.refused(DRY, "DEVICE=cpu", *arguments)


def test_the_same_time_in_another_notation_gives_the_same_run(program):
    def run_id(*arguments):
        return program.plan(*arguments).runs[0].run_id

    assert run_id("MAX_TIME=90") == run_id("MAX_TIME=1m30s") != run_id("MAX_TIME=91")
    assert run_id("MAX_COST=5", "MACHINE_HOUR_PRICE=1") != run_id("MAX_COST=5", "MACHINE_HOUR_PRICE=2")
