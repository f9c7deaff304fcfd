"""The sentences about verdicts: each state, each outcome of a pair, and the numbers in them."""

from __future__ import annotations

import pytest

from kmatrix.records.decode import replaced
from kmatrix.report.analyse import analyse
from kmatrix.report.render import headlines
from kmatrix.report.results import AdaptiveSeeds, Configuration, Cost, Ranking
from kmatrix.report.wording import cost, p_text
from kmatrix.report.write import summary
from kmatrix.stats import Interval
from kmatrix.verdict.family import FamilyVerdict, Method, NoMoreSeeds, Pair, PairOutcome, Rules, State
from records_factory import FakeRun, make_matrix

BETTER, WORSE, OPEN, EQUIVALENT = PairOutcome.BETTER, PairOutcome.WORSE, PairOutcome.OPEN, PairOutcome.EQUIVALENT


def pair(a, b, outcome, difference=-0.0117, half=0.0031, **fields):
    interval = None if half is None else Interval(low=difference - half, high=difference + half)
    known = {"method": Method.PAIRED, "seeds": (1, 2, 3, 4, 5), "p": 0.001, "p_holm": 0.003, **fields}
    return Pair(a=a, b=b, outcome=outcome, difference=difference, interval=interval, **known)


UNTESTED = {"half": None, "p": None, "p_holm": None, "method": Method.NONE, "reason": "one seed", "seeds": (1,)}


def ranking(*pairs, reference="muon", baseline=None, **fields):
    """Return a ranking of the configurations of these pairs."""
    order = tuple(dict.fromkeys([reference, *(name for one in pairs for name in (one.a, one.b))]))
    means = dict.fromkeys(order, 3.0)
    verdict = FamilyVerdict(rules=Rules(baseline=baseline), reference=reference, means=means, pairs=tuple(pairs))
    known = {
        **{"measure": "final_val_loss", "unit": "nats/token", "data_sha256": "1a2b", "preliminary": False},
        **{"no_result": (), "confidence": 0.95, "min_difference": 0.004, "family_size": len(pairs)},
    }
    still_open = tuple(one.b for one in verdict.still_open)
    return Ranking(
        **known
        | {"state": verdict.state, "order": order, "reference": reference, "baseline": baseline}
        | {"main": verdict.main, "still_open": still_open}
        | fields,
        pairs=pairs,
    )


@pytest.fixture
def results(tmp_path):
    """Return results with these rankings."""
    base = analyse(make_matrix(tmp_path, [FakeRun()]))

    def of(*rankings, **counts):
        names = dict.fromkeys(name for one in rankings for name in (*one.order, *one.no_result))
        configurations = [
            Configuration(
                name=name,
                axes={},
                data_sha256="1a2b",
                runs=("1", "2"),
                counted=("1", "2"),
                seeds=(1, 2),
                ends=dict(counts.get(name, {})),
                pending=0,
                mean=3.2719,
                deviation=0.002,
                interval=None,
                amounts={},
            )
            for name in names
        ]
        number = {name: counts[name] for name in counts if name not in names} or {"finished": 2}
        return replaced(base, rankings=rankings, configurations=tuple(configurations), counts=number)

    return of


def lines_of(results):
    """Return the lines below the headlines, each on one line."""
    text = summary(results).split("Verdict\n-------\n")[1].split("\n\nRuns\n")[0]
    found = []
    for line in text.splitlines()[1:]:
        if line.startswith("  ") and not line.startswith("    "):
            found[-1] += " " + line.strip()
        else:
            found.append(line.strip())
    return found


SEQUENTIAL = {"method": Method.SEQUENTIAL}


