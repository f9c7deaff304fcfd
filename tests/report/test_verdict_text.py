"""The sentences about verdicts: each state, each outcome of a pair, and the numbers in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kmatrix.records.decode import replaced
from kmatrix.records.runs import Status
from kmatrix.report.numbers import CostDifference, CostQuantity, GroupNumbers, Ranking, RunNumbers
from kmatrix.report.pair_text import open_parts, p_text, plain
from kmatrix.report.sentences.values import LineLabel, Situation, VerdictState
from kmatrix.report.verdict_text import cost_phrase, no_ranking_text, verdict_text
from kmatrix.stats import Interval
from kmatrix.verdict.family import FamilyVerdict, Method, NoMoreSeeds, Pair, PairOutcome, Rules

RULES = Rules(seeds=(1, 2, 3, 4, 5))


def pair(a, b, outcome, difference=-0.0117, half=0.0031, **fields):
    interval = None if half is None else Interval(low=difference - half, high=difference + half)
    known = {"method": Method.PAIRED, "seeds": (1, 2, 3, 4, 5), "p": 0.001, "p_holm": 0.003, **fields}
    return Pair(a=a, b=b, outcome=outcome, difference=difference, interval=interval, **known)


def group(name, *losses):
    runs = tuple(
        RunNumbers(
            name=f"{name}_{seed}",
            run_id="",
            axes={},
            status=Status.FINISHED,
            reason="",
            optimizer=name,
            model="tiny",
            device="cpu",
            seed=seed,
            final_val_loss=loss,
        )
        for seed, loss in enumerate(losses, start=1)
    )
    return GroupNumbers(name=name, axes={}, data_sha256="1a2b", runs=runs)


def ranking(*pairs, groups=("muon", "adamw"), reference="muon", rules=RULES, **fields):
    means = {name: 3.27 for one in pairs for name in (one.a, one.b)}
    verdict = FamilyVerdict(
        rules=rules, reference=reference, means=means, pairs=pairs, diverged=fields.pop("diverged", {})
    )
    return Ranking(
        data_sha256="1a2b",
        groups=tuple(group(name, 3.2719, 3.2720) for name in groups),
        verdict=verdict,
        **fields,
    )


BETTER, WORSE, OPEN, EQUIVALENT = PairOutcome.BETTER, PairOutcome.WORSE, PairOutcome.OPEN, PairOutcome.EQUIVALENT


@pytest.mark.parametrize(
    ("pairs", "state", "headline"),
    [
        ([pair("muon", "adamw", BETTER)], "decided", "muon beats adamw by 0.0117 ± 0.0031 nats/token"),
        (
            [pair("muon", "adamw", BETTER), pair("muon", "sgd", BETTER, -0.5)],
            "decided",
            "muon beats both other configurations; the closest, adamw, by 0.0117 ± 0.0031 nats/token",
        ),
        (
            [pair("muon", "adamw", BETTER), pair("muon", "soap", OPEN, -0.001)],
            "partly open",
            "muon leads, but soap is not distinguishable from it",
        ),
        (
            [pair("muon", "adamw", BETTER), pair("muon", "soap", OPEN, -0.001, method=Method.SEQUENTIAL)],
            "partly open",
            "muon leads, but soap is still open",
        ),
        ([pair("muon", "adamw", OPEN, -0.001)], "open", "No winner: muon is not distinguishable from adamw"),
        (
            [pair("muon", "adamw", OPEN, -0.001, method=Method.SEQUENTIAL)],
            "open",
            "No winner yet: muon is not distinguishable from adamw",
        ),
        (
            [pair("muon", "adamw", EQUIVALENT, -0.001)],
            "decided",
            "muon and adamw are equivalent within 0.004 nats/token",
        ),
        (
            [pair("muon", "adamw", BETTER), pair("muon", "soap", EQUIVALENT, -0.001)],
            "decided",
            "muon beats adamw; soap is equivalent to it within 0.004 nats/token",
        ),
    ],
)
def test_the_headline_of_each_state(pairs, state, headline):
    rules = replaced(RULES, min_difference=0.004)
    text = verdict_text(ranking(*pairs, rules=rules), Situation())
    assert (text.state, text.sentence) == (state, headline)


@pytest.mark.parametrize(
    ("pairs", "headline"),
    [
        ([pair("adamw", "muon", WORSE, 0.0117)], "muon beats the baseline adamw by 0.0117 ± 0.0031 nats/token"),
        (
            [pair("adamw", "muon", WORSE, 0.0117), pair("adamw", "soap", WORSE, 0.2), pair("adamw", "sgd", OPEN, 0.1)],
            "2 of 3 configurations beat the baseline adamw; the best, soap, by 0.2000 ± 0.0031 nats/token; "
            "1 of 3 is not distinguishable from it",
        ),
        ([pair("adamw", "muon", BETTER)], "The baseline adamw beats muon by 0.0117 ± 0.0031 nats/token"),
        (
            [pair("adamw", "muon", BETTER), pair("adamw", "sgd", BETTER)],
            "Neither muon nor sgd beats the baseline adamw",
        ),
    ],
)
def test_the_headline_with_a_baseline(pairs, headline):
    rules = replaced(RULES, baseline="adamw")
    assert verdict_text(ranking(*pairs, reference="adamw", rules=rules), Situation()).sentence == headline


def test_the_evidence_has_interval_method_and_corrected_p():
    found = verdict_text(
        ranking(
            pair("muon", "adamw", BETTER),
            pair("muon", "sgd", BETTER, -0.5),
            pair("adamw", "sgd", BETTER, -0.5),
            groups=("muon", "adamw", "sgd"),
        ),
        Situation(),
    )
    assert found.line(LineLabel.EVIDENCE).text == (
        "against adamw: 95 % interval 0.0086 to 0.0148 nats/token, paired over 5 seeds (Student's t), "
        "p = 0.003 (Holm, 3 comparisons)"
    )


def test_an_open_comparison_says_what_could_be_found_and_what_would_decide_it():
    rival = pair("muon", "soap", OPEN, -0.0012, 0.0018, p_holm=0.2, detectable=0.0029, more_seeds=2, margin=0.0034)
    text = verdict_text(ranking(rival, groups=("muon", "soap")), Situation(command="make add SEED=6,7"))
    assert text.line(LineLabel.OPEN).text == (
        "muon against soap: -0.0012 (-0.0030 to 0.0006) nats/token after 5 seeds; equal within 0.0034; "
        "smallest detectable difference 0.0029 (power 80 %); about 2 more seeds would decide it"
    )
    assert text.line(LineLabel.NEXT).command == "make add SEED=6,7"


@pytest.mark.parametrize(
    ("why", "words"),
    [
        (NoMoreSeeds.MAXIMUM, "all 5 seeds ran"),
        (NoMoreSeeds.FUTILE, "the seeds that are left would not decide it"),
        (NoMoreSeeds.BUDGET, "the budget is spent"),
        (NoMoreSeeds.DIVERGED, "diverged more often"),
        (NoMoreSeeds.NO_LOSS, "has no loss in any of its seeds"),
        (NoMoreSeeds.BEATEN, "is worse than a third configuration"),
    ],
)
def test_an_open_comparison_says_why_it_gets_no_more_seeds(why, words):
    rival = pair("muon", "soap", OPEN, -0.0012, method=Method.SEQUENTIAL, no_more=why, margin=0.0034, more_seeds=3)
    text = verdict_text(ranking(rival, groups=("muon", "soap")), Situation())
    assert words in text.line(LineLabel.OPEN).text
    assert "equal within 0.0034" in text.line(LineLabel.OPEN).text
    assert ("about 3 more" in text.line(LineLabel.OPEN).text) is (why in (NoMoreSeeds.MAXIMUM, NoMoreSeeds.BUDGET))


def test_one_seed_is_not_evidence():
    alone = replace(
        ranking(pair("muon", "adamw", OPEN, half=None, p=None, p_holm=None, method=Method.NONE, reason="one seed")),
        groups=(group("muon", 3.2719), group("adamw", 3.2816)),
    )
    text = verdict_text(alone, Situation(command="make add SEED=2,3"))
    assert text.state is VerdictState.NOT_EVIDENCE
    assert text.sentence == "No verdict: one seed per configuration is not evidence"
    assert text.line(LineLabel.SO_FAR).text.startswith("lowest muon at 3.2719 nats/token, 0.0097 below adamw")
    assert text.line(LineLabel.NEXT).command == "make add SEED=2,3"


def test_one_configuration_has_nothing_to_be_compared_with():
    text = verdict_text(ranking(groups=("muon",)), Situation())
    assert text.state is VerdictState.NO_COMPARISON
    assert text.sentence == "Only one configuration finished: muon ends at 3.2719 nats/token"


@pytest.mark.parametrize(
    ("counts", "goes_on", "state", "headline"),
    [
        ([("failed", 2)], False, VerdictState.NO_RUN, "No verdict: no run finished"),
        ([("failed", 1), ("running", 1)], True, VerdictState.NO_RUN, "No verdict yet: no run has finished"),
        (
            [("finished", 1)],
            False,
            VerdictState.NO_LOSS,
            "No verdict: no finished run has a loss that can be compared",
        ),
    ],
)
def test_a_matrix_without_a_ranking(counts, goes_on, state, headline):
    text = no_ranking_text(counts, [("oom", 2)], goes_on=goes_on)
    assert (text.state, text.sentence) == (state, headline)
    assert text.line(LineLabel.WHY).text == "2 x oom"
    assert text.is_preliminary is goes_on


@pytest.mark.parametrize(
    ("ratio", "p", "phrase"),
    [
        (1.04, 0.001, "4.0 % more time per step"),
        (0.88, None, "12 % less time per step"),
        (1.11, 0.3, "time per step not distinguishable (+11 %)"),
        (1.004, 0.001, "the same time per step"),
        (1.994, 0.001, "99 % more time per step"),
        (2.04, 0.001, "2.0 times the time per step"),
        (11.38, 0.001, "11 times the time per step"),
    ],
)
def test_a_cost_as_a_phrase(ratio, p, phrase):
    cost = CostDifference(quantity=CostQuantity.STEP_TIME, a="muon", b="adamw", mean_a=ratio, mean_b=1.0, p=p, fewest=2)
    assert cost_phrase(cost) == phrase


def test_the_situation_of_a_verdict_is_reported():
    situation = Situation(unfinished=3, reserve=12, reused=2, unused=1)
    text = verdict_text(ranking(pair("muon", "adamw", BETTER), diverged={"adamw": 1, "muon": 0}), situation)
    assert text.mark == "Decided, preliminary"
    assert text.line(LineLabel.RUNS).text == (
        "3 runs have not ended: the verdict may change; 12 runs in reserve, which the verdict does not need"
    )
    notes = [line.text for line in text.lines if line.label is LineLabel.NOTE]
    assert notes[0].startswith("includes 2 reused runs")
    assert notes[1] == "1 result is not used: no round of adaptive seeds needed it"
    assert text.line(LineLabel.DIVERGED).text.startswith("adamw in 1 of 2 runs")


def test_a_p_value_never_hides_its_side_of_the_level():
    assert p_text(0.0496) == "p = 0.0496"
    assert p_text(0.0504) == "p = 0.0504"
    assert p_text(0.05) == "p = 0.050"


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((3.2719, 3.27192), "lowest muon at 3.2719 nats/token, less than 0.0001 below adamw;"),
        ((3.2719, 3.2719), "lowest muon at 3.2719 nats/token, the same as adamw;"),
    ],
)
def test_a_difference_that_rounds_to_0_is_not_printed_as_0(losses, words):
    untested = pair("muon", "adamw", OPEN, -2e-5, half=None, p=None, p_holm=None, method=Method.NONE, reason="one seed")
    alone = replace(ranking(untested), groups=(group("muon", losses[0]), group("adamw", losses[1])))
    assert verdict_text(alone, Situation()).line(LineLabel.SO_FAR).text.startswith(words)
    assert plain(open_parts(untested, "nats/token")) == "less than 0.0001 nats/token apart, one seed"
