"""Reasons for which the numbers of a matrix may mislead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kmatrix.records.runs import Status
from kmatrix.report.results import Run
from kmatrix.status.wanted import SHORT_HASH
from kmatrix.text import first_names

SHARED_S = 1.0  # two runs that trained together for less: one ended while the next started
SHARED = 0.01  # the same, as a share of the shorter one


def run_warnings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence per reason."""
    yield from (f"{run.name}: {run.error}" for run in runs if run.error)
    if early := [run.name for run in runs if run.counts and run.ended_by not in (None, "max_iters")]:
        yield f"ended before the planned steps, with the learning rate schedule incomplete: {first_names(early)}"
    if unknown := [run.name for run in runs if run.counts and not run.data_sha256]:
        yield f"not ranked, because run.json does not record the training data: {first_names(unknown)}"
    # Several tokenizers of one text are compared in bits per byte. A skipped run trains nothing.
    trained = [run for run in runs if run.data_sha256 and run.status is not Status.SKIPPED]
    data = {run.data_sha256 or "": run.tokenizer for run in trained}
    if len(data) > len(set(data.values())):
        hashes = ", ".join(sorted(sha256[:SHORT_HASH] for sha256 in data))
        yield f"runs of this matrix use different data ({hashes}): they are ranked separately"
    codes: dict[str, list[str]] = {}
    for run in runs:
        for code in dict.fromkeys(filter(None, (one.code for one in run.attempts))) if run.counts else ():
            codes.setdefault(code, []).append(run.name)
    if len(codes) > 1:
        named = "; ".join(f"{code[:SHORT_HASH]}: {first_names(names)}" for code, names in codes.items())
        yield f"runs of this matrix were trained by different code ({named})"
    if shared := _shared(runs):
        yield (
            f"runs shared a machine while they trained: {first_names(shared)}; their times, power and host memory "
            "depend on each other (PARALLEL_JOBS=1 separates them)"
        )
    yield from (f"{run.name} was trained with {change}" for run in runs for change in run.adjusted)


def _shared(runs: Sequence[Run]) -> list[str]:
    """Return the runs that trained on a host while another one did."""
    spans = sorted(
        (one.host, one.started, one.end.seconds if one.end else one.seconds, run.name)
        for run in runs
        for one in run.attempts
    )
    found = set()
    for place, (host, began, seconds, name) in enumerate(spans):
        for other_host, later, other_seconds, other in spans[place + 1 :]:
            together = min(began + seconds - later, other_seconds)
            if other_host != host or began + seconds <= later:
                break
            if other != name and together >= max(SHARED_S, SHARED * min(seconds, other_seconds)):
                found |= {name, other}
    return [run.name for run in runs if run.name in found]
