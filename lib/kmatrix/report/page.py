"""Make report.html and gallery.html: one file each with its styles, scripts and data, which loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kmatrix.errors import RecordError
from kmatrix.records.decode import decode
from kmatrix.records.files import write_text
from kmatrix.records.paths import MatrixDir
from kmatrix.report.figure import PALETTE, marks_of
from kmatrix.report.graphs import mean_curve
from kmatrix.report.ranking import axis_span
from kmatrix.report.render import HTML, environment
from kmatrix.report.results import Configuration, Ranking, Results, Run
from kmatrix.report.wording import against
from kmatrix.report.write import written
from kmatrix.verdict.family import Pair

HERE = Path(__file__).resolve().parent
UPLOT = HERE / "vendor" / "uplot"
ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}  # in JSON inside of a <script> element
PICTURES = ("loss_vs_steps.png", "final_loss_by_run.png")  # for readers without scripts
MOST_CURVES = 24  # configurations with a curve: those with the lowest losses
COSTS = ("seconds", "peak_memory_mib")  # the loss is drawn over these
MOST_SEEDS = 100  # runs with a curve of their own


def write_page(matrix: MatrixDir, results: Results) -> Path:
    """Write report.html of a matrix, and return its path. Raises RecordError if it cannot be written."""
    written(matrix, lambda: write_text(matrix.page, render_page(matrix, results)))
    return matrix.page


def render_page(matrix: MatrixDir, results: Results) -> str:
    """Return report.html."""
    runs = {run.name: run for run in results.runs}
    marks = marks_of(results.configurations)
    data = {
        "axes": list(results.axes),
        "groups": [_group(runs, one, marks[one.name], place) for place, one in enumerate(results.configurations)],
    }
    return _rendered(
        "report.html.j2",
        [_packaged(UPLOT / "uPlot.iife.min.js"), _packaged(HERE / "static" / "page.js")],
        [_packaged(UPLOT / "uPlot.min.css"), _css()],
        r=results,
        known={one.name: one for one in results.configurations},
        runs=runs,
        marks={name: f"k{colour}-d{dash}" for name, (colour, dash) in marks.items()},
        strips=partial(_strips, results, runs),
        places={one.name: place for place, one in enumerate(results.configurations)},
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
    hashes = [" ".join(map(_hash, texts)) or "'none'" for texts in (scripts, styles)]
    policy = (
        f"default-src 'none'; script-src {hashes[0]}; style-src {hashes[1]}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    texts = {"scripts": list(map(Markup, scripts)), "styles": list(map(Markup, styles))}
    return environment(HTML).get_template(template).render(**values, policy=policy, **texts)


def _css() -> str:
    colours = "".join(f"--k{place}:light-dark({light},{dark});" for place, (light, dark) in enumerate(PALETTE))
    classes = "".join(f"[class*=k{place}-d]{{--c:var(--k{place})}}" for place in range(len(PALETTE)))
    return f":root{{{colours}}}{classes}\n{_packaged(HERE / 'templates' / 'page.css')}"


def _packaged(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _embedded(value: object) -> Any:
    """Return JSON that cannot end the <script> element that holds it."""
    return Markup(json.dumps(value, separators=(",", ":"), allow_nan=False).translate(ESCAPES))


def _picture(path: Path) -> tuple[str, str]:
    return path.stem.replace("_", " "), f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _strips(
    results: Results, runs: Mapping[str, Run], one: Ranking
) -> tuple[dict[str, list[float]], dict[str, Pair], tuple[float, float], tuple[float, float]]:
    """Return losses and differences to the reference by configuration, and the ends of their axes."""
    names = {each.name: each.counted for each in results.configurations if each.name in one.order}
    losses = {name: [getattr(runs[run], one.measure) for run in counted] for name, counted in names.items()}
    pairs = {pair.b: pair.mirrored() for pair in against(one)}
    ends = [(pair.interval.low, pair.interval.high) for pair in pairs.values() if pair.interval]
    shown = [pair.difference or 0.0 for pair in pairs.values()]
    return losses, pairs, axis_span([*chain(*losses.values())]), axis_span([0.0, *shown, *chain(*ends)])


def _group(runs: dict[str, Run], one: Configuration, mark: tuple[int, int], place: int) -> dict[str, Any]:
    """Return what the scripts know of a configuration: mean curves over its seeds, and those of each."""
    shown = [runs[name] for name in one.counted or one.runs]
    found: dict[str, Any] = {"name": one.name, "colour": mark[0], "dash": mark[1], "axes": one.axes, "runs": one.runs}
    if one.mean is not None:
        found |= {"mean": _short(one.mean), "cost": {name: _short(one.amounts.get(name)) for name in COSTS}}
    if place < MOST_CURVES:
        found |= {kind: _columns(shown, kind) for kind in ("val", "train")}
        if len(shown) > 1 and place * len(shown) < MOST_SEEDS:
            found["seeds"] = [{"seed": run.seed, **_columns([run], "val")} for run in shown]
    return found


def _columns(runs: Sequence[Run], kind: str) -> dict[str, list[float | None]]:
    return {name: list(map(_short, values)) for name, values in mean_curve(runs, kind).items()}


def _short(value: float | None) -> float | None:
    """Return a value with six significant digits; None if it is unknown or not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
