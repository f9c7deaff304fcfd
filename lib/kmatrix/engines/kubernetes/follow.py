"""A pod after the first: it trains the attempts that pod 0 orders, one after the other, until the share is over."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from kmatrix.engines.kubernetes.orders import AGAIN, READY_S, Orders, Ready, read_orders, write_ready
from kmatrix.engines.local.engine import MARGIN_S, trainer_variables
from kmatrix.engines.local.recorder import RecorderLauncher
from kmatrix.engines.spread import RENDEZVOUS_S, AgentSettings, agent_argv
from kmatrix.records.jobs.claim import fresh_owner, is_listed
from kmatrix.records.jobs.files import newest_shares, read_node, read_node_end, read_share_end
from kmatrix.records.jobs.paths import NodeDir, ShareDir
from kmatrix.records.paths import ROOT, MatrixDir, RunDir, program_environment
from kmatrix.records.run_lock import SPENT
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.status.state import RunPlan

LOOK_S = 1.0  # between two looks at the files
SHARES_S = 30.0  # between two looks whether a newer submission has the run
PEERS_S = 15.0  # after the end of node 0: then its attempt is over here, too
TORCHRUN = ("-m", "torch.distributed.run")
STOP = (signal.SIGTERM, signal.SIGINT)
Say = Callable[[str], object]


@dataclass(slots=True)
class Follower:
    """This pod, as one of the nodes of a run."""

    share: ShareDir
    run: RunDir
    job: str  # as in owner.json
    index: int  # of this pod
    say: Say
    _former_end: tuple[str, int] | None = None  # job and restart of the end that was there before this pod
    _began: float = 0.0  # monotonic seconds
    _asked: list[int] = field(default_factory=list)
    _agent: subprocess.Popen[bytes] | None = None
    _current: Orders | None = None
    _handled: tuple[int, int] = (-1, 0)
    _kill_at: float | None = None  # monotonic seconds
    _ended_since: float | None = None  # monotonic seconds: node 0 has ended
    _shares_at: float = 0.0  # monotonic seconds
    _ready: Ready = field(default_factory=lambda: Ready(job=""))
    _ready_at: float = 0.0  # monotonic seconds: when the note is written again

    def listen(self) -> None:
        """Pass the signals of Kubernetes on to the agent, instead of dying from them."""
        for number in STOP:
            signal.signal(number, self._take)

    def follow(self) -> int:
        """Follow orders until the share is over; return the exit status of the pod."""
        self.say(f"pod {self.index} of job {self.job}: waits for the orders of pod 0")
        self._began = time.monotonic()
        end = read_share_end(self.share) if is_listed(self.share.end) else None
        self._former_end = (end.job, end.restart) if end is not None else None
        while True:
            self._watch()
            if self._agent is None:
                if self._asked:
                    return AGAIN
                if why := self._over():
                    self.say(f"over: {why}")
                    return 0
                orders = read_orders(self.run)
                if orders is not None and self._is_new(orders):
                    self._start(orders)
                else:
                    self._announce()
            time.sleep(LOOK_S)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self._asked.append(number)

    def _announce(self) -> None:
        """Write that this pod waits for orders: pod 0 does not start the share before."""
        if time.monotonic() < self._ready_at:
            return
        self._ready_at = time.monotonic() + READY_S
        pod = self._ready.pod or uuid.uuid4().hex
        self._ready = Ready(job=self.job, pod=pod, counter=self._ready.counter + 1)
        with suppress(OSError):  # a full disk: it tries again
            write_ready(self.run, self.index, self._ready)

    def _is_new(self, orders: Orders) -> bool:
        """Return whether orders are for an attempt that no pod of this index has trained, and that has not ended."""
        if orders.job != self.job or orders.over or orders.key <= self._handled:
            return False
        own = NodeDir(self.run, self.index)
        agent = read_node(own) if is_listed(own.node_json) else None
        if agent is not None and agent.attempt >= orders.attempt and agent.attempt != self._handled[1]:
            return False  # of a pod that this one replaces: nobody can join its attempt again
        return not self._has_ended(orders)

    def _has_ended(self, orders: Orders) -> bool:
        """Return whether node 0 of an attempt has ended, or another pod 0 has the share since."""
        head = NodeDir(self.run, 0)
        end = read_node_end(head) if is_listed(head.end) else None
        owner = fresh_owner(self.share)
        superseded = owner is not None and owner.restart > orders.restart
        return superseded or (end is not None and end.attempt >= orders.attempt)

    def _start(self, orders: Orders) -> None:
        plan = self._plan(orders)
        recorders = RecorderLauncher(python=Path(sys.executable), root=ROOT, hz=orders.hz)
        command = agent_argv(
            plan,
            (sys.executable, *TORCHRUN),
            python=sys.executable,
            settings=AgentSettings(
                grace_s=orders.grace_s, recorders=recorders if orders.hz else None, stage_dir=orders.stage_dir
            ),
            address=orders.address,
            port=orders.port,
        )
        variables = {**trainer_variables(plan, ROOT), SPENT: str(orders.spent_s)}
        self.say(f"attempt {orders.attempt} as node {self.index}, with {orders.address}")
        self._current, self._handled, self._ended_since = orders, orders.key, None
        self._agent = subprocess.Popen(
            command, cwd=ROOT, env=program_environment(ROOT, **variables), stdin=subprocess.DEVNULL
        )

    def _plan(self, orders: Orders) -> RunPlan:
        record = read_run_file_or_empty(self.run)
        return RunPlan(
            name=self.run.name,
            run_id=record.run_id or "",
            dir=self.run,
            ranks=orders.ranks,
            nodes=orders.nodes,
            cuda=orders.cuda,
            cpu_threads=orders.cpu_threads,
            attempt=orders.attempt,
            resume=orders.resume,
            micro_batch=orders.micro_batch,
            spent_s=orders.spent_s,
            environment=record.environment,
        )

    def _watch(self) -> None:
        """Stop the agent if this pod, or its attempt, is to end."""
        agent, orders = self._agent, self._current
        if agent is None or orders is None:
            return
        if (code := agent.poll()) is not None:
            self.say(f"attempt {orders.attempt}: exit code {code}")
            self._agent = self._kill_at = None
            return
        now = time.monotonic()
        if self._kill_at is not None:
            if now > self._kill_at:
                agent.kill()  # its guard ends the ranks with it
            return
        if self._asked or self._is_superseded(orders, now):
            agent.terminate()
            self._kill_at = now + orders.grace_s + 2 * MARGIN_S

    def _is_superseded(self, orders: Orders, now: float) -> bool:
        newest = read_orders(self.run)
        if newest is not None and (newest.key > orders.key or newest.over):
            return True
        if not self._has_ended(orders):
            return False
        # Its ranks have lost their peers, and end by themselves as a rule: then they can say why.
        self._ended_since = now if self._ended_since is None else self._ended_since
        return now - self._ended_since > PEERS_S

    def _over(self) -> str:
        """Return why no more orders will come, "" if they may."""
        end = read_share_end(self.share) if is_listed(self.share.end) else None
        owner = fresh_owner(self.share)
        # An end that was there before this pod may be that of an earlier start: pod 0 may still be starting.
        is_new = end is not None and (end.job, end.restart) != self._former_end
        waited = time.monotonic() - self._began > RENDEZVOUS_S
        is_last = end is not None and owner is not None and not end.requeued and end.restart >= owner.restart
        if end is not None and is_last and end.job == self.job and (is_new or waited):
            return f"the share is {end.status or 'ended'}"
        if time.monotonic() >= self._shares_at:
            self._shares_at = time.monotonic() + SHARES_S
            newest: ShareDir | None = None
            with suppress(OSError):  # storage that does not answer now: the exit of this pod would fail the Job
                newest = newest_shares(MatrixDir(self.share.path)).get(self.run.name)
            if newest is not None and newest.id != self.share.id:
                return f"submission {newest.submission} has its run now"
        return ""
