"""Read the phases of a recording: the parts in which its run did not train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter, sub

from kmatrix.gpu.formats.binary import Recording
from kmatrix.gpu.formats.clock import RecordingClock
from kmatrix.gpu.formats.limits import HIGHEST
from kmatrix.records.decode import decode_lines, decode_optional
from kmatrix.records.events import PhaseLine
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunResult
from kmatrix.report.gpu.attempts import recorded_attempts
from kmatrix.report.gpu.numbers import RecordedPhase
from kmatrix.report.metrics import Log
from kmatrix.stats import complete_sum

TRAINER_PHASES = ("set-up", "evaluation", "checkpoint")  # as the trainer logs them
ENDING = "ending"  # the rest of the recording after the trainer's result


def read_phases(
    run_dir: RunDir,
    recording: Recording,
    clock: RecordingClock,
    *,
    running: bool = False,
    leader: Mapping[int, Leader] | None = None,
    is_last: bool = True,
) -> tuple[RecordedPhase, ...]:
    """Return the phases within a recording, sorted by begin; none if the trainer logged none.

    An attempt trains from the end of its set-up to its last step: what follows is its ending, also if it was killed.
    running: the last attempt has not ended.  leader: of each attempt, for the folder of a node after node 0.
    is_last: not the recording of earlier attempts on other devices.
    """
    lines = [line for line in decode_lines(run_dir.phases, PhaseLine) if line.phase in TRAINER_PHASES]
    logged = [(line, *span) for line in lines if (span := _span(line, clock)) is not None]
    if not logged:
        return ()
    if not is_last:
        # A later attempt on another host has another monotonic clock, which may show the same time.
        newest = max(recording.times)
        logged = [entry for entry in logged if entry[0].begin <= newest]
    attempts = recorded_attempts(run_dir, clock)
    if leader is None:
        ended = _last_end(run_dir, lines, clock) if is_last else None
        # The last attempt ends with the result, others with their last sign, which is read only if it is needed.
        trained = [] if len(attempts) == 1 and (running or ended is not None) else _last_steps(run_dir, clock)
    else:
        ends = {number: end for number in leader if (end := _end_here(leader[number], number, logged)) is not None}
        ended, trained = ends.get(lines[-1].attempt) if is_last else None, list(ends.values())

    found: list[tuple[str, float, float]] = []
    for number, attempt in enumerate(attempts, 1):
        first, last = clock.of(attempt.first), clock.of(attempt.last)
        own = [(line, begin, end) for line, begin, end in logged if end > first and begin < last]
        steps = [time for time in trained if first <= time <= last]
        if not own and not steps:
            found.append((TRAINER_PHASES[0], first, last))  # killed, or still at work, before its first step
            continue
        for at, (line, begin, end) in enumerate(own):
            # The launch of the trainer's processes belongs to set-up.
            launched = first if at == 0 and line.phase == TRAINER_PHASES[0] else max(begin, first)
            found.append((line.phase, launched, min(end, last)))
        end = max([*steps, *(end for _, _, end in own)])
        if number == len(attempts) and (running or ended is not None):
            end = last if ended is None or running else ended
        if first < end < last:
            found.append((ENDING, end, last))
    found.sort(key=itemgetter(1))
    joules = joules_of_spans(recording, clock, [(begin, end) for _, begin, end in found])
    return tuple(
        RecordedPhase(name=name, begin=begin, end=end, joules=each)
        for (name, begin, end), each in zip(found, joules, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Leader:
    """The end of an attempt's training as node 0 knows it. Times are Unix seconds by the clock of node 0."""

    end: float  # of its training: its result, or its last training line
    phases: Mapping[tuple[str, int | None], float]  # name and step of each phase -> its end


def read_leader(run: RunDir) -> dict[int, Leader]:
    """Return by attempt how long node 0 trained after each phase, for the nodes that record only their phases."""
    ends = dict(Log(run.metrics).last_times)
    result = decode_optional(run.result, RunResult) or RunResult()
    if result.ended is not None:
        ends[result.attempt or 1] = result.ended
    phases: dict[int, dict[tuple[str, int | None], float]] = {}
    for each in decode_lines(run.phases, PhaseLine):
        phases.setdefault(each.attempt, {})[each.phase, each.step] = each.end
    return {attempt: Leader(end, phases.get(attempt, {})) for attempt, end in ends.items()}


def _end_here(leader: Leader, attempt: int, logged: Sequence[tuple[PhaseLine, float, float]]) -> float | None:
    """Return the recording time (s) at which an attempt's training ended on this node; None without a common phase.

    All nodes leave a phase together. From there on, time passes alike on all of them: no clocks are compared.
    """
    here = [(line, end) for line, _, end in logged if line.attempt == attempt]
    for line, end in reversed(here):
        if (there := leader.phases.get((line.phase, line.step))) is not None:
            return end + max(0.0, leader.end - there)
    return None


def _span(line: PhaseLine, clock: RecordingClock) -> tuple[float, float] | None:
    """Return begin and end of a phase in recording time (s), None if they are unknown."""
    begin, end = clock.at(line.begin, line.begin_monotonic), clock.at(line.end, line.end_monotonic)
    return None if begin is None or end is None or end < begin else (begin, end)


def _last_end(run_dir: RunDir, lines: Sequence[PhaseLine], clock: RecordingClock) -> float | None:
    """Return the recording time (s) of the result of the last attempt with a phase, None if it left none."""
    result = decode_optional(run_dir.result, RunResult) or RunResult()
    # A result of an earlier attempt says nothing about the end of this one.
    if result.ended is None or (result.attempt or 1) != lines[-1].attempt:
        return None
    return clock.at(result.ended)


def _last_steps(run_dir: RunDir, clock: RecordingClock) -> list[float]:
    """Return the recording time (s) of the last training line of each attempt, that of lost work included."""
    last = Log(run_dir.metrics).last_times.values()
    return [time for wall in last if (time := clock.at(wall)) is not None]


def joules_of_spans(
    recording: Recording, clock: RecordingClock, spans: Sequence[tuple[float, float]]
) -> list[float | None]:
    """Return the energy of all devices between two recording times each in J; None if unknown.

    The last sample at or before each time counts.
    """
    if not spans:
        return []
    # The counters only have the values at samples. Columns of all spans: a run has hundreds of phases.
    places = [max(0, clock.index_after(time) - 1) for span in spans for time in span]
    values_of = itemgetter(*places)
    by_device = [
        _increases(values_of(energy)) if (energy := columns.get("energy_j")) is not None else [None] * len(spans)
        for columns in recording.columns
    ]
    return list(map(complete_sum, zip(*by_device, strict=True)))


def _increases(energy: Sequence[float]) -> list[float | None]:
    """Return the increase from each even to the next odd value of an energy counter, None if one is unknown."""
    differences, highest = map(sub, energy[1::2], energy[::2]), HIGHEST["energy_j"]
    return [max(0.0, each) if abs(each) <= highest else None for each in differences]


def merged_spans(phases: Sequence[RecordedPhase]) -> list[tuple[float, float]]:
    """Return begin and end of the time that any phase covers, ascending and without overlaps."""
    spans: list[tuple[float, float]] = []
    for phase in sorted(phases, key=lambda phase: phase.begin):
        if spans and phase.begin <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], phase.end))
        else:
            spans.append((phase.begin, phase.end))
    return spans
