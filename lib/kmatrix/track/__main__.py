"""The tracker process of one run: it uploads the run while it is in progress, or later.

python -m kmatrix.track RUN_DIR [--trackers wandb,trackio] [--project NAME] [--parent PID] [--limit 60]

It exits when the attempt has ended (SIGTERM or exit of the parent) and everything is sent, or after the time limit.
Without a parent the attempt has already ended: it uploads the pending steps.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kmatrix.errors import KmatrixError
from kmatrix.output import lossy_output
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import read_run_file
from kmatrix.redaction.log import RedactedLog
from kmatrix.track.sidecar import feed
from kmatrix.track.wandb import publish_logs

LIMIT_S = 60.0
NICE = 10  # training has priority


def main(argv: Sequence[str] | None = None) -> int:
    """Upload a run. Return 0 if everything was sent, 1 if steps are pending, 2 for an error of the request."""
    parser = argparse.ArgumentParser(prog="python -m kmatrix.track", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="the directory of the run")
    parser.add_argument("--trackers", help="comma-separated list (default: from run.json)")
    parser.add_argument("--project", default="", help="replaces the project of run.json")
    parser.add_argument("--parent", type=int, metavar="PID", help="the attempt ends when this process exits")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds for pending steps after the end (default: %(default)g)"
    )
    arguments = parser.parse_args(argv)
    run = RunDir(arguments.run_dir.absolute())
    os.nice(NICE)
    redact_log(run)
    lossy_output()  # before the first line of output
    try:
        names = arguments.trackers or ",".join(read_run_file(run).tracking.trackers)
        return feed(
            run,
            tuple(name.strip() for name in names.split(",") if name.strip()),
            project=arguments.project,
            parent=arguments.parent,
            limit_s=arguments.limit,
        )
    except KmatrixError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        publish_logs(run.path)


def redact_log(run: RunDir) -> None:
    """Hide keys in the log, if the output of this process is track.log. Raises OSError.

    The trackers' packages and services write what servers answer, which may be an echo of the key.
    """
    if not run.track_log.exists() or not os.path.samestat(os.fstat(1), run.track_log.stat()):
        return
    log = RedactedLog(run.track_log, Path(sys.executable))
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    log.close()


def leave(code: int) -> None:
    """Exit without waiting for threads, and terminate the processes that the trackers' packages started."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Only as the leader of its own group, which the packages' services share; else a shell would get the signal, too.
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    # Threads of a hanging package, and its exit handlers, would delay the exit.
    os._exit(code)


if __name__ == "__main__":
    leave(main())
