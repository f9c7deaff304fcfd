"""Replay successive halving: which configurations train on after each rung, from the losses at the rungs.

All configurations train to the first rung, a step of training. The best of them, by their mean loss there, train to the
next one, and so on; those that are left after the last rung train to their end. Nothing is stored about it: a process
that was killed, continued or given the runs of another matrix finds the same survivors from the same losses.
Source of the procedure: Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter
optimization", AISTATS 2016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kmatrix.verdict.family import Losses
from kmatrix.verdict.halving import Rung


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedAtRungs:
    """What is known about one seed of a configuration. Losses in nats/token; infinity: it diverged."""

    losses: Mapping[int, float] = field(default_factory=dict)  # step of a rung that it reached -> loss there
    over: bool = False  # no further training: it finished, failed or was skipped
    final: float | None = None  # its loss if it is over; None: it has none
    final_step: int | None = None  # of its final loss

    def at(self, step: int) -> float | None:
        """Return the loss that counts at a rung; None if there is none, because it failed before, or was skipped."""
        if step in self.losses:
            return self.losses[step]
        # Ended early, by its own rule: its final loss stands. One that was measured later must not.
        ended_before = self.final_step is not None and self.final_step <= step
        return self.final if ended_before or self.final == math.inf else None

    def has_passed(self, step: int) -> bool:
        """Return whether it trains no further to this rung."""
        return self.over or step in self.losses


# configuration -> seed -> what is known about it
AtRungs = Mapping[str, Mapping[int, SeedAtRungs]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedRung:
    """A rung that all its configurations have reached, and the best of them train on."""

    step: int
    losses: Mapping[str, float | None]  # configuration -> mean over its seeds; infinity: diverged; None: failed
    kept: tuple[str, ...]  # the best first


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvingReplay:
    """What a process that looks after each rung has decided by now."""

    rungs: tuple[DecidedRung, ...]  # that all their configurations have passed
    alive: tuple[str, ...]  # configurations that no rung has ended
    waits_at: int | None  # the next rung, that not all of these have passed; None after the last rung
    # (configuration, seed) -> the step to train it to now, None: to its end. Empty: halving is over.
    wanted: Mapping[tuple[str, int], int | None]

    @property
    def ended_at(self) -> dict[str, DecidedRung]:
        """Configuration -> the rung that ended it."""
        return {name: rung for rung in self.rungs for name in rung.losses if name not in rung.kept}


def survivors(losses: Mapping[str, float | None], keep: int) -> tuple[str, ...]:
    """Return the best configurations of a rung, at most `keep`, the best first; equal ones in the order of names.

    losses: mean at the rung; not finite, or None: it diverged or failed, and never survives.
    """
    known = {name: loss for name, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return tuple(sorted(known, key=lambda name: (known[name], name))[:keep])


def replay_halving(runs: AtRungs, rungs: Sequence[Rung]) -> HalvingReplay:
    """Return the decisions at the rungs so far, and the runs that are wanted now."""
    alive = tuple(runs)
    decided: list[DecidedRung] = []
    for step, keep in ((rung.step, rung.keep) for rung in rungs):
        coming = [(name, seed) for name in alive for seed, run in runs[name].items() if not run.has_passed(step)]
        if coming:
            return HalvingReplay(rungs=tuple(decided), alive=alive, waits_at=step, wanted=dict.fromkeys(coming, step))
        losses = {name: _mean([run.at(step) for run in runs[name].values()]) for name in alive}
        rung = DecidedRung(step=step, losses=losses, kept=survivors(losses, keep))
        decided.append(rung)
        alive = rung.kept
    wanted = {(name, seed): None for name in alive for seed, run in runs[name].items() if not run.over}
    return HalvingReplay(rungs=tuple(decided), alive=alive, waits_at=None, wanted=wanted)


def _mean(losses: Sequence[float | None]) -> float | None:
    """Return the mean without failed seeds; infinity if a seed diverged, None if all failed."""
    known = [loss for loss in losses if loss is not None]
    return math.fsum(known) / len(known) if known else None


def of_survivors(losses: Losses, replay: HalvingReplay) -> Losses:
    """Return the losses of the configurations that no rung has ended: those that a verdict compares."""
    return {name: losses[name] for name in replay.alive}
