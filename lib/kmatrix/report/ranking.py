"""Group the runs of a matrix into configurations, and rank them: families of comparable losses and their verdicts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kmatrix.records.decode import replaced
from kmatrix.records.matrix import Plan
from kmatrix.records.runs import Status, VerdictRules
from kmatrix.report.numbers import (
    BITS,
    GPUS_AXIS,
    CostDifference,
    CostQuantity,
    GroupNumbers,
    Ranking,
    RunNumbers,
)
from kmatrix.stats import LEVEL, mean
from kmatrix.status.wanted import (
    PLAIN_AXES,
    SEED_AXIS,
    Family,
    adaptive_seeds,
    families_of_plan,
    has_adaptive_seeds,
)
from kmatrix.text import plural
from kmatrix.verdict.family import FamilyVerdict, NoMoreSeeds, PairOutcome, Replay, Rules
from kmatrix.verdict.family import Pair as PairVerdict
from kmatrix.verdict.pairs import tested, verdict_on

# Losses are comparable only if these attributes of RunNumbers are equal.
MEASURED_ON = {"data_sha256": "data", "block_size": "context length", "eval_samples": "validation sequences"}

# Attributes of RunNumbers in which ranked runs should not differ, their names, and what a difference means.
DIFFERENCES = (
    ("tokens", "tokens", "a lower loss may result from more training tokens"),
    ("model", "model", "a larger model costs more per token"),
    ("block_size", MEASURED_ON["block_size"], "the losses are not comparable"),
    ("eval_samples", MEASURED_ON["eval_samples"], "the losses are not comparable"),
)
SAMPLED = "validation sequences differ between tokenizers (same text, other parts of it): a larger EVAL_SAMPLES helps"
SHORT_HASH = 8  # characters of a hash in texts


def differences(runs: Sequence[RunNumbers]) -> Iterable[str]:
    """Yield the properties in which compared runs differ, each with its consequence."""
    for attribute, name, consequence in DIFFERENCES:
        values = {getattr(run, attribute) for run in runs}
        known: list[Any] = sorted(value for value in values if value is not None)
        if len(known) > 1:
            listed = ", ".join(value if isinstance(value, str) else f"{value:,}" for value in known)
            yield f"the runs differ in {name} ({listed}): {consequence}"


def measured_differently(base: Sequence[RunNumbers], new: Sequence[RunNumbers]) -> str:
    """Return the name of the first property that makes the losses of two sets of runs incomparable, or ""."""
    for attribute, name in MEASURED_ON.items():
        known = [{getattr(run, attribute) for run in runs} for runs in (base, new)]
        if base and new and known[0] != known[1]:
            return name
    return ""


def ranks(number: int, device: str) -> str:
    """Return "4 GPUs", or "2 ranks" on the CPU."""
    return plural(number, "rank" if device == "cpu" else "GPU")


def short(sha256: str | None) -> str:
    """Return the first characters of a hash."""
    return sha256[:SHORT_HASH] if sha256 else "unknown"


def groups_of(runs: Sequence[RunNumbers], level: float = LEVEL) -> tuple[GroupNumbers, ...]:
    """Return the groups of runs that differ only in their seed. Runs on different data are never in one group.

    level: of the intervals of their means.
    """
    known: dict[object, set[str]] = {}
    for run in runs:
        if run.data_sha256:
            known.setdefault(_group_key(run), set()).add(run.data_sha256)
    members: dict[tuple[object, str | None], list[RunNumbers]] = {}
    for run in runs:
        data = run.data_sha256
        if data is None and not run.counts and len(hashes := known.get(_group_key(run), set())) == 1:
            (data,) = hashes  # a pending run: it will use the data of the other seeds
        members.setdefault((_group_key(run), data), []).append(run)
    names = _group_names([group[0] for group in members.values()], [data for _, data in members], runs)
    return tuple(
        GroupNumbers(
            name=name,
            axes={label: value for label, value in group[0].axes.items() if label != SEED_AXIS},
            data_sha256=data,
            runs=tuple(group),
            level=level,
        )
        for name, ((_, data), group) in zip(names, members.items(), strict=True)
    )


def _group_key(run: RunNumbers) -> object:
    """Return the settings shared by all runs in a group. A run without axes forms its own group."""
    return tuple(item for item in run.axes.items() if item[0] != SEED_AXIS) or run.name


def _group_names(firsts: Sequence[RunNumbers], data: Sequence[str | None], runs: Sequence[RunNumbers]) -> list[str]:
    """Return a name for each group; groups that differ only in their data get its hash."""
    devices = {run.device for run in runs if run.device}
    device = devices.pop() if len(devices) == 1 else ""  # for pending runs, whose device is unknown
    varying = varying_axes(runs)
    names = [", ".join([configuration_name(run, varying), *_ranks_of(run, device)]) for run in firsts]
    return [
        name if names.count(name) == 1 else f"{name}, data {short(sha256)}"
        for name, sha256 in zip(names, data, strict=True)
    ]


def varying_axes(runs: Sequence[RunNumbers]) -> set[str]:
    """Return the axes with several values."""
    labels = {label for run in runs for label in run.axes}
    return {label for label in labels if len({run.axes.get(label) for run in runs}) > 1}


def configuration_name(run: RunNumbers, varying: Iterable[str]) -> str:
    """Return the display name of a configuration: optimizer and varying axes, without seed and number of GPUs."""
    parts = [run.optimizer] if run.optimizer else []
    for label, value in run.axes.items():
        if label in varying and label not in ("optimizer", SEED_AXIS, GPUS_AXIS):
            parts.append(value if label in PLAIN_AXES else f"{label} {value}")
    return ", ".join(parts) or run.name


def _ranks_of(run: RunNumbers, device: str) -> list[str]:
    return [ranks(run.world_size, run.device or device)] if run.world_size else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Rankings:
    """The rankings of a matrix, and what adaptive seeds leave for later."""

    rankings: tuple[Ranking, ...]
    reserve: frozenset[str] = frozenset()  # runs that the verdict does not want (now)


def rankings_of(
    runs: Sequence[RunNumbers],
    groups: Sequence[GroupNumbers],
    plan: Plan,
    *,
    spent: bool = False,
) -> Rankings:
    """Return one ranking per family of comparable losses, then one by bits per byte per text with several tokenizers.

    Families without a loss, or whose data is unknown, are left out.
    spent: the budget of the matrix is spent.
    """
    group_of = {run.name: group for group in groups for run in group.runs}
    rules, families = plan.verdict, families_of_plan(plan)
    ends = {run.name: run.end for run in runs if run.end is not None}
    replays: Sequence[Replay | None] = [None] * len(families)
    reserve: frozenset[str] = frozenset()
    if has_adaptive_seeds(rules):
        seeds = adaptive_seeds(families, ends)
        replays, reserve = seeds.replays, seeds.reserve({run.name: run.status for run in runs})
    found = []
    for family, replay in zip(families, replays, strict=True):
        names = _group_of_each(family, group_of)
        shown = {name: group.name for name, group in names.items()}
        verdict = verdict_on(family.losses(ends), family.rules) if replay is None else replay.verdict
        if replay is not None and replay.wanted and spent:
            verdict = without_budget(verdict)
        if replay is not None:
            names = {name: _asked_for(group, replay.asked[name]) for name, group in names.items()}
        members = list({names[name].name: names[name] for name in family.configurations}.values())
        ranked = [group for group in members if group.losses]
        if not ranked or not members[0].data_sha256:
            continue
        ranking = _ranking(members[0].data_sha256, members, _renamed(verdict, shown), reserve)
        found.append(replace(ranking, replay=replay))
    return Rankings(rankings=(*found, *_rankings_by_text(groups, rules)), reserve=reserve)


def without_budget(verdict: FamilyVerdict) -> FamilyVerdict:
    """Return the verdict of a matrix whose budget is spent: open comparisons that would get a seed get none."""

    def pair_without(pair: PairVerdict) -> PairVerdict:
        ended = pair.outcome is PairOutcome.OPEN and pair.no_more is None
        return replaced(pair, no_more=NoMoreSeeds.BUDGET) if ended else pair

    return replaced(verdict, pairs=tuple(pair_without(pair) for pair in verdict.pairs))


def _group_of_each(family: Family, group_of: Mapping[str, GroupNumbers]) -> dict[str, GroupNumbers]:
    """Return the group of each configuration of a family, with its runs in the family alone."""
    own: dict[str, set[str]] = {name: set() for name in family.configurations}
    for (name, _), run in family.runs.items():
        own[name].add(run)
    groups = {name: group_of[next(iter(runs))] for name, runs in own.items()}
    return {
        name: replace(group, runs=tuple(run for run in group.runs if run.name in own[name]))
        for name, group in groups.items()
    }


def _asked_for(group: GroupNumbers, seeds: Collection[int]) -> GroupNumbers:
    """Return a group without the results that no round of adaptive seeds asked for: they are not in the verdict."""
    return replace(group, runs=tuple(run for run in group.runs if run.end is None or run.seed in seeds))


def _renamed(verdict: FamilyVerdict, names: Mapping[str, str]) -> FamilyVerdict:
    """Return a verdict with the names that the report gives to its configurations."""
    baseline = verdict.rules.baseline
    return FamilyVerdict(
        rules=replaced(verdict.rules, baseline=None if baseline is None else names[baseline]),
        reference=names[verdict.reference],
        means={names[name]: value for name, value in verdict.means.items()},
        pairs=tuple(replaced(pair, a=names[pair.a], b=names[pair.b]) for pair in verdict.pairs),
        diverged={names[name]: number for name, number in verdict.diverged.items()},
    )


def _rankings_by_text(groups: Sequence[GroupNumbers], rules: VerdictRules) -> Iterable[Ranking]:
    """Yield one ranking by bits per byte for each text that runs read with several tokenizers."""
    by_text: dict[str, list[GroupNumbers]] = {}
    for group in groups:
        # Losses per token are not comparable between tokenizers, bits per byte of the same text are.
        in_bits = replace(group, metric=BITS)
        if in_bits.losses and group.data_sha256 and group.runs[0].text:
            by_text.setdefault(group.runs[0].text, []).append(in_bits)
    for members in by_text.values():
        if len({group.runs[0].tokenizer for group in members}) > 1:
            verdict = _verdict_by_text(members, rules)
            yield replace(_ranking("", members, verdict), metric=BITS, notes=(SAMPLED,))


def _verdict_by_text(members: Sequence[GroupNumbers], rules: VerdictRules) -> FamilyVerdict:
    """Return the verdict on groups by bits per byte. The margin and the baseline are those of losses per token."""
    if not (rules.seeds_auto and rules.seeds):
        losses = {group.name: dict(group.losses) for group in members}
        return verdict_on(losses, Rules(confidence=rules.confidence))
    # The rankings by loss chose the number of seeds, by differences that are here, too: a test of a fixed number would
    # call equal configurations different in 8 % of the matrices. A sequential p holds whenever the seeds end.
    verdict = verdict_on(
        {group.name: _outcomes(group) for group in members},
        Rules(seeds=rules.seeds, seeds_min=rules.seeds_min, confidence=rules.confidence),
    )
    pairs = (
        replaced(pair, no_more=NoMoreSeeds.OTHER_RANKING)
        if pair.outcome is PairOutcome.OPEN and pair.no_more is None
        else pair
        for pair in verdict.pairs
    )
    return replaced(verdict, pairs=tuple(pairs))


def _outcomes(group: GroupNumbers) -> dict[int, float | None]:
    """Return the metric of the seeds that are over, as `kmatrix.verdict.family.Losses` has it."""
    losses = group.losses
    return {
        run.seed: losses.get(run.seed, math.inf if run.diverged else None)
        for run in group.runs
        if run.seed is not None and run.end is not None
    }


def _ranking(
    sha256: str, members: Sequence[GroupNumbers], verdict: FamilyVerdict, reserve: Collection[str] = ()
) -> Ranking:
    # By name, too: equal means must not change places between two reports.
    ordered = sorted((group for group in members if group.losses), key=lambda group: (group.mean, group.name))
    ranking = Ranking(
        data_sha256=sha256,
        groups=tuple(ordered),
        verdict=verdict,
        without_result=tuple(_without_result(members, reserve)),
        notes=tuple(differences([run for group in ordered for run in group.counted])),
    )
    return replace(ranking, costs=tuple(_costs(ranking)))


def _without_result(members: Sequence[GroupNumbers], reserve: Collection[str]) -> Iterator[GroupNumbers]:
    """Yield the configurations of which some runs are over and none has a loss, without their runs in reserve."""
    for group in members:
        if not group.losses and any(run.end is not None or run.status is Status.FAILED for run in group.runs):
            yield replace(group, runs=tuple(run for run in group.runs if run.name not in reserve))


def _costs(ranking: Ranking) -> Iterable[CostDifference]:
    """Yield the costs of the winner of the main comparison, relative to the other one."""
    main, by_name = ranking.main_pair, {group.name: group for group in ranking.groups}
    if main is None or main.a not in by_name or main.b not in by_name:
        return
    winner, other = (main.b, main.a) if main.outcome is PairOutcome.WORSE else (main.a, main.b)
    for quantity in CostQuantity:
        a, b = ([cost for run in by_name[name].counted if (cost := _cost(run, quantity))] for name in (winner, other))
        if a and b:
            yield CostDifference(
                quantity=quantity,
                a=winner,
                b=other,
                mean_a=mean(a),
                mean_b=mean(b),
                p=_welch_p(a, b),
                fewest=min(len(a), len(b)),
            )


def _cost(run: RunNumbers, quantity: CostQuantity) -> float | None:
    match quantity:
        case CostQuantity.STEP_TIME:
            return run.step_ms
        case CostQuantity.MEMORY:
            return run.peak_memory_mib
        case CostQuantity.ENERGY:
            return run.measured_joules_per_token


def _welch_p(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Return the two-sided p of Welch's test, None if there is none: costs of equal seeds are not paired."""
    numbered = dict(enumerate(a)), dict(enumerate(b, start=len(a)))
    return tested(("a", "b"), *numbered, Rules()).p
