"""Draw the GPU graphs of any folder: a matrix of kmatrix, or recordings of the original project."""

from __future__ import annotations

from pathlib import Path

from kmatrix.errors import RecordError
from kmatrix.report.folders import read_folder, with_timelines
from kmatrix.report.gpu.graphs import device_timelines, matrix


def draw_memory(folder: Path, output: Path | None) -> tuple[list[Path], list[str]]:
    """Draw the GPU graphs into `output`, by default graphs/ in the folder; return the files and missing graphs."""
    name, root, runs = read_folder(folder)
    target = output or folder / "graphs"
    try:
        files, missing = matrix.draw(name, with_timelines(root, runs), target)
        more, more_missing = device_timelines.draw(name, runs, root, target)
    except OSError as error:
        raise RecordError(
            f"the graphs of {name} cannot be written",
            why=f"{error.filename or target}: {error.strerror or error}",
            hint="free disk space, fix the permissions, or pass --output DIR",
        ) from None
    return files + more, missing + more_missing
