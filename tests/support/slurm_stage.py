"""Start a real Slurm on this machine, each node in namespaces of its own, on storage with the faults of a bad NFS.

    with SlurmStage(nodes=3, gpus=2, caches={"login": 30, "n3": 30}) as stage:
        stage.login(["sbatch", "--nodes=2", "job.sbatch"], cwd=stage.shared)
        stage.wait(lambda: not stage.squeue(), "no job left")

`python tests/support/slurm_stage.py` starts one to look around in (docs/developing.md, "A Slurm to try").

The hosts are `login`, `ctl` (slurmctld, munged) and n1, n2, ... (slurmd). Each has its own network, address, host name,
process numbers, boot id, /tmp and /dev/shm, so that code that confuses two machines fails here: a process number of n1
means nothing on the login node, and localhost is another machine on each. The network has no way out. Everything else
of the file system is common, as if installed on every node.

All processes of a host live in a process namespace whose init dies with the process that started the stage, even if
that one is killed by SIGKILL; interfaces and mounts vanish with them. Only the folder is left, and the next stage
removes it: the owner of a folder holds a lock on it, so the folders of other stages that run now are never touched.

Facts about Slurm 22.05 that were found with this stage, and that no page of its documentation says in one place:

- A requeued job waits `cred_expire` + 1 seconds (AuthInfo in slurm.conf), 121 by default, because the credential of its
  former start must have expired. The stage sets 15. `scontrol update JobId=... StartTime=now` starts it at once.
- `scontrol requeue` sends SIGTERM to the job that called it, and SIGKILL after KillWait; until then, the job is
  COMPLETING. It fails for a job that waits: "Job is pending execution".
- `--signal=B:USR1@60` of a job of 2 minutes came 58.5 s after its start. A job that is preempted gets the same signal
  at once (preempt_send_user_signal), SIGTERM up to 20 s after GraceTime, and SIGKILL after KillWait.
- A task of an array that is cancelled before it starts is not listed any more, not even with --states=all. An array
  that is cancelled as a whole is: 7_[0-3], with the time of its end as its start.
- A waiting task of an array is always in brackets, alone, too: 7_[5].
- More nodes than the partition has, and a time above its limit, are accepted; the job waits for ever. More GPUs than a
  node has are refused, and leave a job FAILED (BadConstraints) with an id of its own.
- Without slurmctld, squeue, sbatch, scancel and sinfo fail after 9 s, `scontrol show job` after 18 s.
- gres.conf needs character devices; with plain files CUDA_VISIBLE_DEVICES is empty.
- Memory of a stage with 4 nodes: 20 MiB. Start: 0.3 to 1.3 s.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import psutil
import pytest

from skips import require_program
from waiting import wait_until

T = TypeVar("T")
PREFIX = "kmatrix-slurm-"  # of the folders of all stages, below the folder for temporary files
NETWORK = "10.98.66"  # in a network of its own: no other stage, and nothing of this machine, sees it
START_S = 240.0  # a generous limit; a start takes one to two seconds on an idle machine
CPUS = 16  # of each node, as Slurm believes; the machine may have two
MEMORY_MIB = 4000

# Process 1 of a host. It waits until its end of the network cable is plugged in, and then adopts orphans for ever.
INIT = r"""
set -eu
read -r _
cd "$STAGE"
hostname "$NAME"
ip link set lo up
ip link set eth0 address "$MAC"
ip address add "$ADDRESS/24" dev eth0
ip link set eth0 up
mount --bind "$STAGE/hosts" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
cat /proc/sys/kernel/random/uuid > "$STAGE/boot/$NAME"
mount --bind "$STAGE/boot/$NAME" /proc/sys/kernel/random/boot_id
mount -t tmpfs tmpfs /mnt
for kept in $KEPT; do
    mkdir -p "/mnt/$kept"
    mount --bind "$TEMPORARY/$kept" "/mnt/$kept"
