"""Compare `make plan` with published runs: print the error of each, and fit the expected MFU to them.

    python bench/published.py

The runs, with their sources, are in bench/published.toml.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kmatrix.config import RunConfig
from kmatrix.experiment.plan import make_plan
from kmatrix.plan.feasibility import (
    PUBLISHED,
    Fit,
    GpuModel,
    MfuModel,
    at_mfu,
    at_rate,
    by_name,
    family_of,
    fit,
    mfu_band,
    middle_mfu,
)
from kmatrix.plan.memory import memory
from kmatrix.text import duration, memory_size

TABLE = Path(__file__).with_name("published.toml")
SAFE = 0.15  # a planned peak may be lower than the measured one by this share
SIZES = range(5, 205, 5)  # candidates for MfuModel.size, in millions of parameters
DEVIATIONS = 2.5  # the band has this many standard deviations to each side


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published run."""

    name: str
    arguments: str  # of make plan
    code: str  # the trainer; its rows on one machine are not independent
    source: str
    seconds: float | None = None  # training time
    memory_mib: float | None = None  # peak of the tensors of one GPU
    fits: str = ""  # a GPU on which it fits, "" if not reported
    not_on: str = ""  # a GPU on which it runs out of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The plan of a published run."""

    run: Published
    config: RunConfig
    device: GpuModel
    memory: float  # bytes, peak of the tensors of one GPU
    verdict: Fit  # on its GPU

    @property
    def mfu(self) -> float | None:
        """The MFU of the published run, None without a time."""
        if self.run.seconds is None or self.config.tokens is None:
            return None
        rate = self.config.tokens / self.run.seconds
        return at_rate(
            rate, shape=self.config.shape, train=self.config.train, tokens=self.config.tokens, device=self.device
        ).mfu

    def seconds(self, model: MfuModel = PUBLISHED) -> tuple[float, float, float]:
        """Return the shortest, the expected and the longest planned time in seconds."""
        shape, train = self.config.shape, self.config.train
        low, high = mfu_band(shape, train, self.device, model)
        shortest, middle, longest = (
            _seconds(self.config, share, self.device)
            for share in (high, middle_mfu(shape, train, self.device, model), low)
        )
        return shortest, middle, longest

    def time_error(self, model: MfuModel = PUBLISHED) -> float | None:
        """Return the expected time relative to the published one, -0.1: 10 % too short; None without a time."""
        return None if self.run.seconds is None else self.seconds(model)[1] / self.run.seconds - 1

    def in_band(self, model: MfuModel = PUBLISHED) -> bool | None:
        """Return whether the published time is inside the planned band; None without a time."""
        shortest, _, longest = self.seconds(model)
        return None if self.run.seconds is None else shortest <= self.run.seconds <= longest

    @property
    def memory_error(self) -> float | None:
        """The planned peak relative to the published one, 0.1: 10 % too high."""
        return None if self.run.memory_mib is None else self.memory / 2**20 / self.run.memory_mib - 1

    @property
    def memory_right(self) -> bool | None:
        """Return whether the plan is at most SAFE below the peak, and has the published verdict; None without one."""
        if not (self.run.memory_mib or self.run.fits or self.run.not_on):
            return None
        low = self.memory_error is not None and self.memory_error < -SAFE
        return not low and (self.verdict is Fit.NOT) == bool(self.run.not_on)


def published() -> list[Published]:
    """Return the published runs."""
    return [Published(**row) for row in tomllib.loads(TABLE.read_text(encoding="utf-8"))["run"]]


def compare(run: Published) -> Compared:
    """Return the plan of a published run, made as `make plan` makes it."""
    words = dict(word.split("=", 1) for word in shlex.split(run.arguments))
    device = by_name(words.pop("GPU"))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / ".config"
        config.write_text("", encoding="utf-8")
        (planned,) = make_plan(config, {**words, "DEVICE": "cuda"}, one=True).runs
    need = memory(planned.config.shape, planned.config.train)
    assert need.total is not None
    return Compared(run=run, config=planned.config, device=device, memory=need.total, verdict=fit(need, device))


