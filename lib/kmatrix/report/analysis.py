"""Run directories -> the numbers of a matrix: groups, rankings with their evidence, scaling, warnings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.records import LOST, MatrixDir, RunDir, Status
from kmatrix.report.gpu import Work, read_gpu
from kmatrix.report.reading import read_numbers, readable, run_dirs
from kmatrix.report.settings import settings
from kmatrix.report.settings import warnings as settings_warnings
from kmatrix.report.values import (
    BITS,
    GPUS_AXIS,
    SEED_AXIS,
    Comparison,
    GroupNumbers,
    MatrixNumbers,
    Ranking,
    RunNumbers,
    Scaling,
    ScalingRow,
)
from kmatrix.stats import LEVEL, Word, compare, holm, mean

PLAIN_AXES = ("optimizer", "model", "schedule", "dtype", "dataset", "tokenizer")  # named by their value alone
WARMUP_LIMIT = 0.25  # share of a run
SAMPLED = (
    "the same validation text, but each tokenizer's sequences are other parts of it: EVAL_SAMPLES takes more of it"
)
SHORT_HASH = 8  # characters of a hash that people see


def analyse(matrix: MatrixDir) -> MatrixNumbers:
    """Return the numbers of a matrix, finished or not, from its files alone.

    Raises RecordError when there is no run in it, or a file has a schema newer than this kmatrix.
    """
    plan = readable(matrix.matrix_json)
    planned = {str(run["name"]): run for run in plan.get("runs") or []}
    runs = tuple(
        _with_gpu(folder, read_numbers(folder, planned.get(folder.name, {})))
        for folder in run_dirs(matrix, list(planned.values()))
    )
    if not runs:
        raise RecordError(
            f"{matrix.path} holds no run",
            why="a matrix has matrix.json, or folders with run.json",
            fix="pass TARGET=<folder of a matrix>; make test-matrix makes one",
        )
    status = readable(matrix.status)
    if not matrix.is_held():
        runs = tuple(_lost(run) if run.status is Status.RUNNING else run for run in runs)
    groups = _groups(runs)
    rankings = _rankings(groups) + _rankings_of_texts(groups)
    settled = settings(runs)
    return MatrixNumbers(
        name=str(plan.get("name") or matrix.name),
        path=matrix.path,
        status=str(status.get("status") or ""),
        created=plan.get("created"),
        ended=status.get("ended"),
        command=str(plan.get("command") or ""),
        overrides=tuple(str(text) for text in plan.get("overrides") or []),
        equal=str(plan.get("equal") or ""),
        provenance=plan.get("provenance") or {},
        axes=_axes(plan, runs),
        cuts=tuple((int(cut["count"]), str(cut["reason"])) for cut in plan.get("cuts") or []),
        runs=runs,
        groups=groups,
        rankings=rankings,
        scalings=_scalings(groups),
        settings=settled,
        warnings=(*_warnings(runs), *settings_warnings(settled)),
    )


def _axes(plan: Mapping[str, Any], runs: Sequence[RunNumbers]) -> dict[str, tuple[str, ...]]:
    """Return the axes of the plan; where that is lost, those that the runs have."""
    if plan.get("axes"):
        return {str(axis["label"]): tuple(str(value) for value in axis["values"]) for axis in plan["axes"]}
    labels = dict.fromkeys(label for run in runs for label in run.axes)
    return {label: tuple(dict.fromkeys(run.axes[label] for run in runs if label in run.axes)) for label in labels}


def _with_gpu(folder: RunDir, run: RunNumbers) -> RunNumbers:
    work = Work(tokens=run.tokens, seconds=run.seconds, device=run.device, mfu=run.mfu)
    return replace(run, gpu=read_gpu(folder, work))


def _lost(run: RunNumbers) -> RunNumbers:
    """A run whose files say "running" after its runner has gone."""
    return replace(run, status=Status.STOPPED, reason=LOST)


def _groups(runs: Sequence[RunNumbers]) -> tuple[GroupNumbers, ...]:
    """Return the runs that differ only in seed, together; runs on different data are never together."""
    known: dict[object, set[str]] = {}
    for run in runs:
        if run.data_sha256:
            known.setdefault(_less_seed(run), set()).add(run.data_sha256)
    members: dict[tuple[object, str | None], list[RunNumbers]] = {}
    for run in runs:
        data = run.data_sha256
        if data is None and not run.counts and len(hashes := known.get(_less_seed(run), set())) == 1:
            (data,) = hashes  # a run to come: it stands with those that it will be compared with
        members.setdefault((_less_seed(run), data), []).append(run)
    names = _group_names([group[0] for group in members.values()], [data for _, data in members], runs)
    return tuple(
        GroupNumbers(
            name=name,
            axes={label: value for label, value in group[0].axes.items() if label != SEED_AXIS},
            data_sha256=data,
            runs=tuple(group),
        )
        for name, ((_, data), group) in zip(names, members.items(), strict=True)
    )


def _less_seed(run: RunNumbers) -> object:
    """Return what the runs of a group have in common; a run without axes is alone."""
    return tuple(item for item in run.axes.items() if item[0] != SEED_AXIS) or run.name


def _group_names(firsts: Sequence[RunNumbers], data: Sequence[str | None], runs: Sequence[RunNumbers]) -> list[str]:
    """Return a name for each group; those that differ only in their data have its hash in it."""
    devices = {run.device for run in runs if run.device}
    device = devices.pop() if len(devices) == 1 else ""  # of runs that have not begun
    varying = _varying(runs)
    names = [", ".join([_configuration(run, varying), *_ranks_of(run, device)]) for run in firsts]
    return [
        name if names.count(name) == 1 else f"{name}, data {short(sha256)}"
        for name, sha256 in zip(names, data, strict=True)
    ]


def _varying(runs: Sequence[RunNumbers]) -> set[str]:
    labels = {label for run in runs for label in run.axes}
    return {label for label in labels if len({run.axes.get(label) for run in runs}) > 1}


def _configuration(run: RunNumbers, varying: Iterable[str]) -> str:
    """Return a name to read: the optimizer and every axis that varies, less the seed and the number of GPUs."""
    parts = [run.optimizer] if run.optimizer else []
    for label, value in run.axes.items():
        if label in varying and label not in ("optimizer", SEED_AXIS, GPUS_AXIS):
            parts.append(value if label in PLAIN_AXES else f"{label} {value}")
    return ", ".join(parts) or run.name


def _ranks_of(run: RunNumbers, device: str) -> list[str]:
    return [ranks(run.world_size, run.device or device)] if run.world_size else []


def ranks(number: int, device: str) -> str:
    """Return "4 GPUs", or "2 ranks" on the CPU."""
    return f"{number} {'rank' if device == 'cpu' else 'GPU'}{'s' if number > 1 else ''}"


def short(sha256: str | None) -> str:
    """Return the beginning of a hash."""
    return sha256[:SHORT_HASH] if sha256 else "unknown"


def _rankings(groups: Sequence[GroupNumbers]) -> tuple[Ranking, ...]:
    """Return one ranking for each set of data. Groups without a finished run, or of unknown data, are in none."""
    by_data: dict[str, list[GroupNumbers]] = {}
    for group in groups:
        if group.losses and group.data_sha256:
            by_data.setdefault(group.data_sha256, []).append(group)
    return tuple(_ranking(sha256, members) for sha256, members in by_data.items())


def _rankings_of_texts(groups: Sequence[GroupNumbers]) -> tuple[Ranking, ...]:
    """Return one ranking by bits per byte for each text that runs read in tokens of different tokenizers."""
    by_text: dict[str, list[GroupNumbers]] = {}
    for group in groups:
        judged = replace(group, measure=BITS)
        if judged.losses and group.data_sha256 and group.runs[0].text:
            by_text.setdefault(group.runs[0].text, []).append(judged)
    return tuple(
        replace(_ranking("", members), measure=BITS, notes=(SAMPLED,))
        for members in by_text.values()
        if len({group.runs[0].tokenizer for group in members}) > 1
    )


def _ranking(sha256: str, groups: Sequence[GroupNumbers]) -> Ranking:
    ordered = tuple(sorted(groups, key=lambda group: (group.mean, group.name)))
    comparisons = _compared(ordered)
    return Ranking(
        data_sha256=sha256,
        groups=ordered,
        comparisons=comparisons,
        evidence=_evidence(ordered, comparisons),
        notes=tuple(differences([run for group in ordered for run in group.counted])),
    )


def _compared(ordered: Sequence[GroupNumbers]) -> tuple[Comparison, ...]:
    """Compare the leader with every other group, and correct for their number after Holm."""
    leader, *others = ordered
    verdicts = [compare(leader.losses, other.losses) for other in others]
    corrected = iter(holm([verdict.p for verdict in verdicts if verdict.p is not None]))
    comparisons = []
    for other, verdict in zip(others, verdicts, strict=True):
        p = None if verdict.p is None else next(corrected)
        word = verdict.word if p is not None and p < 1 - LEVEL else Word.NOT_DISTINGUISHABLE
        comparisons.append(Comparison(leader=leader.name, other=other.name, verdict=verdict, p_holm=p, word=word))
    return tuple(comparisons)


def _evidence(ordered: Sequence[GroupNumbers], comparisons: Sequence[Comparison]) -> str:
    """Say in one sentence what the order of a ranking is worth."""
    if len(ordered) == 1:
        return "one configuration finished on these data: there is nothing to rank it against"
    leader = ordered[0]
    beaten = sum(comparison.word is Word.BETTER for comparison in comparisons)
    if all(len(group.losses) == 1 for group in ordered):
        return "one seed a configuration: the order is not evidence"
    if beaten == len(comparisons):
        return f"the leader, {leader.name}, is better than every other configuration"
    if beaten:
        rest = "the rest are not distinguishable from it"
        return f"the leader, {leader.name}, is better than {beaten} of {len(comparisons)}; {rest}"
    return f"the leader, {leader.name}, is not distinguishable from any other configuration"


def differences(runs: Sequence[RunNumbers]) -> Iterable[str]:
    """Say where ranked runs differ in more than the ranking is about."""
    for name, values, consequence in (
        ("tokens", {run.tokens for run in runs}, "a lower loss may come from more of them"),
        ("model", {run.model for run in runs}, "a larger one costs more for each token"),
        ("context length", {run.block_size for run in runs}, "their losses are not the same measurement"),
        ("validation sequences", {run.eval_samples for run in runs}, "their losses are not the same measurement"),
    ):
        known: list[Any] = sorted(value for value in values if value is not None)
        if len(known) > 1:
            listed = ", ".join(value if isinstance(value, str) else f"{value:,}" for value in known)
            yield f"these runs differ in {name} ({listed}): {consequence}"


def _scalings(groups: Sequence[GroupNumbers]) -> tuple[Scaling, ...]:
    """Return the speed of every configuration that finished on two numbers of GPUs or more."""
    families: dict[tuple[object, ...], list[GroupNumbers]] = {}
    for group in groups:
        rest = tuple(item for item in group.axes.items() if item[0] != GPUS_AXIS)
        if any(run.tokens_per_second for run in group.counted) and group.runs[0].world_size:
            families.setdefault((rest, group.data_sha256, group.runs[0].device), []).append(group)
    varying = _varying([run for group in groups for run in group.runs])
    return tuple(
        Scaling(
            name=_configuration(family[0].runs[0], varying),
            device=family[0].runs[0].device,
            rows=_scaling_rows(family),
        )
        for family in families.values()
        if len({group.runs[0].world_size for group in family}) > 1
    )


def _scaling_rows(family: Sequence[GroupNumbers]) -> tuple[ScalingRow, ...]:
    """Return a row for each number of ranks; speeds are means over seeds, against the fewest ranks."""
    rows: list[ScalingRow] = []
    for group in sorted(family, key=lambda group: group.runs[0].world_size or 0):
        timed = [run for run in group.counted if run.tokens_per_second]
        speed = mean([run.tokens_per_second for run in timed if run.tokens_per_second])
        size = timed[0].world_size or 1
        speedup = speed / rows[0].tokens_per_second if rows else 1.0
        rows.append(
            ScalingRow(
                world_size=size,
                tokens_per_second=speed,
                speedup=speedup,
                efficiency=speedup / (size / rows[0].world_size) if rows else 1.0,
                global_batch=timed[0].global_batch,
                runs=tuple(run.name for run in timed),
            )
        )
    return tuple(rows)


def _warnings(runs: Sequence[RunNumbers]) -> Iterable[str]:
    """Say what makes these numbers worth less than they look."""
    unfinished = [run.name for run in runs if run.status in (Status.PLANNED, Status.RUNNING)]
    if unfinished:
        yield f"the matrix is not complete, and the order may change: {_named(unfinished)} to come"
    stuck = [run.name for run in runs if _never_fell(run)]
    if stuck:
        yield f"the validation loss never fell below its start: {_named(stuck)}"
    slow = [run.name for run in runs if (run.warmup_share or 0) > WARMUP_LIMIT]
    if slow:
        yield f"warm-up is more than a quarter of the run (WARMUP_FRACTION follows its length): {_named(slow)}"
    early = [_early(run) for run in runs if run.counts and run.ended_by not in (None, "max_iters")]
    if early:
        yield f"ended before their steps were done, at a share of their learning rate schedule: {_named(early)}"
    trained = [run for run in runs if run.status is not Status.SKIPPED]
    tokens = sorted({run.planned_tokens for run in trained if run.planned_tokens is not None})
    if len(tokens) > 1:
        yield f"runs of this matrix read different numbers of tokens: {', '.join(f'{n:,}' for n in tokens)}"
    data = sorted({run.data_sha256 for run in trained if run.data_sha256})
    if len(data) > 1:
        yield f"runs of this matrix read different data ({', '.join(map(short, data))}): they are ranked apart"
    unknown = [run.name for run in runs if run.counts and not run.data_sha256]
    if unknown:
        yield f"run.json does not say which data were read, so these are not ranked: {_named(unknown)}"
    lossless = [run.name for run in runs if run.status is Status.FINISHED and run.final_val_loss is None]
    if lossless:
        yield f"finished without a final validation loss, so not ranked: {_named(lossless)}"
    for run in runs:
        for change in run.adjusted:
            yield f"{run.name} was trained with {change}"


def _early(run: RunNumbers) -> str:
    """Return a run that a budget ended, with what it ended by and where."""
    share = "" if not run.max_iters or run.steps is None else f", {100 * run.steps / run.max_iters:.0f} %"
    return f"{run.name} ({str(run.ended_by).replace('_', ' ')}{share})"


def _never_fell(run: RunNumbers) -> bool:
    """Whether a run that was measured after its start has no loss below the first."""
    later = [point.loss for point in run.val if point.step > 0]
    if not later and run.counts and run.final_val_loss is not None:
        later = [run.final_val_loss]
    return bool(later) and run.initial_val_loss is not None and min(later) >= run.initial_val_loss


def _named(names: Sequence[str], limit: int = 4) -> str:
    """Return "a, b, c and 9 more"."""
    more = len(names) - limit
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:limit])} and {more} more"
