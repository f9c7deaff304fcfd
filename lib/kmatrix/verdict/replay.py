"""Replay the rounds of adaptive seeds: which runs a verdict still wants, from the losses that exist.

Nothing is stored about rounds. A process that was killed, continued or given the losses of another matrix computes the
same rounds from the same losses.
"""

from __future__ import annotations

from collections.abc import Mapping

from kmatrix.verdict.family import FamilyVerdict, Losses, PairOutcome, Replay, Rules
from kmatrix.verdict.pairs import verdict_on


def replay(losses: Losses, rules: Rules) -> Replay:
    """Return the verdict of a process that looks after each round, and the runs that it wants now.

    Each configuration gets seeds_min seeds, then one more wherever the comparison with the reference is open. In each
    round only the losses count that the process would have by then: other losses (of reused runs, of seeds that were
    added) wait, so they cannot change a verdict.
    Raises ValueError without a configuration or if the baseline is unknown.
    """
    seeds = {name: min(max(rules.seeds_min, 1), len(rules.seeds)) for name in losses}
    rounds: dict[int, None] = {}
    while True:
        asked = {name: rules.seeds[:count] for name, count in seeds.items()}
        known = {name: {seed: losses[name][seed] for seed in asked[name] if seed in losses[name]} for name in losses}
        verdict = verdict_on(known, rules)
        missing = tuple((name, seed) for name in losses for seed in asked[name] if seed not in known[name])
        more: set[str] = set()
        if not missing:
            rounds[max(seeds.values())] = None
            more = _next_round(verdict, seeds)
        if not more:
            unused = _losses(losses) - _losses(known)
            return Replay(verdict=verdict, wanted=missing, rounds=tuple(rounds), asked=asked, unused=unused)
        for name in more:
            seeds[name] += 1


def _next_round(verdict: FamilyVerdict, seeds: Mapping[str, int]) -> set[str]:
    """Return the configurations that get one more seed: the side of an open pair that has fewer, or both."""
    more = set()
    for pair in verdict.against_reference:
        if pair.outcome is PairOutcome.OPEN and pair.no_more is None:
            fewer = min(seeds[pair.a], seeds[pair.b])
            # Of a pair that has all seeds, no_more is NoMoreSeeds.MAXIMUM.
            more |= {side for side in (pair.a, pair.b) if seeds[side] == fewer < len(verdict.rules.seeds)}
    return more


def _losses(losses: Losses) -> int:
    """Return the number of runs that ended with a loss, finite or not."""
    return sum(loss is not None for known in losses.values() for loss in known.values())
