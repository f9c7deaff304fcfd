"""What the runs of a matrix are promised to have in common (MATRIX_EQUAL), checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping

from kmatrix.config import RunConfig
from kmatrix.errors import ConfigError

EQUAL_BY = {"steps": "one MAX_ITERS for all", "tokens": "MAX_TOKENS=<n> MAX_ITERS=0", "time": "MAX_TIME=<time>"}


def held_equal(what: str, runs: Mapping[str, RunConfig]) -> str:
    """Return what all runs have in common, in words, "" where nothing is promised. runs: by their names.

    what: MATRIX_EQUAL.  Raises ConfigError where the promise does not hold.
    """
    if what == "any" or not runs:
        return ""
    early = next((field for field in _ends_early(what) for run in runs.values() if run.fields[field]), None)
    if early:
        raise ConfigError(
            f"MATRIX_EQUAL={what}, and {early.upper()} ends runs before they are equal",
            fix=f"remove {early.upper()}, or pass MATRIX_EQUAL=any",
        )
    values = {name: _measure(what, run) for name, run in runs.items()}
    least, most = (pick(values, key=lambda name: values[name] or 0) for pick in (min, max))
    slack = max(run.tokens_per_step for run in runs.values()) if what == "tokens" else 0
    if None in values.values() or (values[most] or 0) - (values[least] or 0) > slack:
        raise ConfigError(
            f"MATRIX_EQUAL={what} does not hold",
            why=f"{least} has {_shown(values[least])} and {most} has {_shown(values[most])}",
            fix=f"pass {EQUAL_BY[what]}",
        )
    unit = {"steps": "steps", "tokens": "tokens, to a step", "time": "s at the most"}[what]
    return f"{what}: {_shown(values[most])} {unit}"


def _ends_early(what: str) -> tuple[str, ...]:
    """The fields that, where they are set, end runs at another place than the one they have in common."""
    always = ("max_cost", "early_stopping_patience")
    return always if what == "time" else ("max_time", *always)


def _measure(what: str, run: RunConfig) -> float | None:
    measures: dict[str, float | None] = {"steps": run.steps, "tokens": run.tokens, "time": run.fields["max_time"]}
    return measures[what]


def _shown(number: float | None) -> str:
    return "none" if number is None else f"{number:,.0f}"
