"""Make report.html: one file with its styles, scripts and data, and a policy under which nothing else runs."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kmatrix.records.files import write_text
from kmatrix.records.paths import MatrixDir
from kmatrix.report.numbers import MatrixNumbers
from kmatrix.report.page.parts.text import FILTERS
from kmatrix.report.page.values import page_of, script_data

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).resolve().parent
FIRST = "first.js"  # runs before the page is drawn
# One function, in this order.
SCRIPTS = (
    "core.js",
    "filter.js",
    "curves.js",
    "panels.js",
    "legend.js",
    "address.js",
    "devices.js",
    "runs.js",
    "target.js",
    "start.js",
)
UPLOT = HERE / "vendor" / "uplot"
# What JSON may not hold inside of a <script> element, and the line ends that JavaScript does not take for spaces.
ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def write_page(numbers: MatrixNumbers) -> Path:
    """Write report.html of a matrix, and return its path. Raises OSError if it cannot be written."""
    path = MatrixDir(numbers.path).page
    write_text(path, render_page(numbers))
    return path


def render_page(numbers: MatrixNumbers) -> str:
    """Return the page as HTML."""
    page = page_of(numbers)
    return render(
        "report.html.j2",
        [packaged(HERE / "static" / FIRST), packaged(UPLOT / "uPlot.iife.min.js"), _own_script()],
        data=embedded(script_data(page, numbers)),
        uplot=packaged(UPLOT / "uPlot.min.css"),
        page=page,
        groups=page.groups,
    )


def render(template: str, scripts: Sequence[str], *, data: str = "", uplot: str = "", **values: object) -> str:
    """Return a page with the styles of all pages, and a policy under which only its own scripts run.

    data: JSON for the scripts, from `embedded`.  uplot: the styles of uPlot, for a page that uses it.
    """
    # Here, not at the top: 0.1 s that the other commands would wait, too.
    from markupsafe import Markup

    templates = _environment()
    css = templates.get_template("page.css.j2").render(uplot=Markup(uplot))
    return templates.get_template(template).render(
        **values,
        data=Markup(data),
        policy=policy(scripts, [css]),
        css=Markup(css),
        scripts=[Markup(script) for script in scripts],
    )


def embedded(value: object) -> str:
    """Return JSON that cannot end the <script> element that holds it. Raises ValueError for NaN."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.translate(ESCAPES)


def policy(scripts: Sequence[str], styles: Sequence[str]) -> str:
    """Return the Content-Security-Policy: these scripts and styles run, nothing is loaded, no text becomes markup.

    Hashes, not a nonce: a nonce in a file is known to everybody who can write into the file.
    """
    return "; ".join(
        (
            "default-src 'none'",
            " ".join(("script-src", *map(source_hash, scripts))),
            " ".join(("style-src", *map(source_hash, styles))),
            "img-src data:",  # the icon
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def source_hash(content: str) -> str:
    """Return the expression of a policy that allows an element with this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    found = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(FILTERS)
    return found


def _own_script() -> str:
    """Return the scripts of the page as one function, so that nothing of it is global."""
    parts = "\n".join(packaged(HERE / "static" / name) for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def packaged(path: Path) -> str:
    """Return the text of a packaged file as it will stand in the page: with line feeds only, so that its hash holds."""
    return path.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\r", "\n")
