"""Find out whether a host of a run over several nodes is lost: nobody else says so within minutes.

When a host dies, its peers lose their connections at once, the scheduler notices after its own time limit (300 s by
default in Slurm), and srun waits for the tasks of the dead host. So after the first bad end of a node, the hosts are
asked. A host that loses its power leaves its peers in a collective, where they wait for as long as that may take: the
hosts are also asked when the agent of one has not rewritten its file for a while.

A node may also end alone, and answer: then its peers wait for it in the rendezvous or in a collective. srun kills them
after a minute, if it has heard of that end, which is in the files in any case.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kmatrix.engines.spread import Spread
from kmatrix.records.jobs.claim import is_listed
from kmatrix.records.jobs.files import NodeEnd, read_node, read_node_end
from kmatrix.records.jobs.paths import NodeDir
from kmatrix.status.state import RunPlan

LOOK_S = 1.0  # between two looks at the files of the nodes
PEERS_S = 3.0  # the other nodes end within this time of the first one, as a rule
AGAIN_S = 20.0  # between two questions while the run has not ended
QUIET_S = 90.0  # without a new counter of an agent: several pulses, and the caches of network storage
QUIET_LOOK_S = 10.0  # between two looks at the counters
OVERDUE_S = (
    45.0  # after the first bad end of a node; less than SRUN_WAIT_S, after which srun kills, and hides the cause
)
MOST_S = 30.0  # after the end of the run: then its end counts as it looks


class NodeWatch:
    """Watches the nodes of one attempt. Each call returns at once: the hosts are asked in a thread."""

    def __init__(self, run: RunPlan, spread: Spread) -> None:
        self._run, self._spread = run, spread
        self._nodes = [NodeDir(run.dir, node) for node in range(run.nodes)]
        self._looked = 0.0  # monotonic seconds
        self._counters: dict[int, tuple[int, float]] = {}  # node -> its counter, and since when (monotonic seconds)
        self._counted = time.monotonic()
        self._bad_since: float | None = None  # monotonic seconds
        self._ended_since: float | None = None  # monotonic seconds
        self._asked: float | None = None  # monotonic seconds
        self._answer: list[str] | None = None
        self._thread: threading.Thread | None = None

    def poll(self) -> Sequence[str]:
        """Return the hosts that are lost while the run has not ended; empty as long as none is."""
        now = time.monotonic()
        if now - self._looked >= LOOK_S:
            self._looked = now
            ends = self._ends()
            if self._bad_since is None and any(end is not None and end.exit_code for end in ends):
                self._bad_since = now
            if all(ends):  # each agent has answered
                return ()
        is_quiet = self._is_quiet(now)
        if not is_quiet and (self._bad_since is None or now - self._bad_since < PEERS_S):
            return ()
        return self._ask(now) or ()

    def overdue(self) -> NodeEnd | None:
        """Return how a node ended badly, if that was long ago and the run has not ended since; None otherwise."""
        if self._bad_since is None or time.monotonic() - self._bad_since < OVERDUE_S:
            return None
        return next((end for end in self._ends() if end is not None and end.exit_code), None)

    def after_end(self) -> Sequence[str] | None:
        """Return the hosts that are lost after a bad end of the run, None as long as that is not known."""
        now = time.monotonic()
        self._ended_since = now if self._ended_since is None else self._ended_since
        if all(self._ends()) or now - self._ended_since > MOST_S:
            return ()
        if now - self._ended_since < PEERS_S:
            return None
        return self._ask(now)

    def _is_quiet(self, now: float) -> bool:
        """Return whether the agent of a node has not rewritten its file for a while."""
        if now - self._counted >= QUIET_LOOK_S:
            self._counted = now
            for node in self._nodes:
                found = read_node(node) if is_listed(node.node_json) else None
                if found is not None and found.attempt == self._run.attempt:
                    counter, _ = self._counters.get(node.node, (0, now))
                    if found.counter != counter:
                        self._counters[node.node] = (found.counter, now)
        return any(now - since > QUIET_S for _, since in self._counters.values())

    def _ask(self, now: float) -> list[str] | None:
        """Return the answer to a question of the last seconds, None while there is none."""
        if self._thread is not None and self._thread.is_alive():
            return None
        if self._thread is None or (now - (self._asked or 0.0) > AGAIN_S and not self._answer):
            self._asked, self._answer = now, None
            self._thread = threading.Thread(target=self._question, daemon=True, name="lost nodes")
            self._thread.start()
            return None
        return self._answer

    def _question(self) -> None:
        self._answer = self._spread.lost(self._run)

    def _ends(self) -> list[NodeEnd | None]:
        """Return how each node ended, None for one without an end of this attempt."""
        found = [read_node_end(node) if is_listed(node.end) else None for node in self._nodes]
        return [end if end is not None and end.attempt == self._run.attempt else None for end in found]
