"""The process that prepares the data of a run while it reads them (DATA_STREAMING), next to its trainer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from kmatrix.engines.local.process import ProcessTree
from kmatrix.own_file import open_to_read
from kmatrix.records.files import last_lines
from kmatrix.records.paths import program_environment
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.status.state import JobState, RunPlan

ERROR = '{"what": '  # begins the line in which gpt2.prepare says why it failed


def start_preparation(run: RunPlan, tree: ProcessTree, *, python: Path, root: Path) -> subprocess.Popen[bytes] | None:
    """Start the preparation of a run with streamed data; None for another run. It ends with the trainer."""
    if not read_run_file_or_empty(run.dir).train.data_streaming:
        return None
    command = [str(python), "-m", "gpt2.prepare", f"--run={run.dir.path}"]
    # In a session of its own: Ctrl+C ends the run first.
    return tree.start_companion(command, cwd=root, env=program_environment(root), start_new_session=True)


def why_it_failed(run: RunPlan, state: JobState, code: int) -> str:
    """Return why the preparation of a run failed: its last error in the log of the run. code: its exit status."""
    with open_to_read(run.dir.output_log) as log:
        errors = [line for line in last_lines(log, start=state.log_start or 0) if line.startswith(ERROR)]
    error = json.loads(errors[-1]) if errors else {"what": f"exit status {code}", "why": ""}
    return f"its data could not be prepared: {': '.join(filter(None, (error['what'], error['why'])))}"
