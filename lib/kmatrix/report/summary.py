"""Format the numbers of a matrix as summary_report.txt: fixed width, for a terminal or a mail."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kmatrix.records.attempts import Attempt
from kmatrix.records.matrix import read_plan
from kmatrix.records.paths import MatrixDir
from kmatrix.records.tracking import first_of_each, pending_messages, sync_status
from kmatrix.report.formats.facts import code, devices, machines, models, software
from kmatrix.report.gpu.text import gpu_sections
from kmatrix.report.numbers import (
    BITS,
    GroupNumbers,
    MatrixNumbers,
    OptimizerSetting,
    OptimizerSettings,
    Ranking,
    RunNumbers,
    Scaling,
    SettingOrigin,
    gpu_runs,
)
from kmatrix.report.pair_text import digits_for, outcome_word, p_text, percent_text, signed_text
from kmatrix.report.ranking import short
from kmatrix.report.sentences.alerts import by_subject, worst
from kmatrix.report.sentences.rankings import CORE_NOISE, no_result_text
from kmatrix.report.verdict_text import verdict_texts
from kmatrix.status.alerts import Alert, Severity
from kmatrix.text import (
    UNKNOWN,
    WIDTH,
    columns,
    count,
    duration,
    first_names,
    plural,
    printable,
    section,
    signed,
    table,
    time_of_day,
    wrap,
)
from kmatrix.verdict.family import Pair as PairVerdict
from kmatrix.verdict.family import PairOutcome

Section = tuple[str, Sequence[str]]  # title, lines
Span = tuple[float, float]  # begin, end: Unix seconds
NO_BREAK = "\0"  # stands for a space that textwrap must not break
TAIL_LINES = 6  # shown of a failed run's log
LOSS_NOTE = "val loss: mean over the validation sequences, nats/token; best: lowest val loss@step"
ORIGINS = {SettingOrigin.EXPLICIT: " (explicit)", SettingOrigin.SWEPT: " (swept)"}
LOSS_DIGITS = 4  # of a difference of losses, after the decimal point
MIN_OVERLAP = 0.01  # share of a run's time; shorter overlaps are one run ending while the next starts
MAX_DEVICES = 256  # rows of the table of nodes; results.json has all
MAX_OVERLAPS = 3  # runs listed per line


def render_summary(numbers: MatrixNumbers, trackers: Sequence[str] = (), files: Sequence[str] = ()) -> str:
    """Return the text of the report. trackers: lines about them.  files: names of the report's files."""
    home = str(numbers.provenance.get("host") or "")
    sections: list[Section] = [
        ("Verdict", list(_verdicts(numbers))),
        ("Runs", _run_table(numbers)),
        *_rankings(numbers),
        ("Optimizer settings", _optimizer_settings(numbers.settings)),
        _scaling_section(numbers.scalings),
        ("Benchmarks", _benchmarks(numbers.runs)),
        ("Nodes", _nodes(numbers.runs)),
        *gpu_sections(gpu_runs(numbers)),
        ("Trackers", trackers),
        ("Attempts", [line for run in numbers.runs if len(run.attempts) > 1 for line in _attempts(run, home)]),
        ("Shared machine", [line for text in overlap_lines(numbers.runs) for line in wrap(text)]),
        ("Reused", _reused(numbers.runs)),
        ("Failed, stopped and skipped", [line for run in numbers.runs for line in _failure(run, home)]),
        ("Alerts", [line for run in numbers.runs for line in _alerts(run)]),
        ("Warnings", [line for text in numbers.warnings for line in wrap(text, bullet="! ")]),
        ("Files", [f"in {numbers.path.name}/", *wrap("  ".join(files))] if files else []),
    ]
    blocks = [_header(numbers), *(section(title, lines) for title, lines in sections if lines)]
    text = "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n"
    return printable(text)  # it is a file that people show in a terminal


def tracker_lines(matrix: MatrixDir) -> list[str]:
    """Return the link of each run's trackers and their pending uploads; empty without a tracker."""
    runs = [(run.name, sent) for run in read_plan(matrix.path).runs for sent in sync_status(matrix.run(run.name))]
    if not runs:
        return []
    links = [f"{name}  {sent.tracker}  {sent.points} steps  {sent.link}" for name, sent in runs if sent.link]
    return [*links, *first_of_each((sent.tracker, sent.how) for _, sent in runs), *pending_messages(runs, matrix.path)]


