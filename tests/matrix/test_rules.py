"""The rules of a verdict, from the configuration to matrix.json, and the seeds of MATRIX_SEEDS_AUTO."""

from __future__ import annotations

import pytest

from factories import make_data
from instant import Jobs, instant_program
from kmatrix.records.matrix import read_plan
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import VerdictRules
from programs import Program, give_gpus, prepare_here

TWO = ("OPTIMIZER=adamw,muon", "NUM_GPUS=1")


@pytest.fixture
def kmatrix(tmp_path, monkeypatch):
    give_gpus(monkeypatch, 0)
    program = Program(tmp_path)
    program.check("defconfig-gpt2-cpu-quick")
    return program


def test_the_seeds_are_an_axis_from_the_seed_of_the_configuration(kmatrix):
    result = kmatrix("test-matrix-dry-run", *TWO, "MATRIX_SEEDS_AUTO=y", "SEED=5", "MATRIX_SEEDS_MAX=4")
    assert "2 configurations x 3 to 4 seeds: 6 to 8 runs" in result.out
    assert [name for name in result.names if "adamw" in name] == [f"gpt2_adamw_seed{n}_1cpu" for n in (5, 6, 7, 8)]
    # As a list of seeds would name them, so that runs are reused in both directions.
    listed = kmatrix("test-matrix-dry-run", *TWO, "SEED=5,6,7,8")
    assert (listed.names, listed.ids) == (result.names, result.ids)
    assert "configurations x" not in listed.out


KUBERNETES = ("ENGINE=kubernetes", "K8S_IMAGE=kmatrix:1", "K8S_CLAIM=data", "K8S_MOUNT=/data", "K8S_NAMESPACE=lab")


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*TWO, "MATRIX_SEEDS_AUTO=y", "SEED=1,2"], "chooses the seeds, and there is a list of them"),
        ([*TWO, "MATRIX_SEEDS_AUTO=y", "MATRIX_SEEDS_MIN=5", "MATRIX_SEEDS_MAX=4"], "is more than MATRIX_SEEDS_MAX=4"),
        ([*TWO, "MATRIX_SEEDS_MIN=5"], "depends on MATRIX_SEEDS_AUTO=n"),
        ([*TWO, "MATRIX_SEEDS_AUTO=y", "SEED=2147483646"], "leaves no room for 10 seeds"),
        (["OPTIMIZER=adamw", "NUM_GPUS=1", "MATRIX_SEEDS_AUTO=y"], "has nothing to compare"),
        ([*TWO, "MATRIX_SEEDS_AUTO=y", *KUBERNETES], "needs the runner of this machine, or ENGINE=slurm"),
        ([*TWO, "MATRIX_BASELINE=OPTIMIZER=sgd"], "there are: optimizer=adamw gpus=1, optimizer=muon gpus=1"),
        (["OPTIMIZER=adamw,muon", "NUM_GPUS=1,2", "MATRIX_BASELINE=OPTIMIZER=adamw"], "names 2 configurations"),
        ([*TWO, "MATRIX_BASELINE=SEED=1"], "a seed is not a configuration"),
        ([*TWO, "MATRIX_BASELINE=OPTIMISER=adamw"], "unknown symbol OPTIMISER"),
        ([*TWO, "MATRIX_CONFIDENCE=2"], "out of range"),
    ],
)
def test_rules_that_cannot_hold_are_one_error(kmatrix, words, message):
    assert message in kmatrix.refused("test-matrix-dry-run", *words)


def test_the_lines_of_a_configuration_count_as_those_of_the_command_line(kmatrix, tmp_path):
    config = tmp_path / ".config"
    text = config.read_text().replace("# CONFIG_MATRIX_SEEDS_AUTO is not set", "CONFIG_MATRIX_SEEDS_AUTO=y")
    config.write_text(text)
    assert "2 configurations x 3 to 10 seeds" in kmatrix("test-matrix-dry-run", *TWO).out
    config.write_text(text.replace('CONFIG_MATRIX_GPT2_SEED=""', 'CONFIG_MATRIX_GPT2_SEED="1 2"'))
    assert "there is a list of them" in kmatrix.refused("test-matrix-dry-run", *TWO)
    # A single run has no matrix: its rules do not matter.
    assert kmatrix("test-matrix-dry-run", "OPTIMIZER=adamw", "NUM_GPUS=1", "MATRIX_SEEDS_AUTO=n", "SEED=1").status == 0


def test_a_single_run_takes_no_adaptive_seeds(kmatrix):
    assert "use make test-matrix" in kmatrix.refused("train", "MATRIX_SEEDS_AUTO=y")


