"""The budget of a matrix in many jobs: each tells what its runs have taken, and adds up what the others tell."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from kmatrix.errors import KmatrixError
from kmatrix.records.jobs.claim import Claim
from kmatrix.records.jobs.files import read_share_owner
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.records.train_config import TrainConfig
from kmatrix.runner.share.folder import RunningShare
from kmatrix.status.cost import Spent, spent_in, total_dollars, wall_s
from kmatrix.status.status_file import recover_status

ASK_S = 30.0  # between two looks at the others, or longer for many of them
FILES_PER_S = 20.0  # reads of files on the shared storage, on average


class SharedBudget:
    """What the runs of other shares have taken. Files are read in a thread: storage may be slow."""

    def __init__(self, share: RunningShare, claim: Claim) -> None:
        self._share, self._claim = share, claim
        self._train: dict[str, TrainConfig] = {}  # of the runs of others
        self._spent: dict[str, float] = {}  # run -> seconds, of the runs of others
        self._ended = threading.Event()

    def begin(self) -> None:
        """Read what the others have taken, and go on reading."""
        others = [run for run in MatrixDir(self._share.path).runs() if run.name not in self._share.names]
        for run in others:
            self._train[run.name] = read_run_file_or_empty(run).train
            with suppress(KmatrixError):
                self._spent[run.name] = wall_s(recover_status(run, has_runner=True).attempts) or 0.0
        self.look()
        threading.Thread(target=self._keep, daemon=True, name="budget").start()

    def end(self) -> None:
        """Stop reading."""
        self._ended.set()

    def elsewhere(self) -> Spent:
        """Return what the runs of other shares have taken, and tell the others about those of this share."""
        self._claim.publish(self._own())
        parts = [spent_in(seconds, self._train.get(name, TrainConfig())) for name, seconds in [*self._spent.items()]]
        return Spent(
            wall_s=sum(part.wall_s or 0.0 for part in parts),
            gpu_hours=sum(part.gpu_hours or 0.0 for part in parts),
            dollars=total_dollars(part.dollars for part in parts),
        )

    def look(self) -> int:
        """Read the claims of the other shares; return their number."""
        number = 0
        for folder in JobsDir(MatrixDir(self._share.path)).submissions():
            for task in _tasks(folder.path.iterdir()):
                other = folder.share(task)
                if other.id == self._share.id:
                    continue
                number += 1
                owner = read_share_owner(other)
                for name, seconds in (owner.spent if owner else {}).items():
                    if name in self._train:  # a run may have been in several shares, one after the other
                        self._spent[name] = max(self._spent.get(name, 0.0), seconds)
        return number

    def _own(self) -> dict[str, float]:
        now, spent = time.time(), {}
        for run in self._share.runs():
            with suppress(KmatrixError):
                spent[run.name] = wall_s(recover_status(run, has_runner=True).attempts, now) or 0.0
        return spent

    def _keep(self) -> None:
        pause = ASK_S
        while not self._ended.wait(pause):
            with suppress(OSError, KmatrixError):  # the next look tries again
                pause = max(ASK_S, self.look() / FILES_PER_S)


def _tasks(paths: Iterable[object]) -> list[int]:
    names = [str(path).rpartition("/")[2] for path in paths]
    return sorted(int(name) for name in names if name.isascii() and name.isdecimal())
