"""The agent on each node of a run: torchrun under a guard, and the recorder of this node.

    python -m kmatrix.engines.node RUN_DIR --attempt=N --nodes=N --ranks=N [...] -- torchrun --node-rank=@NODE@ ...

SIGTERM to the agent of node 0 stops the run: the ranks of all nodes agree on the step at which they save a checkpoint.
What an agent says goes to the log of the run through srun; what its ranks say, to the log of its node.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kmatrix.engines.local.process import ProcessTree, start
from kmatrix.engines.local.recorder import RecorderLauncher, end
from kmatrix.engines.spread import NODE, node_number
from kmatrix.engines.staging import Stage, stage_folder
from kmatrix.errors import KmatrixError, LaunchError
from kmatrix.gpu.nvml.detect import detect, usable
from kmatrix.records.decode import as_json
from kmatrix.records.files import write_json
from kmatrix.records.jobs.files import NodeFile
from kmatrix.records.jobs.paths import NodeDir
from kmatrix.records.lock import this_process
from kmatrix.records.paths import ROOT, RunDir, program_environment
from kmatrix.records.run_lock import LOCK, TOKEN, begin_attempt, join_attempt, kill, members
from kmatrix.status.node_ends import node_end
from kmatrix.status.state import RunPlan
from kmatrix.text import plural

PULSE_S = 5.0  # between two writes of node.json
POLL_S = 0.2
MARGIN_S = 5.0  # the guard kills after the grace period; after this margin the agent does
KILLED_S = 5.0  # a process of an earlier attempt that lives so long after its kill is stuck in the kernel
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1
EXIT_REFUSED = 2


@dataclass(slots=True)
class Agent:
    """The processes of a run on this node, and the files that tell about them."""

    node: NodeDir
    plan: RunPlan
    command: Sequence[str]  # torchrun, and what it runs
    grace_s: float
    recorders: RecorderLauncher | None = None
    stage_dir: str = ""
    signals: list[str] = field(default_factory=list)  # names of those that were received
    _file: NodeFile | None = None
    _due: float = 0.0  # monotonic seconds
    _log_start: int = 0  # bytes
    _staging: Stage | None = None  # keeps the copies as long as this process lives
    _started: float | None = None  # Unix seconds, by this host's clock

    def receive(self, number: int, _frame: object = None) -> None:
        """Record a signal; `run` passes it on."""
        self.signals.append(signal.Signals(number).name)

    def run(self) -> int:
        """Run the command to its end, and return its exit code. No process of it is left in any case."""
        self.node.path.mkdir(parents=True, exist_ok=True)
        self.node.end.unlink(missing_ok=True)  # of an earlier attempt
        self._pulse()
        lock, token = self._take()
        try:
            staged = self._stage()
            log = self.node.output_log
            self._log_start, self._started = log.stat().st_size if log.exists() else 0, time.time()
            self._due = 0.0
            self._pulse()  # before a rank can end: the end of this attempt's log is found by it
            tree = start(
                self.command,
                cwd=Path.cwd(),
                env={**self._environment(token), **staged},
                log=log,
                python=Path(sys.executable),
                grace_s=self.grace_s,
                lock=lock,
            )
        finally:
            if lock is not None:
                os.close(lock)  # the guard and torchrun hold it now
        recorder = self._start_recorder(tree)
        code: int | None = None
        try:
            code = self._watch(tree)
        finally:
            code = tree.kill() if code is None else code
            end(recorder)
            self._write_end(code)
        return code

    def _watch(self, tree: ProcessTree) -> int:
        deadline: float | None = None
        while (code := tree.poll()) is None:
            if self.signals and deadline is None:
                say(self.node, f"{self.signals[0]}: asked to stop")
                deadline = time.monotonic() + self.grace_s + MARGIN_S
                tree.stop()
            if deadline is not None and time.monotonic() > deadline:
                return tree.kill()
            self._pulse()
            time.sleep(POLL_S)
        return code

    def _take(self) -> tuple[int | None, str]:
        """Return a descriptor of the lock of this node, and the token of the attempt, after the end of earlier ranks.

        Raises LaunchError if they do not end, or if another attempt has begun.
        """
        if self.node.node == 0:  # the engine, on this host, has it already
            return join_attempt(self.node.run), os.environ.get(TOKEN, "")
        began, own, killed = time.monotonic(), RunDir(self.node.path), math.inf
        while (taken := begin_attempt(own, self.plan.attempt)) is None:
            left = members(own, str(self.node.run.path))
            now = time.monotonic()
            if now - killed > KILLED_S:  # counted from the kill: this process may have been suspended until then
                raise LaunchError(f"an earlier attempt is still running: {', '.join(map(str, left)) or own.lock}")
            if now - began > self.grace_s + MARGIN_S:
                killed = min(killed, now)
                kill(left)
            self._pulse()
            time.sleep(POLL_S)
        return taken

    def _stage(self) -> Mapping[str, str]:
        """Copy the data to this node, if it has a place for them; return the variable for the ranks."""
        folder = stage_folder(self.stage_dir)
        if folder is None:
            return {}
        self._staging = Stage(folder, lambda text: say(self.node, text), self._is_stopped)
        return self._staging.environment([self.node.run])

    def _is_stopped(self) -> bool:
        """Return whether this agent was asked to stop, and show that it lives: a copy takes minutes."""
        self._pulse()
        return bool(self.signals)

    def _environment(self, token: str) -> Mapping[str, str]:
        changes = {TOKEN: token, LOCK: str(self.node.lock)}
        if self.plan.gpus:  # chosen by the engine among those of the job
            changes["CUDA_VISIBLE_DEVICES"] = ",".join(self.plan.gpus)
        elif not self.plan.cuda:
            changes["CUDA_VISIBLE_DEVICES"] = ""
        return program_environment(ROOT, **changes)

    def _start_recorder(self, tree: ProcessTree) -> subprocess.Popen[bytes] | None:
        if self.recorders is None:
            return None
        gpus: tuple[str, ...] = ()
        if self.plan.cuda:
            gpus = self.plan.gpus or visible_gpus(self.node)
        # The recorder finds the ranks by the folder of their run, and writes to that of this node.
        first = self.node.node * self.plan.ranks_per_node
        return self.recorders.start(self.plan, tree, gpus=gpus, folder=self.node.recording, first_rank=first)

    def _pulse(self) -> None:
        """Rewrite node.json, whose counter tells that this agent lives."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + PULSE_S
        node, width, process = self.node.node, self.plan.ranks_per_node, this_process()
        self._file = NodeFile(
            node=node,
            host=process.host,
            attempt=self.plan.attempt,
            pid=process.pid,
            pid_started=process.pid_started,
            boot_id=process.boot_id,
            counter=self._file.counter + 1 if self._file else 1,
            ranks=tuple(range(node * width, (node + 1) * width)),
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            step=os.environ.get("SLURM_STEP_ID", ""),
            started=self._started,
            log_start=self._log_start,
        )
        with contextlib.suppress(OSError):  # a full disk: the next pulse tries again
            write_json(self.node.node_json, as_json(self._file), durable=False, parents=False)

    def _write_end(self, code: int) -> None:
        if self._file is None:
            return
        record = node_end(self.node, self._file, code, self.signals)
        try:
            write_json(self.node.end, as_json(record), parents=False)
        except OSError as error:
            say(self.node, f"cannot write {self.node.end}: {error.strerror}")


