"""A verdict as text: its state, its headline and the lines below it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kmatrix.report.pair_text import Parts, plain


class VerdictState(StrEnum):
    """How much a matrix has decided: a page has a mark for each."""

    DECIDED = "decided"
    PARTLY_OPEN = "partly open"
    OPEN = "open"
    NOT_EVIDENCE = "not evidence"  # one seed per configuration
    NO_COMPARISON = "no comparison"  # one configuration
    NO_RUN = "no run finished"
    NO_LOSS = "no loss"  # runs finished, and none has a loss that can be compared


class LineLabel(StrEnum):
    """What a line below the headline is about."""

    BETTER = "Better"
    EVIDENCE = "Evidence"
    COST = "Cost"
    EQUIVALENT = "Equivalent"
    OPEN = "Open"
    DIVERGED = "Diverged"
    NO_RESULT = "No result"
    TARGET = "Target"
    RUNS = "Runs"
    SO_FAR = "So far"
    WHY = "Why"
    NEXT = "Next"
    NOTE = "Note"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictLine:
    """A line below the headline."""

    label: LineLabel
    parts: Parts
    command: str = ""  # to be pasted; "" if the line has none

    @property
    def text(self) -> str:
        return plain(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictText:
    """The verdict on one ranking, or on a matrix without one."""

    state: VerdictState
    headline: Parts
    lines: tuple[VerdictLine, ...] = ()
    about: str = ""  # what tells the ranking from the others of its matrix; "" if it is the only one
    is_preliminary: bool = False  # runs that the verdict counts on have not ended
    is_running: bool = False  # one of them runs now; known without a ranking only

    @property
    def mark(self) -> str:
        """The state as a page shows it: `Partly open, preliminary`."""
        if self.state is VerdictState.NO_RUN and self.is_preliminary:
            return "Running" if self.is_running else "No run finished yet"
        return str(self.state).capitalize() + (", preliminary" if self.is_preliminary else "")

    @property
    def sentence(self) -> str:
        """The headline as plain text, without a full stop."""
        return plain(self.headline)

    @property
    def report(self) -> str:
        """The headline as a report in plain text prints it, without a full stop."""
        about = f"{self.about}: " if self.about else ""
        return about + self.sentence + (" (preliminary)" if self.is_preliminary else "")

    def line(self, label: LineLabel) -> VerdictLine | None:
        """Return the first line with this label, or None."""
        return next((line for line in self.lines if line.label is label), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a verdict does not say by itself: the state of the runs that it is made of."""

    unfinished: int = 0  # runs that are wanted and have not ended
    reserve: int = 0  # runs with adaptive seeds that the verdict does not want
    reused: int = 0  # losses that were measured in another matrix
    command: str = ""  # runs more seeds; "" if there is none
    wanted: int = 0  # runs that the verdict waits for; with adaptive seeds, those that it wants now
    unused: int = 0  # losses that exist, and that no round of adaptive seeds asked for
    about: str = ""
