"""Hold the training steps of the real trainer, so that a test can act in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from waiting import wait_until

# The package that train.py takes its function from is patched: as the program, it is not the module gpt2.train.
PROGRAM = '''
"""A training step waits until a file exists, or until the trainer is asked to stop."""
import os, sys, time
{before}
if "gpt2.train" in sys.orig_argv:
    import gpt2.dist, gpt2.schedule
    folder, scale, handle, asked, steps = {folder!r}, gpt2.schedule.scale, gpt2.dist.Stop._handle, [], 0
    attempt = sys.orig_argv[sys.orig_argv.index("--attempt") + 1]

    def note(self, number, frame):
        asked.append(number)
        handle(self, number, frame)

    def held(config, step):
        global steps
        steps += 1
        if {condition}:
            open(folder + "/held" + attempt, "a").close()
            while not os.path.exists(folder + "/free") and not asked:
                time.sleep(0.02)
        return scale(config, step)

    gpt2.schedule.scale, gpt2.dist.Stop._handle = held, note
'''


class HeldTraining:
    """A module that holds every trainer that is started with `environment`."""

    def __init__(self, folder: Path, condition: str, *, before: str = "") -> None:
        """Write the module into a new folder.

        condition: of a step that is held, an expression of `step`, and of `steps`: of this attempt, from 1.
        before: code for every Python process.
        """
        folder.mkdir()
        text = PROGRAM.format(folder=str(folder), condition=condition, before=before)
        (folder / "sitecustomize.py").write_text(text, encoding="utf-8")
        self._folder = folder
        self.environment = {"PYTHONPATH": str(folder)}

    def holds(self, attempt: int = 1) -> bool:
        """Return whether an attempt is held, or was."""
        return (self._folder / f"held{attempt}").exists()

    def free(self) -> None:
        """Let all steps go. Raises AssertionError if none was ever held: then the test has tested nothing."""
        assert list(self._folder.glob("held*")), "no training step was held"
        (self._folder / "free").touch()

    @contextmanager
    def freed_when(self, condition: Callable[[], object], what: str) -> Iterator[None]:
        """Let all steps go once one was held and a condition is true, while the caller waits for its command."""

        def wait() -> None:
            try:
                wait_until(lambda: list(self._folder.glob("held*")) and condition(), what)
            finally:  # else the command would never end
                (self._folder / "free").touch()

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait)
            yield
            waiting.result()
