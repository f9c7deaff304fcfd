"""Rank the configurations of a family: their means, the verdict on them, what decides it, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from kmatrix.records.decode import replaced
from kmatrix.records.runs import RunNumbers, Status
from kmatrix.report.results import AdaptiveSeeds, Configuration, Cost, Ranking, Run
from kmatrix.stats import mean, mean_interval, sample_deviation
from kmatrix.status.wanted import Family, SeedEnd
from kmatrix.text import make_command
from kmatrix.verdict.family import Pair, PairOutcome, Replay, Rules, State
from kmatrix.verdict.pairs import tested, verdict_on

LOSS, BITS = "final_val_loss", "final_bits_per_byte"
UNITS = {LOSS: "nats/token", BITS: "bits/byte"}
# Numbers of a run that say what or how much it trained, and its losses: the rest is what it takes, or what it reaches.
NOT_AMOUNTS = ("attempt", "ended", "step", "tokens", "best_val_step", "params", "world_size", "initial_val_loss", LOSS)
MORE_AMOUNTS = ("joules", "joules_per_token", "dollars")  # of a run, besides the numbers of its trainer
COSTS = ("step_ms", "peak_memory_mib", "joules_per_token")
MORE_SEEDS = 2  # per configuration, for a test of configurations with one seed
MOST_PROPOSED = 10  # seeds per configuration; a difference that needs more is small
# What ranked runs should not differ in besides their axes, and what a difference means.
DIFFERENCES = (
    ("tokens", "tokens", "a lower loss may result from more training tokens"),
    ("model", "model", "a larger model costs more per token"),
    ("params", "parameters", "a larger model has a lower loss and costs more per token"),
)
SAMPLED = "validation sequences differ between tokenizers (same text, other parts of it): a larger EVAL_SAMPLES helps"
ENDED = (Status.FAILED, Status.STOPPED, Status.SKIPPED)  # without a result


def configurations_of(family: Family, runs: Mapping[str, Run], replay: Replay | None) -> list[Configuration]:
    """Return the configurations of a family. runs: of the matrix, by name. replay: of adaptive seeds."""
    members: dict[str, list[tuple[int, Run]]] = {name: [] for name in family.configurations}
    for (name, seed), run in family.runs.items():
        members[name].append((seed, runs[run]))
    asked = replay.asked if replay else {}
    return [_configuration(family, name, each, asked.get(name)) for name, each in members.items()]


def _configuration(
    family: Family, name: str, members: Sequence[tuple[int, Run]], asked: Collection[int] | None
) -> Configuration:
    """Return a configuration. asked: its seeds that a round of adaptive seeds asked for: other results wait."""
    runs, measure = [run for _, run in members], measure_of(family)
    counted = [
        run
        for seed, run in members
        if run.counts and getattr(run, measure) is not None and (asked is None or seed in asked)
    ]
    losses = [getattr(run, measure) for run in counted]
    return Configuration(
        name=name,
        axes=dict(family.configurations[name]),
        data_sha256=runs[0].data_sha256,
        runs=tuple(run.name for run in runs),
        counted=tuple(run.name for run in counted),
        seeds=tuple(run.seed for run in counted if run.seed is not None),
        ends=dict(Counter(word for run in runs if not run.counts and (word := _ending(run)))),
        pending=sum(not run.counts and not run.reserve and not _ending(run) for run in runs),
        mean=mean(losses) if losses else None,
        deviation=sample_deviation(losses),
        interval=mean_interval(losses, family.rules.confidence) if len(set(losses)) > 1 else None,
        amounts={quantity: mean(found) for quantity in _quantities() if (found := _values(counted, quantity))},
    )


def measure_of(family: Family) -> str:
    """Return the field of a run that a family compares."""
    return BITS if family.in_bits else LOSS


def _ending(run: Run) -> str:
    """Return how a run ended that is in no mean, "" if it has not."""
    if run.diverged:
        return "diverged"
    if run.status is Status.FINISHED:
        return "finished without a loss"
    return str(run.status) if run.status in ENDED and not run.reserve else ""


def _quantities() -> list[str]:
    types = RunNumbers.__annotations__
    numbers = [name for name, kind in types.items() if "str" not in kind and name not in NOT_AMOUNTS]
    return [*numbers, *MORE_AMOUNTS]


def _values(runs: Sequence[Run], quantity: str) -> list[float]:
    return [value for run in runs if (value := getattr(run, quantity)) is not None]


def ranking_of(
    family: Family,
    configurations: Sequence[Configuration],
    runs: Mapping[str, Run],
    ends: Mapping[str, SeedEnd],
    replay: Replay | None,
    *,
    spent: bool,
    matrix: Path,
) -> Ranking | None:
    """Return the ranking of a family, None if no run of it is over or its data are unknown.

    configurations: of the family. runs: of the matrix, by name. ends: of the runs that are over. replay: of adaptive
    seeds. spent: the budget of the matrix is spent.
    """
    by_name = {one.name: one for one in configurations}
    over = [one.name for one in configurations if one.mean is not None or one.ends]
    if not over or not (family.data_sha256 or family.in_bits):
        return None
    verdict = verdict_on(family.losses(ends), family.rules) if replay is None else replay.verdict
    if replay is not None and replay.wanted and spent:
        verdict = verdict.without_budget()
    # The leader first: its mean may be over other seeds. By name, too: equal means must not change places.
    ranked = [one for one in configurations if one.mean is not None]
    ranked.sort(key=lambda one: (verdict.has_baseline or one.name != verdict.reference, one.mean, one.name))
    order = tuple(one.name for one in ranked)
    counted = [runs[name] for one in ranked for name in one.counted]
    # Of those that more seeds would decide; more than MOST_PROPOSED are not worth it.
    more_seeds = [more for pair in verdict.still_open if (more := pair.more_seeds or 0) <= MOST_PROPOSED]
    measure, shared = measure_of(family), _shared_seeds(ranked)
    ranking = Ranking(
        measure=measure,
        unit=UNITS[measure],
        data_sha256=family.data_sha256 or None,
        state=verdict.state,
        preliminary=any(one.pending for one in configurations),
        order=order,
        no_result=tuple(name for name in over if name not in order),
        shared_seeds=shared,
        shared_means={one.name: mean(_losses(one, runs, measure, shared)) for one in ranked if shared},
        baseline=verdict.rules.baseline,
        reference=verdict.reference,
        confidence=verdict.rules.confidence,
        min_difference=verdict.rules.min_difference,
        family_size=verdict.size,
        pairs=verdict.pairs,
        main=verdict.main,
        still_open=tuple(pair.b for pair in verdict.still_open),
        costs=tuple(_costs(verdict.main, by_name, runs)),
        seeds_auto=None
        if replay is None
        else AdaptiveSeeds(rounds=replay.rounds, wanted=len(replay.wanted), unused=replay.unused),
        reused=sum(bool(run.reused_from) for run in counted),
        notes=(*differences(counted), *([SAMPLED] if family.in_bits else [])),
        more_seeds=max(more_seeds, default=0),
    )
    return replaced(ranking, command=_command(ranking, [runs[run] for run in family.runs.values()], matrix))


def _losses(one: Configuration, runs: Mapping[str, Run], measure: str, seeds: Collection[int]) -> list[float]:
    return [getattr(run, measure) for name in one.counted if (run := runs[name]).seed in seeds]


def differences(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the properties in which compared runs differ, each with its consequence."""
    several_models = len({run.model for run in runs}) > 1
    for field, name, consequence in DIFFERENCES:
        known = {value for run in runs if (value := getattr(run, field))}
        if len(known) > 1 and not (field == "params" and several_models):
            listed = ", ".join(value if isinstance(value, str) else f"{value:,}" for value in sorted(known))
            yield f"the runs differ in {name} ({listed}): {consequence}"


