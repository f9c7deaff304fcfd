"""Make report.html and gallery.html: one file each with its styles, scripts and data, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kmatrix.errors import RecordError
from kmatrix.records.decode import decode
from kmatrix.records.files import write_text
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.report.colours import PALETTE, marks_of
from kmatrix.report.gpu.recordings import recordings_of
from kmatrix.report.gpu.samples import QUANTITIES
from kmatrix.report.gpu.timeline import banded, timeline_of
from kmatrix.report.graphs import mean_curve
from kmatrix.report.render import HTML, environment
from kmatrix.report.results import Configuration, Results, Run
from kmatrix.report.write import written

HERE = Path(__file__).resolve().parent
UPLOT = HERE / "vendor" / "uplot"
# What JSON may not hold inside of a <script> element, and the line ends that JavaScript does not take for spaces.
ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}
PICTURES = ("loss_vs_steps.png", "final_loss_by_run.png")  # for readers without scripts
X_AXES = ("step", "tokens", "seconds", "joules")
MOST_CURVES = 24  # configurations with a curve: those with the lowest losses
MOST_SEEDS = 100  # runs with a curve of their own
MOST_TIMELINES = 24  # runs with timelines of their devices
DIGITS = 5  # significant digits of a point of a curve
LEAST_MAP = 3  # values of the longer axis of a map


def write_page(matrix: MatrixDir, results: Results) -> Path:
    """Write report.html of a matrix, and return its path. Raises RecordError if it cannot be written."""
    written(matrix, lambda: write_text(matrix.page, render_page(matrix, results)))
    return matrix.page


def render_page(matrix: MatrixDir, results: Results) -> str:
    """Return report.html."""
    marks = marks_of(results.configurations)
    places = {one.name: place for place, one in enumerate(results.configurations)}
    data = {
        "name": results.name,
        "axes": list(results.axes),
        "groups": [_group(results, one, marks[one.name], place) for place, one in enumerate(results.configurations)],
        "sweeps": [_sweep(results, name) for name in dict.fromkeys(one.axis for one in results.sweeps)],
        "lanes": _lanes(matrix, results),
    }
    return _rendered(
        "report.html.j2",
        [_packaged(UPLOT / "uPlot.iife.min.js"), _packaged(HERE / "static" / "page.js")],
        [_packaged(UPLOT / "uPlot.min.css"), _css()],
        r=results,
        known={one.name: one for one in results.configurations},
        runs={run.name: run for run in results.runs},
        marks=marks,
        places=places,
        maps=_maps(results),
        pictures=[_picture(matrix.graphs / name) for name in PICTURES if (matrix.graphs / name).is_file()],
        data=_embedded(data),
        path=matrix.path,
    )


def write_gallery(folder: Path, matrices: Sequence[MatrixDir]) -> Path:
    """Write gallery.html into a folder of matrices, from their results.json; return its path. Raises RecordError."""
    cards: list[tuple[MatrixDir, Results | None, str]] = []
    for matrix in matrices:
        try:
            cards.append((matrix, decode(matrix.results, Results), ""))
        except RecordError as error:
            cards.append((matrix, None, f"{error.what.replace(f'{matrix.path}/', '')} {error.why}".strip()))
    path = folder / "gallery.html"
    try:
        write_text(path, _rendered("gallery.html.j2", [], [_css()], cards=cards))
    except OSError as error:
        raise RecordError(f"{path} cannot be written", why=error.strerror or str(error)) from None
    return path


def _rendered(template: str, scripts: Sequence[str], styles: Sequence[str], **values: object) -> str:
    """Return a page with a policy under which only its own scripts run, and nothing is loaded.

    Hashes, not a nonce: a nonce in a file is known to everybody who can write into the file.
    """
    from markupsafe import Markup

    hashes = [" ".join(map(_hash, texts)) or "'none'" for texts in (scripts, styles)]
    policy = f"default-src 'none'; script-src {hashes[0]}; style-src {hashes[1]}; img-src data:; base-uri 'none'"
    return (
        environment(HTML)
        .get_template(template)
        .render(
            **values,
            policy=f"{policy}; form-action 'none'",
            scripts=[Markup(text) for text in scripts],
            styles=[Markup(text) for text in styles],
        )
    )


def _css() -> str:
    colours = "".join(f"--k{place}:light-dark({light},{dark});" for place, (light, dark) in enumerate(PALETTE))
    classes = "".join(f".k{place}{{--c:var(--k{place})}}" for place in range(len(PALETTE)))
    return f":root{{{colours}}}{classes}\n{_packaged(HERE / 'templates' / 'page.css')}"


def _packaged(path: Path) -> str:
    """Return the text of a packaged file as it will stand in the page: with line feeds only, so that its hash holds."""
    return path.read_text(encoding="utf-8").replace("\r\n", "\n").replace("\r", "\n")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _embedded(value: object) -> Any:
    """Return JSON that cannot end the <script> element that holds it."""
    from markupsafe import Markup

    return Markup(json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).translate(ESCAPES))


def _picture(path: Path) -> tuple[str, str]:
    return path.stem.replace("_", " "), f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _group(results: Results, one: Configuration, mark: tuple[int, int], place: int) -> dict[str, Any]:
    """Return what the scripts know of a configuration: mean curves over its seeds, and those of each."""
    by_name = {run.name: run for run in results.runs}
    runs = [by_name[name] for name in one.counted or one.runs]
    found: dict[str, Any] = {"name": one.name, "colour": mark[0], "dash": mark[1], "axes": one.axes, "runs": one.runs}
    if place < MOST_CURVES:
        for kind in ("val", "train"):
            found[kind] = _columns(runs, kind)
        if len(runs) > 1 and place * len(runs) < MOST_SEEDS:
            found["seeds"] = [{"seed": run.seed, **_columns([run], "val")} for run in runs]
    return found


def _columns(runs: Sequence[Run], kind: str) -> dict[str, list[float | None]]:
    return {name: list(map(_short, values)) for name, values in mean_curve(runs, kind).items()}


def _short(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS + 2}g}") if abs(value) < 100 else float(f"{value:.{DIGITS}g}")


def _sweep(results: Results, axis: str) -> dict[str, Any]:
    """Return the losses over an axis, a line for each family of configurations that differ in it alone."""
    means = {one.name: one.mean for one in results.configurations}
    lines = [
        {"name": one.name or axis, "x": one.values, "y": [means[name] for name in one.configurations]}
        for one in results.sweeps
        if one.axis == axis
    ]
    return {"axis": axis, "lines": lines}


def _maps(results: Results) -> list[dict[str, Any]]:
    """Return the mean losses over each pair of axes with several values, if all others have one."""
    ranked = [one for ranking in results.rankings[:1] for one in results.configurations if one.name in ranking.order]
    varying = {
        axis: sorted({one.axes[axis] for one in ranked if axis in one.axes}, key=_order)
        for axis in dict.fromkeys(axis for one in ranked for axis in one.axes)
    }
    varying = {axis: values for axis, values in varying.items() if len(values) > 1}
    if len(varying) != 2 or max(map(len, varying.values())) < LEAST_MAP:
        return []
    row, column = sorted(varying, key=lambda axis: len(varying[axis]))
    cells = {(one.axes.get(row), one.axes.get(column)): one for one in ranked}
    losses = [one.mean for one in ranked if one.mean is not None]
    low, high = min(losses), float(np.median(losses)) or min(losses)

    def level(mean: float) -> int:
        return round(6 * (1 - min(1.0, (mean - low) / (2 * (high - low) or 1.0))))

    rows = [
        (
            value,
            [
                (one, level(one.mean or 0.0)) if (one := cells.get((value, other))) else None
                for other in varying[column]
            ],
        )
        for value in varying[row]
    ]
    return [
        {
            "row": row,
            "column": column,
            "columns": varying[column],
            "rows": rows,
            "best": min(ranked, key=lambda one: one.mean or 0.0).name,
        }
    ]


def _order(value: str) -> tuple[float, str]:
    try:
        return float(value), value
    except ValueError:
        return math.inf, value


def _lanes(matrix: MatrixDir, results: Results) -> list[dict[str, Any]]:
    """Return the devices of some runs over time: of the first recorded run of each configuration."""
    found: list[dict[str, Any]] = []
    seen: set[str] = set()
    for run in results.runs:
        if run.gpu is None or run.configuration in seen or len(found) == MOST_TIMELINES:
            continue
        seen.add(run.configuration)
        recordings = recordings_of(matrix.run(run.name), cpu=run.device == "cpu")
        if timeline := timeline_of(recordings, QUANTITIES, running=run.status is Status.RUNNING):
            lines = {
                quantity: [
                    {"name": one.label, "values": list(map(_short, one.lanes[quantity].mean))}
                    for one in banded(timeline, quantity)
                ]
                for quantity in QUANTITIES
            }
            seconds = list(map(_short, timeline.centres))
            mark = " (simulated)" if run.gpu.simulated else ""
            found.append({"run": f"{run.name}{mark}", "seconds": seconds, "quantities": lines})
    return found
