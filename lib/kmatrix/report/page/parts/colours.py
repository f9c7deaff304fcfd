"""Which colour and which dash a configuration has: the same optimizer has the same colour in every report.

The classes k0 to k7 are distinct colours, r0 to r6 a ramp for numbers; templates/page.css.j2 defines both for light
and dark. They were chosen for the largest smallest distance (CIEDE2000) under normal vision and under protanopia,
deuteranopia and tritanopia (Machado, Oliveira and Fernandes, IEEE TVCG 15 (2009)); dashes and names carry the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

COLOURS, RAMP, DASHES = 8, 7, 4
# The preferred colour of each optimizer. The first five are the most distinct; others avoid what they are like.
OPTIMIZERS = {
    **{"adamw": 0, "muon": 1, "sgd": 2, "adam": 3, "adafactor": 4},
    **{"lion": 5, "soap": 6, "schedulefree": 7, "adamwadv": 5, "adamwspam": 6, "adamwprune": 7, "adopt": 4},
}
NOT_COLOURED = ("seed", "optimizer")  # axes


def colour_classes(configurations: Sequence[Mapping[str, str]], axes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the class of each configuration, from its values of the axes.

    Optimizers have colours. With one optimizer the first other axis that varies has them: a ramp if its values are
    numbers.
    """
    optimizers = list(dict.fromkeys(one.get("optimizer", "") for one in configurations))
    if len(optimizers) <= 1:
        for label, values in axes.items():
            if label not in NOT_COLOURED and len(values) > 1:
                classes = classes_of_values(values)
                return [classes.get(one.get(label, ""), "k0") for one in configurations]
    colours = optimizer_colours(optimizers)
    return [f"k{colours[one.get('optimizer', '')]}" for one in configurations]


def optimizer_colours(names: Sequence[str]) -> dict[str, int]:
    """Return the number of the colour of each optimizer: its own, or the next free one if another has it here."""
    found: dict[str, int] = {}
    # Those with a colour of their own first, in the order of OPTIMIZERS: the same names give the same colours.
    known = [name for name in OPTIMIZERS if name in names]
    for name in (*known, *sorted(set(names) - OPTIMIZERS.keys())):
        wanted = OPTIMIZERS.get(name, len(found))
        free = [(wanted + shift) % COLOURS for shift in range(COLOURS)]
        found[name] = next((colour for colour in free if colour not in found.values()), wanted % COLOURS)
    return found


def classes_of_values(values: Sequence[str]) -> dict[str, str]:
    """Return the class of each value of an axis: a ramp for more than two numbers, else distinct colours."""
    numbers = [_number(value) for value in values]
    known = [number for number in numbers if number is not None]
    if len(values) > 2 and len(known) == len(values):
        order = [value for _, value in sorted(zip(known, values, strict=True))]
        return {value: f"r{round(at * (RAMP - 1) / (len(order) - 1))}" for at, value in enumerate(order)}
    return {value: f"k{at % COLOURS}" for at, value in enumerate(values)}


def dashes(classes: Sequence[str]) -> list[int]:
    """Return the number of the dash of each configuration: those of one colour have different ones."""
    used: dict[str, int] = {}
    found = []
    for colour in classes:
        found.append(used.get(colour, 0) % DASHES)
        used[colour] = used.get(colour, 0) + 1
    return found


def _number(value: str) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
