"""The rungs of successive halving."""

from __future__ import annotations


def rungs(max_iters: int, configurations: int, eta: int, eval_interval: int) -> tuple[int, ...]:
    """Return the steps of the rungs, ascending."""
    found = set()
    level = eta
    while level <= configurations:
        found.add(-(-max_iters // (level * eval_interval)) * eval_interval)
        level *= eta
    return tuple(sorted(step for step in found if step < max_iters))
