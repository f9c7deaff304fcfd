"""Successive halving before the first run: the rungs of each family, and what forbids them or makes them mislead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kmatrix.errors import ConfigError
from kmatrix.matrix.rules import HALVING
from kmatrix.records.jobs.files import LOCAL
from kmatrix.records.train_config import TrainConfig
from kmatrix.text import plural
from kmatrix.verdict.halving import LEAST, Rung, most_steps, rungs

# What shapes the first part of a loss curve other than its end: the name in messages, and the value.
MISLEADING: dict[str, Callable[[TrainConfig], object]] = {
    "optimizer": lambda train: train.optimizer,
    "learning rate schedule": lambda train: (train.schedule, _least_share(train), train.wsd_decay_fraction),
    "warm-up": lambda train: train.warmup_steps,
    "tokens per step": lambda train: train.global_batch * train.block_size,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRungs:
    """The rungs of the configurations of one family."""

    configurations: int
    max_iters: int  # steps of a complete run; 0: not known before the data are prepared
    rungs: tuple[Rung, ...] = ()
    warmup: int = 0  # steps of the longest warm-up, if it has moved the first rung; else 0

    @property
    def text(self) -> str:
        """Return `12 configurations to step 500, 4 to step 1,500, 2 to the end: at most 43 % of all steps`."""
        if not self.max_iters:
            return f"{plural(self.configurations, 'configuration')}: the rungs are known when the data are prepared"
        if not self.rungs:
            return f"{plural(self.configurations, 'configuration')} to the end: too few to halve"
        kept = [self.configurations, *(rung.keep for rung in self.rungs)]
        parts = [f"{number} to step {rung.step:,}" for number, rung in zip(kept[1:], self.rungs[1:], strict=False)]
        first = f"{plural(self.configurations, 'configuration')} to step {self.rungs[0].step:,}"
        if self.warmup:
            first += f" (the warm-up ends at step {self.warmup:,})"
        complete = most_steps(self.max_iters, self.configurations, self.rungs) / self.max_iters
        share = f"at most {100 * complete / self.configurations:.0f} % of all steps"
        # The forecasts of time, energy and cost are those of a complete run.
        runs = f"as many as {complete:.3g} complete runs per seed have"
        return f"{', '.join([first, *parts, f'{kept[-1]} to the end'])}: {share}, {runs}"


def plan_rungs(
    eta: int, families: Sequence[Sequence[TrainConfig]], *, engine: str, by_hand: bool
) -> tuple[PlannedRungs, ...]:
    """Return the rungs of each family. families: the training of each of their configurations.

    engine: that executes the runs.  by_hand: the user starts them.

    Raises ConfigError if the losses at a rung would not be comparable, if there is no rung at all, and for jobs.
    """
    if engine != LOCAL:
        raise ConfigError(
            f"{HALVING}={eta} needs ENGINE=local",
            why=f"the jobs of ENGINE={engine} do not wait for the losses that decide which runs train on",
            hint=f"pass ENGINE=local on a machine with devices, or {HALVING}=0, which trains all runs to their end",
        )
    if by_hand:
        raise ConfigError(
            f"{HALVING}={eta} needs the runner of this machine",
            why="scripts that are started by hand do not wait for the losses that decide which runs train on",
            hint=f"omit RENDER=, or pass {HALVING}=0, which trains all runs to their end",
        )
    found = tuple(_family_rungs(eta, family) for family in families)
    if all(family.max_iters and not family.rungs for family in found):
        most = max(family.configurations for family in found)
        are_few = most < eta or most <= LEAST
        few = f"fewer than {eta}" if most < eta else f"and the best {LEAST} always train to the end"
        raise ConfigError(
            f"{HALVING}={eta} has nothing to halve",
            why=f"{plural(most, 'configuration')} with comparable losses, {few}"
            if are_few
            else "no evaluation between the warm-up and the end",
            hint="pass more configurations" if are_few else "pass a smaller EVAL_INTERVAL",
        )
    return found


def _family_rungs(eta: int, family: Sequence[TrainConfig]) -> PlannedRungs:
    for train in family:
        for name, limit in (("MAX_TIME", train.max_time), ("MAX_COST", train.max_cost)):
            if limit is not None:
                raise ConfigError(
                    f"{HALVING}={eta} conflicts with {name}",
                    why="a run that its budget ends is at another part of its learning rate schedule than the others",
                    hint=f"set the length with MAX_ITERS or MAX_TOKENS, and remove {name}; "
                    "BUDGET_HOURS and BUDGET_DOLLARS limit the whole matrix",
                )
    for symbol, values in (
        ("MAX_ITERS", {train.max_iters for train in family}),
        ("EVAL_INTERVAL", {train.eval_interval for train in family}),
    ):
        if len(values) > 1:
            raise ConfigError(
                f"{HALVING}={eta} needs the same {symbol} in all configurations",
                why=f"they have {', '.join(f'{value:,}' for value in sorted(values))}; "
                "at a rung, all are compared at one step and one part of the schedule",
                hint=f"pass one {symbol}, or a matrix for each",
            )
    one = family[0]
    if not one.max_iters:
        return PlannedRungs(configurations=len(family), max_iters=0)
    warmup = max(train.warmup_steps for train in family)
    known, unmoved = (
        rungs(one.max_iters, len(family), eta, eval_interval=one.eval_interval, warmup=steps) for steps in (warmup, 0)
    )
    moved = known[:1] != unmoved[:1]
    return PlannedRungs(configurations=len(family), max_iters=one.max_iters, rungs=known, warmup=warmup if moved else 0)


def _least_share(train: TrainConfig) -> str:
    """Return the rate at the last step as a share of the peak."""
    return f"{train.min_lr / train.learning_rate:.6g}" if train.learning_rate else ""


def halving_warnings(eta: int, families: Sequence[Sequence[TrainConfig]]) -> list[str]:
    """Return a warning if configurations differ in something that makes early losses mislead."""
    differing = [
        name
        for name, value in MISLEADING.items()
        if any(len({value(train) for train in family}) > 1 for family in families)
    ]
    if not differing:
        return []
    return [
        f"{HALVING}={eta} compares early losses, which mislead if configurations differ in {', '.join(differing)}: "
        "the best one at the end may be dropped"
    ]
