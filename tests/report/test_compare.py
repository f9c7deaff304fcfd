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


def row(found, measure):
    return found.configurations[0].measures[measure]


def single(matrix):
    (run,) = matrix.runs()
    return side_of(matrix, run.name)


def test_with_seeds_a_clear_difference_has_an_interval_and_a_verdict(compare_runs_of):
    found = compare_runs_of(runs_with_seeds(3, HIGH), runs_with_seeds(3, LOW))
    loss = row(found, "final_val_loss")
    assert (loss.base, loss.new, loss.outcome) == (pytest.approx(3.31), pytest.approx(3.21), PairOutcome.BETTER)
    assert loss.pair.difference == pytest.approx(-0.1)
    assert loss.pair.interval.high < 0
    assert "final loss, nats/token  3.3100  3.2100     -0.1000" in comparison_text(found)
    assert "better, p = 0.00" in comparison_text(found)


def test_a_difference_within_the_spread_of_the_seeds_is_not_distinguishable(compare_runs_of):
    found = compare_runs_of(runs_with_seeds(3, HIGH), runs_with_seeds(3, [3.32, 3.28, 3.31]))
    assert row(found, "final_val_loss").outcome is PairOutcome.OPEN
    assert "not distinguishable, p = " in comparison_text(found)


def test_one_seed_gives_a_difference_without_significance(compare_runs_of):
    found = compare_runs_of([FakeRun(final_loss=3.30)], [FakeRun(final_loss=3.10)])
    assert (row(found, "final_val_loss").outcome, row(found, "final_val_loss").pair.p_holm) == (PairOutcome.OPEN, None)
    text = comparison_text(found)
    assert "not significant (one seed)" in text
    assert "better" not in text


@pytest.mark.parametrize(
    ("base", "new", "verdict"), [(4000.0, 5000.0, PairOutcome.BETTER), (5000.0, 4000.0, PairOutcome.WORSE)]
)
def test_a_higher_speed_is_better_and_a_longer_time_is_worse(compare_runs_of, base, new, verdict):
    def runs(speed):
        return [FakeRun(seed=n, axes={"seed": str(n)}, tokens_per_s=speed * (1 + n * n / 1000)) for n in (1, 2, 3)]

    found = compare_runs_of(runs(base), runs(new))
    assert (row(found, "tokens_per_second").outcome, row(found, "seconds").outcome) == (verdict, verdict)


def test_several_configurations_are_several_tests_and_p_is_corrected_for_them(make):
    def side(name, losses, *optimizers):
        return side_of(
            make(name, [run for optimizer in optimizers for run in runs_with_seeds(3, losses, optimizer=optimizer)])
        )

    single = compare(side("a1", HIGH, "adamw"), side("b1", LOW, "adamw"))
    several = compare(side("a2", HIGH, "adamw", "muon"), side("b2", LOW, "adamw", "muon"))
    assert row(several, "final_val_loss").pair.p_holm == pytest.approx(2 * row(single, "final_val_loss").pair.p_holm)
    assert "p Holm-corrected for the number of configurations" in comparison_text(several)


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
    loss = row(found, "final_val_loss")
    assert (loss.incomparable, loss.outcome, row(found, "seconds").incomparable) == (what, PairOutcome.OPEN, "")
    assert f"not comparable (different {what})" in comparison_text(found)


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
    assert row(compare(side_of(matrix), side_of(matrix)), "final_val_loss").base == pytest.approx(3.15)


def test_unfinished_runs_are_reported_and_never_compared(compare_runs_of):
    found = compare_runs_of([FakeRun(final_loss=3.3)], [FakeRun(status="stopped", stop_at=50)])
    assert row(found, "final_val_loss").new is None
    assert "new 1 stopped" in comparison_text(found)


def test_two_runs_are_compared_whatever_their_axes(make):
    sides = single(make(BASE, [FakeRun()])), single(make(NEW, [FakeRun(optimizer="muon")]))
    assert [one.name for one in compare(*sides, one=True).configurations] == ["adamw, 1 rank -> muon, 1 rank"]


def test_a_different_processor_or_torch_version_is_reported(make):
    matrices = make(BASE, [FakeRun()]), make(NEW, [FakeRun()])
    (run,) = matrices[1].runs()
    record = read_json(run.run_json)
    record["provenance"] |= {"cpu": "Xeon", "versions": {"torch": "2.14.0"}}
    write_json(run.run_json, record)
    text = comparison_text(compare(*map(side_of, matrices)))
    assert "! processor AMD EPYC 7R32 -> Xeon" in text
    assert "! torch 2.13.0 -> 2.14.0" in text


def test_the_json_output_has_the_same_content(compare_runs_of, tmp_path, capsys):
    compare_runs_of(runs_with_seeds(3, HIGH), runs_with_seeds(3, LOW))
    assert main(["compare", f"BASE={BASE}", f"NEW={NEW}", f"RESULTS_DIR={tmp_path}", "JSON=1"]) == 0
    value = json.loads(capsys.readouterr().out)
    loss = value["configurations"][0]["measures"]["final_val_loss"]
    pair = loss["pair"]
    assert (value["schema"], loss["outcome"], pair["seeds"]) == (1, "better", [1, 2, 3])
    assert pair["interval"]["low"] < pair["difference"] < pair["interval"]["high"] < 0


def test_means_are_over_the_seeds_of_both_sides_and_a_run_that_diverged_is_counted(compare_runs_of):
    base = runs_with_seeds(3, [3.1, 3.2, 3.3])
    new = [*runs_with_seeds(2, [3.1, 3.2]), FakeRun(seed=3, axes={"seed": "3"}, status="failed", kind="nan", stop_at=4)]
    found = compare_runs_of(base, new)
    loss = row(found, "final_val_loss")
    assert (loss.base, loss.new, loss.pair.difference) == (pytest.approx(3.15), pytest.approx(3.15), 0)
    assert "base 3 finished (seeds 1 2 3); new 2 finished (seeds 1 2), 1 diverged (seed 3)" in comparison_text(found)


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
    assert "without a loss in new, where all runs failed or diverged: adamw, 1 rank" in text


def test_the_side_that_diverged_more_often_is_not_called_better(make):
    nan = {"axes": {"seed": "4"}, "seed": 4, "status": "failed", "kind": "nan", "stop_at": 40}

    def side(name, losses, *, diverged):
        fourth = FakeRun(**(nan if diverged else {**nan, "kind": "oom"}))
        return side_of(make(name, [*runs_with_seeds(3, losses), fourth]))

    found = compare(side("a1", HIGH, diverged=False), side("b1", LOW, diverged=True))
    loss = row(found, "final_val_loss")
    assert (loss.outcome, loss.pair.no_more, loss.pair.diverged) == (PairOutcome.OPEN, "diverged", (1, 0))
    assert (loss.new, loss.pair.p_holm < 0.05) == (pytest.approx(3.21), True)
    assert "not distinguishable (the lower one diverged more often)" in " ".join(comparison_text(found).split())
    assert row(found, "seconds").pair.diverged == (0, 0)
    both = compare(side("a2", HIGH, diverged=True), side("b2", LOW, diverged=True))
    assert row(both, "final_val_loss").outcome is PairOutcome.BETTER
    worse = compare(side("a3", LOW, diverged=False), side("b3", HIGH, diverged=True))
    assert worse.worse == ("adamw, 1 rank",)


@pytest.mark.parametrize(("margin", "status", "words"), [(None, 1, "worse, p"), (0.2, 0, "equivalent within 0.2")])
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