def fit_mfu(rows: Iterable[Compared]) -> MfuModel:
    """Return the model of the MFU that fits these runs best: medians per family, and the size with the least squares.

    A family without a run has the middle of `PUBLISHED`.
    """
    timed = [(family_of(row.device), row.config.shape.params, row.mfu) for row in rows if row.mfu is not None]
    fits = [_fit_at(size * 1e6, timed) for size in SIZES]
    squares, size, logs = min(fits, key=lambda found: found[0])
    # One degree of freedom for each family, and one for the size.
    deviation = math.sqrt(squares / (len(timed) - len(logs) - 1))
    middle = {**PUBLISHED.middle, **{family: math.exp(log) for family, log in logs.items()}}
    return MfuModel(size=size, middle=middle, spread=math.exp(DEVIATIONS * deviation))


def _fit_at(size: float, timed: Sequence[tuple[str, float, float]]) -> tuple[float, float, Mapping[str, float]]:
    """Return the sum of squared residuals, the size, and the logarithm of the middle per family."""
    logs: dict[str, list[float]] = {}
    for family, params, mfu in timed:
        logs.setdefault(family, []).append(math.log(mfu * (params + size) / params))
    middle = {family: statistics.median(found) for family, found in logs.items()}
    squares = sum((log - middle[family]) ** 2 for family, found in logs.items() for log in found)
    return squares, size, middle


def without(rows: Sequence[Compared], row: Compared) -> MfuModel:
    """Return the fit to all runs but one."""
    return fit_mfu(other for other in rows if other is not row)


def without_code(rows: Sequence[Compared], row: Compared) -> MfuModel:
    """Return the fit to the runs of other trainers."""
    return fit_mfu(other for other in rows if other.run.code != row.run.code)


def _seconds(config: RunConfig, share: float, device: GpuModel) -> float:
    speed = at_mfu(share, shape=config.shape, train=config.train, tokens=config.tokens, device=device)
    assert speed is not None
    assert speed.seconds is not None
    return speed.seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args(argv)
    compared = [compare(run) for run in published()]
    print(f"{'published run':42}{'time':>9}  {'plan':>17}{'error':>7}{'others':>8}", end="")
    print(f"{'memory':>11}{'plan':>10}{'error':>7}  fit")
    for row in compared:
        print(_line(row, without(compared, row)))
    timed = [row for row in compared if row.run.seconds is not None]
    sized = [row.memory_right for row in compared if row.memory_right is not None]
    peaks = [row.memory_error for row in compared if row.memory_error is not None]
    errors = [error for row in timed if (error := row.time_error()) is not None]
    codes = {row.run.code for row in timed}
    print("\nerror: of the plan.  others: the same if the run itself is left out of the fit.")
    print(f"{sum(bool(row.in_band()) for row in timed)} of {len(timed)} times are inside the band, ", end="")
    print(f"{sum(bool(row.in_band(without(compared, row))) for row in timed)} if each is left out of the fit, ", end="")
    print(f"{sum(bool(row.in_band(without_code(compared, row))) for row in timed)} if its trainer is left out.")
    print(f"The median error is {_percent(statistics.median(errors))}. The times are of {len(codes)} trainers.")
    print(
        f"{sum(sized)} of {len(sized)} runs have the published memory: {len(peaks)} peaks, at most {SAFE:.0%} below, "
        f"and {len(sized) - len(peaks)} verdicts."
    )
    model = fit_mfu(compared)
    print(f"Fit: size {model.size / 1e6:.0f}M, spread {model.spread:.2f}, middle ", end="")
    print(", ".join(f"{family} {share:.2f}" for family, share in model.middle.items()))
    print(f"Sources: {TABLE.parent.name}/{TABLE.name}")


def _line(row: Compared, others: MfuModel) -> str:
    shortest, _, longest = row.seconds()
    took = "" if row.run.seconds is None else duration(row.run.seconds)
    band = f"{duration(shortest)}-{duration(longest)}"
    errors = [row.time_error(), row.time_error(others), row.memory_error]
    error, left_out, off = ("" if error is None else _percent(error) for error in errors)
    held = "" if row.run.memory_mib is None else memory_size(row.run.memory_mib * 2**20)
    reported = "fits" if row.run.fits else "does not fit" if row.run.not_on else "-"
    wrong = " WRONG" if row.in_band() is False or row.memory_right is False else ""
    return (
        f"{row.run.name:42}{took:>9}  {band:>17}{error:>7}{left_out:>8}"
        f"{held:>11}{memory_size(row.memory):>10}{off:>7}  {row.verdict} (reported: {reported}){wrong}"
    )


def _percent(error: float) -> str:
    return f"{round(100 * error):+d}%"  # not -0%


if __name__ == "__main__":
    main()
