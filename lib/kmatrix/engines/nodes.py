"""The other nodes of a run: each follows attempts/N.json, which node 0 writes, and tells in nodes/K.json what became.

Nobody reaches another node for an attempt: Slurm, ssh or the Indexed Job starts the followers once, and all meet in
files. No clocks of two hosts are compared: pulses are counters.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen

from kmatrix.clock import clock
from kmatrix.engines.failures import only_lost_peers
from kmatrix.engines.place import AGAIN
from kmatrix.engines.ranks import PEERS_S, Ranks
from kmatrix.errors import LaunchError, RecordError
from kmatrix.records import attempts
from kmatrix.records.attempts import NODE_LOST, VOID, Attempt, Exit
from kmatrix.records.decode import Count, Record, as_json, decode, replaced
from kmatrix.records.files import names, write_json
from kmatrix.records.paths import RunDir

LOST_S = 60.0  # without a new pulse: some pulses, and late caches
PULSE_S, LOOK_S = 3.0, 1.0  # between two writes of a follower, and between two looks at the files of others


class NodeFile(Record, frozen=True, kw_only=True, omit_defaults=True):
    """nodes/K.json, written by the follower on node K alone."""

    job: str = ""
    host: str = ""
    start: Count = 0  # number of this follower: a later one has the node
    pulse: Count = 0
    attempt: Count = 0  # the last one that it has joined
    is_over: bool = True  # none of its ranks is left
    exits: tuple[Exit, ...] = ()


def read_node(run: Path, node: int) -> NodeFile:
    """Return what a node tells; nothing before its follower has started. Raises RecordError."""
    path = run / "nodes" / f"{node}.json"
    return decode(path, NodeFile) if path.name in names(path.parent) else NodeFile()


@dataclass
class Pulse:
    """A counter of another host, and how long it has not changed while this process looked at it."""

    _value: int = -1
    _at: float = 0.0  # monotonic seconds
    _quiet_s: float = 0.0

    def is_lost(self, value: int) -> bool:
        """Take a look; return whether the other host is lost. The time that this process has slept does not count."""
        now = clock.monotonic()
        self._quiet_s = self._quiet_s + min(now - self._at, 5 * LOOK_S) if value == self._value else 0.0
        self._value, self._at = value, now
        return self._quiet_s > LOST_S


@dataclass(kw_only=True)
class Followers:
    """The other nodes, as node 0 sees them."""

    run: Path
    job: str
    nodes: int
    programs: Sequence[Popen[bytes]] = ()  # that run the followers: srun, or an ssh per host
    seen: dict[int, NodeFile] = field(default_factory=dict)
    _due: float = 0.0  # monotonic seconds

    def look(self) -> bool:
        """Read what the nodes tell, if it is time; return whether it was."""
        if clock.monotonic() < self._due:
            return False
        self._due = clock.monotonic() + LOOK_S
        for node in range(1, self.nodes):
            with suppress(RecordError):  # storage of a network: the next look will tell
                self.seen[node] = read_node(self.run, node)
        return True

    def gather(self) -> Iterator[list[int]]:
        """Wait until all nodes have written since now, and none has ranks; yield those that are missing.

        Raises LaunchError if they cannot come any more, and RecordError.
        """
        then = {node: read_node(self.run, node).pulse for node in range(1, self.nodes)}
        self.seen.clear()
        while self.look() or True:
            ready = [node for node, one in self.seen.items() if one.job == self.job and one.is_over]
            missing = [node for node in then if node not in ready or self.seen[node].pulse == then[node]]
            if not missing:
                return
            if ended := [one for one in self.programs if one.poll() is not None]:
                words = ended[0].args
                assert isinstance(words, list)
                why = f"`{' '.join(words[:-1])}` ended with exit status {ended[0].returncode}"
                raise LaunchError(f"{self.run.name}: no answer from node {', '.join(map(str, missing))}", why=why)
            yield missing


class AllRanks:
    """The ranks of an attempt on all nodes; `trouble` is kind and reason of a node that was lost."""

    def __init__(self, attempt: int, here: Ranks, followers: Followers) -> None:
        self.trouble: tuple[str, str] | None = None
        # The others agree on the step of a stop, and end with the attempt.
        self.stop, self.kill, self.limit = here.stop, here.kill, here.limit
        self._attempt, self._here, self._followers = attempt, here, followers
        self._pulses: defaultdict[int, Pulse] = defaultdict(Pulse)
        self._until, self._others_first = float("inf"), False  # monotonic seconds

    @property
    def exits(self) -> Sequence[Exit]:
        """Return the exits of all ranks, as far as nodes have told them: the first one is the cause."""
        told = [one.exits for one in self._over() if one.exits]
        told.insert(len(told) if self._others_first else 0, tuple(self._here.exits))
        if not self._others_first:  # a rank that was killed is the cause: its peers have lost it
            told.sort(key=lambda exits: not exits or exits[0].code >= 0)
        return [one for exits in told for one in exits]

    def poll(self) -> bool:
        """Return whether all have exited; those of other nodes get some seconds to tell."""
        if self._followers.look():
            self._watch()
        if not self._here.poll():
            return False
        self._until = min(self._until, clock.monotonic() + 2 * PEERS_S)
        is_told = len(self._over()) == self._followers.nodes - 1
        if not is_told and self.trouble is None and clock.monotonic() > self._until:
            over = self._over()
            silent = [one.host or f"node {node}" for node, one in self._followers.seen.items() if one not in over]
            if silent and only_lost_peers(RunDir(self._followers.run), self._attempt):
                self.trouble = NODE_LOST, f"{silent[0]} has not answered since other nodes lost the connection to it"
        return is_told or self.trouble is not None or clock.monotonic() > self._until

    def _over(self) -> list[NodeFile]:
        return [one for one in self._followers.seen.values() if one.attempt == self._attempt and one.is_over]

    def _watch(self) -> None:
        for node, one in self._followers.seen.items():
            if self._pulses[node].is_lost(one.pulse) and self.trouble is None:
                self.trouble = NODE_LOST, f"{one.host or f'node {node}'} has not answered for {LOST_S:.0f} s"
                self.kill()
        if any(exit.code for one in self._over() for exit in one.exits):
            self._others_first = self._others_first or not self._here.exits
            self._here.limit(PEERS_S)


@dataclass(kw_only=True)
class Follower:
    """The program of a node other than 0."""

    run: Path
    job: str
    node: int
    start: Callable[[Attempt], Ranks]
    grace_of: Callable[[str], float]
    is_done: Callable[[], bool]  # whether the run needs no further attempt
    is_orphan: Callable[[], bool] = lambda: False  # the program that started this one is gone, and no other comes
    signals: list[str] = field(default_factory=list)  # filled by handlers
    _mine: NodeFile = field(default_factory=NodeFile)
    _order: Attempt | None = None  # the newest one, as read last
    _ranks: Ranks | None = None
    _leader: Pulse = field(default_factory=Pulse)

    def follow(self) -> Generator[None, None, int]:
        """Train the attempts that node 0 begins, one after the other; return the exit status."""
        (self.run / "nodes").mkdir(exist_ok=True)
        former, host = read_node(self.run, self.node), socket.gethostname()
        # A node that replaces a lost one joins no attempt that the lost one had joined: its peers have lost it.
        self._mine = replaced(former, job=self.job, host=host, start=former.start + 1, is_over=True)
        look_at, pulse_at, code, is_asked = 0.0, 0.0, None, False
        while True:
            now = clock.monotonic()
            if code is None and now >= look_at:
                look_at, code = now + LOOK_S, self._look()
                if code is None and now >= pulse_at:  # nobody else has written since then
                    pulse_at = now + PULSE_S
                    self._write()
            if self._ranks is not None and self.signals and not is_asked:
                self._ranks.stop(self.grace_of(self.signals[0]))
                is_asked = True
            if self._ranks is not None and self._ranks.poll():
                self._mine = replaced(self._mine, is_over=True, exits=tuple(self._ranks.exits))
                self._ranks, look_at, pulse_at = None, 0.0, 0.0  # it is told before this process leaves
            elif self._ranks is None and (code is not None or self.signals):
                return AGAIN if code is None else code
            yield

    def _look(self) -> int | None:
        """Do what the newest attempt asks for; return the exit status if this process leaves, and writes no more."""
        later = not (self.run / "nodes").exists()  # the run was moved
        with suppress(OSError, RecordError):  # storage of a network: the next look will tell
            later = later or read_node(self.run, self.node).start > self._mine.start
            self._order = newest(self.run)
        order, ranks = self._order, self._ranks
        if later or self.is_orphan():
            if ranks is not None:
                ranks.kill()
            return AGAIN
        if ranks is not None:
            if order is None or order.number != self._mine.attempt or self._leader.is_lost(order.pulse):
                ranks.kill()
            elif order.end is not None:
                ranks.limit(PEERS_S)
        elif order is not None and order.end is not None:
            return 0 if self.is_done() else None
        elif order is not None and (order.job, bool(order.port)) == (self.job, True) and not self.signals:
            if order.number <= self._mine.attempt:
                return None
            self._mine = replaced(self._mine, attempt=order.number, is_over=False, exits=())
            self._write()  # before the first rank exists
            self._ranks, self._leader = self.start(order), Pulse()
        return None

    def _write(self) -> None:
        self._mine = replaced(self._mine, pulse=self._mine.pulse + 1)
        with suppress(OSError):  # a full disk: the next pulse tries again
            write_json(self.run / "nodes" / f"{self.node}.json", as_json(self._mine), durable=False, parents=False)


def newest(run: Path) -> Attempt | None:
    """Return the newest attempt that is not void, None without one."""
    found = (attempts.read(run, number) for number in reversed(attempts.numbers(run)))
    return next((one for one in found if one is not None and (one.end is None or one.end.kind != VOID)), None)
