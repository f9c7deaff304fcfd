"""The settings in which configurations differ, and the warning if a tuned optimizer is compared with an untuned one."""

from __future__ import annotations

import json

from kmatrix.report.analyse import analyse
from kmatrix.report.write import summary
from records_factory import FakeRun, make_matrix

LR = "GPT2_LEARNING_RATE"
TRAIN = {"weight_decay": 0.1, "pruning": "none", "beta1": 0.9}


def run(optimizer, rate, *requested, **fields):
    axes = {"lr": f"{rate:g}"} if fields.pop("axis", False) else {}
    return FakeRun(optimizer=optimizer, asked=requested, axes=axes, train={**TRAIN, "learning_rate": rate, **fields})


def results_of(tmp_path, *runs):
    return analyse(make_matrix(tmp_path, runs))


def swept_runs(optimizer):
    return [run(optimizer, rate, LR, axis=True) for rate in (1e-4, 3e-4)]


def test_a_swept_optimizer_next_to_one_that_was_not_gives_a_warning(tmp_path):
    warnings = results_of(tmp_path, *swept_runs("adamw"), run("muon", 0.02, LR)).warnings
    (warning,) = [text for text in warnings if text.startswith("learning_rate")]
    assert warning == (
        "learning_rate was swept for adamw but not for muon: a tuned optimizer is compared with an untuned one"
    )


def test_a_learning_rate_that_was_set_for_one_optimizer_alone_gives_a_warning(tmp_path):
    (warning,) = results_of(tmp_path, run("adamw", 6e-4), run("muon", 0.02, LR)).warnings
    assert warning.startswith("learning_rate was set for muon but is the default for adamw: ")


def test_the_settings_that_differ_name_the_value_of_each_configuration(tmp_path):
    (rate, *others) = results_of(tmp_path, *swept_runs("adamw")).differing
    assert (rate.name, rate.chosen, others) == ("learning_rate", True, [])
    assert [rate.values[place] for place in rate.of.values()] == list(rate.values)


def test_the_sparsity_of_pruned_runs_is_in_the_summary(tmp_path):
    pruned = FakeRun(optimizer="adamwprune", train={"pruning": "state", "target_sparsity": 0.5})
    matrix = make_matrix(tmp_path, [pruned, FakeRun()])
    result = matrix.run(pruned.name).result
    result.write_text(json.dumps({**json.loads(result.read_text()), "sparsity": 0.4999}))
    numbers = analyse(matrix)

    assert [(run.pruning, run.sparsity) for run in numbers.runs] == [("state", 0.4999), ("none", None)]
    assert "sparsity" in summary(numbers)
    assert " 50.0% " in summary(numbers)
    assert "sparsity" not in summary(analyse(make_matrix(tmp_path / "other", [FakeRun()])))
