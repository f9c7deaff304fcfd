"""The pods of a fake Kubernetes: their own commands as processes, in namespaces, each with its own mount of the claim.

Each pod has its own network and address, host name, process numbers, /dev/shm, and its own mount of the claim, which
believes for some seconds what it knows about files, as NFS does. All processes of a pod live in a process namespace
that dies with the process that started the pod, so nothing is left. Needs root and /dev/fuse.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from skips import require_program
from waiting import wait_until

NETWORK = "10.97"  # in a network of its own, with no way out
START_S = 240.0
# The start of a pod. The command becomes process 1, as in a container, after its end of the cable is plugged in.
INIT = r"""
set -eu
read -r _
hostname "$POD_NAME"
ip link set lo up
ip address add "$POD_ADDRESS/16" dev eth0
ip link set eth0 up
mount --bind "$POD_HOSTS" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount --bind "$POD_CLAIM" "$POD_BEHIND"
mkdir -p "$POD_MOUNT"
bindfs -o "nonempty,$POD_STORAGE" "$POD_BEHIND" "$POD_MOUNT"
cd "$POD_FOLDER"
exec env --ignore-environment "$@"
"""


@dataclass(slots=True)
class PodProcess:
    """A running pod."""

    name: str
    address: str
    process: subprocess.Popen[bytes]  # `unshare`, the parent of the pod's process 1
    log: Path
    is_killed: bool = False

    def exit_code(self) -> int | None:
        """Return the exit code of its command as a kubelet reports it, None while it runs."""
        code = self.process.poll()
        # `unshare` exits with 1 if process 1 was killed by SIGKILL, as it cannot kill itself in the same way.
        if code is not None and self.is_killed:
            return 128 + signal.SIGKILL
        return code if code is None or code >= 0 else 128 - code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to process 1. SIGKILL ends the whole pod."""
        self.is_killed = self.is_killed or number == signal.SIGKILL
        with contextlib.suppress(psutil.NoSuchProcess):
            for init in psutil.Process(self.process.pid).children():
                init.send_signal(number)

    def processes(self) -> list[psutil.Process]:
        """Return all living processes of the pod."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []


class PodRoom:
    """Where pods run: a switch that connects them, and the file with their names.

    claim: its folder.  caches: seconds for which a pod believes what it knows about files.
    """

    def __init__(self, claim: Path, *, caches: float = 0) -> None:
        self.claim, self._caches = claim, caches
        self.folder = Path(tempfile.mkdtemp(prefix="kmatrix-pods-"))
        self.hosts = self.folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n", encoding="utf-8")
        (self.folder / "behind").mkdir()
        self._numbers = itertools.count(1)
        self._pods: list[PodProcess] = []
        self._switch_process = self._unshare(["sleep", "infinity"], spaces=("--net",), log=self.folder / "switch.log")
        self._switch("link", "add", "br0", "type", "bridge")
        self._switch("link", "set", "br0", "up")

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        names: Iterable[str],
        mount: str,
        environment: Mapping[str, str],
        folder: Path,
    ) -> PodProcess:
        """Start a pod. name: its host name.  names: what the DNS knows it by.  folder: its working directory."""
        number = next(self._numbers)
        address = f"{NETWORK}.{number // 250}.{number % 250 + 1}"
        # In place: the file is bound into every pod. An earlier pod of the same name has ended.
        known = [line for line in self.hosts.read_text(encoding="utf-8").splitlines() if not {*names} & {*line.split()}]
        self.hosts.write_text("\n".join([*known, f"{address} {' '.join(names)}", ""]), encoding="utf-8")
        times = ",".join(f"{kind}_timeout={self._caches}" for kind in ("entry", "attr", "negative"))
        variables = {
            "POD_NAME": name,
            "POD_ADDRESS": address,
            "POD_HOSTS": str(self.hosts),
            "POD_CLAIM": str(self.claim),
            "POD_BEHIND": str(self.folder / "behind"),
            "POD_MOUNT": mount,
            "POD_STORAGE": f"{times},direct_io" if self._caches else times,
            "POD_FOLDER": str(folder),
        }
        log = self.folder / f"{number}.log"
        words = [f"{key}={value}" for key, value in {**environment, "HOSTNAME": name}.items()]
        spaces = ("--net", "--mount", "--uts", "--ipc", "--pid", "--mount-proc", "--fork", "--kill-child=SIGKILL")
        process = self._unshare(["bash", "-c", INIT, "pod", *words, *command], spaces=spaces, log=log, extra=variables)
        port = f"port{number}"
        self._switch("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
        self._switch("link", "set", port, "master", "br0", "up")
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
        pod = PodProcess(name, address, process, log)
        self._pods.append(pod)
        return pod

    def close(self) -> None:
        """Kill all pods, and remove the folder."""
        for pod in self._pods:
            pod.send(signal.SIGKILL)
            pod.process.kill()
            pod.process.wait()
        self._switch_process.kill()
        self._switch_process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _switch(self, *arguments: str) -> None:
        space = f"/proc/{self._switch_process.pid}/ns/net"
        subprocess.run(["nsenter", f"--net={space}", "ip", *arguments], check=True)

    def _unshare(
        self, command: Sequence[str], *, spaces: Sequence[str], log: Path, extra: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        here = Path("/proc/self/ns/net").stat().st_ino
        with log.open("ab") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", "unshare", *spaces, *command],
                env={"PATH": os.environ["PATH"], **(extra or {})},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        # Before it has a network of its own, `ip` would change that of this machine.
        wait_until(
            lambda: process.poll() is not None or Path(f"/proc/{process.pid}/ns/net").stat().st_ino != here,
            "a pod has its network",
            START_S,
        )
        assert process.poll() is None, log.read_text(encoding="utf-8")
        return process


def require_pods() -> None:
    """Skip the test if a program or a right is missing that pods need."""
    for program in ("bindfs", "ip", "unshare", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            require_program("bindfs")
            require_program("ip")
    tried = "mount -t tmpfs tmpfs /mnt && ip link add try0 type veth peer name try1 && test -r /dev/fuse"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-c", tried],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        why = f"pods in namespaces need root, namespaces and /dev/fuse: {done.stderr.strip()}"
        pytest.skip(why)
