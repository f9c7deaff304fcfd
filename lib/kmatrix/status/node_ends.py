"""How the ranks of a run ended on each of its nodes, from torchrun's report in the node's log."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kmatrix.own_file import open_to_read
from kmatrix.records.files import last_lines
from kmatrix.records.jobs.files import NodeEnd, NodeFile, RankExit, read_node, read_node_end
from kmatrix.records.jobs.paths import NodeDir, nodes_of
from kmatrix.records.paths import RunDir
from kmatrix.text import printable

TAIL_BYTES = 65536  # of a log that are searched, from its end
TAIL_LINES = 200  # of a node's log in its end.json: torchrun's report on eight ranks, and the tracebacks above it
WORKER_FAILED = re.compile(r"E\d{4} .*torch/distributed/elastic/.* failed \(exitcode: ")  # starts torchrun's report
# One rank in torchrun's report, with the time when torchrun noticed; the last entry is the root cause.
FAILURE = re.compile(r"^ +time +: (\S+)\n +host +: .*\n +rank +: (\d+) .*\n +exitcode +: (-?\d+) ", re.MULTILINE)
PEERS_S = 5.0  # a rank fails within this time after its peer was killed, and may be noticed first


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvidence:
    """The evidence of one node about an attempt."""

    node: int
    host: str  # "" if its agent left none
    log: str  # the end of what this attempt wrote, without escape codes
    exits: tuple[RankExit, ...]  # the root cause last
    signals: tuple[str, ...] = ()  # names of those that its agent was sent
    started: float | None = None  # of the attempt, by the clock of the node (Unix seconds)


def tail_of(log: Path, start: int) -> str:
    """Return the last bytes of a log from `start` (bytes), without escape codes; "" if it cannot be read."""
    try:
        with open_to_read(log) as file:
            return printable("".join(last_lines(file, most_bytes=TAIL_BYTES, start=start)))
    except OSError:
        return ""


def rank_exits(log: str) -> tuple[RankExit, ...]:
    """Return the exits of ranks in torchrun's report, the root cause last; none without a report."""
    return tuple(
        RankExit(rank=int(rank), exit_code=int(code), time=_unix(when)) for when, rank, code in FAILURE.findall(log)
    )


def first_exit(exits: Sequence[RankExit]) -> RankExit | None:
    """Return the exit of a node's ranks that made the others fail, None without one.

    torchrun polls its workers in the order of ranks: it may notice a rank that failed because its peer was killed
    before that peer. So a kill at about that time is preferred to any exit code.
    """
    if not exits:
        return None
    root = exits[-1]
    # SIGKILL only: a rank never sends it to itself, and its peers die of other signals or exit codes.
    killed = [one for one in exits if one.exit_code == -signal.SIGKILL and abs(one.time - root.time) <= PEERS_S]
    return root if root.exit_code < 0 or not killed else killed[0]


def first_node(nodes: Iterable[NodeEvidence]) -> tuple[NodeEvidence, RankExit] | None:
    """Return the node whose rank made the ranks of the other nodes fail, with that exit; None without a report.

    The clocks of two nodes are not compared: a rank that was killed is the cause, then one that another signal ended;
    the others have lost it. Of equals, the node with the lowest number counts.
    """
    found = [(node, exit_) for node in nodes if (exit_ := first_exit(node.exits)) is not None]
    return min(found, key=lambda one: (_weight(one[1].exit_code), one[0].node), default=None)


def node_end(node: NodeDir, agent: NodeFile, exit_code: int, signals: Sequence[str] = ()) -> NodeEnd:
    """Return the end.json of a node whose processes have exited.

    agent: as its node.json says.  exit_code: of torchrun.  signals: names of those that the agent was sent.
    It has the end of the log: another node may see the log itself only later.
    """
    log = tail_of(node.output_log, agent.log_start)
    return NodeEnd(
        node=node.node,
        host=agent.host,
        attempt=agent.attempt,
        exit_code=exit_code,
        signals=tuple(signals),
        log_start=agent.log_start,
        exits=rank_exits(log),
        tail=tuple(log.splitlines()[-TAIL_LINES:]),
    )


def other_nodes(run: RunDir, attempt: int) -> list[NodeEvidence]:
    """Return the evidence of the nodes after node 0 about an attempt, in order; empty for a run on one node."""
    found = []
    for node in nodes_of(run):
        about, end = read_node(node), read_node_end(node)
        if node.node == 0:
            continue
        if end is not None and end.attempt == attempt:
            log, exits, host, signals = "\n".join([*end.tail, ""]), end.exits, end.host, end.signals
        elif about is not None and about.attempt == attempt:  # its agent was killed
            log = tail_of(node.output_log, about.log_start)
            exits, host, signals = rank_exits(log), about.host, ()
        else:
            continue
        started = about.started if about is not None and about.attempt == attempt else None
        found.append(NodeEvidence(node=node.node, host=host, log=log, exits=exits, signals=signals, started=started))
    return found


def host_of_first(run: RunDir, attempt: int) -> str:
    """Return the host of node 0 in an attempt, "" if it left none."""
    about = read_node(NodeDir(run, 0))
    return about.host if about is not None and about.attempt == attempt else ""


def _weight(code: int) -> int:
    """Return the order of exits as causes: killed, ended by another signal, then the rest."""
    return 0 if code == -signal.SIGKILL else 1 if code < 0 else 2


def _unix(when: str) -> float:
    """Return a time in torchrun's format as Unix seconds, 0 for another format."""
    try:
        return datetime.strptime(when, "%Y-%m-%d_%H:%M:%S").timestamp()
    except ValueError:
        return 0.0
