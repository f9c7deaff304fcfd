"""The section at the top of the page: the verdict, what it rests on, what is open, and the basic facts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kmatrix.report.formats import facts
from kmatrix.report.numbers import MatrixNumbers
from kmatrix.report.page.parts.groups import PageGroup
from kmatrix.report.page.parts.text import MINUS, big, dollars, duration
from kmatrix.report.page.provenance import Fact
from kmatrix.report.pair_text import Part, PartKind, Parts
from kmatrix.report.sentences.values import VerdictLine, VerdictState, VerdictText
from kmatrix.report.verdict_text import verdict_texts
from kmatrix.status.cost import total_dollars
from kmatrix.text import plural

WARNINGS_SHOWN = 6  # the others need a click
HYPHEN_AS_MINUS = re.compile(r"(?<![\w.)-])-(?=\d)")
# The class of an article, which decides its colour and the shape of its mark.
CLASSES = {
    VerdictState.DECIDED: "decided",
    VerdictState.PARTLY_OPEN: "partly",
    VerdictState.OPEN: "open",
    VerdictState.NOT_EVIDENCE: "open",
    VerdictState.NO_COMPARISON: "none",
    VerdictState.NO_RUN: "bad",
    VerdictState.NO_LOSS: "bad",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownVerdict:
    """The verdict on one ranking, with the short names of the page."""

    text: VerdictText
    kind: str  # decided, partly, open, none or bad


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictSection:
    """The verdicts of a matrix, and what a reader has to know about it first."""

    verdicts: tuple[ShownVerdict, ...]  # one at least
    facts: tuple[Fact, ...]
    warnings: tuple[str, ...]
    warnings_shown: int = WARNINGS_SHOWN

    @property
    def title(self) -> str:
        return self.verdicts[0].text.sentence


def verdict(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> VerdictSection | None:
    """Return the section."""
    short = {group.numbers.name: group.short for group in groups}
    return VerdictSection(
        verdicts=tuple(_shown(text, short) for text in verdict_texts(numbers)),
        facts=tuple(Fact(label=label, text=text) for label, text in _facts(numbers) if text),
        warnings=numbers.warnings,
    )


def _shown(text: VerdictText, short: Mapping[str, str]) -> ShownVerdict:
    lines = tuple(_line(line, short) for line in text.lines)
    kind = CLASSES[text.state]
    if text.state is VerdictState.NO_RUN and text.is_preliminary:
        kind = "open"  # nothing has gone wrong: the matrix has only begun
    return ShownVerdict(text=replace(text, headline=_parts(text.headline, short), lines=lines), kind=kind)


def _line(line: VerdictLine, short: Mapping[str, str]) -> VerdictLine:
    parts = _parts(line.parts, short)
    if parts[0].kind is PartKind.TEXT:  # after a label a new sentence begins
        parts = (replace(parts[0], text=parts[0].text[:1].upper() + parts[0].text[1:]), *parts[1:])
    return replace(line, parts=parts)


def _parts(parts: Parts, short: Mapping[str, str]) -> Parts:
    """Return the parts of a sentence with short names and real minus signs."""
    return tuple(
        Part(short.get(part.text, part.text), part.kind)
        if part.kind is PartKind.NAME
        else Part(HYPHEN_AS_MINUS.sub(MINUS, part.text), part.kind)
        for part in parts
    )


def _facts(numbers: MatrixNumbers) -> Iterator[tuple[str, str]]:
    """Yield the facts below the verdict: label and text, "" if there is nothing to say."""
    runs = [f"{number:,} {state}" for state, number in numbers.states.items()]
    yield "Runs", ", ".join(runs)
    yield "Model", facts.models(numbers)
    tokens = sorted({run.tokens for run in numbers.runs if run.counts and run.tokens})
    yield "Tokens per run", " to ".join(dict.fromkeys(map(big, (tokens[0], tokens[-1])))) if tokens else ""
    yield "Devices", _devices(numbers)
    yield "Took", "" if numbers.took_s is None else duration(numbers.took_s)
    cost = total_dollars(run.dollars for run in numbers.runs)
    yield "Cost", "" if cost is None else dollars(cost)


def _devices(numbers: MatrixNumbers) -> str:
    """Return the devices that trained, and how many of them a run had at most."""
    most: dict[tuple[str, str], int] = {}
    for run in numbers.runs:
        if run.device_name and run.world_size:
            key = run.device_name, "rank" if run.device == "cpu" else "GPU"
            most[key] = max(most.get(key, 0), run.world_size)
    return ", ".join(f"{name}, up to {plural(count, noun)} per run" for (name, noun), count in most.items())
