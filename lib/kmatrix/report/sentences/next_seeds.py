"""What to run next: the command that runs the seeds a verdict still needs, and whether they are worth it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from kmatrix.records.runs import Status
from kmatrix.report.numbers import BITS, MatrixNumbers, Ranking, RunNumbers
from kmatrix.report.pair_text import comparisons_of, sentence
from kmatrix.report.sentences.rankings import compared_pairs, open_pairs
from kmatrix.report.sentences.values import LineLabel, Situation, VerdictLine
from kmatrix.text import plural
from kmatrix.verdict.family import Pair as PairVerdict

TO_END = (Status.PLANNED, Status.RUNNING)
MORE_SEEDS = 2  # per configuration, for a test of configurations with one seed
MOST_PROPOSED = 10  # seeds per configuration; a difference that needs more is small


def matrix_command(target: str, **arguments: str) -> str:
    """Return a make command for the files of a report, which are read elsewhere: without the paths of this machine."""
    return " ".join(["make", target, *(f"{name}={shlex.quote(value)}" for name, value in arguments.items())])


def to_end(numbers: MatrixNumbers) -> list[RunNumbers]:
    """Return the runs that the verdict waits for."""
    return [run for run in numbers.runs if run.status in TO_END and run.name not in numbers.reserve]


def more_seeds_command(numbers: MatrixNumbers, ranking: Ranking) -> str:
    """Return the command that runs the seeds that would decide what is open; "" if there is none worth proposing."""
    if numbers.count(Status.RUNNING):
        return ""  # they run already, or what runs may decide it
    matrix = numbers.path.name
    if ranking.replay is not None:
        return matrix_command("continue", TARGET=matrix) if ranking.replay.wanted else ""
    if to_end(numbers):
        return matrix_command("continue", TARGET=matrix)  # planned seeds come before further ones
    known = {run.seed for run in numbers.runs if run.seed is not None}
    more = needed(open_pairs(ranking.verdict))
    if not comparisons_of(ranking.verdict) and compared_pairs(ranking.verdict):
        more = MORE_SEEDS  # without a loss of the baseline, more seeds of the others allow no test
    # With adaptive seeds, the rankings by loss decide about further ones, not that of tokenizers.
    by_others = ranking.metric == BITS and ranking.verdict.rules.seeds
    if not more or not known or by_others:
        return ""
    return matrix_command("add", TARGET=matrix, SEED=",".join(str(max(known) + place) for place in range(1, more + 1)))


def needed(pairs: Sequence[PairVerdict]) -> int:
    """Return the seeds that would decide these open comparisons, of those that need at most MOST_PROPOSED; else 0."""
    return max((more for pair in pairs if (more := pair.more_seeds or 0) <= MOST_PROPOSED), default=0)


def next_line(still_open: Sequence[PairVerdict], situation: Situation) -> Iterator[VerdictLine]:
    """Yield the command that runs more seeds, or why there is none: too many would be needed."""
    if situation.wanted and situation.command:
        parts = sentence(f"{plural(situation.wanted, 'run')} that the verdict needs now")
        yield VerdictLine(label=LineLabel.NEXT, parts=parts, command=situation.command)
        return
    affordable = needed(still_open)
    if affordable and situation.command:
        error = "; seeds that are added after a test raise the error rate, MATRIX_SEEDS_AUTO=y does not"
        parts = sentence(f"about {plural(affordable, 'more seed')} per configuration{error}")
        yield VerdictLine(label=LineLabel.NEXT, parts=parts, command=situation.command)
    most = max((pair.more_seeds or 0 for pair in still_open), default=0)
    if most > MOST_PROPOSED and not situation.wanted and not situation.unfinished:
        start = "deciding the rest" if affordable else "a decision"
        text = f"{start} needs about {plural(most, 'more seed')} per configuration: probably not worth it"
        yield VerdictLine(label=LineLabel.NEXT, parts=sentence(text))
