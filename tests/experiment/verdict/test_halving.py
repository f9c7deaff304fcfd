"""MATRIX_HALVING before the first run: the rungs of the plan, warnings, and what it cannot be combined with."""

from __future__ import annotations

import pytest

from kmatrix.experiment.verdict.halving import PlannedRungs
from kmatrix.verdict.halving import rungs
from programs import Program, give_gpus

RATES = "LEARNING_RATE=1e-3,2e-3,3e-3,4e-3,5e-3,6e-3,7e-3,8e-3,9e-3"
NINE = ("OPTIMIZER=adamw", "NUM_GPUS=1", RATES, "MAX_ITERS=900", "EVAL_INTERVAL=50")
KUBERNETES = ("K8S_IMAGE=kmatrix:1", "K8S_CLAIM=data", "K8S_MOUNT=/data", "K8S_NAMESPACE=lab")
LINE = (
    "9 configurations to step 100, 3 to step 300, 2 to the end: at most 33 % of all steps, "
    "as many as 3 complete runs per seed have"
)


@pytest.fixture
def kmatrix(tmp_path, monkeypatch):
    give_gpus(monkeypatch, 0)
    program = Program(tmp_path)
    program.check("defconfig-gpt2-cpu-quick")
    return program


def test_the_plan_says_where_configurations_are_compared(kmatrix):
    result = kmatrix("test-matrix-dry-run", *NINE, "MATRIX_HALVING=3")
    assert LINE in result.out
    assert "MATRIX_HALVING" not in result.out  # they differ only in the rate: no warning
    plain = kmatrix("test-matrix-dry-run", *NINE)
    assert "to the end" not in plain.out
    assert (plain.names, plain.ids) == (result.names, result.ids)  # so that runs are reused in both directions
    assert LINE in kmatrix("plan", *NINE, "MATRIX_HALVING=3").out


def test_seeds_share_their_configuration(kmatrix):
    assert LINE in kmatrix("test-matrix-dry-run", *NINE, "SEED=1,2", "MATRIX_HALVING=3").out


def test_other_data_have_rungs_of_their_own(kmatrix):
    result = kmatrix("test-matrix-dry-run", *NINE, "BLOCK_SIZE=32,64", "MATRIX_HALVING=3")
    assert result.out.count(LINE) == 2


def test_configurations_whose_early_losses_mislead_are_a_warning(kmatrix):
    words = [word for word in NINE if not word.startswith("OPTIMIZER")]
    result = kmatrix(
        "test-matrix-dry-run", *words, "OPTIMIZER=adamw,sgd", "WARMUP_FRACTION=0.01,0.02", "MATRIX_HALVING=3"
    )
    warning = "MATRIX_HALVING=3 compares early losses, which mislead if configurations differ in optimizer, warm-up"
    assert result.out.count(warning) == 1


@pytest.mark.parametrize(
    "words",
    [("SCHEDULE=wsd", "WSD_DECAY_FRACTION=0.1,0.2,0.4"), ("MIN_LR=0,1e-5,1e-4",), ("SCHEDULE=cosine,linear,wsd",)],
)
def test_schedules_that_differ_in_one_number_are_a_warning(kmatrix, words):
    result = kmatrix("test-matrix-dry-run", *NINE[:2], "LEARNING_RATE=1e-3", *NINE[3:], *words, "MATRIX_HALVING=2")
    assert result.out.count("mislead if configurations differ in learning rate schedule: ") == 1


