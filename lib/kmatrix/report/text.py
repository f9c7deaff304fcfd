"""The numbers of a matrix -> summary_report.txt: fixed width, for a terminal or a mail."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from kmatrix.alerts import Alert, Severity
from kmatrix.records import Status
from kmatrix.report.analysis import short
from kmatrix.report.layout import UNKNOWN, WIDTH, amount, duration, section, speed, table, wrap
from kmatrix.report.sharing import sharing_lines
from kmatrix.report.values import (
    BITS,
    Comparison,
    GroupNumbers,
    MatrixNumbers,
    OptimizerSettings,
    Origin,
    Ranking,
    RunNumbers,
    Scaling,
    Setting,
)
from kmatrix.stats import Verdict, Word

UNBROKEN = "\0"  # stands for a space at which a line is not to be broken
TAIL_LINES = 6  # of a failed run's log
SOFTWARE = ("torch", "numpy", "kconfiglib", "nvidia-ml-py")  # of the packages in a provenance
BEST = "a loss is the mean over the validation sequences, in nats a token; best is written loss@step"


def render_summary(
    numbers: MatrixNumbers, files: Sequence[str] = (), sections: Sequence[tuple[str, Sequence[str]]] = ()
) -> str:
    """Return the whole report. files: what was written beside it, named at the end.

    sections: of other kinds of numbers, a title and lines each; they stand between scaling and what went wrong.
    """
    blocks = [
        _header(numbers),
        section("Runs", [*_runs(numbers), *wrap(_footnote(numbers))]),
        *(section(_ranking_title(numbers, ranking), list(_ranking(ranking))) for ranking in numbers.rankings),
    ]
    if not numbers.rankings:
        blocks.append(section("Ranking", ["no finished run with a loss and known data: nothing to rank"]))
    if numbers.settings:
        blocks.append(section("Settings of the optimizers", list(_settings(numbers.settings))))
    if numbers.scalings:
        blocks.append(
            section("Scaling: tokens a second, against the smallest count", list(_scalings(numbers.scalings)))
        )
    blocks += [section(title, lines) for title, lines in sections]
    if several := [run for run in numbers.runs if len(run.attempts) > 1]:
        blocks.append(section("Attempts", [line for run in several for line in _attempts(run)]))
    if beside := sharing_lines(numbers.runs):
        blocks.append(section("Sharing the box", [line for text in beside for line in wrap(text)]))
    if reused := [run for run in numbers.runs if run.reused_from]:
        blocks.append(section("Taken over", [*map(_reused, reused), "REUSE=n trains them again"]))
    if lost := [run for run in numbers.runs if run.status in (Status.FAILED, Status.STOPPED, Status.SKIPPED)]:
        blocks.append(section("Failed, stopped and skipped", [line for run in lost for line in _lost(run)]))
    if any(run.alerts for run in numbers.runs):
        blocks.append(section("Alerts", [line for run in numbers.runs for line in _alerts(run)]))
    if numbers.warnings:
        blocks.append(section("Warnings", [line for text in numbers.warnings for line in wrap(text, bullet="! ")]))
    if files:
        blocks.append(section("Files", [f"in {numbers.path.name}/", *wrap("  ".join(files))]))
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n"


def utilization(run: RunNumbers) -> str:
    """Return MFU in percent; n/a on the CPU, where no peak is known."""
    if run.mfu is None:
        return "n/a" if run.device == "cpu" else UNKNOWN
    return f"{100 * run.mfu:.1f}%"


def _header(numbers: MatrixNumbers) -> list[str]:
    title = "Test Matrix Summary Report"
    lines = [title, "=" * len(title)]
    for name, text in _header_fields(numbers):
        if text:
            lines += textwrap.wrap(text, WIDTH, initial_indent=f"{name:<10}", subsequent_indent=" " * 10)
    return lines


def _header_fields(numbers: MatrixNumbers) -> Iterator[tuple[str, str]]:
    about = numbers.provenance
    yield "Matrix", numbers.name
    yield "When", _when(numbers)
    yield "Where", ", ".join(filter(None, [str(about.get("host") or ""), _devices(numbers)]))
    yield "Software", _software(numbers)
    yield "Command", numbers.command
    yield "Overrides", " ".join(numbers.overrides)
    yield "Equal", numbers.equal
    yield "Model", _models(numbers)
    yield "Data", ", ".join(dict.fromkeys(short(run.data_sha256) for run in numbers.runs if run.data_sha256))
    yield "Axes", "; ".join(f"{label} {' '.join(values)}" for label, values in numbers.axes.items())
    for count, reason in numbers.cuts:
        yield "Cut", f"{count}: {reason}"
    states = [f"{numbers.count(status)} {status}" for status in Status if numbers.count(status)]
    yield "Runs", f"{len(numbers.runs)}: {', '.join(states)}"


def _when(numbers: MatrixNumbers) -> str:
    """Return when the matrix was made, in UTC, and how long it took."""
    if numbers.created is None:
        return ""
    text = f"{datetime.fromtimestamp(numbers.created, UTC):%Y-%m-%d %H:%M:%S} UTC"
    if numbers.ended is not None and numbers.ended >= numbers.created:
        return f"{text}, took {duration(numbers.ended - numbers.created)}"
    return f"{text}, {numbers.status}" if numbers.status else text


def _devices(numbers: MatrixNumbers) -> str:
    """Return the devices that runs used; before there is one, those that the host has."""
    about = numbers.provenance
    used = dict.fromkeys(run.device_name for run in numbers.runs if run.device_name)
    gpus = Counter(str(gpu.get("name")) for gpu in about.get("gpus") or [])
    parts = [
        f"{gpus[name]} x {name}" if name in gpus else str(name) for name in used or gpus or [about.get("cpu") or ""]
    ]
    if "cpu" in numbers.devices and about.get("cores"):
        parts.append(f"{about['cores']} cores")
    return ", ".join(filter(None, parts))


def _software(numbers: MatrixNumbers) -> str:
    about = numbers.provenance
    versions = about.get("versions") or {}
    parts = [f"{name} {versions[name]}" for name in SOFTWARE if versions.get(name)]
    if about.get("python"):
        parts.append(f"Python {about['python']}")
    if about.get("git_commit"):
        dirty = " with uncommitted changes" if about.get("git_dirty") else ""
        dirty += f" ({about['patch']})" if dirty and about.get("patch") else ""
        parts.append(f"git {str(about['git_commit'])[:10]}{dirty}")
    return ", ".join(parts)


def _models(numbers: MatrixNumbers) -> str:
    params: dict[str, str] = {}
    for run in numbers.runs:
        if run.model and (run.params or run.model not in params):
            params[run.model] = f"{run.model} ({run.params:,} parameters)" if run.params else run.model
    return ", ".join(params.values())


def _runs(numbers: MatrixNumbers) -> list[str]:
    only_cpu = numbers.devices == ("cpu",)
    titles = ["run", "optimizer", "ranks" if only_cpu else "GPUs", "seed", "final", "best", "ppl", "tokens"]
    pruned = any(run.pruning != "none" for run in numbers.runs)
    titles += [*(["zeros"] if pruned else []), "tok/s", "MFU", "time", "status"]
    rows = [_row(run, mixed=len(numbers.devices) > 1, pruned=pruned) for run in numbers.runs]
    return table(titles, rows, left=(0, 1, len(titles) - 1))


def _row(run: RunNumbers, *, mixed: bool, pruned: bool) -> list[str]:
    size = UNKNOWN if run.world_size is None else f"{run.world_size}{'cpu' if mixed and run.device == 'cpu' else ''}"
    best = _loss(run.best_val_loss)
    return [
        run.name,
        run.optimizer or UNKNOWN,
        size,
        UNKNOWN if run.seed is None else str(run.seed),
        _loss(run.final_val_loss) + ("" if run.counts or run.final_val_loss is None else "*"),
        best if run.best_val_loss is None or run.best_val_step is None else f"{best}@{run.best_val_step}",
        _perplexity(run.perplexity),
        amount(run.tokens),
        *([UNKNOWN if run.sparsity is None else f"{100 * run.sparsity:.1f}%"] if pruned else []),
        speed(run.tokens_per_second),
        utilization(run),
        duration(run.seconds),
        str(run.status),
    ]


def _footnote(numbers: MatrixNumbers) -> str:
    if any(run.final_val_loss is not None and not run.counts for run in numbers.runs):
        return f"{BEST}; * the last that was measured: not finished, not ranked"
    return BEST


def _loss(loss: float | None) -> str:
    if loss is None:
        return UNKNOWN
    return f"{loss:.4f}" if abs(loss) < 10000 else f"{loss:.3g}"


def _perplexity(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"


def _ranking_title(numbers: MatrixNumbers, ranking: Ranking) -> str:
    if ranking.measure == BITS:
        return "Ranking by mean bits per byte: the same text, different tokenizers"
    data = f" on data {short(ranking.data_sha256)}" if len(numbers.rankings) > 1 else ""
    return f"Ranking by mean final validation loss{data}"


def _ranking(ranking: Ranking) -> Iterator[str]:
    rows = [_rank_row(1, ranking.groups[0], "the leader")]
    for place, (group, comparison) in enumerate(zip(ranking.groups[1:], ranking.comparisons, strict=True), start=2):
        rows.append(_rank_row(place, group, _beside(comparison)))
    yield from wrap(f"{ranking.evidence}.")
    yield ""
    lower = "bits" if ranking.measure == BITS else "loss"
    titles = ["   configuration", "mean", "+- 95 %", "sd", "seeds", f"the leader beside it: {lower} lower by"]
    yield from table(titles, rows, left=(0, len(titles) - 1))
    yield from wrap("behind the leader: " + ", ".join(run.name for run in ranking.groups[0].counted))
    if method := _method(ranking):
        yield from wrap(method)
    for note in ranking.notes:
        yield from wrap(note, bullet="! ")


def _rank_row(place: int, group: GroupNumbers, beside: str) -> list[str]:
    interval = group.interval
    return [
        f"{place:>2} {group.name}",
        _loss(group.mean),
        UNKNOWN if interval is None else f"{(interval.high - interval.low) / 2:.4f}",
        UNKNOWN if group.deviation is None else f"{group.deviation:.4f}",
        str(len(group.losses)),
        beside,
    ]


def _beside(comparison: Comparison) -> str:
    """Say what the data say of the leader beside this one, with the interval that says it."""
    verdict = comparison.verdict
    lower = UNKNOWN if verdict.difference is None else _gain(-verdict.difference)
    if verdict.interval is None or comparison.p_holm is None:
        return f"{lower}, {verdict.reason.partition(':')[0]}: not evidence"
    span = f"{lower} ({_gain(-verdict.interval.high)} to {_gain(-verdict.interval.low)})"
    p = "p < 0.001" if comparison.p_holm < 0.001 else f"p {comparison.p_holm:.3f}"
    return f"{span}, {p}: {comparison.word}"


def _gain(difference: float) -> str:
    """Return a difference of losses; one that rounds to 0 has no sign."""
    text = f"{difference:.4f}"
    return text.removeprefix("-") if float(text) == 0 else text


def _method(ranking: Ranking) -> str:
    """Say which tests stand behind the words."""
    tested: list[Verdict] = [c.verdict for c in ranking.comparisons if c.verdict.method and c.p_holm is not None]
    if not tested:
        return ""
    methods = " and ".join(dict.fromkeys(verdict.method for verdict in tested))
    several = f", p corrected after Holm for {len(tested)} comparisons" if len(tested) > 1 else ""
    return (
        f'brackets: 95 % interval of the difference, Student\'s t ({methods}){several}; "{Word.BETTER}" needs p < 0.05'
    )


def _scalings(scalings: Sequence[Scaling]) -> Iterator[str]:
    cpu = all(scaling.device == "cpu" for scaling in scalings)
    titles = ["configuration", "ranks" if cpu else "GPUs", "tok/s", "speed-up", "efficiency", "global batch", "runs"]
    rows = []
    for scaling in scalings:
        for place, row in enumerate(scaling.rows):
            batch = UNKNOWN if row.global_batch is None else f"{row.global_batch:,}"
            seconds = [f"{row.speedup:.2f}x", f"{100 * row.efficiency:.0f}%", batch, str(len(row.runs))]
            rows.append(["" if place else scaling.name, str(row.world_size), speed(row.tokens_per_second), *seconds])
    yield from table(titles, rows, left=(0,))
    batches = [{row.global_batch for row in scaling.rows} for scaling in scalings]
    if any(len(sizes) > 1 for sizes in batches):
        yield from wrap("the global batch grows with the count: GLOBAL_BATCH=<n> holds it, and the losses compare")


def _settings(found: Sequence[OptimizerSettings]) -> Iterator[str]:
    """List what each optimizer ran with; a default has no word behind it."""
    width = max(len(one.optimizer) for one in found) + 2
    for one in found:
        text = ", ".join(_setting(setting).replace(" ", UNBROKEN) for setting in one.settings)
        lines = textwrap.wrap(text, WIDTH, initial_indent=one.optimizer.ljust(width), subsequent_indent=" " * width)
        yield from (line.replace(UNBROKEN, " ") for line in lines)
    if any(setting.origin is None for one in found for setting in one.settings):
        yield from wrap("these runs do not record which values were asked for")
    else:
        yield from wrap("values without a word behind them are defaults, not tuned for this model")


def _setting(setting: Setting) -> str:
    shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value).lower() for value in setting.values)
    origin = "" if setting.origin in (None, Origin.DEFAULT) else f" ({setting.origin})"
    return f"{setting.name} {shown}{origin}"


def _attempts(run: RunNumbers) -> Iterator[str]:
    """Say how each attempt of a run ended, what it began from and how small its micro-batch was."""
    yield run.name
    for attempt in run.attempts:
        begin = str(attempt.get("resume") or "none")
        about = [] if begin == "none" else [f"from {'its last good checkpoint' if begin == 'auto' else begin}"]
        about += [f"micro-batch {attempt['micro_batch']}"] if attempt.get("micro_batch") else []
        words = [f"{attempt.get('attempt')}: {attempt.get('status')}", *about, str(attempt.get("reason") or "")]
        yield from (f"    {line}" for line in wrap(", ".join(filter(None, words)), width=WIDTH - 4))


def _reused(run: RunNumbers) -> str:
    """Say where a run was trained that this matrix took over."""
    when = f", trained until {datetime.fromtimestamp(run.ended, UTC):%Y-%m-%d %H:%M} UTC" if run.ended else ""
    return f"{run.name}  from {run.reused_from}{when}"


def _lost(run: RunNumbers) -> Iterator[str]:
    """Say why a run did not finish, where its log is, and how the log ends."""
    yield from wrap(f"{run.name}  {run.status}: {run.reason or 'no reason recorded'}{_progress(run)}")
    if run.log:
        yield f"    log: {run.log}"
    for line in run.log_tail[-TAIL_LINES:]:
        yield f"    | {line[: WIDTH - 6]}"


def _alerts(run: RunNumbers) -> Iterator[str]:
    """Say what a run was warned of while it went on, for how long, and what to do; the critical first."""
    if not run.alerts:
        return
    yield run.name
    alike: dict[tuple[str, str], list[Alert]] = {}
    for alert in sorted(run.alerts, key=lambda alert: (alert.severity is Severity.WARNING, alert.since)):
        alike.setdefault((alert.kind, alert.about), []).append(alert)
    for alerts in alike.values():
        mark = "! " if alerts[0].severity is Severity.CRITICAL else ""
        for line in wrap(f"{mark}{_worst(alerts).text} ({_spans(alerts)}): {alerts[0].advice}", width=WIDTH - 4):
            yield f"    {line}"


def _worst(alerts: Sequence[Alert]) -> Alert:
    """Return the one of these that lies farthest from its limit."""
    return max(alerts, key=lambda alert: abs((alert.value or 0.0) - (alert.threshold or 0.0)))


def _spans(alerts: Sequence[Alert]) -> str:
    """Say when alerts of one kind held, and for how long in all."""
    begun = f"from {datetime.fromtimestamp(alerts[0].since, UTC):%H:%M:%S} UTC"
    if alerts[-1].until is None:
        return f"{begun} to the end"
    lasted = duration(sum(alert.until - alert.since for alert in alerts if alert.until is not None))
    return f"{begun} for {lasted}" if len(alerts) == 1 else f"{len(alerts)} times {begun} on, {lasted} in all"


def _progress(run: RunNumbers) -> str:
    if run.steps is None or run.max_iters is None:
        return ""
    return f" (after {run.steps:,} of {run.max_iters:,} steps)"
