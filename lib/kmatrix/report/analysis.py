"""Compute the numbers of a matrix from its run directories: groups, rankings with their evidence, scaling, warnings."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.records.decode import Scalar
from kmatrix.records.jobs.usage import usage_of
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.plan import runs_to_archive
from kmatrix.records.runs import LOST, MatrixFile, RunFile, Status, read_matrix_file_or_empty
from kmatrix.records.states import read_matrix_status
from kmatrix.report.gpu.numbers import RunGpus
from kmatrix.report.gpu.read_gpu import TrainingTotals, read_gpu
from kmatrix.report.numbers import (
    BITS,
    GPUS_AXIS,
    SEED_AXIS,
    GroupNumbers,
    MatrixNumbers,
    OptimizerSetting,
    OptimizerSettings,
    Ranking,
    RunNumbers,
    Scaling,
    ScalingRow,
    SettingOrigin,
    gpu_runs,
)
from kmatrix.report.read_run import read_numbers, times_on_hosts
from kmatrix.stats import mean
from kmatrix.status.activity import MatrixActivity
from kmatrix.text import first_names, plural
from kmatrix.verdict.family import FamilyVerdict, PairOutcome, Rules
from kmatrix.verdict.fixed import fixed_verdict

PLAIN_AXES = ("optimizer", "model", "schedule", "dtype", "dataset", "tokenizer")  # named by their value alone

# Losses are comparable only if these attributes of RunNumbers are equal.
MEASURED_ON = {"data_sha256": "data", "block_size": "context length", "eval_samples": "validation sequences"}

# Attributes of RunNumbers in which ranked runs should not differ, their names, and what a difference means.
DIFFERENCES = (
    ("tokens", "tokens", "a lower loss may result from more training tokens"),
    ("model", "model", "a larger model costs more per token"),
    ("block_size", MEASURED_ON["block_size"], "the losses are not comparable"),
    ("eval_samples", MEASURED_ON["eval_samples"], "the losses are not comparable"),
)

WARMUP_LIMIT = 0.25  # share of a run that warm-up may take without a warning
SAMPLED = "validation sequences differ between tokenizers (same text, other parts of it): a larger EVAL_SAMPLES helps"
SHORT_HASH = 8  # characters of a hash in texts
TUNED = ("learning_rate", "weight_decay", "beta1", "beta2")  # settings that papers tune per optimizer


def analyse(matrix: MatrixDir) -> MatrixNumbers:
    """Return the numbers of a matrix, finished or not, from its files alone.

    Raises RecordError if it has no run, or a file has a newer schema than this kmatrix.
    """
    # Read all runs: those of the plan, and others that exist.
    plan = read_matrix_file_or_empty(matrix)
    planned = {run.name: run for run in plan.runs if run.name}
    activity = MatrixActivity(matrix)
    runs = tuple(_numbers_of(folder, planned, plan, activity) for folder in matrix.all_runs())
    if not runs:
        raise RecordError(
            f"{matrix.path} has no run",
            why="a matrix directory has a matrix.json, or run directories with a run.json",
            hint="pass TARGET=<matrix directory>, or run `make test-matrix`",
        )
    status = read_matrix_status(matrix)
    # A runner may have ended while the files were read.
    activity.refresh()
    runs = tuple(
        _without_runner(run) if run.status is Status.RUNNING and not activity.has_runner(run.name) else run
        for run in runs
    )

    # Everything else follows from the runs.
    groups = _groups(runs)
    settings = settings_by_optimizer(runs)
    return MatrixNumbers(
        name=plan.name or matrix.name,
        path=matrix.path,
        status=str(status.status or ""),
        created=plan.created,
        ended=status.ended,
        command=plan.command,
        overrides=plan.overrides,
        equal=plan.equal,
        provenance=plan.provenance,
        axes=plan.axes or _axes(runs),
        excluded=plan.excluded,
        runs=runs,
        groups=groups,
        rankings=_rankings_by_data(groups) + _rankings_by_text(groups),
        scalings=_scalings(groups),
        settings=settings,
        warnings=(*_run_warnings(runs), *_tuning_warnings(settings)),
        engine=activity.engine.engine if activity.engine else "",
        usage=usage_of(matrix, activity.claim_ages()) if activity.engine else None,
    )


def _numbers_of(
    folder: RunDir, planned: Mapping[str, RunFile], plan: MatrixFile, activity: MatrixActivity
) -> RunNumbers:
    """Return the numbers of one run of a matrix. planned: the entries of matrix.json."""
    if activity.engine is None:
        activity.refresh()  # a report may be made while the matrix starts, or ends
    has_runner = activity.has_runner(folder.name)
    numbers = read_numbers(folder, planned.get(folder.name, RunFile()), plan.axis_entries, has_runner=has_runner)
    if activity.engine is not None:
        numbers = replace(numbers, on_hosts=times_on_hosts(folder, numbers))
    return _with_gpu(folder, numbers)


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


def settings_by_optimizer(runs: Sequence[RunNumbers]) -> tuple[OptimizerSettings, ...]:
    """Return the settings of each optimizer over all of its runs, in the order of the runs."""
    members: dict[str, list[RunNumbers]] = {}
    for run in runs:
        if run.optimizer and run.settings:
            members.setdefault(run.optimizer, []).append(run)
    return tuple(
        OptimizerSettings(
            optimizer=optimizer,
            runs=tuple(run.name for run in group),
            settings=tuple(
                _setting(name, group) for name in dict.fromkeys(name for run in group for name in run.settings)
            ),
        )
        for optimizer, group in members.items()
    )


def ranks(number: int, device: str) -> str:
    """Return "4 GPUs", or "2 ranks" on the CPU."""
    return plural(number, "rank" if device == "cpu" else "GPU")


def short(sha256: str | None) -> str:
    """Return the first characters of a hash."""
    return sha256[:SHORT_HASH] if sha256 else "unknown"


def _axes(runs: Sequence[RunNumbers]) -> dict[str, tuple[str, ...]]:
    """Return the axes of the runs, for a matrix without its matrix.json."""
    labels = dict.fromkeys(label for run in runs for label in run.axes)
    return {label: tuple(dict.fromkeys(run.axes[label] for run in runs if label in run.axes)) for label in labels}


def analyse_gpus(matrix: MatrixDir) -> list[RunGpus]:
    """Return every run of a matrix with the numbers of its devices."""
    return gpu_runs(analyse(matrix))


def _with_gpu(folder: RunDir, run: RunNumbers) -> RunNumbers:
    """Return a run with its recordings, unless they are being archived."""
    if folder.name in runs_to_archive(MatrixDir(folder.path.parent)):
        return run
    totals = TrainingTotals(
        tokens=run.tokens,
        seconds=run.seconds,
        device=run.device,
        mfu=run.mfu,
        wall_s=run.wall_s,
        gpu_hours=run.gpu_hours,
        dollars=run.dollars,
        reused=bool(run.reused_from),
        running=run.status is Status.RUNNING,
    )
    return replace(run, gpu=read_gpu(folder, totals))


def _without_runner(run: RunNumbers) -> RunNumbers:
    """Return a run whose status is "running" although its runner died, as stopped."""
    return replace(run, status=Status.STOPPED, reason=LOST)


def _groups(runs: Sequence[RunNumbers]) -> tuple[GroupNumbers, ...]:
    """Return the groups of runs that differ only in their seed. Runs on different data are never in one group."""
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
    varying = _varying(runs)
    names = [", ".join([_configuration(run, varying), *_ranks_of(run, device)]) for run in firsts]
    return [
        name if names.count(name) == 1 else f"{name}, data {short(sha256)}"
        for name, sha256 in zip(names, data, strict=True)
    ]


def _varying(runs: Sequence[RunNumbers]) -> set[str]:
    """Return the axes with several values."""
    labels = {label for run in runs for label in run.axes}
    return {label for label in labels if len({run.axes.get(label) for run in runs}) > 1}


def _configuration(run: RunNumbers, varying: Iterable[str]) -> str:
    """Return the display name of a configuration: optimizer and varying axes, without seed and number of GPUs."""
    parts = [run.optimizer] if run.optimizer else []
    for label, value in run.axes.items():
        if label in varying and label not in ("optimizer", SEED_AXIS, GPUS_AXIS):
            parts.append(value if label in PLAIN_AXES else f"{label} {value}")
    return ", ".join(parts) or run.name


def _ranks_of(run: RunNumbers, device: str) -> list[str]:
    return [ranks(run.world_size, run.device or device)] if run.world_size else []


def _rankings_by_data(groups: Sequence[GroupNumbers]) -> tuple[Ranking, ...]:
    """Return one ranking per dataset. Groups without a finished run or with an unknown dataset are omitted."""
    by_data: dict[str, list[GroupNumbers]] = {}
    for group in groups:
        if group.losses and group.data_sha256:
            by_data.setdefault(group.data_sha256, []).append(group)
    return tuple(_ranking(sha256, members) for sha256, members in by_data.items())


def _rankings_by_text(groups: Sequence[GroupNumbers]) -> tuple[Ranking, ...]:
    """Return one ranking by bits per byte for each text that runs read with several tokenizers."""
    by_text: dict[str, list[GroupNumbers]] = {}
    for group in groups:
        # Losses per token are not comparable between tokenizers, bits per byte of the same text are.
        in_bits = replace(group, metric=BITS)
        if in_bits.losses and group.data_sha256 and group.runs[0].text:
            by_text.setdefault(group.runs[0].text, []).append(in_bits)
    return tuple(
        replace(_ranking("", members), metric=BITS, notes=(SAMPLED,))
        for members in by_text.values()
        if len({group.runs[0].tokenizer for group in members}) > 1
    )


def _ranking(sha256: str, groups: Sequence[GroupNumbers]) -> Ranking:
    # By name, too: equal means must not change places between two reports.
    ordered = tuple(sorted(groups, key=lambda group: (group.mean, group.name)))
    verdict = fixed_verdict({group.name: group.losses for group in ordered}, Rules(seeds=()))
    return Ranking(
        data_sha256=sha256,
        groups=ordered,
        evidence=_evidence(ordered, verdict),
        notes=tuple(differences([run for group in ordered for run in group.counted])),
        verdict=verdict,
    )


def _evidence(ordered: Sequence[GroupNumbers], verdict: FamilyVerdict) -> str:
    """Return one sentence on the significance of a ranking."""
    if len(ordered) == 1:
        return "Only one configuration finished on this data: nothing to compare it with"
    pairs = verdict.against_reference
    beaten = sum(pair.outcome is PairOutcome.BETTER for pair in pairs)
    if all(len(group.losses) == 1 for group in ordered):
        return "One seed per configuration: the ranking is not significant"
    if beaten == len(pairs):
        return f"The leader, {verdict.reference}, is better than every other configuration"
    if beaten:
        rest = "the others are not distinguishable from it"
        return f"The leader, {verdict.reference}, is better than {beaten} of {len(pairs)} configurations; {rest}"
    return f"The leader, {verdict.reference}, is not distinguishable from any other configuration"


def _scalings(groups: Sequence[GroupNumbers]) -> tuple[Scaling, ...]:
    """Return the throughput of every configuration that finished on at least two numbers of GPUs."""
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
    """Return a row per number of ranks: mean throughput over seeds, relative to the fewest ranks."""
    rows: list[ScalingRow] = []
    for group in sorted(family, key=lambda group: group.runs[0].world_size or 0):
        timed = [run for run in group.counted if run.tokens_per_second]
        speed = mean([run.tokens_per_second for run in timed if run.tokens_per_second])
        size = timed[0].world_size or 1
        # The first row has the fewest ranks: the base of all others.
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


def _run_warnings(runs: Sequence[RunNumbers]) -> Iterator[str]:
    """Yield the reasons for which the numbers of these runs may mislead."""
    unfinished = [run.name for run in runs if run.status in (Status.PLANNED, Status.RUNNING)]
    if unfinished:
        yield f"incomplete matrix, the ranking may change; not finished yet: {first_names(unfinished)}"
    stuck = [run.name for run in runs if _never_fell(run)]
    if stuck:
        yield f"the validation loss never fell below its initial value: {first_names(stuck)}"
    slow = [run.name for run in runs if (run.warmup_share or 0) > WARMUP_LIMIT]
    if slow:
        yield f"warm-up takes more than a quarter of the run (WARMUP_FRACTION scales with it): {first_names(slow)}"
    early = [_early(run) for run in runs if run.counts and run.ended_by not in (None, "max_iters")]
    if early:
        yield f"ended before the planned steps, with the learning rate schedule incomplete: {first_names(early)}"
    # A skipped run may have been planned for other data or another length, but trains nothing.
    trained = [run for run in runs if run.status is not Status.SKIPPED]
    tokens = sorted({run.planned_tokens for run in trained if run.planned_tokens is not None})
    if len(tokens) > 1:
        yield f"runs of this matrix train on different numbers of tokens: {', '.join(f'{n:,}' for n in tokens)}"
    data = sorted({run.data_sha256 for run in trained if run.data_sha256})
    if len(data) > 1:
        yield f"runs of this matrix use different data ({', '.join(map(short, data))}): they are ranked separately"
    unknown = [run.name for run in runs if run.counts and not run.data_sha256]
    if unknown:
        yield f"not ranked, because run.json does not record the training data: {first_names(unknown)}"
    lossless = [run.name for run in runs if run.status is Status.FINISHED and run.final_val_loss is None]
    if lossless:
        yield f"not ranked, because they finished without a final validation loss: {first_names(lossless)}"
    for run in runs:
        for change in run.adjusted:
            yield f"{run.name} was trained with {change}"


def _early(run: RunNumbers) -> str:
    """Return the name of a run that a budget ended, with the budget and the share of its steps."""
    share = "" if not run.max_iters or run.steps is None else f", {100 * run.steps / run.max_iters:.0f} %"
    return f"{run.name} ({str(run.ended_by).replace('_', ' ')}{share})"


def _never_fell(run: RunNumbers) -> bool:
    """Return True if no validation loss after step 0 is below the initial one."""
    later = run.val.loss[1 if run.val and run.val.step[0] == 0 else 0 :]
    # A run without evaluations after the first has only the loss in its result.
    if not later and run.counts and run.final_val_loss is not None:
        later = array("d", [run.final_val_loss])
    return bool(later) and run.initial_val_loss is not None and min(later) >= run.initial_val_loss


def _tuning_warnings(found: Sequence[OptimizerSettings]) -> Iterator[str]:
    """Yield a warning per setting that is tuned for some optimizers only."""
    for name in TUNED:
        known = [(one.optimizer, setting.origin) for one in found if (setting := one.get(name)) and setting.origin]
        swept = [optimizer for optimizer, origin in known if origin is SettingOrigin.SWEPT]
        rest = [optimizer for optimizer, origin in known if origin is not SettingOrigin.SWEPT]
        # Tuning one side only can decide a comparison.
        if swept and rest:
            yield (
                f"{name} was swept for {', '.join(swept)} but not for {', '.join(rest)}: "
                "a tuned optimizer is compared with an untuned one"
            )
    rates = {one.optimizer: rate.origin for one in found if (rate := one.get("learning_rate")) and rate.origin}
    explicit = [optimizer for optimizer, origin in rates.items() if origin is SettingOrigin.EXPLICIT]
    default = [optimizer for optimizer, origin in rates.items() if origin is SettingOrigin.DEFAULT]
    if explicit and default:
        yield (
            f"learning_rate was set for {', '.join(explicit)} but is the default for {', '.join(default)}: "
            "the comparison is fair only if all values suit this model"
        )


def _setting(name: str, group: Sequence[RunNumbers]) -> OptimizerSetting:
    values = tuple(dict.fromkeys(run.settings[name] for run in group if name in run.settings))
    return OptimizerSetting(name=name, values=values, origin=_origin(name, values, group))


def _origin(name: str, values: Sequence[Scalar], group: Sequence[RunNumbers]) -> SettingOrigin | None:
    """Return how a setting got its values; None if the runs do not record it."""
    recorded = [known for run in group if name in run.settings and (known := run.is_explicit(name)) is not None]
    if not recorded:
        return None
    if not any(recorded):
        return SettingOrigin.DEFAULT
    return SettingOrigin.SWEPT if len(values) > 1 else SettingOrigin.EXPLICIT
