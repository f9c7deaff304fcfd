"""Replay the rounds of adaptive seeds: which runs a verdict still wants, from the losses that exist.

Nothing is stored about rounds. A process that was killed, continued or given the losses of another matrix computes the
same rounds from the same losses.
"""

from __future__ import annotations

from collections.abc import Mapping

from kmatrix.verdict.adaptive import Decision, decided, described
from kmatrix.verdict.family import Losses, PairOutcome, Replay, Rules


def replay(losses: Losses, rules: Rules) -> Replay:
    """Return the verdict of a process that looks after each round, and the runs that it wants now.

    Each configuration gets seeds_min seeds, then one more wherever the comparison with the reference is open. In each
    round only the losses count that the process would have by then: other losses (of reused runs, of seeds that were
    added, from a time when the maximum was higher) wait, so they cannot change a verdict.
    Raises ValueError without a configuration or if the baseline is unknown.
    """
    seeds = {name: min(max(rules.seeds_min, 1), len(rules.seeds)) for name in losses}
    rounds: list[int] = []
    while True:
        known = {name: _first(losses[name], rules, count) for name, count in seeds.items()}
        decision = decided(known, rules)
        missing = {
            (name, seed) for name, count in seeds.items() for seed in rules.seeds[:count] if seed not in losses[name]
        }
        if not missing:
            rounds.append(max(seeds.values()))
        more = set() if missing else _next_round(decision, seeds)
        if not more:
            return Replay(
                verdict=described(decision),
                wanted=frozenset(missing),
                rounds=tuple(dict.fromkeys(rounds)),
                asked={name: rules.seeds[:count] for name, count in seeds.items()},
                unused=_losses(losses) - _losses(known),
            )
        for name in more:
            seeds[name] += 1


def _first(known: Mapping[int, float | None], rules: Rules, count: int) -> dict[int, float | None]:
    """Return the outcomes of the first seeds of one configuration, as far as they are over."""
    return {seed: known[seed] for seed in rules.seeds[:count] if seed in known}


def _next_round(decision: Decision, seeds: Mapping[str, int]) -> set[str]:
    """Return the configurations that get one more seed: the side of an open pair that has fewer, or both.

    A pair of which both have all seeds is not asked: it has NoMoreSeeds.MAXIMUM.
    """
    reference, more = decision.reference, set()
    for name in seeds:
        if name == reference:
            continue
        pair = decision.pair(name)
        if decision.outcomes[pair] is PairOutcome.OPEN and decision.no_more[pair] is None:
            fewer = min(seeds[name], seeds[reference])
            more |= {side for side in pair if seeds[side] == fewer}
    return more


def _losses(losses: Losses) -> int:
    """Return the number of runs that ended with a loss, finite or not."""
    return sum(loss is not None for known in losses.values() for loss in known.values())