def _shared_seeds(ranked: Sequence[Configuration]) -> tuple[int, ...]:
    """Return the seeds that all have, () if all have the same: means over different seeds do not subtract."""
    seeds = [set(one.seeds) for one in ranked]
    shared = set.intersection(*seeds) if seeds else set()
    return tuple(sorted(shared)) if any(own != shared for own in seeds) else ()


def _costs(main: Pair | None, known: Mapping[str, Configuration], runs: Mapping[str, Run]) -> Iterator[Cost]:
    """Yield the costs of the better one of the main comparison, relative to the other one."""
    if main is None:
        return
    a, b = (main.b, main.a) if main.outcome is PairOutcome.WORSE else (main.a, main.b)
    for quantity in COSTS:
        of_a, of_b = (_values([runs[run] for run in known[name].counted], quantity) for name in (a, b))
        if not of_a or not of_b or not mean(of_b):  # a multiple of 0 is none
            continue
        # By Welch's test, without common seeds: costs of equal seeds are not paired.
        test = tested((a, b), dict(enumerate(of_a)), dict(enumerate(of_b, len(of_a))), Rules())
        means = mean(of_a), mean(of_b)
        yield Cost(
            quantity=quantity,
            a=a,
            b=b,
            mean_a=means[0],
            mean_b=means[1],
            ratio=means[0] / means[1],
            p=test.p,
        )


def _command(ranking: Ranking, runs: Sequence[Run], matrix: Path) -> str | None:
    """Return the command that runs what would decide what is open, None if there is none worth proposing.

    runs: of the family.
    """
    if any(run.status is Status.RUNNING for run in runs):
        return None  # they run already, or what runs may decide it
    if ranking.seeds_auto.wanted if ranking.seeds_auto else ranking.preliminary:
        return make_command("continue", matrix)  # planned seeds come before further ones
    seeds = {run.seed for run in runs if run.seed is not None}
    more = ranking.more_seeds
    if ranking.state is State.NOT_EVIDENCE and ranking.reference in ranking.order:
        more = MORE_SEEDS  # without a loss of the baseline, more seeds of the others allow no test
    if ranking.seeds_auto or not more or not seeds:  # adaptive seeds have a fixed maximum
        return None
    return make_command("add", matrix, SEED=",".join(str(max(seeds) + place) for place in range(1, more + 1)))


def axis_limit(losses: Sequence[float]) -> float:
    """Return the highest loss on an axis: what is far off does not make all others look equal."""
    ordered = sorted(losses)
    middle = ordered[len(ordered) // 2]
    limit = middle + (8 if len(ordered) > 3 else 20) * max(middle - ordered[0], 1e-9)
    return max(loss for loss in ordered if loss <= limit)


def axis_span(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis of these values, without those that are far off."""
    near = [value for value in values if value <= axis_limit(values)] or [0.0]
    room = 0.05 * (max(near) - min(near)) or 0.001
    return min(near) - room, max(near) + room
