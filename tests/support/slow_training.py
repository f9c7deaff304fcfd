"""Slow down the training steps of the program, so that a test has time for what it does meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from waiting import wait_until

# The package that train.py takes its function from is patched: as the program, it is not the module gpt2.train.
PROGRAM = '''
"""A training step lasts longer until a file exists, or until the trainer is asked to stop."""
import os, sys, time
from math import inf
{before}
if "gpt2.train" in sys.orig_argv and "torch.distributed.run" not in sys.orig_argv:
    import gpt2.dist, gpt2.loop.schedule
    folder, scale, handle, asked, steps = {folder!r}, gpt2.loop.schedule.scale, gpt2.dist.Stop._handle, [], 0

    def note(self, number, frame):
        asked.append(number)
        handle(self, number, frame)

    def slow(config, step):
        global steps
        steps += 1
        open(folder + "/slowed", "w").close()
        while os.path.exists(folder + "/hold"):
            time.sleep(0.02)
        end = time.monotonic() + ({seconds})
        while not os.path.exists(folder + "/free") and not asked and time.monotonic() < end:
            time.sleep(0.02)
        return scale(config, step)

    gpt2.loop.schedule.scale, gpt2.dist.Stop._handle = slow, note
'''


class SlowTraining:
    """A module that slows down every trainer that is started with `environment`."""

    def __init__(self, folder: Path, seconds: str = "0.05", *, before: str = "") -> None:
        """Write the module into a new folder.

        seconds: how much longer a step lasts, an expression of `step`, and of `steps`: of this attempt, from 1.
        inf: until `free`, or until the trainer is asked to stop.  before: code for every Python process.
        """
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(
            PROGRAM.format(folder=str(folder), seconds=seconds, before=before), encoding="utf-8"
        )
        self._folder = folder
        self.environment = {"PYTHONPATH": str(folder)}

    def hold(self) -> None:
        """Let no step end, even if its trainer is asked to stop."""
        (self._folder / "hold").touch()

    def unhold(self) -> None:
        """End `hold`."""
        (self._folder / "hold").unlink()

    def has_begun(self) -> bool:
        """Return whether a step was slow."""
        return (self._folder / "slowed").exists()

    def free(self) -> None:
        """End the delay. Raises AssertionError if no step was ever slow: then the test has tested nothing."""
        assert self.has_begun(), "no training step was slow"
        (self._folder / "free").touch()

    @contextmanager
    def freed_when(self, condition: Callable[[], object], what: str) -> Iterator[None]:
        """End the delay once a step was slow and a condition is true, while the caller waits for its command."""

        def wait() -> None:
            try:
                wait_until(lambda: self.has_begun() and condition(), what)
            finally:  # else the command would never end
                (self._folder / "free").touch()

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait)
            yield
            waiting.result()
