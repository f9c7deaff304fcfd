"""Who a run is to its trackers, from its run.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kmatrix.errors import RecordError
from kmatrix.records import MATRIX_PREFIX, RunDir, read_json
from kmatrix.track.values import Identity

NO_PROJECT = "gpt2"  # of a run.json that names none


def identity(run: RunDir, *, project: str = "") -> Identity:
    """Return who a run is. project: in the place of that in run.json.

    A run that is done anew (`make test-rerun`) is another one to its trackers: they cannot take back what they were
    sent of the former.
    Raises RecordError where run.json is missing or names no run.
    """
    record = read_json(run.run_json)
    run_id, matrix = record.get("run_id"), str(record.get("matrix") or run.path.parent.name)
    if not run_id:
        raise RecordError(f"{run.run_json} names no run", why="it has no run_id")
    again = _reruns(run)
    suffix = f"-rerun{again}" if again else ""
    stamp = re.sub(r"\D", "", matrix.removeprefix(MATRIX_PREFIX))
    symbols = record.get("symbols") or {}
    return Identity(
        dir=run,
        project=project or str(tracking(record).get("project") or NO_PROJECT),
        name=run.name + suffix,
        id=f"{run_id}-{stamp}{suffix}",
        group=matrix,
        tags=tuple(f"{axis}={value}" for axis, value in (record.get("axes") or {}).items()),
        config={**{str(name): str(text) for name, text in symbols.items()}, "run_id": str(run_id), "matrix": matrix},
        tracking=run.path.parent.parent,
    )


def tracking(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a run.json says of trackers: their names and the project; nothing in one of older days."""
    value = record.get("tracking")
    return value if isinstance(value, dict) else {}


def _reruns(run: RunDir) -> int:
    """How many results of this run were set aside."""
    return sum(1 for path in run.former.glob("*") if path.name.isdigit())