def visible_gpus(node: NodeDir) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that the scheduler gave to this node, () if the driver does not tell."""
    found = detect()
    try:
        return tuple(gpu.uuid for gpu in usable(found, visible=os.environ.get("CUDA_VISIBLE_DEVICES"), asked=None))
    except LaunchError as error:
        say(node, f"nothing is recorded: {error.what}")
        return ()


def say(node: NodeDir, text: str) -> None:
    """Print a line, which reaches the log of the run."""
    with contextlib.suppress(OSError):
        print(f"node {node.node} ({socket.gethostname()}): {text}", flush=True)


def agent_of(argv: Sequence[str], environment: Mapping[str, str]) -> Agent:
    """Return the agent of a command line."""
    parser = argparse.ArgumentParser(prog="python -m kmatrix.engines.node", description="Run one node of a run.")
    parser.add_argument("run_dir", type=Path, help="the directory of the run")
    parser.add_argument("--attempt", type=int, required=True, help="number of this attempt")
    parser.add_argument("--nodes", type=int, required=True, help="nodes of the run")
    parser.add_argument("--ranks", type=int, required=True, help="ranks on all nodes")
    parser.add_argument("--grace", type=float, required=True, help="seconds to save a checkpoint")
    parser.add_argument("--cuda", action="store_true", help="the ranks use GPUs")
    parser.add_argument("--stage", default="", help="directory for a copy of the data on this node")
    parser.add_argument("--gpus", default="", help="UUIDs (default: those of CUDA_VISIBLE_DEVICES)")
    parser.add_argument("--hz", type=int, default=0, help="samples/s of the recorder, 0: none")
    parser.add_argument("command", nargs="+", help="torchrun and its arguments, after --")
    options = parser.parse_args(argv)
    run = RunDir(options.run_dir.absolute())
    number = node_number(environment)
    plan = RunPlan(
        name=run.name,
        run_id="",
        dir=run,
        ranks=options.ranks,
        nodes=options.nodes,
        cuda=options.cuda,
        gpus=tuple(filter(None, options.gpus.split(","))),
        attempt=options.attempt,
    )
    recorders = RecorderLauncher(
        python=Path(sys.executable),
        root=ROOT,
        hz=options.hz,
    )
    return Agent(
        node=NodeDir(run, number),
        plan=plan,
        command=[f"--node-rank={number}" if word == f"--node-rank={NODE}" else word for word in options.command],
        grace_s=options.grace,
        recorders=recorders if options.hz else None,
        stage_dir=options.stage,
    )


def main(argv: Sequence[str]) -> int:
    """Run the agent; return the exit code of its torchrun."""
    agent = agent_of(argv, os.environ)
    for number in STOP:
        signal.signal(number, agent.receive)
    # The task's parent, slurmstepd, may be killed without its tasks.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    try:
        say(agent.node, f"attempt {agent.plan.attempt}, {plural(agent.plan.ranks_per_node, 'rank')}")
        return agent.run()
    except (OSError, KmatrixError) as error:
        say(agent.node, f"error: {str(error).splitlines()[0]}")
        return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
