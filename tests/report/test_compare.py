"""Compare two matrices or two runs: changed settings, and conclusions only with a significance test."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.report.compare import compare, comparison_text, side_of
from kmatrix.verdict.family import PairOutcome
from programs import main
from records_factory import FakeRun, make_matrix, replan, runs_with_seeds

BASE, NEW = "test_matrix_results_20261120_052300", "test_matrix_results_20261120_062300"
HIGH, LOW = [3.30, 3.31, 3.32], [3.20, 3.22, 3.21]


@pytest.fixture
def make(tmp_path):
    """Make the matrix of one side, with these symbols in each of its runs."""

    def side(name, runs, symbols=None):
        symbols = {"GPT2_DROPOUT": "0.0"} | (symbols or {})
        return make_matrix(tmp_path, [replace(run, symbols=symbols) for run in runs], name=name)

    return side


@pytest.fixture
def compare_runs_of(make):
    """Make two matrices of fake runs and compare them."""

    def both(base, new, base_symbols=None, new_symbols=None):
        matrices = make(BASE, base, base_symbols), make(NEW, new, new_symbols)
        return compare(*map(side_of, matrices), {"RESULTS_DIR"})

    return both


def losses(found):
    """Return the mean final losses of the first configuration, and new compared with base."""
    one = found.configurations[0]
    return one.measures["final_val_loss"], one.pair


def words_of(found):
    """Return the text of a comparison with one space between words."""
    return " ".join(comparison_text(found).split())


def single(matrix):
    (run,) = matrix.runs()
    return side_of(matrix, run.name)


def test_with_seeds_a_clear_difference_has_an_interval_and_a_verdict(compare_runs_of):
    found = compare_runs_of(runs_with_seeds(3, HIGH), runs_with_seeds(3, LOW))
    means, pair = losses(found)
    assert (means, pair.outcome) == (pytest.approx((3.31, 3.21)), PairOutcome.BETTER)
    assert pair.difference == pytest.approx(-0.1)
    assert pair.interval.high < 0
    assert "final loss 3.3100 3.2100 -0.1000 [-0.1" in words_of(found)
    assert "], p = 0.003: better" in comparison_text(found)


def test_a_difference_within_the_spread_of_the_seeds_is_not_distinguishable(compare_runs_of):
    found = compare_runs_of(runs_with_seeds(3, HIGH), runs_with_seeds(3, [3.32, 3.28, 3.31]))
    assert losses(found)[1].outcome is PairOutcome.OPEN
    assert ": not distinguishable" in comparison_text(found)


def test_one_seed_gives_a_difference_without_significance(compare_runs_of):
    found = compare_runs_of([FakeRun(final_loss=3.30)], [FakeRun(final_loss=3.10)])
    assert (losses(found)[1].outcome, losses(found)[1].p_holm) == (PairOutcome.OPEN, None)
    text = comparison_text(found)
    assert "-0.2000 (one seed, not significant)" in text
    assert "better" not in text


def test_what_runs_took_has_a_share_and_no_test(compare_runs_of):
    found = compare_runs_of(*(runs_with_seeds(3, HIGH, tokens_per_s=speed) for speed in (4000.0, 5000.0)))
    assert found.configurations[0].measures["seconds"] == pytest.approx((25.6, 20.48))
    assert "tokens/s 4.00k 5.00k +25.0% time 25.6s 20.5s -20.0%" in words_of(found)


def test_several_configurations_are_several_tests_and_p_is_corrected_for_them(make):
    def side(name, losses, *optimizers):
        return side_of(
            make(name, [run for optimizer in optimizers for run in runs_with_seeds(3, losses, optimizer=optimizer)])
        )

    single = compare(side("a1", HIGH, "adamw"), side("b1", LOW, "adamw"))
    several = compare(side("a2", HIGH, "adamw", "muon"), side("b2", LOW, "adamw", "muon"))
    assert losses(several)[1].p_holm == pytest.approx(2 * losses(single)[1].p_holm)
    assert "p Holm-corrected for 2 comparisons" in comparison_text(several)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"data_sha256": "f" * 64}, "data"),
        ({"block_size": 64}, "context length"),
        ({"eval_samples": 64}, "validation sequences"),
    ],
)
def test_losses_on_different_data_are_not_compared_but_times_are(compare_runs_of, change, what):
    found = compare_runs_of(runs_with_seeds(3, HIGH), runs_with_seeds(3, LOW, train=change))
    assert (found.configurations[0].incomparable, losses(found)[1]) == (what, None)
    text = words_of(found)
    assert text.count(f"not comparable (different {what})") == 2  # the final and the best loss
    assert "peak memory 812 MiB 812 MiB 0.0%" in text


def test_differing_symbols_are_listed_with_neutral_ones_apart(compare_runs_of):
    before = {"GPT2_DROPOUT": "0.1", "RESULTS_DIR": "a", "GPT2_OLD": "y"}
    text = comparison_text(compare_runs_of([FakeRun()], [FakeRun()], before, {"RESULTS_DIR": "b", "GPT2_SEED": "1"}))
    assert "GPT2_DROPOUT 0.1 -> 0.0\nGPT2_OLD y -> (none)\nGPT2_SEED (none) -> 1\n" in text
    assert "without effect on results: RESULTS_DIR a -> b" in text


def test_an_axis_of_both_sides_is_not_a_difference(compare_runs_of):
    runs = [FakeRun(optimizer=name) for name in ("adamw", "muon")]
    assert "none that can change a result" in comparison_text(compare_runs_of(runs, runs))


def test_configurations_are_matched_by_their_axes_and_the_rest_is_listed(compare_runs_of):
    found = compare_runs_of([FakeRun(), FakeRun(optimizer="sgd")], [FakeRun(), FakeRun(optimizer="muon", gpus=2)])
    assert [one.name for one in found.configurations] == ["adamw, 1 rank"]
    assert (found.only_in_base, found.only_in_new) == (("sgd, 1 rank",), ("muon, 2 ranks",))
    assert "only in base: sgd, 1 rank" in comparison_text(found)


def test_an_axis_that_varies_on_one_side_matches_nothing_and_a_constant_one_is_ignored(make):
    swept = [FakeRun(axes={"lr": value}) for value in ("1e-3", "3e-4")]
    plain, varying, constant = (side_of(make(*side)) for side in (("a", [FakeRun()]), ("b", swept), ("c", swept[:1])))
    assert compare(plain, varying).configurations == ()
    assert "no configuration in common" in comparison_text(compare(plain, varying))
    assert len(compare(plain, constant).configurations) == 1


def test_two_runs_of_one_seed_are_two(make):
    matrix = make(BASE, runs_with_seeds(2, [3.1, 3.2]))
    replan(matrix, lambda run: {**run, "train": {**run["train"], "seed": 1}})
    assert losses(compare(side_of(matrix), side_of(matrix)))[0] == pytest.approx((3.15, 3.15))


def test_unfinished_runs_are_reported_and_never_compared(compare_runs_of):
    found = compare_runs_of([FakeRun(final_loss=3.3)], [FakeRun(status="stopped", stop_at=50)])
    assert losses(found)[0] == (3.3, None)
    assert "new 1 stopped" in comparison_text(found)


def test_two_runs_are_compared_whatever_their_axes(make):
    sides = single(make(BASE, [FakeRun()])), single(make(NEW, [FakeRun(optimizer="muon")]))
    assert [one.name for one in compare(*sides).configurations] == ["adamw -> muon"]


def test_a_different_processor_or_torch_version_is_reported(make):
    matrices = make(BASE, [FakeRun()]), make(NEW, [FakeRun()])
    (run,) = matrices[1].runs()
    record = read_json(run.run_json)
    record["provenance"] |= {"cpu": "Xeon", "versions": {"torch": "2.14.0"}}
    write_json(run.run_json, record)
    text = comparison_text(compare(*map(side_of, matrices)))
    assert "! device AMD EPYC 7R32 -> Xeon" in text
    assert "! torch 2.13.0 -> 2.14.0" in text


def test_the_json_output_has_the_same_content(compare_runs_of, tmp_path, capsys):
    compare_runs_of(runs_with_seeds(3, HIGH), runs_with_seeds(3, LOW))
    assert main(["compare", f"BASE={BASE}", f"NEW={NEW}", f"RESULTS_DIR={tmp_path}", "JSON=1"]) == 0
    value = json.loads(capsys.readouterr().out)
    pair = value["configurations"][0]["pair"]
    assert (value["schema"], pair["outcome"], pair["seeds"]) == (1, "better", [1, 2, 3])
    assert pair["interval"]["low"] < pair["difference"] < pair["interval"]["high"] < 0


def test_means_are_over_the_seeds_of_both_sides_and_a_run_that_diverged_is_counted(compare_runs_of):
    base = runs_with_seeds(3, [3.1, 3.2, 3.3])
    new = [*runs_with_seeds(2, [3.1, 3.2]), FakeRun(seed=3, axes={"seed": "3"}, status="failed", kind="nan", stop_at=4)]
    found = compare_runs_of(base, new)
    means, pair = losses(found)
    assert (means, pair.difference) == (pytest.approx((3.15, 3.15)), 0)
    assert "base 3 finished; new 2 finished, 1 diverged (gpt2_adamw_seed3_1cpu)" in comparison_text(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "compare needs BASE="),
        ([f"BASE={BASE}"], "compare needs NEW="),
        ([f"BASE={BASE}", "NEW=nothing"], "NEW=nothing is not a matrix directory"),
        ([f"BASE={BASE}", f"NEW={NEW}/gpt2_lion_1cpu"], f"NEW={NEW}/gpt2_lion_1cpu: no run gpt2_lion_1cpu in "),
        ([f"BASE={BASE}", f"NEW={NEW}/gpt2_adamw_1cpu"], "cannot compare a matrix (BASE=) with a run (NEW=)"),
    ],
)
def test_targets_that_cannot_be_compared_are_refused(compare_runs_of, tmp_path, capsys, arguments, message):
    compare_runs_of([FakeRun()], [FakeRun()])
    assert MatrixDir(tmp_path / NEW).run("gpt2_adamw_1cpu").run_json.is_file()
    assert main(["compare", *arguments, f"RESULTS_DIR={tmp_path}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("base", "new", "status"), [(LOW, HIGH, 1), (HIGH, LOW, 0), (LOW, LOW, 0)])
def test_fail_on_worse_is_an_exit_status_for_ci(tmp_path, base, new, status):
    make_matrix(tmp_path, runs_with_seeds(3, base), name=BASE)
    make_matrix(tmp_path, runs_with_seeds(3, new), name=NEW)
    arguments = ["compare", f"BASE={BASE}", f"NEW={NEW}", f"RESULTS_DIR={tmp_path}"]
    assert main([*arguments, "FAIL_ON=worse"]) == status
    assert main(arguments) == 0


def test_other_values_of_fail_on_are_refused(tmp_path, capsys):
    assert main(["compare", f"BASE={BASE}", f"NEW={NEW}", f"RESULTS_DIR={tmp_path}", "FAIL_ON=better"]) == 2
    assert "invalid FAIL_ON=better" in capsys.readouterr().err


def status_of(tmp_path, base, new, base_rules=None, new_rules=None):
    """Return the exit status of FAIL_ON=worse for two matrices of these runs."""
    make_matrix(tmp_path, base, name=BASE, verdict=base_rules)
    make_matrix(tmp_path, new, name=NEW, verdict=new_rules)
    return main(["compare", f"BASE={BASE}", f"NEW={NEW}", f"RESULTS_DIR={tmp_path}", "FAIL_ON=worse"])


def other_seeds(losses):
    return [FakeRun(seed=seed, final_loss=loss, axes={"seed": str(seed)}) for seed, loss in enumerate(losses, 11)]


@pytest.mark.parametrize(("losses", "status"), [(HIGH, 1), (LOW, 0)])
def test_fail_on_worse_compares_different_seeds_without_pairs(tmp_path, losses, status):
    assert status_of(tmp_path, runs_with_seeds(3, LOW), other_seeds(losses)) == status


def test_fail_on_worse_cannot_pass_without_a_test(tmp_path, capsys):
    assert status_of(tmp_path, [FakeRun(final_loss=3.2)], [FakeRun(final_loss=3.3)]) == 2
    assert "FAIL_ON=worse: no final loss could be tested" in capsys.readouterr().err


def test_fail_on_worse_names_what_it_could_not_test(tmp_path, capsys):
    base = [*runs_with_seeds(3, LOW), *runs_with_seeds(3, LOW, optimizer="muon")]
    assert status_of(tmp_path, base, runs_with_seeds(3, LOW)) == 0
    assert "FAIL_ON=worse: not tested: 'muon, 1 rank'" in capsys.readouterr().err


def test_runs_that_diverge_in_new_are_worse(tmp_path, capsys):
    assert status_of(tmp_path, runs_with_seeds(3, LOW), runs_with_seeds(3, [20.0, 21.0, 22.0])) == 1
    text = capsys.readouterr().out
    assert "new 3 diverged (gpt2_adamw_seed1_1cpu, " in text
    assert "worse in new: adamw, 1 rank" in text


def test_the_side_that_diverged_more_often_is_not_called_better(make):
    nan = {"axes": {"seed": "4"}, "seed": 4, "status": "failed", "kind": "nan", "stop_at": 40}

    def side(name, losses, *, diverged):
        fourth = FakeRun(**(nan if diverged else {**nan, "kind": "oom"}))
        return side_of(make(name, [*runs_with_seeds(3, losses), fourth]))

    found = compare(side("a1", HIGH, diverged=False), side("b1", LOW, diverged=True))
    means, pair = losses(found)
    assert (pair.outcome, pair.no_more, pair.diverged) == (PairOutcome.OPEN, "diverged", (1, 0))
    assert (means[1], pair.p_holm < 0.05) == (pytest.approx(3.21), True)
    assert "not distinguishable (the one with the lower loss diverged more often" in comparison_text(found)
    both = compare(side("a2", HIGH, diverged=True), side("b2", LOW, diverged=True))
    assert losses(both)[1].outcome is PairOutcome.BETTER
    worse = compare(side("a3", LOW, diverged=False), side("b3", HIGH, diverged=True))
    assert worse.worse == ("adamw, 1 rank",)


@pytest.mark.parametrize(("margin", "status", "words"), [(None, 1, ": worse"), (0.2, 0, ": equivalent")])
def test_a_difference_within_the_margin_of_base_is_not_worse(tmp_path, capsys, margin, status, words):
    rules = {"confidence": 0.95, "min_difference": margin}
    assert status_of(tmp_path, runs_with_seeds(3, LOW), runs_with_seeds(3, HIGH), rules, rules) == status
    assert words in capsys.readouterr().out


def test_the_level_is_that_of_base(tmp_path, capsys):
    status_of(tmp_path, runs_with_seeds(3, LOW), runs_with_seeds(3, HIGH), {"confidence": 0.999}, {"confidence": 0.9})
    text = capsys.readouterr().out
    assert "99.9 % CI" in text
    assert "95 %" not in text
    assert "significant if p <= 0.001" in text
    assert "those of base are used" in text
