"""Reasons for which the numbers of a matrix may mislead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kmatrix.records.runs import Status
from kmatrix.report.results import Run
from kmatrix.status.wanted import SHORT_HASH
from kmatrix.text import first_names

WARMUP_LIMIT = 0.25  # share of a run that warm-up may take without a warning
SHARED_S = 1.0  # two runs that trained together for less: one ended while the next started
SHARED = 0.01  # the same, as a share of the shorter one
TO_END = (Status.PLANNED, Status.RUNNING)
OF_RUNS: dict[str, Callable[[Run], object]] = {  # sentence -> the runs that it names
    "incomplete matrix, the ranking may change; not finished yet": lambda run: run.status in TO_END and not run.reserve,
    "warm-up takes more than a quarter of the run (WARMUP_FRACTION scales with it)": lambda run: (
        (run.warmup_share or 0) > WARMUP_LIMIT
    ),
    "ended before the planned steps, with the learning rate schedule incomplete": lambda run: (
        run.counts and run.ended_by not in (None, "max_iters")
    ),
    "not ranked, because run.json does not record the training data": lambda run: run.counts and not run.data_sha256,
    "not ranked, because they finished without a final validation loss": lambda run: (
        run.status is Status.FINISHED and run.final_val_loss is None
    ),
}


def run_warnings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence per reason."""
    yield from (f"{run.name}: {run.error}" for run in runs if run.error)
    for text, is_so in OF_RUNS.items():
        if names := [run.name for run in runs if is_so(run)]:
            yield f"{text}: {first_names(names)}"
    yield from _different(runs)
    if shared := _shared(runs):
        yield (
            f"runs shared a machine while they trained: {first_names(shared)}; their times, power and host memory "
            "depend on each other (PARALLEL_JOBS=1 separates them)"
        )
    yield from (f"{run.name} was trained with {change}" for run in runs for change in run.adjusted)


def _different(runs: Sequence[Run]) -> Iterator[str]:
    """Yield in what the runs differ that are in one matrix. A skipped run trains nothing."""
    trained = [run for run in runs if run.status is not Status.SKIPPED]
    tokens = sorted({run.planned_tokens for run in trained if run.planned_tokens is not None})
    if len(tokens) > 1:
        yield f"runs of this matrix train on different numbers of tokens: {', '.join(f'{n:,}' for n in tokens)}"
    # Several tokenizers of one text are compared in bits per byte.
    data = {run.data_sha256: run.tokenizer for run in trained if run.data_sha256}
    if len(data) > len(set(data.values())):
        hashes = ", ".join(sorted(sha256[:SHORT_HASH] for sha256 in data))
        yield f"runs of this matrix use different data ({hashes}): they are ranked separately"
    layouts = sorted({run.data_layout for run in trained})
    if len(layouts) > 1:
        yield (
            f"runs of this matrix have different row layouts ({', '.join(layouts)}): they are ranked separately, "
            "because packing lowers the loss of the same model"
        )
    codes: dict[str, list[str]] = {}
    for run in runs:
        for code in dict.fromkeys(filter(None, (one.code for one in run.attempts))) if run.counts else ():
            codes.setdefault(code, []).append(run.name)
    if len(codes) > 1:
        named = "; ".join(f"{code[:SHORT_HASH]}: {first_names(names)}" for code, names in codes.items())
        yield f"runs of this matrix were trained by different code ({named})"


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
