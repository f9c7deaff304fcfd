"""The tables of the reports: titles and cells as text, the same in plain text, Markdown and HTML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kmatrix.gpu.balance import cv_text
from kmatrix.records.runs import RunNumbers
from kmatrix.report import wording
from kmatrix.report.ranking import NOT_AMOUNTS
from kmatrix.report.results import Ranking, Results, Run
from kmatrix.text import UNKNOWN, count, duration, fixed, plural, signed
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
EFFORTS = {"step": "steps", "tokens": "tokens", "seconds": "time", "joules": "energy"}
LOSS_NOTE = "val loss: mean over the validation sequences, nats/token; best: lowest val loss@step"
MARK_NOTE = "; *: the run has not finished, or diverged: its last val loss, not ranked"
Row = Mapping[str, str | None]  # title of a column -> cell; None: unknown, and without a column if all are


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table. words: places of the columns of words, which are aligned to the left."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)


def table_of(rows: Sequence[Row], words: Collection[str] = ()) -> Table:
    """Return rows that all have the same titles as a table. words: the titles of columns of words, next to the first.

    >>> table_of([{"run": "a", "loss": None, "time": None}, {"run": "b", "loss": "3.1", "time": None}]).rows
    [['a', '-'], ['b', '3.1']]
    """
    titles = [title for title in rows[0] if any(row[title] is not None for row in rows)] if rows else []
    cells = [[UNKNOWN if (cell := row[title]) is None else cell for title in titles] for row in rows]
    places = [place for place, title in enumerate(titles) if not place or title in words]
    return Table(titles=titles, rows=cells, words=places)


def runs(results: Results) -> Table:
    """Return a row per run."""
    rows = []
    for run in results.runs:
        best = wording.known("best_val_loss", run.best_val_loss)
        rows.append(
            {
                "run": run.name,
                "optimizer": run.optimizer or UNKNOWN,
                "ranks": UNKNOWN if run.world_size is None else str(run.world_size),
                "seed": UNKNOWN if run.seed is None else str(run.seed),
                "val loss": wording.loss(run.final_val_loss) + wording.unfinished(run),
                "best@step": best and f"{best}@{run.best_val_step}",
                "ppl": wording.perplexity(run.perplexity),
                "tokens": count(run.tokens),
                "sparsity": None if run.pruning == "none" else wording.quantity("sparsity", run.sparsity),
                "tok/s": count(run.tokens_per_second),
                "MFU": wording.known("mfu", run.mfu),
                "time": duration(run.seconds),
                # Trained in another matrix: its time and speed are of another day, or another machine.
                "status": f"{run.status}, reused" if run.reused_from else "reserve" if run.reserve else str(run.status),
            }
        )
    return table_of(rows, ("optimizer", "status"))


def loss_note(results: Results) -> str:
    """Return what the losses in the table of runs mean."""
    return LOSS_NOTE + (MARK_NOTE if any(map(wording.unfinished, results.runs)) else "")


def ranking(results: Results, one: Ranking) -> Table:
    """Return a row per configuration, with its difference to the reference."""
    known = {each.name: each for each in results.configurations}
    against = {pair.b: pair.mirrored() for pair in one.pairs if pair.a == one.reference}
    word = "baseline" if one.baseline else "leader"
    rows = []
    for name in (*one.order, *one.no_result):
        each = known[name]
        place = f"{one.order.index(name) + 1:>2}" if name in one.order else " -"
        text = difference(against[name], one.confidence) if name in against else word
        if name in one.no_result:
            text = wording.endings(each)
        rows.append({
            "   configuration": f"{place} {name}",
            "bits/byte" if one.unit == "bits/byte" else "val loss": wording.mean_of(each),
            f"{wording.percent(one.confidence)} CI": f"±{wording.half(each.interval)}" if each.interval else UNKNOWN,
            "sd": wording.loss(each.deviation, wording.digits_for(each.interval)),
            "seeds": str(len(each.counted)),
            f"difference to {word}": text,
        })  # fmt: skip
    return table_of(rows, (f"difference to {word}",))


def difference(pair: Pair, confidence: float) -> str:
    """Return a difference to the reference, with interval, p and outcome."""
    if pair.difference is None:
        return UNKNOWN
    digits = wording.digits_for(pair.interval)
    if pair.interval is None or pair.p_holm is None:
        why = pair.reason.partition(":")[0] or "no test"
        return f"{wording.difference(pair.difference, digits)} ({why}, not significant)"
    low, high = (signed(value, digits) for value in (pair.interval.low, pair.interval.high))
    p = wording.p_text(pair.p_holm, 1 - confidence)
    return f"{signed(pair.difference, digits)} [{low}, {high}], {p}: {wording.outcome(pair)}"


def cost(results: Results) -> Table:
    """Return what each configuration takes, as means over its finished runs."""
    rows: list[Row] = []
    for one in results.configurations:
        shown = {title: wording.known(name, one.amounts.get(name)) for name, title in COST_TITLES.items()}
        if one.amounts:
            rows.append({"configuration": one.name, **shown})
    return table_of(rows)


def benchmarks(results: Results) -> Table:
    """Return what runs measured besides their loss and what it took, a column per number of the trainer."""
    types = RunNumbers.__annotations__
    fields = [name for name, kind in types.items() if "str" not in kind and name not in (*NOT_AMOUNTS, *SHOWN)]
    rows: list[Row] = [
        {
            "run": run.name,
            "tokenizer": run.tokenizer or UNKNOWN,
            **{name.replace("_", " "): wording.known(name, getattr(run, name)) for name in fields},
        }
        for run in results.runs
        if any(getattr(run, name) is not None for name in fields)
    ]
    return table_of(rows, ("tokenizer",))


def scaling(results: Results) -> Table:
    """Return throughput relative to the fewest ranks."""
    rows = [
        {
            "configuration": row.configuration,
            "ranks": str(row.world_size),
            "tok/s": count(row.tokens_per_second),
            "speed-up": f"{row.speedup:.2f}x",
            "efficiency": f"{100 * row.efficiency:.0f}%",
            "global batch": UNKNOWN if row.global_batch is None else f"{row.global_batch:,}",
        }
        for row in results.scaling
    ]
    return table_of(rows)


def method(pairs: Sequence[Pair], size: int, confidence: float) -> str:
    """Return the name of the significance test, or "" if there was none. size: of the family."""
    methods = dict.fromkeys(str(pair.method) for pair in pairs if pair.p_holm is not None)
    if not methods:
        return ""
    many = plural(size, "comparison")
    correction = f", p Holm-corrected for {many}, brackets not" if size > 1 else ""
    return (
        f"brackets: {wording.percent(confidence)} CI of the difference; Student's t test ({' and '.join(methods)})"
        f"{correction}; significant if p <= {round(1 - confidence, 10):g}"
    )


def target(results: Results) -> Table:
    """Return what it took each configuration to reach the target: medians over all of its runs."""
    found = results.target.configurations if results.target else ()
    tested = any(one.test for one in found)
    rows = [
        {
            "configuration": one.name,
            "reached": f"{one.reached} of {plural(one.runs, 'run')}"
            + (f", {one.pending} to come" if one.pending else ""),
            "mean below": _test(one.test) if tested else None,
            **{title: wording.known(name, getattr(one.median, name)) for name, title in EFFORTS.items()},
        }
        for one in found
    ]
    return table_of(rows)


def _test(test: TargetTest | None) -> str:
    """Return whether the mean is below the target, with its p."""
    if test is None or test.p_holm is None:
        return "no test" if test is None else test.reason.partition(":")[0]
    return f"{'yes' if test.is_below else 'not shown'}, {wording.p_text(test.p_holm)}"


def devices(runs: Sequence[Run]) -> Table:
    """Return the devices of each run: means of the training where it is known."""
    rows = []
    for run in runs:
        if run.gpu is None or not run.gpu.gpus:
            continue
        gpu, main = run.gpu, run.gpu.main
        heat = [device.whole["temperature"].max for device in gpu.gpus if "temperature" in device.whole]
        even = main.balance.get("memory_used")
        peak, capacity = gpu.memory_used_max, gpu.memory_total if gpu.unit == "GPU" else None
        rows.append({
            "run": run.name,
            "devices": plural(len(gpu.gpus), gpu.unit) + (" (simulated)" if gpu.simulated else ""),
            "memory MiB": fixed(main.memory_used_mean, 0, grouped=True),
            "peak MiB": fixed(peak, 0, grouped=True),
            "of capacity": f"{100 * peak / capacity:.0f}%" if capacity and peak is not None else None,
            "utilization": UNKNOWN if main.utilization is None else f"{main.utilization:.1f}%",
            "W": None if main.mean_power is None else fixed(main.mean_power),
            "energy": wording.known("joules", gpu.whole.joules),
            "max °C": fixed(max(heat), 0) if heat else None,
            "CV of memory": None if even is None else f"{cv_text(even.cv)} {even.quality}",
        })  # fmt: skip
    return table_of(rows, ("devices", "CV of memory"))


def differing(results: Results) -> Table:
    """Return the settings in which configurations differ: the value of the reference, then those of the others."""
    first = results.configurations[0].name if results.configurations else ""
    rows = []
    for one in results.differing:
        counts = Counter(one.of.values())
        values = list(map(wording.value_text, one.values))
        others = ", ".join(f"{counts[place]} x {values[place]}" for place in range(1, len(values[:9])))
        more = f", and {len(values) - 9} more" if len(values) > 9 else ""
        rows.append({
            "setting": one.name, first: values[0], "others": others + more, "": "chosen" if one.chosen else "",
        })  # fmt: skip
    return table_of(rows, (first, "others", ""))
