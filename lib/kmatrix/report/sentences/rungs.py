"""The sentences about successive halving: its rungs, who trained on, and what early losses do not show."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kmatrix.report.numbers import HalvingNumbers, MatrixNumbers
from kmatrix.report.pair_text import DIGITS, Part, Parts, name, number_text, sentence
from kmatrix.report.sentences.values import LineLabel, VerdictLine
from kmatrix.text import UNKNOWN
from kmatrix.verdict.survivors import DecidedRung

MOST_NAMED = 5  # configurations of a rung in one sentence
CAVEAT = (
    "an early loss can mislead, above all if learning rates, schedules or lengths differ: a configuration that a rung "
    "ended could have been the best at the end. The verdict compares only those that trained to the end"
)


def rung_lines(numbers: MatrixNumbers) -> Iterator[VerdictLine]:
    """Yield what successive halving decided at each rung, and what that does not show."""
    for parts in _rungs(numbers):
        yield VerdictLine(label=LineLabel.RUNG, parts=parts)
    if any(halving.rungs for halving in numbers.halvings):
        yield VerdictLine(label=LineLabel.NOTE, parts=sentence(CAVEAT))


def _rungs(numbers: MatrixNumbers) -> Iterator[Parts]:
    for halving in numbers.halvings:
        about = "" if len(numbers.halvings) == 1 else f"data {halving.data_sha256[:8] or UNKNOWN}, "
        for rung in halving.rungs:
            yield sentence(f"{about}step {rung.step:,}: ", *_kept(rung))
        if halving.waits_at is not None:
            waiting = f"{len(halving.alive)} configurations train to step {halving.waits_at:,}"
            yield sentence(f"{about}step {halving.waits_at:,}: not decided yet, {waiting}")


def _kept(rung: DecidedRung) -> Iterator[Part | str]:
    yield f"{len(rung.kept)} of {len(rung.losses)} configurations trained on"
    for place, kept in enumerate(rung.kept[:MOST_NAMED]):
        yield "; " if place else ": "
        yield name(kept)
    if len(rung.kept) > MOST_NAMED:
        yield f" and {len(rung.kept) - MOST_NAMED} more"


def ended_rows(halving: HalvingNumbers) -> Iterator[tuple[str, str, str]]:
    """Yield configuration, step and loss of those that rungs ended: the last rung first, the best there first."""
    for rung in reversed(halving.rungs):
        ended = [one for one in rung.losses if one not in rung.kept]
        for one in sorted(ended, key=lambda one: (_order(rung.losses[one]), one)):
            yield one, f"{rung.step:,}", loss_text(rung.losses[one])


def _order(loss: float | None) -> float:
    return math.inf if loss is None else loss


def loss_text(loss: float | None) -> str:
    """Return the mean loss of a configuration at a rung."""
    if loss is None:
        return "failed"
    return number_text(loss, DIGITS) if math.isfinite(loss) else "diverged"
