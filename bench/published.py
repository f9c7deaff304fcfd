"""Compare `make plan` with published runs, and print the error of each.

    python bench/published.py

The runs, with their sources, are in bench/published.toml.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kmatrix.config import RunConfig
from kmatrix.experiment.plan import make_plan
from kmatrix.plan.feasibility import Fit, GpuModel, at_mfu, by_name, fit, mfu_band, middle_mfu
from kmatrix.plan.memory import memory
from kmatrix.text import duration, memory_size

TABLE = Path(__file__).with_name("published.toml")
SAFE = 0.15  # a planned peak may be lower than the measured one by this share


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One published run."""

    name: str
    arguments: str  # of make plan
    source: str
    seconds: float | None = None  # training time
    memory_mib: float | None = None  # peak of the tensors of one GPU
    fits: str = ""  # a GPU on which it fits, "" if not reported
    not_on: str = ""  # a GPU on which it runs out of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The plan of a published run."""

    run: Published
    shortest: float  # s, at the highest MFU of the band
    middle: float  # s
    longest: float  # s
    memory: float  # bytes, peak of the tensors of one GPU
    verdict: Fit  # on its GPU

    @property
    def time_error(self) -> float | None:
        """The middle of the planned time relative to the published one, -0.1: 10 % too short."""
        return None if self.run.seconds is None else self.middle / self.run.seconds - 1

    @property
    def in_band(self) -> bool | None:
        """Return whether the published time is inside the planned band; None if there is none."""
        return None if self.run.seconds is None else self.shortest <= self.run.seconds <= self.longest

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
    low, high = mfu_band(planned.config.shape, planned.config.train, device)
    return Compared(
        run=run,
        shortest=_seconds(planned.config, high, device),
        middle=_seconds(planned.config, middle_mfu(planned.config.shape, planned.config.train, device), device),
        longest=_seconds(planned.config, low, device),
        memory=need.total,
        verdict=fit(need, device),
    )


def _seconds(config: RunConfig, share: float, device: GpuModel) -> float:
    speed = at_mfu(share, shape=config.shape, train=config.train, tokens=config.tokens, device=device)
    assert speed is not None
    assert speed.seconds is not None
    return speed.seconds


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args(argv)
    compared = [compare(run) for run in published()]
    print(f"{'published run':42}{'time':>9}  {'plan':>17}{'error':>8}   {'memory':>9}{'plan':>10}{'error':>8}  fit")
    for row in compared:
        print(_line(row))
    timed = [row.in_band for row in compared if row.in_band is not None]
    sized = [row.memory_right for row in compared if row.memory_right is not None]
    print(f"\n{sum(timed)} of {len(timed)} times are inside the band.")
    print(
        f"{sum(sized)} of {len(sized)} runs have the published memory: at most {SAFE:.0%} below, and fit if theirs did."
    )
    print(f"Sources: {TABLE.parent.name}/{TABLE.name}")


def _line(row: Compared) -> str:
    took = "" if row.run.seconds is None else duration(row.run.seconds)
    band = f"{duration(row.shortest)}-{duration(row.longest)}"
    error = "" if row.time_error is None else f"{row.time_error:+.0%}"
    held = "" if row.run.memory_mib is None else memory_size(row.run.memory_mib * 2**20)
    off = "" if row.memory_error is None else f"{row.memory_error:+.0%}"
    reported = "fits" if row.run.fits else "does not fit" if row.run.not_on else "-"
    wrong = " WRONG" if row.in_band is False or row.memory_right is False else ""
    return (
        f"{row.run.name:42}{took:>9}  {band:>17}{error:>8}   {held:>9}{memory_size(row.memory):>10}{off:>8}  "
        f"{row.verdict} (reported: {reported}){wrong}"
    )


if __name__ == "__main__":
    main()
