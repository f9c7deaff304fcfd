"""Analyse a matrix: its runs -> Results. Nothing but files is read, and nothing is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter

from kmatrix.errors import RecordError
from kmatrix.records.decode import replaced
from kmatrix.records.matrix import run_files
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.report.facts import facts_of
from kmatrix.report.ranking import configurations_of, ranking_of
from kmatrix.report.read import read_runs
from kmatrix.report.render import headlines
from kmatrix.report.results import Configuration, Ranking, Results, Run, ScalingRow
from kmatrix.report.settings import differing, tuning_warnings
from kmatrix.report.target import reached, target_loss, target_of
from kmatrix.report.warnings import run_warnings
from kmatrix.status.cost import spent, total_dollars
from kmatrix.status.fold import overall
from kmatrix.status.look import Look, look
from kmatrix.status.wanted import GPUS_AXIS, adaptive_seeds, end_of, families_of_plan, has_adaptive_seeds
from kmatrix.text import assignment, first_names


def analyse(matrix: MatrixDir) -> Results:
    """Return the results of a matrix, finished or not, from its files alone.

    Raises RecordError if it has no run, or its matrix.json or requests.json is missing or damaged.
    """
    seen = look(matrix.path)
    if not seen.plan.runs:
        raise RecordError(f"{matrix.path} has no run", hint="pass TARGET=<matrix directory>, or run `make test-matrix`")
    return results_of(matrix, seen, read_runs(seen))


def results_of(matrix: MatrixDir, seen: Look, runs: Sequence[Run]) -> Results:
    """Return the results of a matrix. runs: all of its runs, in its order."""
    plan, families = seen.plan, families_of_plan(seen.plan)
    ends = {name: end for name, state in seen.states.items() if (end := end_of(seen.files[name], state)) is not None}
    seeds = adaptive_seeds(families, ends) if has_adaptive_seeds(plan.verdict) else None
    reserve = seeds.reserve({run.name: run.status for run in runs}) if seeds else frozenset()
    names = {run: name for family in families for (name, _), run in family.runs.items()}
    runs = [replaced(run, configuration=names[run.name], reserve=run.name in reserve) for run in runs]
    by_name = {run.name: run for run in runs}
    is_running = any(run.status is Status.RUNNING for run in runs)
    is_spent = plan.verdict.seeds_auto and not is_running and bool(spent(seen))
    known: dict[str, Configuration] = {}
    rankings: list[Ranking] = []
    for family, replay in zip(families, seeds.replays if seeds else [None] * len(families), strict=True):
        configurations = configurations_of(family, by_name, replay)
        known |= {one.name: one for one in configurations}
        ranking = ranking_of(family, configurations, by_name, ends, replay, spent=is_spent, matrix=matrix.path)
        rankings += [ranking] if ranking else []
    # Those of rankings first, in their order.
    known = {name: known[name] for one in rankings for name in (*one.order, *one.no_result)} | known
    loss, of = target_loss(plan.verdict.target_loss, rankings, known)
    if loss is not None:
        runs = [replaced(run, reached=reached(run, loss)) for run in runs]
        by_name = {run.name: run for run in runs}
    files = run_files(matrix.path)
    states = [state for name, state in seen.states.items() if name not in reserve]
    results = Results(
        name=plan.name or matrix.name,
        status=Status.PLANNED if all(one.status is Status.PLANNED for one in states) else overall(states),
        created=plan.created,
        command=plan.command,
        overrides=tuple(assignment(*word.split("=", 1)) for word in plan.overrides),
        equal=plan.equal,
        axes=plan.axes,
        cuts=plan.excluded,
        counts=_counts(runs),
        facts=facts_of(plan, runs),
        dollars=total_dollars(run.dollars for run in runs),
        rankings=tuple(rankings),
        configurations=tuple(known.values()),
        target=None if loss is None else target_of(loss, families, known, by_name, ends, of=of),
        scaling=tuple(_scaling(known, by_name)),
        differing=differing(list(known.values()), files),
        warnings=(*_others(matrix, files), *run_warnings(runs), *tuning_warnings(files)),
        provenance=plan.provenance,
        runs=tuple(runs),
    )
    return replaced(results, verdict=headlines(results))


def _others(matrix: MatrixDir, runs: Collection[str]) -> Iterator[str]:
    """Yield a warning about folders of runs that are not runs of a matrix, such as copies."""
    folders = sorted(path.parent.name for path in matrix.path.glob("*/run.json"))
    if others := [name for name in folders if name not in runs]:
        yield f"not in matrix.json, and in no number: {first_names(others)}"


def _counts(runs: Sequence[Run]) -> dict[str, int]:
    """Return status -> runs, as a reader sees them: runs in reserve are not planned ones."""
    needed = Counter(run.status for run in runs if not run.reserve)
    found = {str(status): needed[status] for status in Status if needed[status]}
    reserve = sum(run.reserve for run in runs)
    return found | ({"in reserve": reserve} if reserve else {})


def _scaling(configurations: Mapping[str, Configuration], runs: Mapping[str, Run]) -> Iterator[ScalingRow]:
    """Yield the throughput of the configurations that finished on at least two numbers of ranks."""
    families: dict[object, list[tuple[int, float, Configuration, Run]]] = {}
    for one in configurations.values():
        first, speed = runs[one.runs[0]], one.amounts.get("tokens_per_second")
        if speed and first.world_size:
            rest = tuple(item for item in one.axes.items() if item[0] != GPUS_AXIS)
            families.setdefault((rest, one.data_sha256, first.device), []).append((first.world_size, speed, one, first))
    for family in families.values():
        family.sort(key=itemgetter(0))
        fewest, base, *_ = family[0]
        for size, speed, one, first in family if fewest < family[-1][0] else ():
            yield ScalingRow(
                configuration=one.name,
                world_size=size,
                tokens_per_second=speed,
                speedup=speed / base,
                efficiency=speed / base / (size / fewest),
                global_batch=first.global_batch,
            )
