"""Colours and dashes of configurations, the same in pictures and on the page.

The colours can be told apart with the common forms of colour blindness; dashes and names say the same. An optimizer has
its colour in every matrix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kmatrix.report.results import Configuration

# On white and on black paper.
PALETTE = (
    *(("#0a4a96", "#78a6ee"), ("#bf4f26", "#f0784f"), ("#117c56", "#9fe8b8"), ("#8f5aea", "#8371ea")),
    *(("#b88406", "#f2cb45"), ("#de2f92", "#c866a6"), ("#22262c", "#eef0f5"), ("#1f9adf", "#5fcbdc")),
)
DASHES = 4
OPTIMIZERS = {
    **{"adamw": 0, "muon": 1, "sgd": 2, "adam": 3, "adafactor": 4, "lion": 5, "soap": 6, "schedulefree": 7},
    **{"adamwadv": 5, "adamwspam": 6, "adamwprune": 7, "adopt": 4},
}


def colour_of(optimizer: str) -> int:
    """Return the place of the colour of an optimizer."""
    return OPTIMIZERS.get(optimizer, sum(optimizer.encode()) % len(PALETTE))


def colours_of(optimizers: Iterable[str]) -> dict[str, str]:
    """Return the colour of each optimizer on white paper."""
    return {name: PALETTE[colour_of(name)][0] for name in optimizers}


def marks_of(configurations: Sequence[Configuration]) -> dict[str, tuple[int, int]]:
    """Return configuration -> colour and dash. Those of one optimizer have different dashes, then other colours."""
    optimizers = {one.axes.get("optimizer", "") for one in configurations}
    used: dict[int, int] = {}
    found = {}
    for place, one in enumerate(configurations):
        colour = colour_of(one.axes.get("optimizer", ""))
        if len(optimizers) < 2:  # its configurations differ in something else, and have all colours, its own first
            colour = (colour + place) % len(PALETTE)
        found[one.name] = colour, used.get(colour, 0) % DASHES
        used[colour] = used.get(colour, 0) + 1
    return found
