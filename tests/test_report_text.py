"""The summary as people read it: whole texts against golden files, and the rules of each part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from records_factory import FakeRun, make_matrix, seeds

from kmatrix.errors import RecordError
from kmatrix.launch.lock import held
from kmatrix.records import MatrixDir, read_json, write_json
from kmatrix.report import write_summary
from kmatrix.report.layout import WIDTH, amount, duration, speed, table


def test_summary_of_two_optimizers_on_one_and_two_gpus(golden, tmp_path):
    runs = [
        FakeRun(optimizer=name, gpus=gpus, device="cuda", final_loss=loss - 0.04 * gpus, tokens_per_s=rate, mfu=mfu)
        for name, loss in (("adamw", 3.3211), ("muon", 3.3102))
        for gpus, rate, mfu in ((1, 13_900.0, 0.438), (2, 26_500.0, 0.417))
    ]
    golden("summary_2x2.txt", write_summary(make_matrix(tmp_path, runs)))


def test_summary_of_three_seeds_on_the_cpu(golden, tmp_path):
    runs = seeds(3, [3.2811, 3.2834, 3.2802]) + seeds(3, [3.2715, 3.2741, 3.2702], optimizer="muon")
    runs += seeds(3, [3.2822, 3.2815, 3.2819], optimizer="adam")
    golden("summary_seeds.txt", write_summary(make_matrix(tmp_path, runs)))


def test_summary_of_a_matrix_with_every_kind_of_trouble(golden, tmp_path):
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
    cuts = [(2, "GPT2_USE_DDP is off: one GPU at most")]
    matrix = make_matrix(tmp_path, runs, planned=planned, cuts=cuts, took=None)
    with held(matrix):
        golden("summary_trouble.txt", write_summary(matrix))


def test_no_line_is_wider_than_a_mail_even_with_long_names(tmp_path):
    axes = {"lr": "0.00123456789", "schedule": "constant", "wd": "0.123456", "warmup": "100000", "dropout": "0.15"}
    runs = [FakeRun(optimizer="adafactor", gpus=n, axes=axes, log_tail=("x" * 500,)) for n in (1, 2)]
    runs.append(FakeRun(status="failed", reason="a reason " * 40, axes=axes, stop_at=40, log_tail=("x" * 500,)))
    text = write_summary(make_matrix(tmp_path, runs))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert all(run.name in text for run in runs)


def test_one_seed_is_said_to_be_no_evidence_and_nobody_is_better(tmp_path):
    text = write_summary(make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="muon", final_loss=1.0)]))
    assert "one seed a configuration: the order is not evidence" in text
    assert "better" not in text


def test_mfu_is_not_applicable_on_the_cpu_and_unknown_on_a_gpu_without_a_peak(tmp_path):
    text = write_summary(make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="muon", device="cuda")]))
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("gpt2_")}
    assert "n/a" in rows["gpt2_adamw_1cpu"]
    assert "n/a" not in rows["gpt2_muon_1gpu"]
    assert "-" in rows["gpt2_muon_1gpu"]


def test_a_matrix_where_nothing_finished_is_reported_without_a_ranking(tmp_path):
    text = write_summary(make_matrix(tmp_path, [FakeRun(status="skipped", reason="needs 8 GPUs, 0 are there")]))
    assert "nothing to rank" in text
    assert "needs 8 GPUs, 0 are there" in text


def test_writing_again_gives_the_same_text_and_needs_nothing_that_was_written(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="muon")])
    first = write_summary(matrix)
    results = matrix.results.read_bytes(), matrix.all_results.read_bytes()
    matrix.results.write_text("not JSON")
    matrix.all_results.unlink()
    matrix.summary.write_text("")
    assert write_summary(matrix) == first == matrix.summary.read_text()
    assert (matrix.results.read_bytes(), matrix.all_results.read_bytes()) == results


def test_a_report_changes_no_file_of_a_run(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="sgd", status="failed", stop_at=20, result=False)])
    before = {path: path.read_bytes() for path in matrix.path.rglob("*") if path.is_file()}
    write_summary(matrix)
    assert {path: path.read_bytes() for path in before} == before
    assert {path.name for path in matrix.path.iterdir() if path.is_file() and path not in before} == {
        "summary_report.txt",
        "results.json",
        "all_results.json",
    }


def test_a_report_that_cannot_be_written_says_so_and_leaves_the_old_one(tmp_path, monkeypatch):
    matrix = make_matrix(tmp_path, [FakeRun()])
    old = write_summary(matrix)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kmatrix.records.files.os.fsync", full)
    with pytest.raises(RecordError, match="No space left on device"):
        write_summary(matrix)
    assert matrix.summary.read_text() == old
    assert not list(MatrixDir(matrix.path).path.glob(".*"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.04, "0.0s"),
        (59.94, "59.9s"),
        (59.96, "1m00s"),
        (723, "12m03s"),
        (3599.6, "1h00m"),
        (90000, "25h00m"),
    ],
)
def test_durations_are_short_and_never_ambiguous(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "-"), (0, "0"), (512, "512"), (999.6, "1.00k"), (102_400, "102k"), (1_024_000, "1.02M"), (10**10, "10.0B")],
)
def test_amounts_have_three_figures(number, text):
    assert amount(number) == text


@given(st.floats(1, 9.99e14))
def test_an_amount_is_right_to_three_figures(number):
    text = amount(number)
    factor = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1.0)
    value = float(text.rstrip("kMBT")) * factor
    assert value == pytest.approx(number, rel=0.005, abs=0.51 if factor == 1.0 else 0)


def test_speeds_keep_a_digit_where_they_are_small():
    assert [speed(value) for value in (None, 12.34, 55188.4)] == ["-", "12.3", "55,188"]


@given(st.lists(st.tuples(st.text("abc", min_size=1, max_size=150), st.text("0123456789", max_size=9)), max_size=5))
def test_a_table_keeps_its_columns_and_every_name(rows):
    lines = table(["name", "number"], rows)
    assert all(any(line.startswith(name) for line in lines) for name, _ in rows)
    assert all(len(line) <= WIDTH for line in lines if line not in {name for name, _ in rows})


def test_a_run_that_was_taken_over_says_from_where(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="muon")])
    run = matrix.run(FakeRun().name)
    write_json(
        run.run_json, read_json(run.run_json) | {"reused_from": "test_matrix_results_20261101_000000/gpt2_adamw"}
    )
    text = write_summary(matrix)
    (line,) = [line for line in text.splitlines() if "test_matrix_results_20261101_000000" in line]
    assert line == (
        "gpt2_adamw_1cpu  from test_matrix_results_20261101_000000/gpt2_adamw, trained until 2026-11-20 05:24 UTC"
    )
    runs = {entry["name"]: entry["reused_from"] for entry in read_json(matrix.results)["runs"]}
    assert list(runs.values()) == ["test_matrix_results_20261101_000000/gpt2_adamw", None]


def test_a_run_of_several_attempts_lists_them(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(attempt=2)])
    run = matrix.run(FakeRun().name)
    attempts = [
        {"attempt": 1, "status": "failed", "kind": "oom", "reason": "out of memory", "resume": "none"},
        {"attempt": 2, "status": "finished", "resume": "auto", "micro_batch": 6},
    ]
    write_json(run.status, read_json(run.status) | {"attempts": attempts})
    lines = write_summary(matrix).splitlines()
    begin = lines.index("Attempts")
    assert lines[begin + 2 : begin + 5] == [
        "gpt2_adamw_1cpu",
        "    1: failed, out of memory",
        "    2: finished, from its last good checkpoint, micro-batch 6",
    ]
    assert read_json(matrix.results)["runs"][0]["attempts"] == attempts
