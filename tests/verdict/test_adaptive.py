"""Verdicts with adaptive seeds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kmatrix.verdict.adaptive import adaptive_verdict
from kmatrix.verdict.family import Method, NoMoreSeeds, PairOutcome, Rules

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text(encoding="utf-8"))
TEN = Rules(seeds=tuple(range(1, 11)))


def by_seed(*losses):
    return dict(enumerate(losses, start=1))


@pytest.mark.parametrize("vector", VECTORS["decisions"], ids=lambda v: f"{v['baseline']}-{v['min_difference']}")
def test_verdicts_are_those_of_the_vectors(vector):
    losses = {
        name: by_seed(*(math.inf if loss == "diverged" else loss for loss in values))
        for name, values in vector["losses"].items()
    }
    rules = Rules(seeds=TEN.seeds, baseline=vector["baseline"], min_difference=vector["min_difference"])
    found = adaptive_verdict(losses, rules)
    assert found.reference == vector["reference"]
    pairs = {pair.b: pair for pair in found.against_reference}
    assert pairs.keys() == {expected["configuration"] for expected in vector["verdicts"]}
    # The vectors are about the other configuration, a verdict is about the reference.
    opposite = {"better": "worse", "worse": "better", "equivalent": "equivalent", "open": "open"}
    for expected in vector["verdicts"]:
        pair = pairs[expected["configuration"]]
        assert pair.outcome == opposite[expected["outcome"]]
        assert -pair.difference == pytest.approx(expected["difference"], rel=1e-12)
        assert (-pair.interval.high, -pair.interval.low) == pytest.approx(
            (expected["low"], expected["high"]), rel=1e-12
        )
        assert pair.p_holm == pytest.approx(expected["p"], rel=1e-12)
        assert pair.margin == pytest.approx(expected["margin"], rel=1e-12)
        assert (len(pair.seeds), pair.more_seeds) == (expected["n"], expected["more_seeds"])
        assert pair.diverged == tuple(reversed(expected["diverged"]))
        assert (pair.outcome is not PairOutcome.OPEN or pair.no_more is not None) is expected["finished"]


@pytest.mark.parametrize("key", ["sequential", "sequential_equivalence"])
def test_each_look_is_that_of_the_vectors(key):
    vector = VECTORS[key]
    rules = Rules(seeds=TEN.seeds, min_difference=vector.get("min_difference"))
    for look in vector["looks"]:
        n = look["n"]
        losses = {"a": by_seed(*vector["differences"][:n]), "b": by_seed(*[0.0] * n)}
        (pair,) = adaptive_verdict(losses, rules).pairs
        assert (pair.a, pair.method, len(pair.looks)) == ("a", Method.SEQUENTIAL, n - 2)
        assert pair.difference == pytest.approx(look["mean"], rel=1e-12)
        assert pair.deviation == pytest.approx(look["sd"], rel=1e-12)
        assert pair.p == pytest.approx(look["sequential_p_two_sided"], rel=1e-12)
        assert (pair.interval.low, pair.interval.high) == pytest.approx(tuple(look["repeated_interval_95"]), rel=1e-12)
        if "sequential_p_equivalence" in look:
            equivalent = look["sequential_p_equivalence"] <= 0.05
            assert (pair.outcome is PairOutcome.EQUIVALENT) is equivalent
            # A margin is reached exactly where the test says "equivalent", unless an earlier look did.
            assert equivalent or pair.margin > 0.004


def test_a_baseline_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="baseline 'adamw'"):
        adaptive_verdict({"muon": {}}, Rules(seeds=(1, 2, 3), baseline="adamw"))


def test_a_configuration_without_a_loss_in_its_first_seeds_gets_no_other():
    losses = {"a": by_seed(3.1, 3.2, 3.3), "b": by_seed(math.nan, math.inf, 1e200), "c": by_seed(None, None, None)}
    found = adaptive_verdict(losses, TEN)
    assert found.means == {"a": pytest.approx(3.2), "b": None, "c": None}
    assert found.diverged == {"a": 0, "b": 3, "c": 0}
    assert {pair.no_more for pair in found.pairs} == {NoMoreSeeds.NO_LOSS}