def test_the_plan_has_a_warm_up_that_moves_the_first_rung(kmatrix):
    result = kmatrix("test-matrix-dry-run", *NINE, "WARMUP_FRACTION=0.13", "MATRIX_HALVING=3")
    assert "9 configurations to step 150 (the warm-up ends at step 117), 3 to step 300, 2 to the end" in result.out
    assert LINE in kmatrix("test-matrix-dry-run", *NINE, "WARMUP_FRACTION=0.11", "MATRIX_HALVING=3").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MATRIX_HALVING=1"], "MATRIX_HALVING=1 drops no configuration"),
        (["MATRIX_HALVING=-2"], "MATRIX_HALVING"),
        (["MATRIX_HALVING=3", "MATRIX_SEEDS_AUTO=y"], "MATRIX_HALVING=3 and MATRIX_SEEDS_AUTO=y exclude each other"),
        (["MATRIX_HALVING=3", "MATRIX_BASELINE=LR=1e-3"], "MATRIX_HALVING=3 and MATRIX_BASELINE exclude each other"),
        (["MATRIX_HALVING=3", "ENGINE=slurm"], "MATRIX_HALVING=3 needs ENGINE=local"),
        (["MATRIX_HALVING=3", "MAX_TIME=1h"], "MATRIX_HALVING=3 conflicts with MAX_TIME"),
        (["MATRIX_HALVING=3", "MAX_ITERS=100,900"], "MATRIX_HALVING=3 needs the same MAX_ITERS in all configurations"),
        (["MATRIX_HALVING=3", "EVAL_INTERVAL=50,100"], "MATRIX_HALVING=3 needs the same EVAL_INTERVAL"),
        (["MATRIX_HALVING=10"], "why: 9 configurations with comparable losses, fewer than 10"),
        (
            ["MATRIX_HALVING=2", "LEARNING_RATE=1e-3,2e-3"],
            "why: 2 configurations with comparable losses, and the best 2",
        ),
        (["MATRIX_HALVING=3", "EVAL_INTERVAL=900"], "why: no evaluation between the warm-up and the end"),
    ],
)
def test_halving_that_cannot_work_is_one_error(kmatrix, words, message):
    given = {word.partition("=")[0] for word in words}
    rest = [word for word in NINE if word.partition("=")[0] not in given]
    assert message in kmatrix.refused("test-matrix-dry-run", *rest, *words)


@pytest.mark.parametrize("command", ["plan", "test-matrix-dry-run", "test-matrix"])
@pytest.mark.parametrize("words", [["ENGINE=slurm", "GPUS_PER_NODE=0"], ["ENGINE=kubernetes", *KUBERNETES]])
def test_halving_on_a_cluster_is_refused_with_the_reason_and_a_way(kmatrix, command, words):
    refused = kmatrix.refused(command, *NINE, "MATRIX_HALVING=3", *words)
    assert refused.startswith("error: MATRIX_HALVING=3 needs ENGINE=local\n")
    assert f"why: the jobs of {words[0]} do not wait for the losses" in refused
    assert "hint: pass ENGINE=local on a machine with devices, or MATRIX_HALVING=0" in refused


def test_scripts_that_the_user_starts_are_not_halved(kmatrix, tmp_path):
    refused = kmatrix.refused("plan", *NINE, "MATRIX_HALVING=3", f"RENDER={tmp_path / 'rendered'}")
    assert "MATRIX_HALVING=3 needs the runner of this machine" in refused
    assert "hint: omit RENDER=, or pass MATRIX_HALVING=0" in refused


def test_a_single_run_is_not_halved(kmatrix):
    assert "use make test-matrix" in kmatrix.refused("train", "MATRIX_HALVING=3")


def test_a_plan_without_rungs_says_why():
    assert PlannedRungs(configurations=2, max_iters=90).text == "2 configurations to the end: too few to halve"
    unknown = PlannedRungs(configurations=9, max_iters=0).text
    assert unknown == "9 configurations: the rungs are known when the data are prepared"
    twelve = PlannedRungs(configurations=12, max_iters=4500, rungs=rungs(4500, 12, 3, eval_interval=100))
    start, _, share = twelve.text.partition(": ")
    assert start == "12 configurations to step 500, 4 to step 1,500, 2 to the end"
    assert share == "at most 30 % of all steps, as many as 3.56 complete runs per seed have"
