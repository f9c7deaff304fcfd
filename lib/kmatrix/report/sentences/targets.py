"""The sentences about a target loss."""

from __future__ import annotations

from collections.abc import Iterator

from kmatrix.report.numbers import MatrixNumbers
from kmatrix.report.pair_text import margin_text, name, p_text, sentence
from kmatrix.report.sentences.values import LineLabel, VerdictLine
from kmatrix.report.target import QUANTITIES, TargetGroup, target_numbers
from kmatrix.text import duration, money, plural

MOST_TARGETS = 8  # configurations with a line about the target


def target_lines(numbers: MatrixNumbers) -> Iterator[VerdictLine]:
    """Yield how surely each configuration is below TARGET_LOSS, and in how many runs it was reached."""
    target = target_numbers(numbers)
    if target is None or not target.is_set:
        return
    for one in target.groups[:MOST_TARGETS]:
        parts = sentence(name(one.name), f": {target_text(one, target.value, 1 - numbers.confidence)}")
        yield VerdictLine(label=LineLabel.TARGET, parts=parts)
    if len(target.groups) > MOST_TARGETS:
        rest = sentence(f"and {plural(len(target.groups) - MOST_TARGETS, 'more configuration')}, in results.json")
        yield VerdictLine(label=LineLabel.TARGET, parts=rest)


def target_text(one: TargetGroup, target: float, alpha: float) -> str:
    """Return `below 3.28 (p = 0.003), reached in 5 of 5 runs, median 3,250 steps, 12m03s`."""
    test, loss, step = one.test, margin_text(target), one.reached("step")
    if test is None or test.p_holm is None:
        reason = "" if test is None else test.reason.partition(":")[0]
        parts = [f"no test against {loss} ({reason or 'no loss'})"]
    else:
        parts = [f"{'below' if test.is_below else 'not shown to be below'} {loss} ({p_text(test.p_holm, alpha)})"]
    if not step.runs:
        return ", ".join([*parts, "no run has ended"])
    missed = f"not reached in {step.missed} of {plural(step.runs, 'run')}"
    parts.append(missed if step.missed else f"reached in {step.reached} of {plural(step.runs, 'run')}")
    medians = {quantity: one.reached(quantity).median for quantity in QUANTITIES}
    texts = {
        "step": lambda value: f"median {value:,.0f} steps",
        "seconds": duration,
        "joules": lambda value: f"{value:,.0f} J",
        "dollars": money,
    }
    return ", ".join([*parts, *(text(value) for unit, text in texts.items() if (value := medians[unit]) is not None)])