def utilization(run: RunNumbers) -> str:
    """Return MFU in percent; n/a on the CPU, whose peak is unknown."""
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
    yield "Matrix", numbers.name
    yield "Created", _created(numbers)
    yield "Machine", ", ".join(filter(None, [machines(numbers), devices(numbers)]))
    yield "Software", ", ".join(filter(None, [software(numbers), code(numbers)]))
    yield "Command", numbers.command
    yield "Overrides", " ".join(numbers.overrides)
    yield "Equal", numbers.equal
    yield "Model", models(numbers)
    yield "Data", ", ".join(dict.fromkeys(short(run.data_sha256) for run in numbers.runs if run.data_sha256))
    yield "Axes", "; ".join(f"{label} {' '.join(values)}" for label, values in numbers.axes.items())
    for cells in numbers.excluded:
        yield "Excluded", f"{cells.count}: {cells.reason}"
    states = [f"{number} {state}" for state, number in numbers.states.items()]
    yield "Runs", f"{len(numbers.runs)}: {', '.join(states)}"


def _created(numbers: MatrixNumbers) -> str:
    """Return when the matrix was created (UTC), and how long it took or its status."""
    if numbers.created is None:
        return ""
    text = time_of_day(numbers.created, utc=True)
    if numbers.took_s is not None:
        pauses = f" and {duration(numbers.paused_s)} of pauses" if numbers.paused_s else ""
        return f"{text}, took {duration(numbers.took_s)}{pauses}"
    return f"{text}, {numbers.status}" if numbers.status else text


def _run_table(numbers: MatrixNumbers) -> list[str]:
    only_cpu = numbers.devices == ("cpu",)
    pruned = any(run.pruning != "none" for run in numbers.runs)
    titles = ["run", "optimizer", "ranks" if only_cpu else "GPUs", "seed", "val loss", "best@step", "ppl", "tokens"]
    titles += [*(["sparsity"] if pruned else []), "tok/s", "MFU", "time", "status"]
    mixed = len(numbers.devices) > 1
    rows = [_run_row(run, mixed=mixed, pruned=pruned, reserve=run.name in numbers.reserve) for run in numbers.runs]
    note = LOSS_NOTE
    if any(run.final_val_loss is not None and not run.counts for run in numbers.runs):
        note += "; *: last val loss of an unfinished run, not ranked"
    return [*table(columns(titles, (0, 1, len(titles) - 1)), rows, WIDTH, rule=True), *wrap(note)]


def _nodes(runs: Sequence[RunNumbers]) -> list[str]:
    """Return a row per rank of the runs over several nodes: its node, host and device."""
    rows = [
        [run.name, str(device.node), device.host, str(device.rank), device.name]
        for run in runs
        if any(device.node for device in run.devices)
        for device in run.devices
    ]
    if not rows:
        return []
    lines = table(columns(["run", "node", "host", "rank", "device"], (0, 2, 4)), rows[:MAX_DEVICES], WIDTH, rule=True)
    return lines + ([f"... and {len(rows) - MAX_DEVICES} more in results.json"] if len(rows) > MAX_DEVICES else [])


def _run_row(run: RunNumbers, *, mixed: bool, pruned: bool, reserve: bool) -> list[str]:
    """Return one row of the run table. mixed: the matrix has runs on GPUs and on the CPU."""
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
        count(run.tokens),
        *([UNKNOWN if run.sparsity is None else f"{100 * run.sparsity:.1f}%"] if pruned else []),
        count(run.tokens_per_second),
        utilization(run),
        duration(run.seconds),
        # Trained in another matrix: its time and speed are of another day, or another machine.
        f"{run.status}, reused" if run.reused_from else run.word(reserve=reserve),
    ]


def _loss(loss: float | None) -> str:
    if loss is None:
        return UNKNOWN
    return f"{loss:.4f}" if abs(loss) < 10000 else f"{loss:.3g}"


