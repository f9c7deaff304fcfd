"""phases.jsonl and gpu_samples.bin -> when a run did not train, and the joules of it."""

from __future__ import annotations

from bisect import bisect_right

from kmatrix.errors import RecordError
from kmatrix.gpu.formats import Recording, read_samples
from kmatrix.records import RunDir, read_jsonl
from kmatrix.report.gpu_values import Phase
from kmatrix.report.reading import finite, readable

KINDS = ("set-up", "evaluation", "checkpoint")  # as the trainer writes them
ENDING = "ending"  # what the recording holds after the trainer's result


def read_phases(run_dir: RunDir) -> tuple[Phase, ...]:
    """Return the phases that lie within the recording, by time; none where the samples are not there."""
    lines = [line for line in read_jsonl(run_dir.phases) if line.get("phase") in KINDS]
    try:
        recording = read_samples(run_dir.gpu_samples) if lines else None
    except RecordError:
        return ()
    if recording is None or not len(recording):
        return ()
    first, last = recording.times[0], recording.times[len(recording) - 1]
    found: list[Phase] = []
    for line in lines:
        begin, end = finite(line, "begin"), finite(line, "end")
        if begin is None or end is None or end <= first or begin >= last or end < begin:
            continue
        if line["phase"] == KINDS[0] and not found:
            begin = first  # what the launcher did before the trainer was there is set-up too
        begin, end = max(begin, first), min(end, last)
        joules = joules_between(recording, begin, end)
        found.append(Phase(name=str(line["phase"]), begin=begin - first, end=end - first, joules=joules))
    result = readable(run_dir.result)
    attempts = [line.get("attempt") for line in lines]
    ended = finite(result, "ended") if not attempts or result.get("attempt") == attempts[-1] else None
    if found and ended is not None and first < ended < last:
        joules = joules_between(recording, ended, last)
        found.append(Phase(name=ENDING, begin=ended - first, end=last - first, joules=joules))
    return tuple(sorted(found, key=lambda phase: phase.begin))


def joules_between(recording: Recording, begin: float, end: float) -> float | None:
    """Return the joules of all devices between two Unix times, from the samples nearest to them; None: not known."""
    first, last = (max(0, bisect_right(recording.times, time) - 1) for time in (begin, end))
    total = 0.0
    for columns in recording.columns:
        energy = columns.get("energy_j")
        if energy is None or energy[first] != energy[first] or energy[last] != energy[last]:
            return None
        total += energy[last] - energy[first]
    return total
