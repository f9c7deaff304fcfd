"""results.json, its schema, and all_results.json: for programs."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys

import jsonschema
import pytest

from kmatrix.records.decode import decode, replaced
from kmatrix.records.files import read_json
from kmatrix.records.paths import ROOT
from kmatrix.report.analyse import analyse
from kmatrix.report.results import Results
from kmatrix.report.write import indented, schema, write_summary
from records_factory import FakeRun, make_matrix, runs_with_seeds

ORIGINAL_KEYS = {"test_id", "model", "optimizer", "pruning", "target_sparsity", "elapsed_time", "success"}
OUR_KEYS = {"run_id", "status", "reason", "axes", "tokens", "tokens_per_second", "mfu", "joules", "joules_per_token"}


def read_results(matrix):
    write_summary(matrix, analyse(matrix))
    return read_json(matrix.results), json.loads(matrix.all_results.read_text())


def test_all_results_has_every_run_with_the_original_keys_and_ours(tmp_path):
    failed = FakeRun(optimizer="sgd", status="failed", reason="out of memory", stop_at=20, result=False)
    skipped = FakeRun(optimizer="muon", status="skipped", reason="needs 4 GPUs")
    _, (good, bad, left) = read_results(make_matrix(tmp_path, [FakeRun(), failed, skipped]))
    for entry in (good, bad, left):
        assert entry.keys() >= ORIGINAL_KEYS | OUR_KEYS | {"world_size", "global_batch", "seed"}
    assert (good["success"], good["status"], good["pruning"]) == (True, "finished", "none")
    assert good["final_val_loss"] == 3.28
    assert "error" not in good
    assert (bad["success"], bad["error"], bad["final_val_loss"]) == (False, "out of memory", None)
    assert (left["success"], left["status"], left["tokens"]) == (False, "skipped", None)


def test_results_validate_against_the_schema_of_their_type_and_are_read_back_as_they_were(tmp_path):
    planned = [FakeRun(optimizer="lion")]
    runs = [*runs_with_seeds(3, [3.2, 3.21, 3.22]), FakeRun(optimizer="sgd", status="failed", kind="nan", stop_at=40)]
    matrix = make_matrix(tmp_path, runs, planned=planned, verdict={"target_loss": 3.3})
    results, _ = read_results(matrix)
    jsonschema.validate(results, json.loads(schema()))
    assert decode(matrix.results, Results) == analyse(matrix)
    run = json.loads(schema())["$defs"]["Run"]["properties"]
    assert run["tokens_per_second"]["description"] == "steady state of the last attempt"


def test_unknown_nan_and_infinity_are_null(tmp_path):
    results = replaced(analyse(make_matrix(tmp_path, [FakeRun()])), dollars=math.nan)

    def reject_constant(name: str) -> None:
        raise AssertionError(f"{name} is not valid JSON")

    found = json.loads(indented(results), parse_constant=reject_constant)
    assert (found["dollars"], found["runs"][0]["gpu"]) == (None, None)


def test_a_name_that_is_not_utf_8_is_written_with_question_marks():
    assert json.loads(indented({"a": math.inf, "b": ["é\udce9", "\U0001f600"]})) == {
        "a": None,
        "b": ["é?", "\U0001f600"],
    }


def test_results_have_the_validation_curve(tmp_path):
    results, _ = read_results(make_matrix(tmp_path, [FakeRun()]))
    (run,) = results["runs"]
    assert {len(column) for column in run["val"].values()} == {11}
    assert run["val"]["step"][-1] == 100


def test_the_same_runs_give_the_same_bytes(tmp_path):
    matrix = make_matrix(tmp_path, runs_with_seeds(3, [3.2, 3.21, 3.22]))
    assert indented(analyse(matrix)) == indented(analyse(matrix))


COPY = """
import json, pathlib, sys
from kmatrix.report.analyse import analyse
from kmatrix.report.page import render_page
from kmatrix.report.write import results_csv, indented, schema, summary
from records_factory import FakeRun, make_matrix

matrix = make_matrix(pathlib.Path(sys.argv[1]), [FakeRun()])
path = matrix.run(FakeRun().name).result
path.write_text(json.dumps({**json.loads(path.read_text()), "arc_accuracy": 0.4321}))
results = analyse(matrix)
texts = indented(results).decode(), schema().decode(), results_csv(results), summary(results)
print(*("arc" in text for text in (*texts, render_page(matrix, results))))
"""


@pytest.mark.process
def test_a_new_metric_is_one_line_of_the_trainers_result(tmp_path):
    """In a copy of the tree: it is in results.json, its schema, results.csv, the summary and the page."""
    for folder in ("lib", "tests/support", "gpt2"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "lib" / "kmatrix" / "records" / "runs.py"
    line = '    params: Annotated[Count | None, Meta(description="parameters of the model")] = None\n'
    new = '    arc_accuracy: Annotated[Amount | None, Meta(description="ARC, 0 to 1")] = None\n'
    text = path.read_text(encoding="utf-8")
    assert text.count(line) == 1
    path.write_text(text.replace(line, line + new), encoding="utf-8")
    paths = ":".join(str(tmp_path / folder) for folder in ("lib", "tests/support", ""))
    words = [sys.executable, "-c", COPY, str(tmp_path / "results")]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True"] * 5, done.stderr