done
mount --move /mnt "$TEMPORARY"
cd "$STAGE"
mount --bind "$STAGE/shared" "$STAGE/storage"
mount --bind "$STAGE/empty" "$STAGE/shared"
bindfs $STORAGE "$STAGE/storage" "$STAGE/shared"
for daemon in "$@"; do eval "$daemon"; done
: > "$STAGE/up/$NAME"
sleep infinity &
wait
"""
MUNGED = (
    'munged --force --socket="$STAGE/munge.socket" --pid-file="$STAGE/munged.pid" --log-file="$STAGE/log/munged.log"'
    ' --seed-file="$STAGE/munge.seed" --key-file="$STAGE/munge.key"'
)


@dataclass(slots=True)
class Host:
    """One machine of the stage."""

    name: str
    address: str
    process: subprocess.Popen[bytes]  # `unshare`, the parent of the host's process 1
    port: str  # its end of the cable, on the switch

    def enter(self) -> list[str]:
        """Return the start of a command line that runs a program on this host."""
        space = f"/proc/{self.process.pid}/ns"
        names = [("net", "net"), ("mount", "mnt"), ("uts", "uts"), ("ipc", "ipc"), ("pid", "pid_for_children")]
        return ["nsenter", *(f"--{option}={space}/{file}" for option, file in names), "--"]

    def kill(self) -> None:
        """Kill all processes of the host at once, and return when none is left."""
        if self.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
                for init in psutil.Process(self.process.pid).children():
                    init.kill()  # the kernel kills the others with it
        self.process.wait()


class SlurmStage:
    """A running Slurm, as a context manager. Skips the test if this machine cannot start one.

    nodes: how many nodes. gpus: fake GPUs of each node, one number or one per node. caches: seconds for which a host
    believes what it knows about files: one number, or one per host by name, 0 for the others. locks: whether a lock
    that one host holds keeps the others out. kill_wait, grace: seconds between SIGTERM and SIGKILL of a cancelled job,
    and of a preempted one. installed: folders below /tmp that every host sees, such as the .venv of the test; the rest
    of /tmp is its own. requeue_delay: seconds that a requeued job waits at least. partitions: lines of slurm.conf
    below the default ones (`main`, which `urgent` preempts, and `short` with a limit of 5 minutes). settings: further
    lines of slurm.conf.
    """

    def __init__(
        self,
        *,
        nodes: int = 3,
        gpus: int | Sequence[int] = 2,
        caches: float | Mapping[str, float] = 0,
        locks: bool = False,
        kill_wait: int = 30,
        grace: int = 60,
        requeue_delay: int = 15,
        installed: Sequence[Path] = (),
        partitions: Sequence[str] = (),
        settings: Sequence[str] = (),
    ) -> None:
        self.gpus = [gpus] * nodes if isinstance(gpus, int) else list(gpus)
        self.nodes = [f"n{i}" for i in range(1, nodes + 1)]
        self._caches, self._locks = caches, locks
        self._kill_wait, self._grace, self._requeue_delay = kill_wait, grace, requeue_delay
        self._installed = installed
        self._partitions, self._settings = partitions, settings
        self._hosts: dict[str, Host] = {}
        self._ports = itertools.count(1)
        self._background: list[subprocess.Popen[str]] = []
        self._lock: IO[str] | None = None
        self.folder = Path()

    def __enter__(self) -> SlurmStage:
        require_slurm()
        remove_stale_stages()
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def shared(self) -> Path:
        """The shared folder. It has this path on every host, through the host's own mount.

        Outside, where the test runs, this path is the folder itself: a test reads what is true now.
        """
        return self.folder / "shared"

    @property
    def environment(self) -> dict[str, str]:
        """What a host adds to the environment of its programs."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def login(
        self,
        command: Sequence[str | Path],
        *,
        check: bool = True,
        timeout: float = 300.0,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node. See `on`."""
        return self.on("login", command, check=check, timeout=timeout, cwd=cwd, env=env)

    def on(
        self,
        host: str,
        command: Sequence[str | Path],
        *,
        check: bool = True,
        timeout: float = 300.0,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, in the shared folder or in `cwd`, and return its output.

        env: the environment; without it, that of the test. Raises AssertionError with the state of the whole stage if
        the command fails (with `check`) or takes longer than `timeout` seconds.
        """
        with self.start(host, command, cwd=cwd, env=env) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
                message = f"{host}: {command} took more than {timeout:g} s"
                raise AssertionError(f"{message}\n{out}\n{err}\n{self.report()}") from None
        if check and process.returncode:
            raise AssertionError(f"{host}: {command}: exit {process.returncode}\n{out}\n{err}\n{self.report()}")
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(
        self,
        host: str,
        command: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a host, in a session of its own, with pipes; the stage kills it at its end.

        `os.killpg(process.pid, ...)` reaches the command, as its terminal would.
        """
        entered = [*self._hosts[host].enter(), "env", f"--chdir={cwd or self.shared}", "--", *map(str, command)]
        process = subprocess.Popen(
            entered,
            env={**(os.environ if env is None else env), **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._background = [*(other for other in self._background if other.poll() is None), process]
        return process

    def kill_node(self, number: int, *, power_cut: bool = False) -> None:
        """Kill all processes of a node at once. With `power_cut` its connections stay open on the other side."""
        host = self._hosts.pop(f"n{number}")
        if power_cut:
            self._switch("link", "set", host.port, "down")
        host.kill()

    def start_node(self, number: int) -> None:
        """Start a node again after `kill_node`, with the same name and address and an empty memory."""
        self._start_host(f"n{number}")
        self._wait_up(f"n{number}")
        self.wait(lambda: f"n{number}" in self.idle_or_busy(), f"n{number} is back")

    def stop_controller(self) -> None:
        """Stop slurmctld, as for an upgrade. Jobs go on; every command of Slurm fails after its time limit."""
        pid_file = self.folder / "slurmctld.pid"
        number = pid_file.read_text(encoding="utf-8").strip()
        self.on("ctl", ["kill", number], cwd=self.folder)
        wait_until(lambda: self.on("ctl", ["kill", "-0", number], check=False, cwd=self.folder).returncode, "its end")

    def start_controller(self) -> None:
        """Start slurmctld again, with its saved state, and wait until it knows all nodes that run.

        Before, it refuses jobs that need them: "Requested node configuration is not available".
        """
        self.on("ctl", ["slurmctld"], cwd=self.folder)
        alive = {node for node in self.nodes if node in self._hosts}
        self.wait(lambda: alive <= set(self.idle_or_busy()), "slurmctld knows the nodes")

    def squeue(self, fields: str = "%i|%T|%r|%N") -> list[list[str]]:
        """Return the jobs that wait or run: job id (of the array task), state, reason and nodes, or other `fields`."""
        out = self.login(["squeue", "--noheader", "--array", f"--format={fields}"]).stdout
        return [line.split("|") for line in out.splitlines()]

    def job_state(self, job: str) -> str:
        """Return the state of a job in Slurm's words, also after its end; "" if Slurm does not know it."""
        out = self.login(["scontrol", "--oneliner", "show", "job", job], check=False).stdout
        return next((word.partition("=")[2] for word in out.split() if word.startswith("JobState=")), "")

    def idle_or_busy(self) -> list[str]:
        """Return the nodes that can run jobs."""
        out = self.login(["sinfo", "--noheader", "--Node", "--format=%N|%t"], check=False, timeout=30).stdout
        states = dict(line.split("|") for line in out.splitlines() if "|" in line)
        return [name for name, state in states.items() if state in ("idle", "alloc", "mix", "comp")]

    def wait(self, condition: Callable[[], T], what: str, seconds: float = 240.0) -> T:
        """Return the first true value of a condition. After `seconds`, fail with the state of the whole stage."""
        try:
            return wait_until(condition, what, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.report()}") from None

    def report(self) -> str:
        """Describe everything: jobs, nodes, and the ends of all logs."""
        parts = []
        for command in (
            ["squeue", "--all", "--array", "--states=all", "-o", "%i %P %j %T %r %N %S %M"],
            ["sinfo", "-Nl"],
        ):
            if "login" in self._hosts:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    done = subprocess.run(
                        [*self._hosts["login"].enter(), *command],
                        env={**os.environ, **self.environment},
                        capture_output=True,
                        text=True,
                        check=False,
                        timeout=20,
                    )
                    parts.append(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}")
        logs = sorted((self.folder / "log").glob("*"))
        texts = {log: log.read_text(encoding="utf-8", errors="replace").splitlines()[-25:] for log in logs}
        parts += ["\n".join([f"--- {log.name}", *lines]) for log, lines in texts.items() if lines]
        return "\n".join(parts)

    def close(self) -> None:
        """Kill everything that the stage has started, and remove its folder."""
        for process in self._background:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        for name in list(self._hosts):
            self._hosts.pop(name).kill()
        for process in self._background:
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()
            self._lock = None

    def _start(self) -> None:
        # The path is short, because a socket's may have 107 characters at most.
        # Locked under another name: between the two, another stage that starts would take it for stale.
        new = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}"))
        self._lock = (new / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = new.rename(new.with_name(new.name.removeprefix("new-")))
        self._write_files()
        self._hosts["switch"] = Host("switch", "", self._unshare("exec sleep infinity", {}), "")
        self._switch("link", "add", "br0", "type", "bridge")
        self._switch("link", "set", "br0", "up")
        names = ["ctl", "login", *self.nodes]
        for name in names:
            self._start_host(name)
        for name in names:
            self._wait_up(name)
        self.wait(lambda: len(self.idle_or_busy()) == len(self.nodes), "all nodes are idle", START_S)

    def _write_files(self) -> None:
        for name in (
            "shared",
            "boot",
            "storage",
            "empty",
            "state",
            "log",
            "dev",
            "up",
            *(f"spool.{node}" for node in self.nodes),
        ):
            (self.folder / name).mkdir()
        for index in range(max(self.gpus)):
            os.mknod(self.folder / "dev" / f"nvidia{index}", 0o666 | 0o020000, os.makedev(1, 3))  # as /dev/null
        hosts = ["127.0.0.1 localhost", *(f"{self._address(name)} {name}" for name in ["ctl", "login", *self.nodes])]
        (self.folder / "hosts").write_text("\n".join([*hosts, ""]), encoding="utf-8")
        (self.folder / "slurm.conf").write_text("\n".join([*self._slurm_conf(), ""]), encoding="utf-8")
        gres = [
            f"NodeName={node} Name=gpu Type=a10g File={self.folder}/dev/nvidia[0-{count - 1}]"
            for node, count in zip(self.nodes, self.gpus, strict=True)
            if count
        ]
        (self.folder / "gres.conf").write_text("\n".join([*gres, ""]), encoding="utf-8")
        subprocess.run(["mungekey", "--create", f"--keyfile={self.folder / 'munge.key'}"], check=True)

    def _slurm_conf(self) -> Iterator[str]:
        folder, all_nodes = self.folder, ",".join(self.nodes)
        yield from (
            "ClusterName=stage",
            f"SlurmctldHost=ctl({self._address('ctl')})",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={folder}/munge.socket,cred_expire={self._requeue_delay}",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "GresTypes=gpu",
            "SlurmdParameters=config_overrides",  # believe the number of CPUs below
            "SlurmctldParameters=preempt_send_user_signal",
            "ReturnToService=2",
            "MpiDefault=none",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool.%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd.%n.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld.log",
            f"SlurmdLogFile={folder}/log/slurmd.%n.log",
            "SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1,sched_min_interval=10000",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
            "MinJobAge=3600",
            "SlurmdTimeout=20",
            f"KillWait={self._kill_wait}",
            "MaxArraySize=1001",
            "AccountingStorageType=accounting_storage/none",
            "JobAcctGatherType=jobacct_gather/none",
        )
        for node, count in zip(self.nodes, self.gpus, strict=True):
            gres = f" Gres=gpu:a10g:{count}" if count else ""
            yield f"NodeName={node} NodeAddr={self._address(node)} CPUs={CPUS} RealMemory={MEMORY_MIB}{gres}"
        yield (
            f"PartitionName=main Nodes={all_nodes} Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE"
            f" GraceTime={self._grace} MaxTime=2-0"
        )
        yield f"PartitionName=urgent Nodes={all_nodes} State=UP PriorityTier=10 PreemptMode=OFF MaxTime=1:00:00"
        yield f"PartitionName=short Nodes={all_nodes} State=UP PriorityTier=1 PreemptMode=OFF MaxTime=5"
        yield from self._partitions
        yield from self._settings

    def _address(self, name: str) -> str:
        number = {"login": 254, "ctl": 253}.get(name) or int(name.removeprefix("n"))
        return f"{NETWORK}.{number}"

    def _storage(self, name: str) -> str:
        """Return the options of a host's mount of the shared folder.

        With caches it behaves as NFS without locks: a name that was missing stays missing, and size and times stay as
        they were, for that many seconds; listing a folder is always true, and so is the content of a file when it is
        opened (direct_io: otherwise a file that was replaced by a longer one is read up to the old length).
        """
        caches = self._caches.get(name, 0) if isinstance(self._caches, Mapping) else self._caches
        times = ",".join(f"{kind}_timeout={caches}" for kind in ("entry", "attr", "negative"))
        locks = ["--enable-lock-forwarding", "--multithreaded"] if self._locks else []
        return " ".join(["-o", f"{times},direct_io" if caches else times, *locks])

    def _kept(self) -> list[str]:
        """Return the folders below the one for temporary files that the hosts have in common."""
        temporary = Path(tempfile.gettempdir()).resolve()
        folders = [folder.resolve() for folder in (self.folder, *self._installed)]
        return [str(folder.relative_to(temporary)) for folder in folders if folder.is_relative_to(temporary)]

    def _unshare(self, script: str, variables: Mapping[str, str], *arguments: str) -> subprocess.Popen[bytes]:
        spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]
        log = self.folder / "log" / f"{variables.get('NAME', 'switch')}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                # setpriv: the host dies with the thread that started it, whatever ends that.
                ["setpriv", "--pdeathsig=KILL", "unshare", *spaces, "bash", "-c", script, "init", *arguments],
                env={**os.environ, **self.environment, **variables},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        # Before it has a network of its own, `ip` would change that of this machine.
        wait_until(lambda: process.poll() is not None or _has_namespaces(process.pid), "namespaces of a host", START_S)
        assert process.poll() is None, log.read_text(encoding="utf-8")
        return process

    def _start_host(self, name: str) -> None:
        address = self._address(name)
        variables = {
            "STAGE": str(self.folder),
            "NAME": name,
            "ADDRESS": address,
            "MAC": f"02:00:00:00:00:{int(address.rpartition('.')[2]):02x}",  # the same after a restart: caches of ARP
            "STORAGE": self._storage(name),
            "TEMPORARY": tempfile.gettempdir(),
            "KEPT": " ".join(self._kept()),
        }
        daemons = {"login": [], "ctl": [MUNGED, "slurmctld"]}.get(name, [f"slurmd -D -N {name} &"])
        (self.folder / "up" / name).unlink(missing_ok=True)
        process = self._unshare(INIT, variables, *daemons)
        port = f"port{next(self._ports)}"
        host = self._hosts[name] = Host(name, address, process, port)
        self._switch("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
        self._switch("link", "set", port, "master", "br0", "up")
        assert host.process.stdin is not None
        host.process.stdin.write(b"go\n")
        host.process.stdin.close()

    def _wait_up(self, name: str) -> None:
        process = self._hosts[name].process
        self.wait(lambda: (self.folder / "up" / name).exists() or process.poll() is not None, f"{name} is up", START_S)
        if process.poll() is not None:
            raise AssertionError(f"{name} ended with {process.returncode}\n{self.report()}")

    def _switch(self, *arguments: str) -> None:
        """Run `ip` where the cables of all hosts end."""
        space = f"/proc/{self._hosts['switch'].process.pid}/ns/net"
        subprocess.run(["nsenter", f"--net={space}", "ip", *arguments], check=True)


def require_slurm() -> None:
    """Skip the test if a program or a right is missing that a stage needs."""
    require_program("slurmctld")
    require_program("slurmd")
    require_program("sbatch")
    require_program("munged")
    require_program("bindfs")
    require_program("ip")
    tried = "mount -t tmpfs tmpfs /mnt && ip link add try0 type veth peer name try1 && test -r /dev/fuse"
    spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork"]
    done = subprocess.run(["unshare", *spaces, "sh", "-c", tried], capture_output=True, text=True, check=False)
    if done.returncode:
        why = f"a Slurm in namespaces needs root, namespaces and /dev/fuse: {done.stderr.strip()}"
        pytest.skip(why)


def remove_stale_stages() -> None:
    """Remove the folders of stages whose process was killed. Their processes died with it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if its owner lives
            shutil.rmtree(folder, ignore_errors=True)


def _has_namespaces(process: int) -> bool:
    """Return whether a process and its children have left the namespaces of this process."""
    names = ("net", "mnt", "uts", "ipc", "pid_for_children")
    try:  # that of the children can be read when the first of them lives
        return all(
            Path(f"/proc/{process}/ns/{n}").stat().st_ino != Path(f"/proc/self/ns/{n}").stat().st_ino for n in names
        )
    except FileNotFoundError:
        return False


def main() -> None:
    """Start a stage and open a shell on its login node."""
    with SlurmStage(nodes=3, gpus=2, caches={"login": 5}) as stage:
        print(f"login node; nodes {', '.join(stage.nodes)}; shared folder {stage.shared}; exit ends it", flush=True)
        shell = [*stage._hosts["login"].enter(), "env", f"--chdir={stage.shared}", "bash", "-i"]
        subprocess.run(shell, env={**os.environ, **stage.environment, "PS1": "login$ "}, check=False)


if __name__ == "__main__":
    sys.exit(main())
