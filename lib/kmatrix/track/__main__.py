"""The process that feeds the trackers of one run: beside it while it goes on, or afterwards.

python -m kmatrix.track RUN_DIR [--trackers wandb,trackio] [--project NAME] [--parent PID] [--limit 60]

It ends when the attempt has ended (SIGTERM, or the end of the parent) and everything is sent, and at the latest when
nothing was taken for as long as the limit. Without a parent nothing is written any more: it sends what trackers lack.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from kmatrix.errors import KmatrixError
from kmatrix.records import RunDir, read_json
from kmatrix.redaction import redact_files, redact_output
from kmatrix.track.identity import tracking
from kmatrix.track.output import lossy_output

LIMIT_S = 60.0
NICE = 10  # what trains goes first


def main(argv: Sequence[str] | None = None) -> int:
    """Feed the trackers; return 0 where everything was sent, 1 where something was not, 2 where nothing can be."""
    parser = argparse.ArgumentParser(prog="python -m kmatrix.track", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="the folder of the run")
    parser.add_argument("--trackers", help="a comma list (default: those in run.json)")
    parser.add_argument("--project", default="", help="in the place of that in run.json")
    parser.add_argument("--parent", type=int, metavar="PID", help="the attempt has ended when this process has")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after the end (default: %(default)g)")
    arguments = parser.parse_args(argv)
    run = RunDir(arguments.run_dir.absolute())
    os.nice(NICE)
    lossy_output()
    redact_output()  # track.log is kept with the results
    try:
        from kmatrix.track.sidecar import feed

        names = arguments.trackers or ",".join(tracking(read_json(run.run_json)).get("trackers") or ())
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
        redact_files(run.path.glob("wandb/*/logs/*.log"))  # W&B keeps there what a server answered, word for word


def leave(code: int) -> None:
    """End this process and what the trackers' packages started, whatever their threads still do."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    os._exit(code)


if __name__ == "__main__":
    leave(main())
