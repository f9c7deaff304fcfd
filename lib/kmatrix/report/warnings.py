"""Reasons for which the numbers of a matrix may mislead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kmatrix.records.runs import Status
from kmatrix.report.results import Run
from kmatrix.status.wanted import SHORT_HASH
from kmatrix.text import first_names

WARMUP_LIMIT = 0.25  # share of a run that warm-up may take without a warning
SHARED_S = 1.0  # two runs that trained together for less: one ended while the next started
SHARED = 0.01  # the same, as a share of the shorter one
UNKNOWN = "unknown"


def run_warnings(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a sentence per reason."""
    for run in runs:
        if run.error:
            yield f"{run.name}: {run.error}"
    if unfinished := [run.name for run in runs if run.status in (Status.PLANNED, Status.RUNNING) and not run.reserve]:
        yield f"incomplete matrix, the ranking may change; not finished yet: {first_names(unfinished)}"
    if stuck := [run.name for run in runs if _never_fell(run)]:
        yield f"the validation loss never fell below its initial value: {first_names(stuck)}"
    if slow := [run.name for run in runs if (run.warmup_share or 0) > WARMUP_LIMIT]:
        yield f"warm-up takes more than a quarter of the run (WARMUP_FRACTION scales with it): {first_names(slow)}"
    if early := [_early(run) for run in runs if run.counts and run.ended_by not in (None, "max_iters")]:
        yield f"ended before the planned steps, with the learning rate schedule incomplete: {first_names(early)}"
    yield from _different(runs)
    if unknown := [run.name for run in runs if run.counts and not run.data_sha256]:
        yield f"not ranked, because run.json does not record the training data: {first_names(unknown)}"
    if lossless := [run.name for run in runs if run.status is Status.FINISHED and run.final_val_loss is None]:
        yield f"not ranked, because they finished without a final validation loss: {first_names(lossless)}"
    if shared := _shared(runs):
        yield (
            f"runs shared a machine while they trained: {first_names(shared)}; their times, power and host memory "
            "depend on each other (PARALLEL_JOBS=1 separates them)"
        )
    for run in runs:
        for change in run.adjusted:
            yield f"{run.name} was trained with {change}"


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


def _early(run: Run) -> str:
    """Return the name of a run that a budget ended, with the budget and the share of its steps."""
    share = "" if not run.max_iters or run.step is None else f", {100 * run.step / run.max_iters:.0f} %"
    return f"{run.name} ({str(run.ended_by).replace('_', ' ')}{share})"


def _never_fell(run: Run) -> bool:
    """Return True if no validation loss after step 0 is below the initial one."""
    later = [loss for step, loss in zip(run.val.step, run.val.loss, strict=True) if step]
    # A run without evaluations after the first has only the loss in its result.
    if not later and run.final_val_loss is not None and run.status is Status.FINISHED:
        later = [run.final_val_loss]
    return bool(later) and run.initial_val_loss is not None and min(later) >= run.initial_val_loss


def _shared(runs: Sequence[Run]) -> list[str]:
    """Return the runs that trained on a host while another one did."""
    spans = sorted(
        (one.host, one.started, one.started + one.seconds, run.name)
        for run in runs
        for one in run.attempts
        if one.seconds
    )
    found: dict[str, None] = {}
    active: list[tuple[str, float, float, str]] = []
    for span in spans:
        active = [one for one in active if one[0] == span[0] and one[2] > span[1]]
        for one in active:
            together = min(one[2], span[2]) - span[1]
            shorter = min(one[2] - one[1], span[2] - span[1])
            if one[3] != span[3] and together >= max(SHARED_S, SHARED * shorter):
                found |= {one[3]: None, span[3]: None}
        active.append(span)
    return [run.name for run in runs if run.name in found]
