"""The orders of pod 0 to the other pods of a run, which attempt they train now, and their notes that they are ready.

Nobody can start a process in another pod, so the others read a file in the folder of the run. It has values, never a
command: each pod makes the command itself, as the folder may come from anywhere.
"""

from __future__ import annotations

import signal

from kmatrix.records.decode import Amount, Count, Record, as_json, decode_optional
from kmatrix.records.files import write_json
from kmatrix.records.jobs.claim import is_listed
from kmatrix.records.jobs.paths import NodeDir
from kmatrix.records.paths import RunDir

READY = "ready.json"
READY_S = 3.0  # between two writes of it
AGAIN = 128 + signal.SIGTERM  # exit code of a pod that Kubernetes is to replace: not one of the final codes


class Orders(Record, frozen=True, kw_only=True):
    """nodes/orders.json of a run, written by pod 0 alone."""

    job: str  # as in owner.json
    restart: Count = 0  # of pod 0
    attempt: Count = 1
    address: str = ""  # of the rendezvous: the name of pod 0
    port: Count = 0
    nodes: Count = 1
    ranks: Count = 1  # on all nodes
    cuda: bool = False
    cpu_threads: Count = 1  # per rank
    resume: str = "none"  # start of the training, as --resume has it
    micro_batch: Count | None = None  # sequences, None for that of run.json
    spent_s: Amount = 0.0  # time of the attempts before
    grace_s: Amount = 35.0  # time to save a checkpoint
    hz: Count = 0  # samples/s of the recorder, 0: none
    stage_dir: str = ""  # for copies of the data in each pod
    over: bool = False  # the attempt is to end at once

    @property
    def key(self) -> tuple[int, int]:
        """The attempt, and which pod 0 has ordered it."""
        return self.restart, self.attempt


class Ready(Record, frozen=True, kw_only=True):
    """nodes/<k>/ready.json of a run, rewritten by pod k while it waits for orders."""

    job: str  # as in owner.json
    pod: str = ""  # random: a pod that replaces another one has the same name
    counter: Count = 0  # grows every few seconds


def read_ready(run: RunDir, index: int) -> Ready | None:
    """Return the note of a pod as it is on the storage now, None without one."""
    path = NodeDir(run, index).path / READY
    return decode_optional(path, Ready) if is_listed(path) else None


def write_ready(run: RunDir, index: int, ready: Ready) -> None:
    """Write the note of a pod. Raises OSError if that fails."""
    folder = NodeDir(run, index).path
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / READY, as_json(ready), durable=False)


def read_orders(run: RunDir) -> Orders | None:
    """Return the orders as they are on the storage now, None without any."""
    path = run.path / "nodes" / "orders.json"
    return decode_optional(path, Orders) if is_listed(path) else None


def write_orders(run: RunDir, orders: Orders) -> None:
    """Write the orders. Raises OSError if that fails."""
    folder = NodeDir(run, 0).path.parent
    folder.mkdir(exist_ok=True)
    write_json(folder / "orders.json", as_json(orders))