def test_a_configuration_that_is_compared_with_nothing_needs_no_baseline(kmatrix):
    """On the longer context only adamw is left: it is compared with nothing, and the baseline is that of the other."""
    words = ("test-matrix-dry-run", *TWO, "BLOCK_SIZE=32,64", "MATRIX_EXCLUDE=OPTIMIZER=muon BLOCK_SIZE=64: not tuned")
    assert "3 runs" in kmatrix(*words, "MATRIX_BASELINE=OPTIMIZER=muon").out
    assert "names 0 configurations" in kmatrix.refused(*words, "MATRIX_BASELINE=OPTIMIZER=sgd")


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Make a matrix whose runs finish at once, and return the program and a reader of its rules."""
    prepare_here(monkeypatch)
    make_data(tmp_path / "data")
    kmatrix = instant_program(tmp_path, monkeypatch)
    monkeypatch.setattr("kmatrix.cli.run.start", lambda *_: 0)  # the rules are made before
    settings = (
        *("NUM_GPUS=1", "GPU_MONITOR=n", "AUTO_GENERATE_GRAPHS=n", "PREFLIGHT=n", "MAX_ITERS=30", "EVAL_SAMPLES=10"),
        *("DATASET=shards", f"DATA_PATH={tmp_path / 'data'}", f"RESULTS_DIR={tmp_path / 'results'}"),
    )

    def make(*words):
        kmatrix.check("test-matrix", *settings, *words)
        *_, path = sorted((tmp_path / "results").glob("test_matrix_results_*"))
        return path

    return kmatrix, make


def rules_of(path):
    return read_plan(path).verdict


@pytest.mark.process
def test_matrix_json_has_the_rules_with_the_baseline_as_axes_of_every_family(made):
    _, make = made
    path = make(
        *("OPTIMIZER=adamw,muon", "BLOCK_SIZE=32,64", "MATRIX_BASELINE=OPTIMIZER=muon NUM_GPUS=1"),
        *("MATRIX_CONFIDENCE=0.9", "MATRIX_MIN_DIFFERENCE=0.01", "TARGET_LOSS=3.28"),
    )
    # The runs on both lengths are not comparable: the baseline is one configuration of each.
    assert rules_of(path) == VerdictRules(
        confidence=0.9, min_difference=0.01, target_loss=3.28, baseline={"optimizer": "muon", "gpus": "1"}
    )


@pytest.mark.process
def test_an_addition_keeps_the_rules(made):
    kmatrix, make = made
    path = make("OPTIMIZER=adamw,muon", "BLOCK_SIZE=32", "SEED=1,2", "MATRIX_BASELINE=OPTIMIZER=adamw")
    former = rules_of(path)
    kmatrix.check("add", "SEED=3", f"TARGET={path}")
    assert rules_of(path) == former
    for words in (["MATRIX_CONFIDENCE=0.9"], ["TARGET_LOSS=3"], ["MATRIX_BASELINE=OPTIMIZER=muon"]):
        assert "compares its losses by other rules" in kmatrix.refused("add", "SEED=4", *words, f"TARGET={path}")
    assert rules_of(path) == former


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "3.28,3.3", "low"])
def test_a_target_that_no_loss_can_reach_is_refused(made, tmp_path, text):
    kmatrix, _ = made
    assert f"TARGET_LOSS={text}" in kmatrix.refused("test-matrix-dry-run", f"TARGET_LOSS={text}")
    assert not list(tmp_path.glob("results/*"))


@pytest.mark.process
def test_a_baseline_cannot_be_named_after_the_first_run(made):
    kmatrix, make = made
    path = make("OPTIMIZER=adamw,muon", "BLOCK_SIZE=32", "SEED=1,2")
    for words in (["SEED=3"], ["GRAD_CLIP=1.0,0.5"], []):
        given = "MATRIX_BASELINE=OPTIMIZER=adamw" + (" GRAD_CLIP=1.0" if "GRAD" in "".join(words) else "")
        assert "by other rules: baseline" in kmatrix.refused("add", *words, given, f"TARGET={path}")
    assert rules_of(path).baseline == {}


@pytest.mark.process
def test_only_the_maximum_of_adaptive_seeds_can_be_raised_and_only_until_a_run_has_ended(made):
    kmatrix, make = made
    path = make("OPTIMIZER=adamw,muon", "BLOCK_SIZE=32", "MATRIX_SEEDS_AUTO=y", "MATRIX_SEEDS_MAX=4", "SEED=7")
    # What `continue` knows them by if matrix.json is lost.
    assert all(run.selected for run in read_plan(path).runs)
    for words in (["MATRIX_SEEDS_MAX=5", "MATRIX_SEEDS_MIN=4"], ["MATRIX_SEEDS_MIN=4"]):
        assert "by other rules: seeds_min" in kmatrix.refused("add", *words, f"TARGET={path}")
    assert "there is a list of them" in kmatrix.refused("add", "SEED=11", f"TARGET={path}")
    kmatrix.check("add", "MATRIX_SEEDS_MAX=6", f"TARGET={path}")
    assert rules_of(path).seeds == (7, 8, 9, 10, 11, 12)
    assert "gives other runs" in kmatrix.refused("add", "MATRIX_SEEDS_MAX=5", f"TARGET={path}")
    # A new configuration gets the same seeds, also after a run has ended.
    Jobs(path).submit([read_plan(path).runs[0].name])
    kmatrix.check("add", "OPTIMIZER=sgd", f"TARGET={path}")
    assert len(MatrixDir(path).runs()) == 18
    assert "cannot be raised: runs have ended" in kmatrix.refused("add", "MATRIX_SEEDS_MAX=7", f"TARGET={path}")
    assert len(rules_of(path).seeds) == 6
