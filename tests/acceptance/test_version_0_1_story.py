"""After an update from version 0.1, its matrix on disk is read, continued, reproduced and synced."""

from __future__ import annotations

import json
import re

import pytest

from story import complete_lines, load_json, matrices, only
from version_0_1 import FINISHED, PLANNED, STOPPED, unpack

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]


def test_a_matrix_of_version_0_1_can_be_read_continued_reproduced_and_synced(fresh_clone):
    matrix = unpack(fresh_clone.root)
    finished = (matrix / FINISHED / "result.json").read_bytes()

    def make(*arguments: str) -> str:
        completed = fresh_clone.make(*arguments)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout

    assert "1 planned, 1 finished, 1 stopped" in make("status")
    assert "54/60" in make("estimate", f"TARGET={matrix}")
    assert "GPU 1 was lost at" in make("summary", f"TARGET={matrix}")
    make("update-graphs", f"TARGET={matrix}")
    assert (matrix / "graphs" / "gpu_memory_timeline.png").stat().st_size > 0
    assert "GPT2_OPTIMIZER adamw -> muon" in make("compare", f"BASE={matrix / FINISHED}", f"NEW={matrix / STOPPED}")
    assert "step_00000054.pt" in make("list-checkpoints", f"TARGET={matrix}")

    make("continue", f"TARGET={matrix}")
    results = {name: load_json(matrix / name / "result.json") for name in (FINISHED, STOPPED, PLANNED)}
    assert {(result["status"], result["step"]) for result in results.values()} == {("finished", 60)}
    assert (matrix / FINISHED / "result.json").read_bytes() == finished
    resumed = [line["step"] for line in complete_lines(matrix / STOPPED / "metrics.jsonl") if line.get("resumed")]
    assert resumed == [54]
    assert json.loads(fresh_clone.kmatrix("status", f"TARGET={matrix}", "JSON=1").stdout)["counts"] == {"finished": 3}

    for target in ("track-sync", "track-replay"):
        make(target, f"TARGET={matrix}")
        synced = load_json(matrix / STOPPED / "track.json")["trackers"]["tensorboard"]
        assert (synced["state"], synced["points"], synced["waiting"]) == ("done", 61, 0)

    completed = fresh_clone.make("reproduce", f"RUN={matrix / FINISHED}", "DATA_PATH=notes")
    assert completed.returncode in (0, 1), (
        completed.stdout + completed.stderr
    )  # 1, because another processor may not give the same bits
    assert re.search(r"\d+ values in 61 steps", completed.stdout), completed.stdout
    repeated = only(path for path in matrices(fresh_clone.root) if path != matrix) / FINISHED
    before, after = results[FINISHED], load_json(repeated / "result.json")
    assert after["run_id"] == before["run_id"]
    assert after["final_val_loss"] == pytest.approx(before["final_val_loss"], abs=1e-3)
