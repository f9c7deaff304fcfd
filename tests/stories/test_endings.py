"""Each kind of end of a run in one matrix, and the same matrix in every report of it."""

from __future__ import annotations

import csv
import json
from xml.etree import ElementTree

import jsonschema
import pytest

from scripted_story import kinds
from story import load_json

pytestmark = pytest.mark.story

ENDS = {"adamw": [3.3, "nan", "fails", "oom"], "muon": [3.2, 3.21, 3.19, 3.2]}
AXES = ("OPTIMIZER=adamw", "SEED=1337,1338,1339,1340", "DEVICE=cpu,cuda", "DDP_BACKEND=gloo")
SIZES = ("BATCH_SIZE=2", "GLOBAL_BATCH=2")


def test_failed_diverged_and_skipped_runs_are_reported_everywhere(story):
    """The one that is out of memory recovers with a smaller micro-batch."""
    matrix, _ = story.matrix(ENDS, *AXES, *SIZES, status=2)
    view = json.loads(story.clone.kmatrix("status", f"TARGET={matrix.path}", "JSON=1").stdout)
    assert view["counts"] == {"finished": 2, "failed": 2, "skipped": 4}
    assert view["status"] == "failed"
    runs = {
        load_json(matrix.path / run["name"] / "run.json")["train"]["seed"]: run
        for run in view["runs"]
        if run["attempt"]
    }
    good, diverged, failed, recovered = (runs[1337 + number] for number in range(4))
    assert (good["status"], good["step"], good["attempt"]) == ("finished", 10, 1)
    assert (diverged["kind"], diverged["reason"]) == ("nan", "loss is nan at step 10")
    assert failed["kind"] == "died"
    assert "the cable was pulled" in failed["reason"]
    assert (recovered["status"], recovered["attempt"], recovered["micro_batch"]) == ("finished", 2, 1)
    assert kinds(matrix.path / recovered["name"]) == ["oom", "finished"]

    # People and programs read the same.
    status = story.make("status", f"TARGET={matrix.path}")
    summary = matrix.summary.read_text()
    for text in (status, summary):
        assert "loss is nan at step 10" in text
        assert "the cable was pulled" in text
        assert "needs 1 GPU" in text
        assert "micro-batch 1" in text
    results = load_json(matrix.results)
    jsonschema.validate(results, json.loads(story.make("results-schema")))
    losses = {run["name"]: run["final_val_loss"] for run in results["runs"]}
    assert sorted(loss for loss in losses.values() if loss) == [3.3, 3.3]
    with (matrix.path / "results.csv").open(newline="", encoding="utf-8") as file:
        assert {row["run"]: float(row["final_val_loss"] or 0) or None for row in csv.DictReader(file)} == losses
    suites = ElementTree.parse(matrix.path / "junit.xml").getroot()
    assert [suites.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["8", "2", "0", "4"]

    # Killed runs and failed ones go on only if the user asks.
    again = story.make("continue", f"TARGET={matrix.path}", status=2)
    assert "RETRY_FAILED=1" in again
    story.script({"adamw": [3.3, 3.31, 3.32, 3.3]})
    story.make("continue", f"TARGET={matrix.path}", "RETRY_FAILED=1", status=2)  # some are still skipped
    assert json.loads(story.clone.kmatrix("status", f"TARGET={matrix.path}", "JSON=1").stdout)["counts"] == {
        "finished": 4,
        "skipped": 4,
    }


def test_a_rerun_archives_the_old_result_and_leaves_the_others(story):
    matrix, _ = story.matrix({"adamw": [3.3], "muon": [3.2]})
    adamw, muon = (matrix.run(f"gpt2_{name}_1cpu") for name in ("adamw", "muon"))
    old, kept = load_json(muon.result), adamw.result.read_bytes()
    story.script({"adamw": [3.3], "muon": [3.1]})
    story.make("test-rerun", f"TARGET={matrix.path}", "RUN=*muon*")
    assert load_json(muon.archive / "2" / "result.json") == old
    assert (load_json(muon.result)["attempt"], load_json(muon.result)["final_val_loss"]) == (3, 3.1)
    assert adamw.result.read_bytes() == kept
    reported = {run["name"]: run["final_val_loss"] for run in load_json(matrix.results)["runs"]}
    assert reported == {adamw.name: 3.3, muon.name: 3.1}
