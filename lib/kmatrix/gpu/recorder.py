"""The recorder: a process of its own that writes down what the devices of a run do, from before its start to its end.

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
from pathlib import Path

from kmatrix.errors import KmatrixError, LaunchError
from kmatrix.gpu import processes
from kmatrix.gpu.recording import STOP, Recorder
from kmatrix.gpu.source import Source
from kmatrix.records import RunDir, append_jsonl

HZ, MOST_HZ = 20.0, 1000.0
NOTHING = "nothing recorded"  # the event that the report quotes
FIND_S = 0.2  # between two looks for the ranks of a run that is starting


def record(arguments: argparse.Namespace) -> int:
    """Record a run; return the exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP)
    run_dir = RunDir(arguments.run_dir.absolute())
    _claim(run_dir)
    uuids = [uuid.strip() for uuid in (arguments.gpus or "").split(",") if uuid.strip()]
    source = open_source(arguments.device, uuids, run_dir.path, arguments.ranks_of, arguments.parent)
    if source is None:
        _say_why(run_dir, arguments.device)
        return 0
    root = arguments.ranks_of or arguments.parent
    recorder = Recorder(source, run_dir, hz=arguments.hz, parent=arguments.parent, root=root)
    if arguments.prometheus:
        recorder.serve(arguments.prometheus)
    recorder.run()
    return 0


def _say_why(run_dir: RunDir, device: str) -> None:
    """Say why nothing is recorded: in the log, and for the report in the run's events."""
    text = "no GPU and no rank to record: nothing is recorded"
    if device in ("nvidia", "auto"):
        from kmatrix.gpu import nvml

        text = "; ".join([text, *nvml.detect().notes])
    print(f"kmatrix recorder: {text}")
    event = {"time": time.time(), "event": NOTHING, "gpu_index": None, "text": text}
    with contextlib.suppress(OSError):
        append_jsonl(run_dir.gpu_events, event)


def _claim(run_dir: RunDir) -> None:
    """Hold the run's folder for as long as this process lives: two recorders would write over one another."""
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
        folder = os.open(run_dir.path, os.O_RDONLY | os.O_CLOEXEC)  # closed by the process's end
    except OSError as error:
        raise LaunchError(f"{run_dir.path} cannot be recorded into", why=error.strerror or str(error)) from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LaunchError(
            f"{run_dir.path} is being recorded", why="another recorder holds it", fix="end that one first"
        ) from None
    except OSError:
        pass  # a disk that cannot lock


def open_source(
    device: str, uuids: Sequence[str], run_dir: Path, ranks_of: int | None, parent: int | None
) -> Source | None:
    """Return what is to be recorded. auto: NVIDIA's GPUs, else AMD's, else the run's ranks on the CPU."""
    if device in ("nvidia", "auto"):
        from kmatrix.gpu import nvml

        if (gpus := nvml.open_source(uuids)) is not None:
            return gpus
    if device in ("amd", "auto"):
        from kmatrix.gpu import amd

        if (cards := amd.open_source(uuids)) is not None:
            return cards
    if device in ("cpu", "auto") and ranks_of:
        return _open_ranks(ranks_of, run_dir, parent)
    return None


def _open_ranks(root: int, run_dir: Path, parent: int | None) -> Source | None:
    """Wait until the first rank of the run is there; None when the run ends without one, or SIGTERM comes."""
    from kmatrix.gpu import host

    watched = [processes.Watched(pid) for pid in (root, parent) if pid]
    while all(each.lives() for each in watched):
        if ranks := host.find(root, run_dir):
            return host.HostSource(root, run_dir, ranks)
        if signal.sigtimedwait(STOP, FIND_S) is not None:
            return None
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Record, or export a recording; print errors that a user can mend."""
    parser = argparse.ArgumentParser(prog="python -m kmatrix.gpu.recorder", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="the folder of the run")
    parser.add_argument(
        "--hz", type=float, default=HZ, help=f"samples a second, up to {MOST_HZ:g} (default: %(default)g)"
    )
    parser.add_argument("--gpus", help="UUIDs, one a rank, in the order of ranks (default: all GPUs)")
    parser.add_argument("--ranks-of", type=int, metavar="PID", help="the process below which the run's ranks are")
    parser.add_argument("--parent", type=int, metavar="PID", help="end when this process has ended")
    parser.add_argument("--device", choices=("auto", "nvidia", "amd", "cpu"), default="auto", help="what to record")
    parser.add_argument("--prometheus", type=int, metavar="PORT", help="answer GET /metrics on this port of 127.0.0.1")
    parser.add_argument(
        "--format", choices=("csv", "npz", "parquet"), help="write a recording in this form instead, beside it"
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.format:
            from kmatrix.gpu.export import export

            print(export(RunDir(arguments.run_dir), arguments.format))
            return 0
        if not 0 < arguments.hz <= MOST_HZ:
            raise LaunchError(
                f"--hz is {arguments.hz:g}", why=f"it must be above 0, at most {MOST_HZ:g}", fix=f"pass --hz {HZ:g}"
            )
        return record(arguments)
    except KmatrixError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
