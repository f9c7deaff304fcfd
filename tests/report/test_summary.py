"""Golden files of complete summaries, and the rules of each section."""

from __future__ import annotations

import pytest

from kmatrix.records.files import read_json
from kmatrix.records.paths import MatrixDir
from kmatrix.report.analyse import analyse
from kmatrix.report.page import write_page
from kmatrix.report.write import write_summary
from kmatrix.text import WIDTH
from records_factory import FakeRun, edit_attempt, make_matrix, runs_with_seeds


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # commands have the path of the matrix from here


def summary_of(matrix):
    return write_summary(matrix, analyse(matrix))


def test_summary_of_two_optimizers_on_one_and_two_gpus(golden, tmp_path):
    runs = [
        FakeRun(optimizer=name, gpus=gpus, device="cuda", final_loss=loss - 0.04 * gpus, tokens_per_s=rate, mfu=mfu)
        for name, loss in (("adamw", 3.3211), ("muon", 3.3102))
        for gpus, rate, mfu in ((1, 13_900.0, 0.438), (2, 26_500.0, 0.417))
    ]
    golden("summary_2x2.txt", summary_of(make_matrix(tmp_path, runs)))


def test_summary_of_three_seeds_on_the_cpu(golden, tmp_path):
    runs = runs_with_seeds(3, [3.2811, 3.2834, 3.2802]) + runs_with_seeds(3, [3.2715, 3.2741, 3.2702], optimizer="muon")
    runs += runs_with_seeds(3, [3.2822, 3.2815, 3.2819], optimizer="adam")
    golden("summary_seeds.txt", summary_of(make_matrix(tmp_path, runs)))


def test_summary_of_a_matrix_with_every_kind_of_failure(golden, tmp_path):
    log = (
        "Iter 40 | epoch 1 | loss 9.1000 | lr 1.00e-01 | norm 85.10 | dt 250.0ms | tok/s 4000 | mfu n/a",
        "loss is nan",
    )
    runs = [
        FakeRun(),
        FakeRun(
            optimizer="sgd", status="failed", kind="nan", reason="loss is nan at step 47", stop_at=47, log_tail=log
        ),
        FakeRun(optimizer="adam", status="stopped", reason="stopped by make stop", stop_at=62),
        FakeRun(optimizer="muon", gpus=4, status="skipped", reason="needs 4 GPUs, 2 are there"),
        FakeRun(optimizer="adafactor", status="running", stop_at=30),
    ]
    planned = [FakeRun(optimizer="muon")]
    excluded = [(2, "GPT2_USE_DDP is off: one GPU at most")]
    matrix = make_matrix(tmp_path, runs, planned=planned, cuts=excluded)
    golden("summary_trouble.txt", summary_of(matrix))


def test_no_line_is_wider_than_80_columns_even_with_long_names(tmp_path):
    axes = {"lr": "0.00123456789", "schedule": "constant", "wd": "0.123456", "warmup": "100000", "dropout": "0.15"}
    runs = [FakeRun(optimizer="adafactor", gpus=n, axes=axes, log_tail=("x" * 500,)) for n in (1, 2)]
    runs.append(FakeRun(status="failed", reason="a reason " * 40, axes=axes, stop_at=40, log_tail=("x" * 500,)))
    text = summary_of(make_matrix(tmp_path, runs))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(run.name in text for run in runs)


def test_a_second_report_has_the_same_text_and_needs_no_earlier_report(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="muon")])
    first = summary_of(matrix)
    results = matrix.results.read_bytes(), matrix.all_results.read_bytes()
    matrix.results.write_text("not JSON")
    matrix.all_results.unlink()
    matrix.summary.write_text("")
    assert summary_of(matrix) == first == matrix.summary.read_text()
    assert (matrix.results.read_bytes(), matrix.all_results.read_bytes()) == results


def test_a_report_changes_no_file_of_a_run_and_reads_none_but_for_its_results(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="sgd", status="failed", stop_at=20, result=False)])
    before = {path: path.read_bytes() for path in matrix.path.rglob("*") if path.is_file()}
    results = analyse(matrix)
    matrix.matrix_json.rename(tmp_path / "elsewhere")  # reports are made of the results alone
    write_summary(matrix, results)
    write_page(matrix, results)
    (tmp_path / "elsewhere").rename(matrix.matrix_json)
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in matrix.path.iterdir() if path.is_file() and path not in before} == {
        "summary_report.txt",
        "report.html",
        "results.json",
        "all_results.json",
        "report.md",
        "results.csv",
        "junit.xml",
    }


def test_a_failed_write_is_an_error_and_keeps_the_old_report(tmp_path, monkeypatch):
    matrix = make_matrix(tmp_path, [FakeRun()])
    old = summary_of(matrix)

    def raise_disk_full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    # A full disk is often reported only by fsync, after all writes have succeeded.
    monkeypatch.setattr("kmatrix.records.files.os.fsync", raise_disk_full)
    with pytest.raises(OSError, match="No space left on device"):
        summary_of(matrix)
    assert matrix.summary.read_text() == old
    assert not list(MatrixDir(matrix.path).path.glob(".*"))


def test_a_reused_run_names_its_origin(tmp_path):
    reused = FakeRun(reused_from="test_matrix_results_20261101_000000/gpt2_adamw", seconds=0.0)
    matrix = make_matrix(tmp_path, [reused, FakeRun(optimizer="muon")])
    text = summary_of(matrix)
    (line,) = [line for line in text.splitlines() if "test_matrix_results_20261101_000000" in line]
    assert line == (
        "gpt2_adamw_1cpu  from test_matrix_results_20261101_000000/gpt2_adamw, trained until 2026-11-20 05:24:00 UTC"
    )
    runs = {entry["name"]: entry["reused_from"] for entry in read_json(matrix.results)["runs"]}
    assert list(runs.values()) == ["test_matrix_results_20261101_000000/gpt2_adamw", None]


def test_the_attempts_of_a_run_are_listed(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun()])
    run = matrix.run(FakeRun().name)
    edit_attempt(run, 2, resume="auto", micro_batch=6)
    exits = [{"rank": 1, "code": -9}, {"rank": 0, "code": 1}]
    edit_attempt(run, 1, end={"kind": "oom", "reason": "out of memory", "exits": exits}, code="c0de")
    lines = summary_of(matrix).splitlines()
    begin = lines.index("Attempts")
    assert lines[begin + 2] == (
        "gpt2_adamw_1cpu  1: oom on node-1, out of memory; 2: finished on node-1, micro-batch 6"
    )
    first, second = read_json(matrix.results)["runs"][0]["attempts"]
    assert (first["end"]["kind"], first["end"]["reason"], second["micro_batch"]) == ("oom", "out of memory", 6)
