"""Make gallery.html, in the style and under the policy of report.html."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kmatrix.errors import RecordError
from kmatrix.records.files import write_text
from kmatrix.records.paths import MatrixDir
from kmatrix.report.gallery.cards import MatrixCard, card
from kmatrix.report.page.assemble import FIRST, HERE, packaged, render

FILE = "gallery.html"


def write_gallery(folder: Path, matrices: Iterable[MatrixDir]) -> Path:
    """Write the gallery into a folder, and return its path. Raises RecordError if it cannot be written."""
    path = folder / FILE
    html = render_gallery([card(matrix, folder) for matrix in matrices])
    try:
        write_text(path, html)
    except OSError as error:
        raise RecordError(
            f"{path} cannot be written",
            why=f"{error.filename2 or error.filename or folder}: {error.strerror or error}",
            hint="free disk space or fix the permissions of the folder, then run the command again",
        ) from None
    return path


def render_gallery(cards: Sequence[MatrixCard]) -> str:
    """Return the gallery as HTML."""
    return render("gallery.html.j2", [packaged(HERE / "static" / FIRST)], cards=cards)