def _perplexity(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else f"{value:.1e}"


def _verdicts(numbers: MatrixNumbers) -> Iterator[str]:
    """Yield the verdict on each ranking, or why there is none."""
    for place, text in enumerate(verdict_texts(numbers)):
        if place:
            yield ""
        yield from wrap(f"{text.report}.")
        for line in text.lines:
            yield from wrap(f"{line.label}: {line.text}.")
            if line.command:
                yield f"    {line.command}"  # on one line, to be pasted


def _rankings(numbers: MatrixNumbers) -> Iterator[Section]:
    """Yield a section per ranking, or one that explains why there is none."""
    if not numbers.rankings:
        yield "Ranking", ["nothing to rank: no finished run with a loss and known data"]
    for ranking in numbers.rankings:
        data = f" on data {short(ranking.data_sha256)}" if len(numbers.rankings) > 1 else ""
        title = f"Ranking by mean final validation loss{data}"
        if ranking.metric == BITS:
            title = "Ranking by mean bits per byte: same text, different tokenizers"
        yield title, list(_ranking(ranking))


def _ranking(ranking: Ranking) -> Iterator[str]:
    family = ranking.verdict
    reference = "leader" if family.rules.baseline is None else "baseline"
    pairs = ranking.pairs_by_name
    rows = [
        [*_ranking_cells(place, group), _difference(pair.mirrored(), ranking) if pair else reference]
        for place, group in enumerate(ranking.groups, start=1)
        for pair in [pairs.get(group.name)]
    ]
    rows += [[f" - {one.name}", *[UNKNOWN] * 3, "0", no_result_text(one)] for one in ranking.without_result]
    metric = "bits/byte" if ranking.metric == BITS else "val loss"
    titles = [
        "   configuration",
        metric,
        f"{percent_text(family.rules.confidence)} CI",
        "sd",
        "seeds",
        f"difference to {reference}",
    ]
    yield from table(columns(titles, (0, len(titles) - 1)), rows, WIDTH, rule=True)
    runs = [run.name for group in ranking.groups if group.name == family.reference for run in group.counted]
    if runs:
        yield from wrap(f"{reference}: " + ", ".join(runs))
    yield from wrap(_detectable(ranking))
    yield from wrap(_method(ranking))
    for note in ranking.notes:
        yield from wrap(note, bullet="! ")


def _ranking_cells(place: int, group: GroupNumbers) -> list[str]:
    """Return the cells of a configuration in a ranking, without its difference."""
    interval = group.interval
    return [
        f"{place:>2} {group.name}",
        _loss(group.mean),
        UNKNOWN if interval is None else f"±{(interval.high - interval.low) / 2:.{LOSS_DIGITS}f}",
        UNKNOWN if group.deviation is None else f"{group.deviation:.{LOSS_DIGITS}f}",
        str(len(group.losses)),
    ]


def _difference(pair: PairVerdict, ranking: Ranking) -> str:
    """Return the difference of a group to the reference, with its confidence interval, p value and outcome."""
    if pair.difference is None:
        return UNKNOWN
    digits = digits_for(pair.interval)
    if pair.interval is None or pair.p_holm is None:
        return f"{signed_text(pair.difference, digits)} ({pair.reason.partition(':')[0] or 'no test'}, not significant)"
    difference = signed(pair.difference, digits)
    interval = f"[{signed(pair.interval.low, digits)}, {signed(pair.interval.high, digits)}]"
    text = f"{difference} {interval}, {p_text(pair.p_holm, ranking.verdict.rules.alpha)}: "
    return text + outcome_word(pair.outcome, pair.method)


def _detectable(ranking: Ranking) -> str:
    """Return the smallest differences that could have been found, of the pairs that are not distinguishable."""
    found = [
        f"{pair.b} {pair.detectable:.{digits_for(pair.interval)}f}"
        for pair in ranking.verdict.against_reference
        if pair.outcome is PairOutcome.OPEN and pair.detectable is not None
    ]
    return f"smallest detectable difference (power 80 %): {'; '.join(found)}" if found else ""


def _method(ranking: Ranking) -> str:
    """Return the name of the significance test, or "" if there was none."""
    family = ranking.verdict
    tested = [pair for pair in family.pairs if pair.p_holm is not None]
    if not tested:
        return ""
    level, alpha = percent_text(family.rules.confidence), round(family.rules.alpha, 10)
    methods = " and ".join(dict.fromkeys(str(pair.method) for pair in tested))
    correction = f", p Holm-corrected for {plural(family.size, 'comparison')}, brackets not" if family.size > 1 else ""
    significant = f"significant if p <= {alpha:g}"
    return f"brackets: {level} CI of the difference; Student's t test ({methods}){correction}; {significant}"


def _optimizer_settings(found: Sequence[OptimizerSettings]) -> list[str]:
    """Return the settings of each optimizer. Settings that were set or swept are marked."""
    if not found:
        return []
    lines = []
    width = max(len(one.optimizer) for one in found) + 2
    for one in found:
        # A name and its value stay on one line.
        text = ", ".join(_setting(setting).replace(" ", NO_BREAK) for setting in one.settings)
        wrapped = textwrap.wrap(text, WIDTH, initial_indent=one.optimizer.ljust(width), subsequent_indent=" " * width)
        lines += [line.replace(NO_BREAK, " ") for line in wrapped]
    return [*lines, "unmarked values are defaults, not tuned for this model"]


def _setting(setting: OptimizerSetting) -> str:
    values = " ".join(f"{value:g}" if isinstance(value, float) else str(value).lower() for value in setting.values)
    return f"{setting.name} {values}{ORIGINS.get(setting.origin, '')}"


def _scaling_section(scalings: Sequence[Scaling]) -> Section:
    unit = "ranks" if all(scaling.device == "cpu" for scaling in scalings) else "GPUs"
    rows = []
    for scaling in scalings:
        for place, row in enumerate(scaling.rows):
            batch = UNKNOWN if row.global_batch is None else f"{row.global_batch:,}"
            relative = [f"{row.speedup:.2f}x", f"{100 * row.efficiency:.0f}%", batch, str(len(row.runs))]
            rows.append(["" if place else scaling.name, str(row.world_size), count(row.tokens_per_second), *relative])
    if not rows:
        return "Scaling", []
    titles = ["configuration", unit, "tok/s", "speed-up", "efficiency", "global batch", "runs"]
    lines = table(columns(titles), rows, WIDTH, rule=True)
    if any(len({row.global_batch for row in scaling.rows}) > 1 for scaling in scalings):
        lines += wrap(f"the global batch grows with the number of {unit}: GLOBAL_BATCH=<n> makes the losses comparable")
    return f"Scaling: throughput relative to the fewest {unit}", lines


def _benchmarks(runs: Sequence[RunNumbers]) -> list[str]:
    """Return a table of the runs with bits per byte, HellaSwag or CORE; empty if there are none."""
    with_bits = any(run.bits_per_byte is not None for run in runs)
    with_hellaswag = any(run.hellaswag_accuracy is not None for run in runs)
    with_core = any(run.core_metric is not None for run in runs)
    rows = []
    for run in runs:
        if run.bits_per_byte is run.hellaswag_accuracy is run.core_metric is None:
            continue
        row = [run.name, run.tokenizer or UNKNOWN]
        if with_bits:
            row.append(_decimal(run.bits_per_byte, 4) + ("" if run.counts else "*"))
        if with_hellaswag:
            row += [_decimal(run.hellaswag_accuracy, 4), _decimal(run.hellaswag_accuracy_norm, 4)]
        if with_core:
            row += [_decimal(run.core_metric, 4), _decimal(run.core_standard_error, 4)]
        rows.append(row)
    titles = ["run", "tokenizer", *(["bits/byte"] if with_bits else [])]
    titles += ["HellaSwag", "normalized"] if with_hellaswag else []
    titles += ["CORE", "std. error"] if with_core else []
    lines = table(columns(titles, (0, 1)), rows, WIDTH, rule=True) if rows else []
    return [*lines, *wrap(CORE_NOISE)] if with_core else lines


def _decimal(value: float | None, places: int) -> str:
    return UNKNOWN if value is None else f"{value:z.{places}f}"


def _origin(attempt: Attempt, starts: Mapping[int, int]) -> str:
    """Return where a later attempt started, "" for the first one or if it logged nothing."""
    number = attempt.number
    if number == 1 or number not in starts:
        return ""
    # It resumes if it can: without a checkpoint it starts from scratch.
    if attempt.resume == "none" or starts[number] == 0:
        return "started again"
    return "resumed from " + ("the last good checkpoint" if attempt.resume == "auto" else attempt.resume)


def _attempts(run: RunNumbers, home: str) -> Iterator[str]:
    """Yield how each attempt of a run ended, the checkpoint it resumed from and a reduced micro-batch.

    home: the host of the matrix.
    """
    yield run.name
    for attempt in run.attempts:
        end = run.how_ended(attempt)
        on = f" on {attempt.host}" if attempt.host not in ("", home) else ""
        parts = [f"{attempt.number}: {end.kind if end else 'running'}{on}"]
        parts += [origin] if (origin := _origin(attempt, run.starts)) else []
        parts += [f"micro-batch {attempt.micro_batch}"] if attempt.micro_batch else []
        parts += [end.reason] if end and end.reason else []
        yield from (f"    {line}" for line in wrap(", ".join(parts), width=WIDTH - 4))


@dataclass(frozen=True, slots=True)
class Overlap:
    """A run that trained at the same time as others."""

    run: str
    others: tuple[str, ...]
    share: float  # of the run's time during which any other trained, 0 to 1


def overlaps(runs: Sequence[RunNumbers]) -> list[Overlap]:
    """Return the runs that trained at the same time as other runs of the matrix, on the same host."""
    by_host: dict[str, dict[int, list[Span]]] = {}  # host -> place of a run -> its spans there
    for place, run in enumerate(runs):
        for attempt in run.attempts:
            if seconds := attempt.end.seconds if attempt.end else attempt.seconds:
                span = attempt.started, attempt.started + seconds
                by_host.setdefault(attempt.host, {}).setdefault(place, []).append(span)
    found: dict[int, tuple[set[int], float]] = {}  # place of a run -> those of the others, and the largest share
    for trained in by_host.values():  # of one host, so that the times are of one clock
        for place, parts in _shared_spans(trained).items():
            time = sum(end - begin for begin, end in trained[place])
            others = [other for other in parts if time and _length(parts[other]) >= MIN_OVERLAP * time]
            if others:
                # The union: time shared with two others counts once.
                together = _length([part for other in others for part in parts[other]])
                before, share = found.get(place, (set(), 0.0))
                found[place] = (before | set(others), max(share, together / time))
    return [
        Overlap(runs[place].name, tuple(runs[other].name for other in sorted(others)), share)
        for place, (others, share) in sorted(found.items())
    ]


def _shared_spans(spans: Mapping[int, Sequence[Span]]) -> dict[int, dict[int, list[Span]]]:
    """Return for each run: place of another run -> the spans in which both trained. spans: of each run by its place.

    A sweep in order of time, which compares only runs that overlap: a matrix may have thousands of runs.
    """
    shared: dict[int, dict[int, list[Span]]] = {place: {} for place in spans}
    active: list[tuple[float, int]] = []  # end and place of the runs that train now
    for begin, end, place in sorted((*span, place) for place, own in spans.items() for span in own):
        active = [(until, other) for until, other in active if until > begin]
        for until, other in active:
            part = (begin, min(end, until))
            for one, its_other in ((place, other), (other, place)):
                if one != its_other:
                    shared[one].setdefault(its_other, []).append(part)
        active.append((end, place))
    return shared


def overlap_lines(runs: Sequence[RunNumbers]) -> list[str]:
    """Return a line per run that shared a host, and how to avoid it; empty if none did."""
    lines = []
    for one in overlaps(runs):
        lines.append(f"{one.run}  {one.share:.0%} of its time in parallel with {first_names(one.others, MAX_OVERLAPS)}")
    if lines:
        lines.append("time, power and host memory of these runs depend on each other: PARALLEL_JOBS=1 separates them")
    return lines


def _length(spans: Sequence[Span]) -> float:
    """Return the length of the union of spans, seconds."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _reused(runs: Sequence[RunNumbers]) -> list[str]:
    """Return where each reused run was trained, and when."""
    lines = []
    for run in runs:
        if run.reused_from:
            when = f", trained until {time_of_day(run.ended, utc=True)}" if run.ended else ""
            lines.append(f"{run.name}  from {run.reused_from}{when}")
    return [*lines, "REUSE=n trains them again"] if lines else []


def _failure(run: RunNumbers, home: str) -> Iterator[str]:
    """Yield why a run did not finish, its log and the last lines of it. home: the host of the matrix."""
    if not run.ended_badly:
        return
    known = run.steps is not None and run.max_iters is not None
    progress = f" (after {run.steps:,} of {run.max_iters:,} steps)" if known else ""
    yield from wrap(f"{run.name}  {run.status}: {run.reason or 'no reason recorded'}{progress}")
    if run.attempts and run.attempts[-1].host not in ("", home):
        yield f"    on {run.attempts[-1].host}"
    if run.log:
        yield f"    log: {run.log}"
    # A carriage return (of a progress bar) ends a line, too: each gets its mark, and none looks like the report.
    for line in printable("\n".join(run.log_tail)).splitlines()[-TAIL_LINES:]:
        yield f"    | {line[: WIDTH - 6]}"


def _alerts(run: RunNumbers) -> Iterator[str]:
    """Yield the alerts of a run with their duration and advice, critical ones first."""
    if not run.alerts:
        return
    yield run.name
    for alerts in by_subject(run.alerts):
        mark = "! " if alerts[0].severity is Severity.CRITICAL else ""
        for line in wrap(f"{mark}{worst(alerts).text} ({_when(alerts)}): {alerts[0].advice}", width=WIDTH - 4):
            yield f"    {line}"


def _when(alerts: Sequence[Alert]) -> str:
    """Return when alerts of one kind were active, and for how long in total."""
    begin = f"from {time_of_day(alerts[0].since, date=False, utc=True)}"
    if alerts[-1].until is None:
        return f"{begin} to the end"
    total = duration(sum(alert.until - alert.since for alert in alerts if alert.until is not None))
    return f"{begin} for {total}" if len(alerts) == 1 else f"{len(alerts)} times {begin}, {total} in total"
