"""The lines of a job's log: what its runner does, with times, for whoever reads it when the job has died."""

from __future__ import annotations

import time
from contextlib import suppress

from kmatrix.records.runs import Status
from kmatrix.redaction.redactor import redact
from kmatrix.status.watch import RunProgress

EVERY_S = 300.0  # between two lines about a run that trains


def say(text: str) -> None:
    """Print lines, the first one with the time of this host."""
    with suppress(OSError):  # a full disk must not end a run
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {redact(text)}", flush=True)


class ProgressLog:
    """Prints a line when a run starts or ends, and one every few minutes while it trains."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, str]] = {}  # run -> status and note, as printed last
        self._due: dict[str, float] = {}  # run -> monotonic seconds

    def __call__(self, progress: RunProgress) -> None:
        """Print what has changed."""
        now, about = time.monotonic(), (progress.status.value, progress.note)
        is_new = self._known.get(progress.run) != about
        if not is_new and (progress.status is not Status.RUNNING or now < self._due.get(progress.run, 0.0)):
            return
        self._known[progress.run] = about
        self._due[progress.run] = now + EVERY_S
        say(f"{progress.run}: {_describe(progress)}")


def _describe(progress: RunProgress) -> str:
    words = [progress.status.value]
    if progress.status is Status.RUNNING and progress.step is not None:
        words.append(f"step {progress.step:,} of {progress.max_iters or 0:,}")
        words += [f"loss {progress.loss:.4g}"] if progress.loss is not None else []
    elif progress.status is Status.FINISHED and progress.val_loss is not None:
        words.append(f"validation loss {progress.val_loss:.4f}")
    words += [text for text in (progress.reason, progress.note) if text]
    return ", ".join(words)
