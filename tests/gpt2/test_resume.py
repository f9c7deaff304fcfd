"""k and then n - k steps equal n steps bit for bit: every optimizer, one rank and two, in real processes."""

from __future__ import annotations

import pytest

import forked
from checkpoints import final_of
from factories import environment
from gpt2.checkpoint import load_checkpoint
from kmatrix.records.files import read_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import merged_metrics
from once import make_once
from optim_factory import equal
from recordings import read_jsonl
from resume_ranks import STEPS, cases

PROGRAM = "tests/support/resume_ranks.py"
CASES = {case.name: case for case in cases()}
# In the gate, by ranks; the others nightly. That each optimizer restores its state is in test_optimizers.py.
QUICK = {
    1: ("adamw", "adamwprune-adamw", "border", "start"),
    2: ("adamw", "muon", "adamw-sharded", "muon-sharded"),
}
OTHERS = {ranks: [name for name in CASES if name not in QUICK[ranks]] for ranks in QUICK}
NUMBERS = ("initial_val_loss", "final_val_loss", "best_val_loss", "best_val_step", "final_train_loss", "step")
MEASURED = ("train/loss", "grad/norm", "train/lr", "val/loss", "tokens", "sparsity")
TIMEOUT_S = 500  # seconds for all cases of one kind

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def train_cases(tmp_path_factory):
    """Return a function that trains some cases, uninterrupted and in parts, and returns their directory.

    All worker processes of pytest share the trained runs.
    """

    def train(ranks, names):
        def make(folder):
            try:
                completed = forked.run([PROGRAM, str(folder), *names], environment(), ranks=ranks, timeout=TIMEOUT_S)
                output = completed.stdout[-3000:] + completed.stderr[-5000:]
            except Exception as error:
                output = repr(error)
            # Also after a failure: each case fails with it then, and none trains again.
            (folder / "done").write_text(output)

        return make_once(tmp_path_factory, f"resume-{ranks}-{names[0]}", make)[0]

    return train


def check_same(runs, components=("model", "optimizer", "pruner")):
    """Check that two runs ended alike, bit for bit."""
    ends = [load_checkpoint(final_of(run.path)) for run in runs]
    assert ends[0]["step"] == ends[1]["step"] == STEPS
    for component in components:
        assert equal(*(end.get(component, end["parts"].get(component)) for end in ends)), component
    lines = [[{key: at.values.get(key) for key in MEASURED} for at in merged_metrics(run.metrics)] for run in runs]
    assert lines[0] == lines[1]


def check_same_end(folder, name):
    """Check that a run in two parts ended like the uninterrupted one, and that its result covers both parts."""
    assert (folder / name).exists(), (folder / "done").read_text()
    runs = [RunDir(folder / name / half) for half in ("straight", "parts")]
    check_same(runs)
    (resumed,) = (event["step"] for event in read_jsonl(runs[1].events) if event["event"] == "resume")
    assert 0 <= resumed - CASES[name].stop <= 2
    whole, parts = (read_json(run.result) for run in runs)
    assert {key: parts[key] for key in NUMBERS} == {key: whole[key] for key in NUMBERS}
    assert (parts["attempt"], parts["ended_by"]) == (2, "max_iters")


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in QUICK for name in QUICK[ranks]])
def test_a_run_in_two_parts_equals_an_uninterrupted_run_bit_for_bit(train_cases, ranks, name):
    check_same_end(train_cases(ranks, QUICK[ranks]), name)


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in OTHERS for name in OTHERS[ranks]])
def test_every_other_case_resumes_bit_for_bit_too(train_cases, ranks, name):
    check_same_end(train_cases(ranks, OTHERS[ranks]), name)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_two_ranks_with_sharded_states_train_bit_for_bit_like_two_with_all_of_them(train_cases, name):
    folder = train_cases(2, QUICK[2])
    runs = [RunDir(folder / case / "straight") for case in (name, f"{name}-sharded")]
    check_same(runs, ("model", "optimizer"))
    plain, sharded = (read_json(run.result)["optimizer_state_mib"] for run in runs)
    assert sharded < 0.65 * plain
