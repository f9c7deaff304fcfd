"""How many steps a run takes: the least of what bounds it. Plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROUNDING = 1e-9  # of a step: 3e9 tokens in steps of 0.1 are whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """steps: None where they are not known before the data are.  bound: the field that decides."""

    steps: int | None
    bound: str


def length(fields: Mapping[str, Any], *, params: int, tokens_per_step: int, train_tokens: int | None = None) -> Length:
    """Return how long a run is: the first of max_iters, max_tokens, tokens_per_param x params and max_epochs.

    train_tokens: of the training data, where they are known. A bound is never exceeded, but one step is always taken.
    """
    tokens = {
        "max_tokens": fields["max_tokens"],
        "tokens_per_param": _times(fields["tokens_per_param"], params),
        "max_epochs": _times(fields["max_epochs"], train_tokens),
    }
    steps = {name: max(1, math.floor(n / tokens_per_step + ROUNDING)) for name, n in tokens.items() if n is not None}
    if fields["max_iters"]:
        steps["max_iters"] = int(fields["max_iters"])
    if not steps:
        return Length(steps=None, bound="max_epochs")
    bound = min(steps, key=lambda name: steps[name])
    return Length(steps=steps[bound], bound=bound)


def _times(ratio: float | None, whole: int | None) -> float | None:
    return None if ratio is None or whole is None else ratio * whole
