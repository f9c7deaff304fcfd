"""Read the sections of report.html, as a reader without scripts sees them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kmatrix.report.analysis import analyse
from kmatrix.report.page.assemble import render_page

from html_reader import Element, read_html
from kmatrix.records.paths import MatrixDir
from records_factory import FakeRun, make_matrix


def page_of(matrix: MatrixDir) -> Element:
    """Return the page of a matrix."""
    return read_html(render_page(analyse(matrix)))


def page(folder: Path, runs: Sequence[FakeRun], **fields: Any) -> Element:
    """Return the page of a matrix with these runs."""
    return page_of(make_matrix(folder, runs, **fields))


def section(found: Element, name: str) -> Element:
    """Return the element with this id."""
    element = found.by_id(name)
    assert element is not None, f"no section {name}"
    return element


def script_data(found: Element) -> dict[str, Any]:
    """Return the data of the page's scripts."""
    return dict(json.loads("".join(map(str, section(found, "data").children))))


def rows(table: Element) -> list[list[str]]:
    """Return the texts of the cells of each row in the body of a table."""
    return [[cell.text for cell in row.children if isinstance(cell, Element)] for row in table.one("tbody").all("tr")]
