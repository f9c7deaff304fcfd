"""results.json and all_results.json, for programs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from kmatrix.records.files import read_json
from kmatrix.report.analysis import analyse
from kmatrix.report.write import write_summary
from records_factory import FakeRun, make_matrix

ORIGINAL_KEYS = {"test_id", "model", "optimizer", "pruning", "target_sparsity", "elapsed_time", "success"}
OUR_KEYS = {"run_id", "status", "reason", "axes", "tokens", "tokens_per_second", "mfu", "joules", "joules_per_token"}


def read_results(matrix):
    write_summary(analyse(matrix))
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


def test_a_rerun_replaces_the_old_result(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(final_loss=3.2)])
    read_results(matrix)
    result = matrix.run("gpt2_adamw_1cpu").result
    result.write_text(json.dumps({**json.loads(result.read_text()), "final_val_loss": 2.0}))
    results, _ = read_results(matrix)
    assert results["runs"][0]["final_val_loss"] == 2.0


def test_no_file_contains_a_float_that_json_does_not_allow(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun()])
    write_summary(replace(analyse(matrix), ended=math.nan))

    def reject_constant(name: str) -> None:
        raise AssertionError(f"{name} is not valid JSON")

    json.loads(matrix.all_results.read_text(), parse_constant=reject_constant)
    assert json.loads(matrix.results.read_text(), parse_constant=reject_constant)["ended"] is None


def test_results_json_has_the_validation_curve_and_the_origin_of_the_numbers(tmp_path):
    results, _ = read_results(make_matrix(tmp_path, [FakeRun()]))
    (run,) = results["runs"]
    assert run["evidence"] == "gpt2_adamw_1cpu/result.json"
    assert {len(column) for column in run["val"].values()} == {11}
    assert run["val"]["step"][-1] == 100
