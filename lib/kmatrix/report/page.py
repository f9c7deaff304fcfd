"""Make report.html and gallery.html: one file each with its styles, scripts and data, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from markupsafe import Markup

from kmatrix.errors import RecordError
from kmatrix.records.decode import decode
from kmatrix.records.files import write_text
from kmatrix.records.paths import MatrixDir
from kmatrix.report import figure
from kmatrix.report.graphs import mean_curve
from kmatrix.report.ranking import axis_span
from kmatrix.report.render import HTML, environment, render
from kmatrix.report.results import Results, Run

HERE = Path(__file__).resolve().parent
UPLOT = HERE / "vendor" / "uplot"
SCRIPTS = (UPLOT / "uPlot.iife.min.js", HERE / "static" / "page.js")
STYLES = (UPLOT / "uPlot.min.css", HERE / "templates" / "page.css")
ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}  # JSON in a <script> cannot end it
PICTURES = ("loss_vs_steps.png", "final_loss_by_run.png")  # for readers without scripts
MOST_CURVES = 24  # configurations with a curve: those with the lowest losses
COSTS = ("seconds", "peak_memory_mib")  # the loss is drawn over these
TITLES = {"step": "steps", "tokens": "tokens", "joules": "energy, J", "peak_memory_mib": "peak memory, MiB"}


def write_page(matrix: MatrixDir, results: Results) -> Path:
    """Write report.html of a matrix, and return its path. Raises OSError."""
    write_text(matrix.page, render_page(matrix, results))
    return matrix.page


def render_page(matrix: MatrixDir, results: Results) -> str:
    """Return report.html."""
    runs = {run.name: run for run in results.runs}
    marks = figure.marks_of(results.configurations)
    unit, size = figure.time_unit(max((run.seconds or 0.0 for run in results.runs), default=0.0))
    titles = {**TITLES, "seconds": f"time, {unit}"}
    pictures = [matrix.graphs / name for name in PICTURES if (matrix.graphs / name).is_file()]
    data = msgspec.json.encode({"titles": titles, "groups": list(_groups(results, runs, marks, size))})
    return render(
        HTML,
        "report.html.j2",
        results,
        runs=runs,
        marks={name: f"k{colour}-d{dash}" for name, (colour, dash) in marks.items()},
        axis_span=axis_span,
        titles=titles,
        pictures={path.stem: base64.b64encode(path.read_bytes()).decode() for path in pictures},
        data=Markup(data.decode().translate(ESCAPES)),
        path=matrix.path,
        **_own(SCRIPTS),
    )


def write_gallery(folder: Path, matrices: Sequence[MatrixDir]) -> Path:
    """Write gallery.html into a folder of matrices, from their results.json; return its path. Raises OSError."""
    cards: list[tuple[MatrixDir, Results | None, str]] = []
    for matrix in matrices:
        try:
            cards.append((matrix, decode(matrix.results, Results), ""))
        except RecordError as error:
            cards.append((matrix, None, f"{error.what.replace(f'{matrix.path}/', '')} {error.why}".strip()))
    path = folder / "gallery.html"
    write_text(path, environment(HTML).get_template("gallery.html.j2").render(cards=cards, **_own()))
    return path


def _own(scripts: Sequence[Path] = ()) -> dict[str, str]:
    """Return the script, the styles and the policy of a page: nothing else runs, and nothing is loaded.

    Hashes, not a nonce: a nonce in a file is known to everybody who can write into the file.
    """
    colours = "".join(f"--k{place}:light-dark({light},{dark});" for place, (light, dark) in enumerate(figure.PALETTE))
    classes = "".join(f"[class*=k{place}-d]{{--c:var(--k{place})}}" for place in range(len(figure.PALETTE)))
    script, style = ("".join(path.read_text(encoding="utf-8") for path in paths) for paths in (scripts, STYLES))
    style = f":root{{{colours}}}{classes}\n{style}"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    return {"script": Markup(script), "style": Markup(style), "policy": policy}


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'" if content else "'none'"


def _groups(
    results: Results, runs: Mapping[str, Run], marks: Mapping[str, tuple[int, int]], size: float
) -> Iterator[dict[str, Any]]:
    """Yield what the script knows of each configuration: what it took, and the mean curves over its seeds.

    size: of the unit of time, s.
    """

    def short(name: str, value: float) -> float:
        return float(f"{value / (size if name == 'seconds' else 1):.6g}")

    for place, one in enumerate(results.configurations):
        colour, dash = marks[one.name]
        axes = {label: value for label, value in one.axes.items() if len(results.axes.get(label, ())) > 1}
        group = {"name": one.name, "colour": colour, "dash": dash, "axes": axes, "runs": one.runs, "mean": one.mean}
        group["cost"] = {name: short(name, one.amounts[name]) for name in COSTS if name in one.amounts}
        for kind in ("val", "train") if place < MOST_CURVES else ():
            curve = mean_curve([runs[name] for name in one.counted or one.runs], kind)
            group[kind] = {name: [short(name, value) for value in values] for name, values in curve.items()}
        yield group
