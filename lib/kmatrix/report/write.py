"""Write the reports of a matrix into its directory: page, summary, results and graphs."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kmatrix.records.decode import as_json
from kmatrix.records.files import write_bytes
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.records.tracking import first_of_each, pending_messages, sync_status
from kmatrix.report import graphs
from kmatrix.report.gpu import graphs as gpu_graphs
from kmatrix.report.gpu.results import Gpu
from kmatrix.report.render import HTML, MARKDOWN, TEXT, render
from kmatrix.report.results import Results, Run
from kmatrix.text import printable

# Spreadsheets evaluate a cell that begins like this (OWASP, CSV injection).
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")
MOST_CELL = 32_767  # characters, the limit of Excel
CONTAINERS = re.compile(r"\b(tuple|dict|Effort|Evaluations|TrainingLosses|Gpu)\b")  # types of a field
SAME = (  # fields of a run with the same name in all_results.json
    *("best_val_loss", "tokens", "tokens_per_second", "mfu", "sparsity", "run_id", "model", "optimizer", "pruning"),
    *("target_sparsity", "reason", "reused_from", "wall_s", "gpu_hours", "dollars", "world_size", "global_batch"),
    *("seed", "status", "axes"),
)


def write_summary(matrix: MatrixDir, results: Results) -> str:
    """Write the summary and the files for other programs; return the text of the summary. Raises OSError."""
    files: dict[Path, bytes] = {
        matrix.results: indented(results),
        matrix.all_results: indented([original(run) for run in results.runs]),
        matrix.report_md: markdown(matrix, results).encode(),
        matrix.results_csv: results_csv(results).encode(),
        matrix.junit: junit(results).encode(),
    }
    text = summary(results, tracker_lines(matrix, results))
    # The summary last: it refers to the other files.
    for path, content in {**files, matrix.summary: text.encode()}.items():
        write_bytes(path, content)
    return text


def draw_graphs(matrix: MatrixDir, results: Results) -> tuple[list[Path], list[str]]:
    """Draw every graph that has data; return the files, and the reason for each graph that was not drawn."""
    files, missing = graphs.draw(results, matrix.graphs)
    more, without = gpu_graphs.draw(matrix.path, results.runs, {}, matrix.graphs)
    return [*files, *more], [*missing, *without]


def summary(results: Results, trackers: Sequence[str] = ()) -> str:
    """Return the content of summary_report.txt. trackers: lines about them."""
    return render(TEXT, "summary.txt.j2", results, trackers=trackers)


def markdown(matrix: MatrixDir, results: Results) -> str:
    """Return the content of report.md, to be pasted into a pull request. Tables are GitHub's."""
    return render(MARKDOWN, "report.md.j2", results, path=matrix.path)


def ending(results: Results, files: Sequence[str]) -> str:
    """Return the short form of the report, which ends a matrix on the terminal. files: with the whole report."""
    return render(TEXT, "ending.txt.j2", results, files=files)


def tracker_lines(matrix: MatrixDir, results: Results) -> list[str]:
    """Return the link of each run's trackers and their pending uploads; empty without a tracker."""
    runs = [(run.name, sent) for run in results.runs for sent in sync_status(matrix.run(run.name))]
    links = [f"{name}  {sent.tracker}  {sent.points} steps  {sent.link}" for name, sent in runs if sent.link]
    return [*links, *first_of_each((sent.tracker, sent.how) for _, sent in runs), *pending_messages(runs, matrix.path)]


def indented(value: object) -> bytes:
    """Return a file of JSON, such as results.json: null for what is unknown, for NaN and infinity."""
    try:
        return msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    except UnicodeEncodeError:  # a file name that is not UTF-8: its bytes are replaced by "?"
        finite = json.loads(json.dumps(as_json(value)), parse_constant=lambda _: None)
        return json.dumps(finite, indent=2, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def schema() -> bytes:
    """Return the JSON Schema (draft 2020-12) of results.json."""
    found = msgspec.json.schema(Results)
    return indented({"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "results.json", **found})


def original(run: Run) -> dict[str, Any]:
    """Return the numbers of a run by their names in the original project: an object of all_results.json.

    Unknown values are None. An unfinished run has no final loss.
    """
    gpu = run.gpu or Gpu()
    main, whole = gpu.main, gpu.whole
    numbers = {
        "final_val_loss": run.final_val_loss if run.counts else None,
        "final_perplexity": run.perplexity if run.counts else None,
        "total_time": run.seconds,
        "model_params": run.params,
        "joules": whole.joules,
        "joules_per_token": main.joules_per_token,
        "joules_per_token_run": whole.joules_per_token,
        "gpu_memory_mean": main.memory_used_mean,
        "gpu_memory_mean_run": whole.memory_used_mean,
        "gpu_memory_max": gpu.memory_used_max,
        "gpu_simulated": run.gpu.simulated if run.gpu else None,
        "test_id": run.name,
        "elapsed_time": run.seconds,
        "success": run.status is Status.FINISHED,
    }
    failure = {"error": run.reason or "no reason recorded"} if run.status is Status.FAILED else {}
    return {**numbers, **{name: getattr(run, name) for name in SAME}, **failure}


def results_csv(results: Results) -> str:
    """Return the content of results.csv (RFC 4180): a row per run; unknown values are empty cells."""
    file = io.StringIO()
    writer = csv.writer(file)
    fields = [name for name in scalars() if name != "name"]
    axes = list(results.axes)
    titles = ("run", *(f"axis {label}" for label in axes), *fields, "simulated")
    writer.writerow([_cell(title) for title in titles])
    for run in results.runs:
        simulated = None if run.gpu is None else run.gpu.simulated
        values = [run.name, *(run.axes.get(label, "") for label in axes), *(getattr(run, name) for name in fields)]
        writer.writerow([_cell(value) for value in (*values, simulated)])
    return file.getvalue()


def scalars() -> list[str]:
    """Return the fields of a run that are one value: texts, numbers, true or false."""
    types = {name: kind for one in reversed(Run.__mro__) for name, kind in getattr(one, "__annotations__", {}).items()}
    return [name for name, kind in types.items() if not CONTAINERS.search(kind)]


def _cell(value: object) -> str:
    """Return a value as a cell. Text that a spreadsheet would evaluate gets an apostrophe; numbers stay as they are."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = printable(str(value))[:MOST_CELL]
    return f"'{text}" if text.startswith(FORMULA) else text


def junit(results: Results) -> str:
    """Return the content of junit.xml: a suite with a test case per run."""
    return render(HTML, "junit.xml.j2", results)
