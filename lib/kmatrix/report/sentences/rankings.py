"""Words that every form of a ranking uses: its unit, its open comparisons, rows without a result, what CORE shows."""

from __future__ import annotations

from kmatrix.records.runs import Status
from kmatrix.report.numbers import BITS, GroupNumbers, Ranking
from kmatrix.text import plural
from kmatrix.verdict.family import FamilyVerdict, PairOutcome
from kmatrix.verdict.family import Pair as PairVerdict

CORE_NOISE = (
    "CORE: equal runs of nanochat varied by a standard deviation of 0.005 to 0.012 (docs/evaluation.md); "
    "configurations are ranked by their losses"
)


def unit_of(ranking: Ranking) -> str:
    """Return the unit of the losses of a ranking."""
    return "bits/byte" if ranking.metric == BITS else "nats/token"


def compared_pairs(family: FamilyVerdict) -> list[PairVerdict]:
    """Return the comparisons of the reference with configurations that have a loss."""
    return [pair for pair in family.against_reference if pair.difference is not None]


def open_pairs(family: FamilyVerdict) -> list[PairVerdict]:
    """Return the open comparisons of the reference, without those of configurations that are worse than a third one."""
    beaten = set()
    if family.rules.baseline is None:
        beaten = {pair.b for pair in family.pairs if pair.outcome is PairOutcome.BETTER}
        beaten |= {pair.a for pair in family.pairs if pair.outcome is PairOutcome.WORSE}
    return [pair for pair in compared_pairs(family) if pair.outcome is PairOutcome.OPEN and pair.b not in beaten]


def no_result_text(group: GroupNumbers) -> str:
    """Return why a configuration has no loss: `no result: 2 of 3 runs diverged, 1 failed`."""
    runs = group.runs
    counts = {
        "diverged": sum(run.diverged for run in runs),
        **{
            str(status): sum(run.status is status and not run.diverged for run in runs)
            for status in (Status.FAILED, Status.STOPPED, Status.SKIPPED)
        },
        "without a loss": sum(run.status is Status.FINISHED and not run.diverged for run in runs),
    }
    to_come = len(runs) - sum(counts.values())
    parts = [f"{number} {word}" for word, number in counts.items() if number]
    head, _, rest = parts[0].partition(" ") if parts else ("0", "", "ended")
    first = f"{head} of {plural(len(runs), 'run')} {rest}"
    return f"no result{' yet' if to_come else ''}: {', '.join([first, *parts[1:]])}"
