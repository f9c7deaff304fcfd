"""Every read-only command reads a matrix directory written by version 0.1."""

from __future__ import annotations

import json

import pytest
from PIL import Image

from kmatrix.cli.commands import main
from kmatrix.cli.running.reproduce import former_settings
from kmatrix.experiment.plan import make_plan
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import read_train_values
from version_0_1 import FINISHED, MATRIX, PLANNED, STOPPED, unpack

ALL = (FINISHED, STOPPED, PLANNED)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    return unpack(tmp_path_factory.mktemp("old"))


@pytest.fixture
def output_of(matrix, capsys):
    """Run a command and return its output."""

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    return run


def test_status_reads_a_matrix_of_version_0_1(output_of, matrix):
    view = json.loads(output_of("status", f"TARGET={matrix}", "JSON=1"))
    assert view["counts"] == {"finished": 1, "stopped": 1, "planned": 1}
    runs = {run["name"]: run for run in view["runs"]}
    finished, stopped = runs[FINISHED], runs[STOPPED]
    assert (finished["status"], finished["step"], finished["attempt"]) == ("finished", 60, 2)
    assert (stopped["status"], stopped["step"], stopped["kind"]) == ("stopped", 54, "signal")
    assert runs[PLANNED]["status"] == "planned"
    output = output_of("status", f"TARGET={matrix}")
    assert "60/60" in output
    assert "54/60" in output


def test_estimate_reads_a_matrix_of_version_0_1(output_of, matrix):
    estimate = json.loads(output_of("estimate", f"TARGET={matrix}", "JSON=1"))
    time_left = {run["name"]: run["left_s"] for run in estimate["runs"]}
    assert time_left[FINISHED] in (None, 0)
    assert 0 < time_left[STOPPED] < time_left[PLANNED]


def test_summary_reads_a_matrix_of_version_0_1(output_of, matrix):
    output = output_of("summary", f"TARGET={matrix}")
    for text in (MATRIX, "3.8523", "4.0187", "(simulated)", "GPU 1 was lost at", "61 steps", "Energy: "):
        assert text in output
    results = json.loads((matrix / "results.json").read_text())
    losses = {run["name"]: run["final_val_loss"] for run in results["runs"]}
    assert losses[FINISHED] == pytest.approx(3.8523, abs=1e-4)


def test_update_graphs_reads_a_matrix_of_version_0_1(output_of, matrix):
    output_of("update-graphs", f"TARGET={matrix}")
    for name in ("loss_vs_steps", "gpu_memory_timeline", "per_gpu_memory_breakdown"):
        with Image.open(matrix / "graphs" / f"{name}.png") as picture:
            assert picture.width >= 800


def test_compare_reads_a_matrix_of_version_0_1(output_of, matrix):
    output = output_of("compare", f"BASE={matrix / FINISHED}", f"NEW={matrix / STOPPED}")
    assert "GPT2_OPTIMIZER adamw -> muon" in output


def test_list_checkpoints_reads_a_matrix_of_version_0_1(output_of, matrix):
    output = output_of("list-checkpoints", f"TARGET={matrix}")
    for text in (f"{FINISHED}: 1 checkpoint", f"{STOPPED}: 2 checkpoints", "step_00000054.pt"):
        assert text in output


def test_a_muon_run_of_version_0_1_is_reproduced_in_the_fused_form(matrix):
    plans = [make_plan((run := RunDir(matrix / name)).config, former_settings(run), one=True) for name in ALL]

    muon = plans[ALL.index(STOPPED)]
    assert [config.train.muon_split_qkv for config in muon.configs.values()] == [False]
    for name, plan in zip(ALL, plans, strict=True):
        was = read_train_values(RunDir(matrix / name))
        (now,) = plan.configs.values()
        changed = {field for field, value in now.train.to_json().items() if was.get(field) != value}
        assert changed <= {"cpu_threads", "data_path", "data_sha256", "checkpoint_dir"}
