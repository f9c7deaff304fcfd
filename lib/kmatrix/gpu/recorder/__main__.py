"""The recorder: a separate process that samples the devices of a run from before its start to its end.

python -m kmatrix.gpu.recorder RUN_DIR [--hz 20] [--gpus UUID,UUID] [--ranks-of PID] [--parent PID] ...
python -m kmatrix.gpu.recorder RUN_DIR --format csv
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kmatrix.errors import KmatrixError, LaunchError
from kmatrix.gpu import host, processes
from kmatrix.gpu.devices import Device, DeviceSource
from kmatrix.gpu.nvml.detect import detect as nvml_detect
from kmatrix.gpu.nvml.detect import driver_problem as nvml_problem
from kmatrix.gpu.nvml.source import open_source as nvml_open_source
from kmatrix.gpu.recorder.files import export
from kmatrix.gpu.recorder.loop import STOP, Recorder
from kmatrix.records.files import append_jsonl
from kmatrix.records.paths import RunDir

HZ, MAX_HZ = 20.0, 1000.0
NOTHING = "nothing recorded"  # event that the report quotes
FIND_S = 0.2  # between two searches for the ranks of a starting run


def record(arguments: argparse.Namespace) -> int:
    """Record a run; return the exit status."""
    # Blocked from the start, collected by sigtimedwait: no handler interrupts a write or a call of the driver.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    run_dir = RunDir(arguments.run_dir.absolute())
    _lock(run_dir)
    uuids = [uuid.strip() for uuid in (arguments.gpus or "").split(",") if uuid.strip()]
    run = RunDir((arguments.run or arguments.run_dir).absolute())
    source = open_source(arguments.device, uuids, run.path, arguments.ranks_of, arguments.parent)
    if source is None:
        _report_nothing(run_dir, arguments.device, uuids)
        return 0
    if source.device_type != host.HostSource.device_type:  # ranks on the CPU have their numbers in their environment
        source.devices = numbered(source.devices, arguments.first_rank)
    root = arguments.ranks_of or arguments.parent
    recorder = Recorder(
        source, run_dir, run, hz=arguments.hz, parent=arguments.parent, root=root, attempt=arguments.attempt
    )
    recorder.run()
    return 0


def _report_nothing(run_dir: RunDir, device: str, uuids: Sequence[str]) -> None:
    """Write why nothing is recorded to the log, and to the events for the report."""
    text = f"no {'GPU' if uuids else 'GPU and no rank'} found: nothing is recorded"
    if device in ("nvidia", "auto"):
        notes = nvml_detect().notes
        # Without GPUs a driver that is not loaded is normal. A run on GPUs needs it.
        problem = nvml_problem() if uuids and not notes else ""
        text = "; ".join([text, *notes, *([problem] if problem else [])])
    print(f"kmatrix recorder: {text}")
    now = {"time": time.time(), "monotonic": time.monotonic()}
    event = {**now, "event": NOTHING, "gpu_index": None, "text": text}
    with contextlib.suppress(OSError):
        append_jsonl(run_dir.gpu_events, event)


def _lock(run_dir: RunDir) -> None:
    """Lock the run directory until this process exits: two recorders would overwrite each other."""
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        # The directory itself is locked: a lock file would be one more file in every run.
        folder = os.open(run_dir.path, os.O_RDONLY | os.O_CLOEXEC)  # closed at process exit
    except OSError as error:
        raise LaunchError(f"cannot record to {run_dir.path}", why=error.strerror or str(error)) from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LaunchError(
            f"{run_dir.path} is already being recorded", why="another recorder holds its lock", hint="stop it first"
        ) from None
    except OSError:
        pass  # a file system without locks must not prevent a recording


def open_source(
    device: str, uuids: Sequence[str], run_dir: Path, ranks_of: int | None, parent: int | None
) -> DeviceSource | None:
    """Return the devices to record. auto: NVIDIA GPUs, else the ranks of a run on the CPU."""
    if device in ("nvidia", "auto") and (gpus := nvml_open_source(uuids)) is not None:
        return gpus
    # A run on GPUs whose driver fails must not look like one on the CPU.
    if ranks_of and (device == "cpu" or (device == "auto" and not uuids)):
        return _open_ranks(ranks_of, run_dir, parent)
    return None


def numbered(devices: Sequence[Device], first_rank: int) -> tuple[Device, ...]:
    """Return the devices of a node with the ranks that they have in the run. first_rank: the lowest of the node."""
    return tuple(each if each.rank is None else replace(each, rank=first_rank + each.rank) for each in devices)


def _open_ranks(root: int, run_dir: Path, parent: int | None) -> DeviceSource | None:
    """Wait for the first rank of the run. Return None if the run ends without one, or on SIGTERM."""
    watched = [processes.ProcessHandle(pid) for pid in (root, parent) if pid]
    while all(each.is_alive() for each in watched):
        if ranks := host.find_ranks(root, run_dir):
            return host.HostSource(root, run_dir, ranks)
        if signal.sigtimedwait(STOP, FIND_S) is not None:  # a sleep that ends at once on SIGTERM
            return None
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Record, or export a recording. Print user errors and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m kmatrix.gpu.recorder", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="the directory of the run, or of one of its nodes")
    parser.add_argument("--run", type=Path, metavar="DIR", help="the directory of the run, if that is another one")
    parser.add_argument("--hz", type=float, default=HZ, help=f"samples/s, up to {MAX_HZ:g} (default: %(default)g)")
    parser.add_argument("--gpus", help="UUIDs in the order of ranks (default: all GPUs)")
    parser.add_argument("--first-rank", type=int, default=0, metavar="RANK", help="rank of the first of these GPUs")
    parser.add_argument(
        "--attempt", type=int, metavar="N", help="of the run: a restarted recorder continues its energy"
    )
    parser.add_argument("--ranks-of", type=int, metavar="PID", help="process whose descendants are the ranks")
    parser.add_argument("--parent", type=int, metavar="PID", help="exit when this process exits")
    parser.add_argument("--device", choices=("auto", "nvidia", "cpu"), default="auto", help="what to record")
    parser.add_argument("--format", choices=("csv",), help="export an existing recording to this format instead")
    arguments = parser.parse_args(argv)
    try:
        if arguments.format:
            print(export(RunDir(arguments.run_dir)))
            return 0
        if not 0 < arguments.hz <= MAX_HZ:
            raise LaunchError(
                f"--hz is {arguments.hz:g}",
                why=f"expected above 0, at most {MAX_HZ:g}",
                hint=f"pass --hz {HZ:g}",
            )
        return record(arguments)
    except KmatrixError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
