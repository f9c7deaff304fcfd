"""The tables of the reports: titles and cells as text, the same in plain text, Markdown and HTML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kmatrix.gpu.balance import Balance, cv_text
from kmatrix.records.decode import Scalar
from kmatrix.records.runs import RunNumbers, Status
from kmatrix.report import wording
from kmatrix.report.ranking import NOT_AMOUNTS
from kmatrix.report.results import Configuration, Ranking, Results, Run, Scaling
from kmatrix.text import UNKNOWN, count, duration, first_names, fixed, joules, plural, signed
from kmatrix.verdict.family import Pair
from kmatrix.verdict.target import TargetTest

COST_TITLES = {
    "step_ms": "time per step",
    "tokens_per_second": "tokens/s",
    "seconds": "time",
    "peak_memory_mib": "peak memory",
    "joules_per_token": "energy per token",
    "dollars": "dollars",
}
# Amounts with a place of their own; all others are benchmarks.
SHOWN = {*COST_TITLES, "joules", "mfu", "sparsity", "best_val_loss", "final_train_loss", "best_bits_per_byte"}
SHOWN |= {"optimizer_state_mib"}
MOST_SHORT = 10
# Which runs are shown if not all fit: first those that need attention.
URGENCY = (Status.FAILED, Status.STOPPED, Status.SKIPPED, Status.RUNNING, Status.FINISHED, Status.PLANNED)
EFFORTS = {"step": "steps", "tokens": "tokens", "seconds": "time", "joules": "energy", "dollars": "dollars"}
LOSS_NOTE = "val loss: mean over the validation sequences, nats/token; best: lowest val loss@step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table. words: places of the columns of words, which are aligned to the left."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)


def runs(results: Results) -> Table:
    """Return a row per run."""
    devices = {run.device for run in results.runs if run.device}
    pruned = any(run.pruning != "none" for run in results.runs)
    titles = ["run", "optimizer", "ranks" if devices == {"cpu"} else "GPUs", "seed", "val loss", "best@step", "ppl"]
    titles += ["tokens", *(["sparsity"] if pruned else []), "tok/s", "MFU", "time", "status"]
    rows = []
    for run in results.runs:
        mark = "cpu" if len(devices) > 1 and run.device == "cpu" else ""
        best = wording.loss(run.best_val_loss)
        sparsity = [UNKNOWN if run.sparsity is None else f"{100 * run.sparsity:.1f}%"]
        rows.append([
            run.name,
            run.optimizer or UNKNOWN,
            UNKNOWN if run.world_size is None else f"{run.world_size}{mark}",
            UNKNOWN if run.seed is None else str(run.seed),
            wording.loss(run.final_val_loss) + wording.unfinished(run),
            best if run.best_val_loss is None or run.best_val_step is None else f"{best}@{run.best_val_step}",
            wording.perplexity(run.perplexity),
            count(run.tokens),
            *(sparsity if pruned else []),
            count(run.tokens_per_second),
            utilization(run),
            duration(run.seconds),
            status(run),
        ])  # fmt: skip
    return Table(titles=titles, rows=rows, words=(0, 1, len(titles) - 1))


def short(results: Results) -> Table:
    """Return a row for at most MOST_SHORT runs: if not all fit, failed ones, then those with the lowest loss."""

    def key(run: Run) -> tuple[int, float]:
        return URGENCY.index(run.status), math.inf if run.final_val_loss is None else run.final_val_loss

    kept = {run.name for run in sorted(results.runs, key=key)[:MOST_SHORT]}
    rows = [
        [
            run.name,
            wording.loss(run.final_val_loss) + wording.unfinished(run),
            wording.perplexity(run.perplexity),
            count(run.tokens_per_second),
            "" if run.mfu is None else f"{100 * run.mfu:.1f}%",
            duration(run.seconds),
            "reused" if run.reused_from else status(run),
        ]
        for run in results.runs
        if run.name in kept
    ]
    return Table(titles=["run", "val loss", "ppl", "tok/s", "MFU", "time", "status"], rows=rows, words=(0, 6))


def utilization(run: Run) -> str:
    """Return MFU in percent; n/a on the CPU, whose peak is unknown."""
    if run.mfu is None:
        return "n/a" if run.device == "cpu" else UNKNOWN
    return f"{100 * run.mfu:.1f}%"


def status(run: Run) -> str:
    """Return the status of a run as a reader sees it."""
    # Trained in another matrix: its time and speed are of another day, or another machine.
    return f"{run.status}, reused" if run.reused_from else "reserve" if run.reserve else str(run.status)


def loss_notes(results: Results) -> list[str]:
    """Return what the losses in the table of runs mean."""
    marked = [run for run in results.runs if wording.unfinished(run)]
    notes = [LOSS_NOTE]
    if any(not run.diverged for run in marked):
        notes.append("*: last val loss of an unfinished run, not ranked")
    if diverged := [run.name for run in marked if run.diverged]:
        notes.append(f"* of {first_names(diverged)}: diverged, not ranked")
    return ["; ".join(notes)]


def ranking(results: Results, one: Ranking) -> Table:
    """Return a row per configuration, with its difference to the reference."""
    known = {each.name: each for each in results.configurations}
    against = {pair.b: pair.mirrored() for pair in one.pairs if pair.a == one.reference}
    word = "baseline" if one.baseline else "leader"
    titles = ["   configuration", "bits/byte" if one.unit == "bits/byte" else "val loss"]
    titles += [f"{wording.percent(one.confidence)} CI", "sd", "seeds"]
    rows = []
    for place, name in enumerate(one.order, start=1):
        each = known[name]
        rows.append([
            f"{place:>2} {name}",
            wording.mean_of(each),
            UNKNOWN if each.interval is None else f"±{wording.half(each.interval)}",
            UNKNOWN if each.deviation is None else f"{each.deviation:.{wording.digits_for(each.interval)}f}",
            str(len(each.counted)),
            difference(one, against, name) or word,
        ])  # fmt: skip
    for name in one.no_result:
        rows.append([f" - {name}", *[UNKNOWN] * 3, "0", wording.endings(known[name])])
    return Table(titles=[*titles, f"difference to {word}"], rows=rows, words=(0, len(titles)))


def difference(one: Ranking, against: dict[str, Pair], name: str) -> str:
    """Return the difference of a configuration to the reference, with interval, p and outcome; "" of the reference."""
    pair = against.get(name)
    if pair is None:
        return ""
    if pair.difference is None:
        return UNKNOWN
    digits = wording.digits_for(pair.interval)
    if pair.interval is None or pair.p_holm is None:
        why = pair.reason.partition(":")[0] or "no test"
        return f"{wording.difference(pair.difference, digits)} ({why}, not significant)"
    low, high = (signed(value, digits) for value in (pair.interval.low, pair.interval.high))
    p = wording.p_text(pair.p_holm, 1 - one.confidence)
    return f"{signed(pair.difference, digits)} [{low}, {high}], {p}: {wording.outcome(pair)}"


def cost(results: Results) -> Table:
    """Return what each configuration takes, as means over its finished runs."""
    known = [one for one in results.configurations if one.amounts]
    shown = [name for name in COST_TITLES if any(name in one.amounts for one in known)]
    rows = [[one.name, *(amount_text(one, name) for name in shown)] for one in known]
    return Table(titles=["configuration", *(COST_TITLES[name] for name in shown)], rows=rows)


def amount_text(one: Configuration, name: str) -> str:
    """Return a mean with its unit; simulated energy is no energy."""
    amount = one.amounts.get(name)
    return wording.quantity(name, None if amount is None else amount.mean)


def benchmarks(results: Results) -> Table:
    """Return what runs measured besides their loss and what it took, a column per number of the trainer."""
    types = RunNumbers.__annotations__
    fields = [name for name, kind in types.items() if "str" not in kind and name not in (*NOT_AMOUNTS, *SHOWN)]
    titles = [name for name in fields if any(getattr(run, name) is not None for run in results.runs)]
    rows = [
        [run.name, run.tokenizer or UNKNOWN, *(wording.quantity(name, getattr(run, name)) for name in titles)]
        for run in results.runs
        if any(getattr(run, name) is not None for name in titles)
    ]
    return Table(titles=["run", "tokenizer", *(name.replace("_", " ") for name in titles)], rows=rows, words=(0, 1))


def scaling(found: Sequence[Scaling]) -> Table:
    """Return throughput relative to the fewest ranks."""
    unit = "ranks" if all(one.device == "cpu" for one in found) else "GPUs"
    rows = [
        [
            "" if place else one.configuration,
            str(row.world_size),
            count(row.tokens_per_second),
            f"{row.speedup:.2f}x",
            f"{100 * row.efficiency:.0f}%",
            UNKNOWN if row.global_batch is None else f"{row.global_batch:,}",
            str(len(row.runs)),
        ]
        for one in found
        for place, row in enumerate(one.rows)
    ]
    return Table(titles=["configuration", unit, "tok/s", "speed-up", "efficiency", "global batch", "runs"], rows=rows)


def detectable(one: Ranking) -> str:
    """Return the smallest differences that could have been found, of the pairs that are not distinguishable."""
    return "; ".join(
        f"{pair.b} {pair.detectable:.{wording.digits_for(pair.interval)}f}"
        for pair in one.pairs
        if pair.a == one.reference and pair.outcome == "open" and pair.detectable is not None
    )


def method(one: Ranking) -> str:
    """Return the name of the significance test, or "" if there was none."""
    methods = dict.fromkeys(str(pair.method) for pair in one.pairs if pair.p_holm is not None)
    if not methods:
        return ""
    many = plural(one.family_size, "comparison")
    correction = f", p Holm-corrected for {many}, brackets not" if one.family_size > 1 else ""
    return (
        f"brackets: {wording.percent(one.confidence)} CI of the difference; Student's t test ({' and '.join(methods)})"
        f"{correction}; significant if p <= {round(1 - one.confidence, 10):g}"
    )


def grows(found: Sequence[Scaling]) -> bool:
    """Return whether the global batch grows with the number of ranks."""
    return any(len({row.global_batch for row in one.rows}) > 1 for one in found)


def target(results: Results) -> Table:
    """Return what it took each configuration to reach the target: medians over all of its runs."""
    found = results.target.configurations if results.target else ()
    shown = [q for q in EFFORTS if any(getattr(one.median, q) is not None for one in found)]
    tested = any(one.test for one in found)
    rows = [
        [
            one.name,
            f"{one.reached} of {plural(one.runs, 'run')}" + (f", {one.pending} to come" if one.pending else ""),
            *([_test(one.test)] if tested else []),
            *(wording.quantity(q, getattr(one.median, q)) for q in shown),
        ]
        for one in found
    ]
    titles = ["configuration", "reached", *(["mean below"] if tested else []), *(EFFORTS[q] for q in shown)]
    return Table(titles=titles, rows=rows)


def _test(test: TargetTest | None) -> str:
    """Return whether the mean is below the target, with its p."""
    if test is None or test.p_holm is None:
        return "no test" if test is None else test.reason.partition(":")[0]
    return f"{'yes' if test.is_below else 'not shown'}, {wording.p_text(test.p_holm)}"


def sweeps(results: Results) -> Table:
    """Return where the loss is lowest on each numeric axis."""
    known = {one.name: one for one in results.configurations}
    rows = []
    for one in results.sweeps:
        lowest = known[one.configurations[one.values.index(one.best)]]
        edge = "at the edge of the values that ran" if one.is_edge else ""
        rows.append(
            [
                one.name or lowest.name,
                one.axis,
                f"{one.best:g}",
                wording.loss(lowest.mean),
                wording.loss(one.spread),
                edge,
            ]
        )
    titles = ["configurations", "axis", "lowest at", "mean loss there", "highest - lowest mean", ""]
    return Table(titles=titles, rows=rows, words=(0, 1, 5))


def devices(results: Results) -> Table:
    """Return the devices of each run: means of the training where it is known."""
    rows = []
    for run in results.runs:
        if run.gpu is None or not run.gpu.gpus:
            continue
        gpu, totals = run.gpu, run.gpu.totals
        main = gpu.training or totals
        balance = gpu.training.balance if gpu.training else gpu.balance
        heat = [device.temperature.max for device in gpu.gpus if device.temperature]
        share = (
            None if not totals.capacity or totals.memory_used_max is None else totals.memory_used_max / totals.capacity
        )
        rows.append([
            run.name,
            f"{len(gpu.gpus)} {gpu.unit}{'s'[: len(gpu.gpus) > 1]}" + (" (simulated)" if gpu.simulated else ""),
            fixed(main.memory_used_mean, 0, grouped=True),
            fixed(totals.memory_used_max, 0, grouped=True),
            UNKNOWN if share is None else f"{100 * share:.0f}%",
            UNKNOWN if main.utilization is None else f"{main.utilization:.1f}%",
            fixed(main.mean_power),
            joules(totals.joules),
            fixed(max(heat), 0) if heat else UNKNOWN,
            " / ".join(map(_balance, (balance.memory, balance.power))),
        ])  # fmt: skip
    titles = ["run", "devices", "memory MiB", "peak MiB", "of capacity", "utilization", "W", "energy", "max °C"]
    return Table(titles=[*titles, "CV of memory / power"], rows=rows, words=(0, 1, 9))


def _balance(one: Balance | None) -> str:
    return "n/a" if one is None else f"{cv_text(one.cv)} {one.quality}"


def differing(results: Results) -> Table:
    """Return the settings in which configurations differ: the value of the reference, then those of the others."""
    rows = []
    for one in results.differing:
        counts = Counter(one.of.values())
        others = [f"{counts[place]} x {setting_text(one.values[place])}" for place in range(1, len(one.values))][:8]
        more = f", and {len(one.values) - 9} more" if len(one.values) > 9 else ""
        rows.append([one.name, setting_text(one.values[0]), ", ".join(others) + more, "chosen" if one.chosen else ""])
    first = results.configurations[0].name if results.configurations else ""
    return Table(titles=["setting", first, "others", ""], rows=rows, words=(0, 1, 2, 3))


def setting_text(value: Scalar) -> str:
    """Return the value of a training field."""
    if isinstance(value, bool):
        return str(value).lower()
    return UNKNOWN if value is None else f"{value:g}" if isinstance(value, float) else str(value)