@pytest.mark.parametrize(
    ("pairs", "headline"),
    [
        ([pair("muon", "adamw", BETTER)], "muon beats adamw by 0.0117 ± 0.0031 nats/token"),
        (
            [pair("muon", "adamw", BETTER), pair("muon", "sgd", BETTER, -0.5)],
            "muon beats 2 of 2 (closest: adamw, by 0.0117 ± 0.0031 nats/token)",
        ),
        (
            [pair("muon", "adamw", BETTER), pair("muon", "soap", OPEN, -0.001)],
            "muon beats 1 of 2: adamw by 0.0117 ± 0.0031 nats/token; not distinguishable from it: soap",
        ),
        (
            [pair("muon", "adamw", BETTER), pair("muon", "soap", OPEN, -0.001, **SEQUENTIAL)],
            "muon beats 1 of 2: adamw by 0.0117 ± 0.0031 nats/token; not yet distinguishable from it: soap",
        ),
        ([pair("muon", "adamw", OPEN, -0.001)], "No winner: muon leads; not distinguishable from it: adamw"),
        (
            [pair("muon", "adamw", OPEN, -0.001, **SEQUENTIAL)],
            "No winner yet: muon leads; not yet distinguishable from it: adamw",
        ),
        (
            [pair("muon", "adamw", EQUIVALENT, -0.001)],
            "No winner: muon has the lowest mean; equivalent to it within 0.004 nats/token: adamw",
        ),
        (
            [pair("muon", "adamw", BETTER), pair("muon", "soap", EQUIVALENT, -0.001)],
            "muon beats 1 of 2: adamw by 0.0117 ± 0.0031 nats/token; equivalent to it within 0.004 nats/token: soap",
        ),
        (
            [pair("muon", name, OPEN, -0.001) for name in ("adamw", "sgd", "soap")],
            "No winner: muon leads; not distinguishable from it: 3 configurations",
        ),
        # soap is worse than adamw: nothing about it is asked.
        (
            [pair("muon", "adamw", OPEN, -0.001), pair("muon", "soap", OPEN, -0.02), pair("adamw", "soap", BETTER)],
            "No winner: muon leads; not distinguishable from it: adamw",
        ),
        ([], "Only one configuration has a result: muon ends at 3.2719 nats/token"),
    ],
)
def test_the_headline_of_each_state(results, pairs, headline):
    assert headlines(results(ranking(*pairs))) == (headline,)


@pytest.mark.parametrize(
    ("pairs", "headline"),
    [
        ([pair("adamw", "muon", WORSE, 0.0117)], "muon beats the baseline adamw by 0.0117 ± 0.0031 nats/token"),
        (
            [pair("adamw", "soap", WORSE, 0.2), pair("adamw", "muon", WORSE, 0.0117), pair("adamw", "sgd", OPEN, 0.1)],
            "2 of 3 beat the baseline adamw (best: soap, by 0.2000 ± 0.0031 nats/token); "
            "not distinguishable from the baseline: sgd",
        ),
        ([pair("adamw", "muon", BETTER)], "muon does not beat the baseline adamw"),
        ([pair("adamw", "muon", BETTER), pair("adamw", "sgd", BETTER)], "None of 2 beats the baseline adamw"),
    ],
)
def test_the_headline_with_a_baseline(results, pairs, headline):
    assert headlines(results(ranking(*pairs, reference="adamw", baseline="adamw"))) == (headline,)


def test_the_evidence_has_interval_method_and_corrected_p(results):
    pairs = pair("muon", "adamw", BETTER), pair("muon", "sgd", BETTER, -0.5), pair("adamw", "sgd", BETTER, -0.5)
    (evidence,) = lines_of(results(ranking(*pairs)))
    assert evidence == (
        "Evidence: muon against adamw: -0.0117 (95 % CI -0.0148 to -0.0086) nats/token, paired by seed, 5 seeds, "
        "p = 0.003 (Holm, 3 comparisons)."
    )
    worse = ranking(pair("adamw", "muon", WORSE, 0.0117), reference="adamw", baseline="adamw")
    (evidence,) = lines_of(results(worse))
    assert evidence.startswith("Evidence: adamw against muon: 0.0117 (95 % CI 0.0086 to 0.0148) nats/token")


