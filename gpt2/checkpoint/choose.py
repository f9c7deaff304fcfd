"""Which checkpoint a run goes on from: the newest good one, the best, or the one that is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpt2.checkpoint.files import load
from kmatrix.errors import KmatrixError, RecordError
from kmatrix.records.checkpoints import Kind, Shelf

NONE, AUTO, LATEST, BEST = "none", "auto", "latest", "best"
Chosen = tuple[Path, dict[str, Any]]
Say = Callable[[str], None]


def choose(how: str, shelf: Shelf, refused: Say) -> Chosen | None:
    """Return the checkpoint to go on from, verified and read, or None to begin at the start.

    how: none, auto (the newest good one, or the start), latest (the same, which must be there), best, or a path.
    refused: is told of each newer one that is damaged; that file is put aside under another name.
    Raises RecordError where there is nothing of the kind.
    """
    if how == NONE:
        return None
    if how not in (AUTO, LATEST, BEST):
        path = Path(how)
        return path, load(path)
    if how == BEST:
        entry = shelf.of_kind(Kind.BEST)
        if entry is None:
            raise nothing(shelf.folder, "no evaluation after step 0 was the best so far, or GPT2_SAVE_BEST is n")
        return shelf.folder / entry.name, load(shelf.folder / entry.name)
    for path in newest_first(shelf):
        try:
            return path, load(path)
        except KmatrixError as error:
            set_aside(shelf, path)
            refused(f"{error.what}: {error.why}" if error.why else error.what)
    if how == LATEST:
        raise nothing(shelf.folder, "none was written, or none is whole")
    return None


def newest_first(shelf: Shelf) -> Iterator[Path]:
    """Yield the files that may be gone on from: those of the index, then those that a lost index does not name."""
    known = [shelf.folder / entry.name for entry in reversed(shelf.entries)]
    yield from known
    yield from sorted(set(shelf.folder.glob("step_*.pt")) - set(known), reverse=True)


def set_aside(shelf: Shelf, path: Path) -> None:
    """Rename a damaged checkpoint, so that it is neither counted nor tried again, and can be looked at."""
    if path.exists():
        path.rename(path.with_name(f"{path.name}.damaged"))
    for entry in [entry for entry in shelf.entries if entry.name == path.name]:
        shelf.remove(entry)
    shelf.name_links()


def nothing(folder: Path, why: str) -> RecordError:
    return RecordError(
        f"{folder} has no checkpoint to go on from", why=why, fix="start from the beginning: --resume none"
    )
