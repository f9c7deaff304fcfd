"""The commands about checkpoints: list what there is, and remove what nobody will go on from. Without torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.session import shown
from kmatrix.cli.targets import chosen_runs, find_target
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.records import MatrixDir, RunDir
from kmatrix.records.checkpoints import AGES, Entry, Shelf, folder_of, sha256_of, size

HEADS = ("step", "kinds", "val loss", "size", "attempt", "written", "file")
LEFT = (1, 6)  # columns of words


def list_checkpoints(arguments: Arguments) -> int:
    """Print a table for each run that has checkpoints."""
    found = False
    for run, shelf in shelves(arguments):
        found = True
        total = sum(entry.bytes for entry in shelf.present)
        print(f"{run.name}: {_several(len(shelf.present))}, {in_words(total)} in {shown(shelf.folder)}")
        print("\n".join(table([HEADS, *(row(shelf, entry) for entry in shelf.entries)])))
    if not found:
        print("no checkpoints")
    return 0


def prune(arguments: Arguments) -> int:
    """Remove what is there only for being new, except the newest good one of each run."""
    found = list(shelves(arguments))
    for matrix in {MatrixDir(run.path.parent) for run, _ in found}:
        if matrix.is_held():
            raise LaunchError(f"{shown(matrix.path)} runs: its checkpoints are in use", fix="wait for its end")
    going = [(shelf, entry) for _, shelf in found for entry in removable(shelf)]
    if not going:
        print("nothing to remove")
        return 0
    for shelf, entry in going:
        print(f"{in_words(entry.bytes):>10}  {shown(shelf.folder / entry.name)}")
    total = in_words(sum(entry.bytes for _, entry in going))
    if not agreed(arguments, f"remove {_several(len(going))}, {total}?"):
        print("nothing removed")
        return 0
    for shelf, entry in going:
        shelf.remove(entry)
    print(f"removed {_several(len(going))}, {total}")
    return 0


def removable(shelf: Shelf) -> list[Entry]:
    """Return the checkpoints that may go: neither best, kept nor final, and older than the newest that is whole."""
    newest = next((entry for entry in reversed(shelf.present) if whole(shelf, entry)), None)
    if newest is None:
        return []
    older = shelf.entries[: shelf.entries.index(newest)]
    return [entry for entry in older if entry.kinds <= AGES]


def whole(shelf: Shelf, entry: Entry) -> bool:
    """Whether a checkpoint is, to the last byte, what was written."""
    path = shelf.folder / entry.name
    return size(path) == entry.bytes and sha256_of(path) == entry.sha256


def shelves(arguments: Arguments) -> Iterator[tuple[RunDir, Shelf]]:
    """Yield each run that RUN= names, all by default, with its checkpoints, if it has any."""
    for run in chosen_runs(find_target(arguments), arguments):
        shelf = Shelf(folder_of(run))
        if shelf.entries:
            yield run, shelf


def agreed(arguments: Arguments, question: str) -> bool:
    """Ask on the terminal; YES=1 answers. Raises LaunchError where nobody can answer."""
    answer = arguments.get("YES")
    if answer not in ("", "0", "1"):
        raise ConfigError(f"YES={answer} is neither 1 nor 0")
    if answer:
        return answer == "1"
    if not sys.stdin.isatty():
        raise LaunchError(f"{question} there is nobody to answer", fix="pass YES=1")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def row(shelf: Shelf, entry: Entry) -> tuple[str, ...]:
    """Return one line of the table; a file that is not as it was written is said."""
    there = size(shelf.folder / entry.name)
    state = " (missing)" if there is None else "" if there == entry.bytes else " (damaged: another size)"
    return (
        str(entry.step),
        ",".join(sorted(entry.kinds)),
        "-" if entry.val_loss is None else f"{entry.val_loss:.4f}",
        in_words(entry.bytes),
        str(entry.attempt),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time)),
        entry.name + state,
    )


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return rows as lines of columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for cells in rows:
        padded = [f"{c:<{w}}" if i in LEFT else f"{c:>{w}}" for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        lines.append("  " + "  ".join(padded).rstrip())
    return lines


def in_words(count: int) -> str:
    """Return a number of bytes with its unit."""
    mib = count / 2**20
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.1f} MiB"


def _several(count: int) -> str:
    return f"{count} checkpoint" + ("" if count == 1 else "s")