def test_an_open_comparison_says_what_could_be_found_and_what_would_decide_it(results):
    rival = pair("muon", "soap", OPEN, -0.0012, 0.0018, p_holm=0.2, detectable=0.0029, more_seeds=2, margin=0.0034)
    found = lines_of(results(ranking(rival, more_seeds=2, command="make add SEED=6,7")))
    assert found[0] == (
        "Open: muon against soap: -0.0012 (95 % CI -0.0030 to 0.0006) nats/token, paired by seed, 5 seeds, p = 0.200; "
        "equal within 0.0034; smallest detectable difference 0.0029 (power 80 %); about 2 more seeds would decide it."
    )
    assert found[1].startswith("Next: about 2 more seeds per configuration")
    assert found[2] == "make add SEED=6,7"


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
def test_an_open_comparison_says_why_it_gets_no_more_seeds(results, why, words):
    rival = pair("muon", "soap", OPEN, -0.0012, **SEQUENTIAL, no_more=why, margin=0.0034)
    (line, *_) = lines_of(results(ranking(rival)))
    assert words in line
    assert "equal within 0.0034" in line


def test_one_seed_is_not_evidence(results):
    alone = results(ranking(pair("muon", "adamw", OPEN, **UNTESTED), command="make add SEED=2,3"))
    assert headlines(
        replaced(alone, configurations=tuple(replaced(one, deviation=None) for one in alone.configurations))
    ) == ("No verdict: one seed per configuration is not evidence",)
    assert lines_of(alone) == ["Next: two more seeds per configuration allow a test.", "make add SEED=2,3"]


@pytest.mark.parametrize(
    ("counts", "headline"),
    [
        ({"failed": 2}, "No verdict: no run finished"),
        ({"failed": 1, "running": 1}, "No verdict yet: no run has finished"),
        ({"finished": 1}, "No verdict: no finished run has a loss that can be compared"),
    ],
)
def test_a_matrix_without_a_ranking(results, counts, headline):
    assert headlines(replaced(results(), counts=counts)) == (headline,)


def test_configurations_without_a_loss_have_no_verdict_but_a_reason(results):
    lost = ranking(state=State.NO_RESULT, order=(), no_result=("adamw",), reference="adamw", main=None)
    assert headlines(results(lost, adamw={"diverged": 2})) == ("No result of adamw (2 of 2 runs diverged)",)


def test_what_limits_a_verdict_is_noted(results):
    one = ranking(
        pair("muon", "adamw", BETTER, spread_ratio=5.2),
        preliminary=True,
        reused=2,
        shared_seeds=(1, 2),
        shared_means={"muon": 3.2, "adamw": 3.3},
        seeds_auto=AdaptiveSeeds(rounds=(3,), wanted=0, unused=1),
        notes=("the runs differ in tokens (1, 2)",),
    )
    found = results(one, adamw={"diverged": 1}, **{"running": 3, "in reserve": 12})
    notes = [line.removeprefix("Note: ") for line in lines_of(found)[1:]]
    assert notes == [
        "adamw: 1 of 2 runs diverged; left out of its mean.",
        "the means are over different seeds; over seeds 1, 2, which all have: muon 3.2000, adamw 3.3000.",
        "the losses of muon vary 5.2 times as much as those of adamw: few seeds can miss bad runs.",
        "includes 2 reused runs: if they were the reason for this comparison, it does not count as evidence.",
        "1 result not used: no round of adaptive seeds asked for it.",
        "the runs differ in tokens (1, 2).",
    ]
    assert "Decided, preliminary" not in summary(found)
    assert summary(found).count("(preliminary)") == 1


@pytest.mark.parametrize(
    ("ratio", "p", "phrase"),
    [
        (1.04, 0.001, "4.0 % more time per step"),
        (0.88, None, "12 % less time per step"),
        (1.11, 0.3, "time per step not distinguishable (+11 %)"),
        (1.004, 0.001, "the same time per step"),
        (1.994, 0.001, "99 % more time per step"),
    ],
)
def test_a_cost_as_a_phrase(ratio, p, phrase):
    about = {"quantity": "step_ms", "a": "muon", "b": "adamw", "mean_a": ratio, "mean_b": 1.0}
    assert (
        cost(
            Cost(
                **about,
                ratio=ratio,
                p=p,
            )
        )
        == phrase
    )


def test_a_p_value_never_hides_its_side_of_the_level():
    assert p_text(0.0496) == "p = 0.0496"
    assert p_text(0.0504) == "p = 0.0504"
    assert p_text(0.05) == "p = 0.050"
    assert p_text(0.0003, 0.0002) == "p = 0.0003"
