"""The successive halving of a matrix: which runs train to which step now, and which were ended at a rung."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kmatrix.records.runs import Status
from kmatrix.status.outcomes import Family, SeedEnd
from kmatrix.verdict.halving import Rung
from kmatrix.verdict.survivors import DecidedRung, HalvingReplay, SeedAtRungs, replay_halving

MOST_NAMED = 4  # configurations of a rung in one line of the journal
IN_RESERVE = (Status.PLANNED, Status.STOPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvedFamily:
    """Configurations with comparable losses, and their rungs."""

    family: Family
    rungs: tuple[Rung, ...]  # first to last
    max_iters: int  # steps of a complete run


@dataclass(slots=True)
class Halving:
    """The runs that successive halving wants, by the losses at the rungs so far."""

    halved: Sequence[HalvedFamily]
    _replays: tuple[HalvingReplay, ...] = ()
    _logged: dict[int, int] = field(default_factory=dict)  # rungs of each family that `decisions` has yielded

    @property
    def families(self) -> tuple[Family, ...]:
        """The families, in their order."""
        return tuple(one.family for one in self.halved)

    @property
    def replays(self) -> tuple[HalvingReplay, ...]:
        """The replay of each family at the last call of `targets`, in their order."""
        return self._replays

    @property
    def rungs(self) -> dict[str, tuple[int, ...]]:
        """The steps of the rungs of each run."""
        return {run: tuple(rung.step for rung in one.rungs) for one in self.halved for run in one.family.runs.values()}

    def targets(
        self, ends: Mapping[str, SeedEnd], at_rungs: Mapping[str, Mapping[int, float]]
    ) -> dict[str, int | None]:
        """Return the runs to execute now, each with the step to train it to, None for its end.

        ends: of the runs that are over.  at_rungs: run -> step of a rung -> loss there.
        """
        self._replays = tuple(replay_halving(_known(one.family, ends, at_rungs), one.rungs) for one in self.halved)
        return {
            one.family.runs[key]: step
            for one, replay in zip(self.halved, self._replays, strict=True)
            for key, step in replay.wanted.items()
        }

    def reserve(self, statuses: Mapping[str, Status], wanted: Collection[str]) -> frozenset[str]:
        """Return the runs that wait for others at a rung, or were ended there. wanted: runs to execute now."""
        names = (run for family in self.families for run in family.runs.values())
        return frozenset(run for run in names if statuses.get(run) in IN_RESERVE and run not in wanted)

    def places(self) -> dict[str, RungPlace]:
        """Return where each run stands by the last call of `targets`: waiting at a rung, or ended at one."""
        found = {}
        for one, replay in zip(self.halved, self._replays, strict=True):
            ended = replay.ended_at
            for (name, _), run in one.family.runs.items():
                rung = ended.get(name)
                if rung is not None:
                    found[run] = RungPlace(step=rung.step, kept=len(rung.kept), of=len(rung.losses))
                elif replay.waits_at is not None:
                    found[run] = RungPlace(step=replay.waits_at)
        return found

    def legs(self) -> Iterator[Leg]:
        """Yield the parts of the training that follow the rungs that runs train to now, in the order of steps."""
        for one, replay in zip(self.halved, self._replays, strict=True):
            if replay.waits_at is None:
                continue
            seeds = len(one.family.runs) / max(1, len(one.family.configurations))
            coming = [rung for rung in one.rungs if rung.step >= replay.waits_at]
            for rung, end in zip(coming, [*(rung.step for rung in coming[1:]), one.max_iters], strict=True):
                until = None if end == one.max_iters else end
                run_steps = round(rung.keep * seeds * (end - rung.step))
                yield Leg(configurations=rung.keep, until=until, run_steps=run_steps)

    def decisions(self) -> Iterator[str]:
        """Yield a line per rung that was decided since the last call."""
        for place, replay in enumerate(self._replays):
            for rung in replay.rungs[self._logged.get(place, 0) :]:
                yield described(rung)
            self._logged[place] = len(replay.rungs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """A part of the training between two rungs, or after the last one."""

    configurations: int
    until: int | None  # step of the next rung, None: its end
    run_steps: int  # steps of all its runs together


@dataclass(frozen=True, slots=True, kw_only=True)
class RungPlace:
    """Where a run of successive halving stands."""

    step: int
    kept: int | None = None  # configurations that trained on from this rung; None: it is not decided
    of: int = 0  # configurations that were compared there

    @property
    def has_ended(self) -> bool:
        """True if its configuration was ended at this rung."""
        return self.kept is not None

    @property
    def text(self) -> str:
        """The words for it, after the name or the number of runs."""
        if self.kept is None:
            return f"waiting at step {self.step:,} for the other configurations"
        if not self.kept:
            return f"ended at step {self.step:,}: no configuration had a loss there"
        best = "the best one" if self.kept == 1 else f"the best {self.kept}"
        return f"ended at step {self.step:,}: not among {best} of {self.of}"


def described(rung: DecidedRung) -> str:
    """Return `step 500: 3 of 9 configurations train on: muon (3.2104), ...`."""
    named = [f"{name} ({rung.losses[name]:.4f})" for name in rung.kept[:MOST_NAMED]]
    more = [f"{len(rung.kept) - MOST_NAMED} more"] if len(rung.kept) > MOST_NAMED else []
    listed = ", ".join([*named, *more]) or "none has a loss"
    return f"step {rung.step:,}: {len(rung.kept)} of {len(rung.losses)} configurations train on: {listed}"


def _known(
    family: Family, ends: Mapping[str, SeedEnd], at_rungs: Mapping[str, Mapping[int, float]]
) -> dict[str, dict[int, SeedAtRungs]]:
    """Return what is known about each seed of a family."""
    # A seed whose run is missing or damaged never comes: a rung must not wait for it.
    found = {
        name: {seed: SeedAtRungs(over=True) for seed in family.rules.seeds if (name, seed) not in family.runs}
        for name in family.configurations
    }
    for (name, seed), run in family.runs.items():
        end = ends.get(run)
        found[name][seed] = SeedAtRungs(
            losses=at_rungs.get(run, {}),
            over=end is not None,
            final=None if end is None else end.loss,
            final_step=None if end is None else end.step,
        )
    return found
