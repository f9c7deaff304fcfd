"""Compute the numbers of a matrix from its run directories: groups, rankings with their evidence, scaling, warnings."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from kmatrix.errors import RecordError
from kmatrix.records.decode import Scalar
from kmatrix.records.matrix import run_files
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.runs import Status
from kmatrix.report.gpu.numbers import RunGpus
from kmatrix.report.gpu.read_gpu import TrainingTotals, read_gpu
from kmatrix.report.metrics import Metrics, read_all
from kmatrix.report.numbers import (
    GPUS_AXIS,
    GroupNumbers,
    MatrixNumbers,
    OptimizerSetting,
    OptimizerSettings,
    RunNumbers,
    Scaling,
    ScalingRow,
    SettingOrigin,
    gpu_runs,
)
from kmatrix.report.ranking import configuration_name, groups_of, rankings_of, short, varying_axes
from kmatrix.report.read_run import read_numbers
from kmatrix.stats import mean
from kmatrix.status.cost import spent
from kmatrix.status.fold import overall
from kmatrix.status.look import look
from kmatrix.text import first_names

WARMUP_LIMIT = 0.25  # share of a run that warm-up may take without a warning
TUNED = ("learning_rate", "weight_decay", "beta1", "beta2")  # settings that papers tune per optimizer


def analyse(matrix: MatrixDir) -> MatrixNumbers:
    """Return the numbers of a matrix, finished or not, from its files alone.

    Raises RecordError if it has no run, or its matrix.json or requests.json is missing or damaged.
    """
    seen, files = look(matrix.path), run_files(matrix.path)
    plan = seen.plan
    if not plan.runs:
        raise RecordError(f"{matrix.path} has no run", hint="pass TARGET=<matrix directory>, or run `make test-matrix`")
    # Without an attempt, the files of a run are those of a result that is being archived.
    begun = [name for name in files if seen.states[name].attempts or seen.files[name].damage]
    metrics = dict(zip(begun, read_all([matrix.run(name) for name in begun]), strict=True))
    runs = tuple(
        _with_gpu(matrix.run(name), read_numbers(matrix.run(name), run, seen, metrics.get(name, Metrics())))
        for name, run in files.items()
    )
    # Everything else follows from the runs.
    groups = groups_of(runs, plan.verdict.confidence)
    is_running = any(run.status is Status.RUNNING for run in runs)
    is_spent = plan.verdict.seeds_auto and not is_running and bool(spent(seen))
    ranked = rankings_of(runs, groups, plan, spent=is_spent)
    settings = settings_by_optimizer(runs)
    states = [state for name, state in seen.states.items() if name not in ranked.reserve]
    ends = [attempt.end.at for run in runs for attempt in run.attempts if attempt.end]
    return MatrixNumbers(
        name=plan.name or matrix.name,
        path=matrix.path,
        status=str(Status.PLANNED if all(one.status is Status.PLANNED for one in states) else overall(states)),
        created=plan.created,
        ended=None if is_running else max(ends, default=None),
        command=plan.command,
        overrides=plan.overrides,
        equal=plan.equal,
        provenance=plan.provenance,
        axes=plan.axes,
        excluded=plan.excluded,
        runs=runs,
        confidence=plan.verdict.confidence,
        groups=groups,
        rankings=ranked.rankings,
        reserve=ranked.reserve,
        scalings=_scalings(groups),
        settings=settings,
        warnings=(*_run_warnings(runs, ranked.reserve), *_tuning_warnings(settings)),
        target_loss=plan.verdict.target_loss,
    )


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


def analyse_gpus(matrix: MatrixDir) -> list[RunGpus]:
    """Return every run of a matrix with the numbers of its devices."""
    return gpu_runs(analyse(matrix))


def _with_gpu(folder: RunDir, run: RunNumbers) -> RunNumbers:
    """Return a run with its recordings; before its first attempt, those are of a result that is being archived."""
    if not run.attempts:
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


def _scalings(groups: Sequence[GroupNumbers]) -> tuple[Scaling, ...]:
    """Return the throughput of every configuration that finished on at least two numbers of GPUs."""
    families: dict[tuple[object, ...], list[GroupNumbers]] = {}
    for group in groups:
        rest = tuple(item for item in group.axes.items() if item[0] != GPUS_AXIS)
        if any(run.tokens_per_second for run in group.counted) and group.runs[0].world_size:
            families.setdefault((rest, group.data_sha256, group.runs[0].device), []).append(group)
    varying = varying_axes([run for group in groups for run in group.runs])
    return tuple(
        Scaling(
            name=configuration_name(family[0].runs[0], varying),
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


def _run_warnings(runs: Sequence[RunNumbers], reserve: Collection[str]) -> Iterator[str]:
    """Yield the reasons for which the numbers of these runs may mislead."""
    waiting = (Status.PLANNED, Status.RUNNING)
    unfinished = [run.name for run in runs if run.status in waiting and run.name not in reserve]
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
    layouts = sorted({run.data_layout for run in trained})
    if len(layouts) > 1:
        yield (
            f"runs of this matrix have different row layouts ({', '.join(layouts)}): they are ranked separately, "
            "because packing lowers the loss of the same model"
        )
    yield from _code_warning(runs)
    unknown = [run.name for run in runs if run.counts and not run.data_sha256]
    if unknown:
        yield f"not ranked, because run.json does not record the training data: {first_names(unknown)}"
    lossless = [run.name for run in runs if run.status is Status.FINISHED and run.final_val_loss is None]
    if lossless:
        yield f"not ranked, because they finished without a final validation loss: {first_names(lossless)}"
    for run in runs:
        for change in run.adjusted:
            yield f"{run.name} was trained with {change}"


def _code_warning(runs: Sequence[RunNumbers]) -> Iterator[str]:
    """Yield the warning that compared runs were trained by different code (CODE=checkout)."""
    codes: dict[str, list[str]] = {}
    for run in runs:
        for code in dict.fromkeys(filter(None, (one.code for one in run.attempts))) if run.counts else ():
            codes.setdefault(code, []).append(run.name)
    if len(codes) > 1:
        named = "; ".join(f"{short(code)}: {first_names(names)}" for code, names in codes.items())
        yield f"runs of this matrix were trained by different code ({named})"


def _early(run: RunNumbers) -> str:
    """Return the name of a run that a budget ended, with the budget and the share of its steps."""
    share = "" if not run.max_iters or run.steps is None else f", {100 * run.steps / run.max_iters:.0f} %"
    return f"{run.name} ({str(run.ended_by).replace('_', ' ')}{share})"


def _never_fell(run: RunNumbers) -> bool:
    """Return True if no validation loss after step 0 is below the initial one."""
    later = run.val.loss[1 if run.val.step[:1] == (0,) else 0 :]
    # A run without evaluations after the first has only the loss in its result.
    if not later and run.counts and run.final_val_loss is not None:
        later = (run.final_val_loss,)
    return bool(later) and run.initial_val_loss is not None and min(later) >= run.initial_val_loss


def _tuning_warnings(found: Sequence[OptimizerSettings]) -> Iterator[str]:
    """Yield a warning per setting that is tuned for some optimizers only."""
    for name in TUNED:
        known = [(one.optimizer, setting.origin) for one in found if (setting := one.get(name))]
        swept = [optimizer for optimizer, origin in known if origin is SettingOrigin.SWEPT]
        rest = [optimizer for optimizer, origin in known if origin is not SettingOrigin.SWEPT]
        # Tuning one side only can decide a comparison.
        if swept and rest:
            yield (
                f"{name} was swept for {', '.join(swept)} but not for {', '.join(rest)}: "
                "a tuned optimizer is compared with an untuned one"
            )
    rates = {one.optimizer: rate.origin for one in found if (rate := one.get("learning_rate"))}
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


def _origin(name: str, values: Sequence[Scalar], group: Sequence[RunNumbers]) -> SettingOrigin:
    """Return how a setting got its values."""
    if not any(name in run.settings and run.is_explicit(name) for run in group):
        return SettingOrigin.DEFAULT
    return SettingOrigin.SWEPT if len(values) > 1 else SettingOrigin.EXPLICIT
