"""The recorded runs that come with kmatrix: forecasts are checked with them until enough runs have finished here.

`bench/record_curves.py` trained them on a CPU and wrote the file: runs of a tiny model with several optimizers,
learning rates, schedules, lengths and seeds.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from kmatrix.records.decode import Amount, Count, Record, Size, decode
from kmatrix.verdict.forecast import Course, LossCurve

FILE = Path(__file__).with_name("recorded_curves.json")


class RecordedRun(Record, frozen=True, kw_only=True):
    """A run in recorded_curves.json."""

    name: str  # optimizer, learning rate, schedule, steps, seed
    schedule: str
    steps: Size
    least: Amount  # minimum rate / peak
    warmup: Size  # steps
    decay: Amount  # share of the steps in which wsd decays
    every: Count  # steps between two evaluations, of which the first is at step 0 and the last at the end
    losses: tuple[Amount, ...]  # nats/token


class Recorded(Record, frozen=True, kw_only=True):
    """The file recorded_curves.json."""

    about: str  # the command that made it, and the machine
    vocabulary: Size
    runs: tuple[RecordedRun, ...]


@cache
def recorded_curves() -> tuple[LossCurve, ...]:
    """Return the validation losses of the recorded runs."""
    found = decode(FILE, Recorded)
    return tuple(
        LossCurve(
            name=run.name,
            steps=tuple(min(index * run.every, run.steps) for index in range(len(run.losses))),
            losses=run.losses,
            course=Course(steps=run.steps, schedule=run.schedule, least=run.least, warmup=run.warmup, decay=run.decay),
            setting="recorded",
            vocabulary=found.vocabulary,
        )
        for run in found.runs
    )
