"""Pod 0 of a run over several nodes, before it starts the share: it waits until all other pods are ready.

Kubernetes starts the pods of a Job one by one, and replaces them one by one. A rendezvous would time out, and count as
a failed attempt, while another pod waits for a node for hours.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

from kmatrix.engines.kubernetes.follow import SHARES_S, STOP, Say
from kmatrix.engines.kubernetes.orders import AGAIN, Ready, read_orders, read_ready, write_orders
from kmatrix.records.decode import replaced
from kmatrix.records.jobs.files import newest_shares
from kmatrix.records.jobs.paths import ShareDir
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.status.state import OPEN, is_left_out
from kmatrix.status.status_file import recover_status
from kmatrix.text import plural

LOOK_S = 0.5  # between two looks at the notes of the other pods


@dataclass(slots=True)
class Gathering:
    """The wait of pod 0 for the other pods."""

    share: ShareDir
    run: RunDir
    job: str  # as in owner.json
    nodes: int
    say: Say
    now: Callable[[], float] = time.monotonic  # s
    sleep: Callable[[float], object] = time.sleep  # s
    _asked: list[int] = field(default_factory=list)

    def listen(self) -> None:
        """Collect the signals that end a pod: process 1 of a container ignores them otherwise."""
        for number in STOP:
            signal.signal(number, self._take)

    def wait(self) -> int | None:
        """Wait until all pods are ready, or there is nothing to run; return an exit status if the pod is to end."""
        self._end_former_attempt()
        before = {index: read_ready(self.run, index) for index in range(1, self.nodes)}
        missing, told, looked = list(before), list[int](), -SHARES_S
        while missing:
            if self._asked:
                return AGAIN
            if self.now() - looked >= SHARES_S:
                looked = self.now()
                if not self._has_work():
                    return None
            missing = [index for index in missing if not self._is_ready(index, before[index])]
            if missing and missing != told:
                told = missing
                self.say(f"waits for {_pods(missing)} of {self.nodes}")
            if missing:
                self.sleep(LOOK_S)
        return AGAIN if self._asked else None

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self._asked.append(number)

    def _end_former_attempt(self) -> None:
        """End, in the other pods, what an earlier start of pod 0 has ordered: its ranks have lost their peers."""
        orders = read_orders(self.run)
        if orders is not None and orders.job == self.job and not orders.over:
            with suppress(OSError):
                write_orders(self.run, replaced(orders, over=True))

    def _is_ready(self, index: int, before: Ready | None) -> bool:
        """Return whether a pod has noted that it is ready since this wait began. A pod that is gone writes no more."""
        now = read_ready(self.run, index)
        return now is not None and now.job == self.job and now != before

    def _has_work(self) -> bool:
        """Return whether the share still has the run, and the run is to go on; otherwise the runner says why not."""
        newest = newest_shares(MatrixDir(self.share.path)).get(self.run.name)
        if newest is not None and newest.id != self.share.id:
            return False
        state = recover_status(self.run, has_runner=True)
        return state.status in OPEN and not is_left_out(state)


def _pods(indexes: Collection[int]) -> str:
    """Return `pod 3`, `pods 1 and 3`, or `5 pods`."""
    found: Sequence[int] = sorted(indexes)
    if len(found) > 2:
        return plural(len(found), "pod")
    return f"pod{'s' if len(found) > 1 else ''} {' and '.join(map(str, found))}"
