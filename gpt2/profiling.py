"""Record a profile of some steps."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import profile, schedule


def profiler(span: str, path: Path, *, done: int) -> profile | None:
    """Return a started profiler of steps i to j - 1 of a span "i:j", to be stepped after each step.

    None without a span, and for a run that begins behind i.  done: steps before this attempt.
    """
    first, last = map(int, span.split(":")) if span else (-1, -1)
    if first < done:
        return None
    warm_up = min(1, first - done)  # steps
    when = schedule(skip_first=first - done - warm_up, wait=0, warmup=warm_up, active=last - first, repeat=1)
    found = profile(schedule=when, on_trace_ready=lambda trace: trace.export_chrome_trace(str(path)))
    found.start()
    return found
