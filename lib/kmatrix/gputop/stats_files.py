"""The statistics files that gputop can write: two JSON arrays that other programs read while they grow."""

from __future__ import annotations

from pathlib import Path

from kmatrix.errors import RecordError, reason_of
from kmatrix.gpu.formats.json_array import open_published
from kmatrix.gpu.formats.samples import Snapshot, legacy, multi

ARRAY_STARTS = (b"[\n{", b"[\n\n]", b"[\n]")  # first bytes of an array that can be continued


class StatsFiles:
    """Appends snapshots to both statistics files. `problem`: the error of the last write, or empty."""

    def __init__(self, path: Path) -> None:
        self.problem = ""
        if not path.name:
            raise RecordError(f"{path} is not the name of a file", hint="pass a file, such as gpu_stats.json")
        pair = (path, multi_path(path))
        for one in pair:
            _check_appendable(one)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._single = open_published(pair[0])
            try:
                self._multi = open_published(pair[1])
            except OSError:
                self._single.close()
                raise
        except BlockingIOError:
            raise RecordError(
                f"another program writes {path}",
                why="the samples of two would replace each other",
                hint="pass another file",
            ) from None
        except OSError as error:
            raise RecordError(f"cannot write {path}", why=reason_of(error), hint="pass another path") from None

    def append(self, snapshot: Snapshot, selected: int | None) -> None:
        """Write one snapshot: of the selected GPU (by default the first), and of all GPUs."""
        if not snapshot.samples:
            return
        one = next((sample for sample in snapshot.samples if sample.gpu_index == selected), snapshot.samples[0])
        try:
            self._single.append(legacy(one, snapshot.time))
            self._multi.append(multi(snapshot))
        except OSError as error:
            self.problem = _cannot_write(error)
        else:
            self.problem = ""

    def close(self) -> None:
        """Write what readers have held up. Afterwards, `problem` is that of the last file that could not be written."""
        for file in (self._single, self._multi):
            try:
                file.close()
            except OSError as error:
                self.problem = _cannot_write(error)


def _cannot_write(error: OSError) -> str:
    return f"cannot write statistics: {error.strerror}"


def multi_path(path: Path) -> Path:
    """Return X_multi_gpu.json for X.json."""
    return path.with_name(f"{path.stem}_multi_gpu{path.suffix}")


def _check_appendable(path: Path) -> None:
    """Raise RecordError for an existing file that is not a statistics file."""
    try:
        with path.open("rb") as file:
            begin = file.read(4)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(f"cannot read {path}", why=reason_of(error), hint="pass another file") from None
    if begin and not begin.startswith(ARRAY_STARTS):
        raise RecordError(
            f"{path} exists and is not a statistics file",
            why="only files written by gputop or the recorder can be continued",
            hint="pass another file",
        )
