"""X.json and X_multi_gpu.json: what the screen shows, in the two layouts of GPU recordings, while it runs."""

from __future__ import annotations

from pathlib import Path

from kmatrix.errors import RecordError
from kmatrix.gpu.formats import JsonArrayFile, Snapshot, legacy, multi

OURS = (b"[\n{", b"[\n\n]", b"[\n]")  # how an array that can be continued begins


class StatsFiles:
    """Appends each snapshot to both files. problem: why the disk took no more, "" while it does."""

    def __init__(self, path: Path) -> None:
        self.problem = ""
        pair = (path, multi_path(path))
        for one in pair:
            _refuse_foreign(one)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._single, self._multi = (JsonArrayFile(one) for one in pair)
        except OSError as error:
            raise RecordError(f"{path} cannot be written", why=str(error), fix="name a place that can") from None

    def append(self, snapshot: Snapshot, selected: int | None) -> None:
        """Write one moment: of the selected GPU (by index; the first where it is not there), and of all."""
        if not snapshot.samples:
            return
        one = next((sample for sample in snapshot.samples if sample.gpu_index == selected), snapshot.samples[0])
        try:
            self._single.append(legacy(one, snapshot.time))
            self._multi.append(multi(snapshot))
        except OSError as error:
            self.problem = f"the statistics are not written: {error.strerror}"
        else:
            self.problem = ""

    def close(self) -> None:
        self._single.close()
        self._multi.close()


def multi_path(path: Path) -> Path:
    """X.json -> X_multi_gpu.json."""
    return path.with_name(f"{path.stem}_multi_gpu{path.suffix}")


def _refuse_foreign(path: Path) -> None:
    """Raise RecordError for a file that appending would damage."""
    try:
        with path.open("rb") as file:
            begin = file.read(4)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecordError(f"{path} cannot be read", why=str(error), fix="name another file") from None
    if begin and not begin.startswith(OURS):
        raise RecordError(
            f"{path} is there already and holds something else",
            why="only statistics that gputop or the recorder wrote are continued",
            fix="name another file",
        )
