"""Numbers from run directories: which runs count, how they are grouped, ranked and compared, and the warnings."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace

import pytest

from kmatrix.errors import RecordError
from kmatrix.records import attempts
from kmatrix.records.decode import replaced
from kmatrix.records.files import write_json
from kmatrix.records.paths import find_matrix
from kmatrix.records.runs import Status
from kmatrix.report.analyse import analyse
from kmatrix.report.write import summary
from kmatrix.verdict.family import NoMoreSeeds, PairOutcome
from records_factory import CREATED, DATA, FakeRun, edit_attempt, make_matrix, runs_with_seeds

ADAMW, MUON = [3.2811, 3.2834, 3.2802], [3.2715, 3.2741, 3.2702]
OTHER_DATA = "f" * 64


def only(numbers):
    (run,) = numbers.runs
    return run


def test_a_finished_run_gives_the_numbers_of_its_result(tmp_path):
    run = only(analyse(make_matrix(tmp_path, [FakeRun(optimizer="muon", gpus=2, final_loss=3.2, seed=7)])))
    assert (run.name, run.optimizer, run.world_size, run.seed, run.device) == ("gpt2_muon_2cpu", "muon", 2, 7, "cpu")
    assert run.status is Status.FINISHED
    assert run.initial_val_loss == pytest.approx(10.9)
    assert (run.final_val_loss, run.best_val_loss, run.best_val_step) == (3.2, 3.2, 100)
    assert run.perplexity == pytest.approx(math.exp(3.2))
    assert run.tokens == 100 * 2 * 8 * 128
    assert run.tokens_per_second == 4000.0
    assert (run.val.step[0], run.val.step[-1], len(run.train.step)) == (0, 100, 20)


def test_a_crashed_run_gives_the_numbers_of_its_metrics(tmp_path):
    crashed = FakeRun(status="failed", reason="killed by signal 9", stop_at=47, result=False, attempt=1)
    run = only(analyse(make_matrix(tmp_path, [crashed])))
    assert run.status is Status.FAILED
    assert (run.val.step[-1], run.step, run.tokens) == (40, 45, 45 * 1024)
    assert run.final_val_loss == run.val.loss[-1]
    assert run.seconds == pytest.approx(45 * 1024 / 4000)
    assert run.tokens_per_second == 4000.0
    assert run.peak_memory_mib is None


def test_the_time_of_runs_is_theirs_whatever_the_clock_of_the_machine_did(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(seconds=60.0), FakeRun(seconds=60.0, optimizer="muon")])
    # The clock was set back by an hour while the first one ran.
    edit_attempt(matrix.runs()[0], started=CREATED + 10, end={"at": CREATED + 70 - 3600})
    results = analyse(matrix)
    assert [run.wall_s for run in results.runs] == [60.0, 60.0]
    assert "2 finished; 2m00s in total" in summary(results)


def test_an_incomplete_last_line_is_ignored(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="running", stop_at=50)])
    metrics = matrix.run("gpt2_adamw_1cpu").metrics
    metrics.write_bytes(metrics.read_bytes()[:-20])
    run = only(analyse(matrix))
    assert run.status is Status.RUNNING
    assert run.val.step[-1] == 50
    assert run.step == 50


def test_a_run_whose_program_was_killed_is_not_running(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="running", stop_at=50)])
    path = attempts.path_of(matrix.run("gpt2_adamw_1cpu").path, 1)
    os.utime(path, (CREATED, CREATED))  # the last pulse of another host
    run = only(analyse(matrix))
    assert (run.status, run.kind, run.reason, run.step) == (Status.STOPPED, "lost", "its process was killed", 50)


def test_a_run_without_metrics_has_unknown_numbers_instead_of_zeros(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="failed", reason="out of memory", result=False)])
    matrix.run("gpt2_adamw_1cpu").metrics.unlink()
    run = only(analyse(matrix))
    assert (run.final_val_loss, run.tokens, run.tokens_per_second, run.seconds) == (None,) * 4


def test_a_nan_run_keeps_its_earlier_losses_and_is_not_ranked(tmp_path):
    diverged = FakeRun(optimizer="sgd", status="failed", kind="nan", reason="loss is nan at step 47", stop_at=47)
    numbers = analyse(make_matrix(tmp_path, [diverged, FakeRun()]))
    assert numbers.runs[0].reason == "loss is nan at step 47"
    assert numbers.runs[0].final_val_loss == numbers.runs[0].val.loss[-1]
    assert numbers.rankings[0].order == ("adamw",)


def test_a_planned_run_without_a_folder_is_counted(tmp_path):
    numbers = analyse(make_matrix(tmp_path, [FakeRun()], planned=[FakeRun(optimizer="muon")]))
    assert [(run.name, run.status) for run in numbers.runs] == [
        ("gpt2_adamw_1cpu", Status.FINISHED),
        ("gpt2_muon_1cpu", Status.PLANNED),
    ]
    assert numbers.runs[1].optimizer == "muon"
    assert numbers.rankings[0].preliminary


def test_a_copy_of_a_run_is_named_and_in_no_number(tmp_path):
    matrix = make_matrix(tmp_path, runs_with_seeds(2, [3.1, 3.2]))
    before = analyse(matrix)
    shutil.copytree(matrix.runs()[0].path, matrix.path / "copy")
    after = analyse(matrix)
    assert after.warnings == ("not in matrix.json, and in no number: copy", *before.warnings)
    assert replaced(after, warnings=before.warnings) == before


def test_a_matrix_is_what_its_runs_are(tmp_path):
    first, second = FakeRun(), FakeRun(optimizer="muon")
    for name, runs, status in (
        ("a", [first, second], "finished"),
        ("b", [first, replace(second, status="failed", stop_at=20)], "failed"),
        ("c", [first, replace(second, status="planned")], "stopped"),
        ("d", [replace(first, status="planned"), replace(second, status="planned")], "planned"),
        ("e", [first, replace(second, status="running", stop_at=20)], "running"),
    ):
        numbers = analyse(make_matrix(tmp_path / name, runs))
        assert (name, numbers.status) == (name, status)


def test_a_restarted_run_does_not_show_its_old_result(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(final_loss=2.0, status="failed")])
    folder = matrix.run("gpt2_adamw_1cpu")
    edit_attempt(folder, 2, end=None)
    line = {"step": 0, "elapsed_s": 0.1, "tokens": 0, "attempt": 2, "val/loss": 10.8}
    folder.metrics.write_text(json.dumps(line) + "\n")
    run = only(analyse(matrix))
    assert run.status is Status.RUNNING
    assert run.final_val_loss == 10.8


def test_a_result_from_before_a_crash_is_not_final(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="stopped", stop_at=40)])
    folder = matrix.run("gpt2_adamw_1cpu")
    edit_attempt(folder, 2, end={"kind": "killed", "reason": "killed by signal 9"})
    with folder.metrics.open("a") as file:
        file.write(json.dumps({"step": 50, "elapsed_s": 1.0, "tokens": 51200, "attempt": 2, "val/loss": 3.9}) + "\n")
    run = only(analyse(matrix))
    assert (run.final_val_loss, run.tokens, run.attempt) == (3.9, 51200, 2)


def test_elapsed_time_continues_over_a_resume(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="running", stop_at=0)])
    points = [(0, 0.0, 1, 10.0), (10, 8.0, 1, 9.0), (20, 3.0, 2, 8.0), (30, 6.0, 2, 7.0)]
    lines = [{"step": s, "elapsed_s": t, "attempt": a, "tokens": s, "val/loss": v} for s, t, a, v in points]
    matrix.run("gpt2_adamw_1cpu").metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert only(analyse(matrix)).val.seconds == (0.0, 8.0, 11.0, 14.0)


def test_a_damaged_result_is_reported_and_the_rest_is_used(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="muon")])
    matrix.run("gpt2_adamw_1cpu").result.write_text('{"schema": 1, "stat')
    adamw, muon = analyse(matrix).runs
    assert (adamw.status, adamw.reason) == (Status.FAILED, "result.json is damaged: Input data was truncated")
    assert adamw.final_val_loss == pytest.approx(3.28)
    assert muon.counts


@pytest.mark.parametrize("text", ["", "{", '{"schema": 2}', '{"runs": 3}'])
def test_a_damaged_plan_is_one_error(tmp_path, text):
    matrix = make_matrix(tmp_path, [FakeRun()])
    matrix.matrix_json.write_text(text)
    with pytest.raises(RecordError, match=r"matrix\.json"):
        analyse(matrix)


def test_seeds_of_one_configuration_form_one_group(tmp_path):
    numbers = analyse(make_matrix(tmp_path, [*runs_with_seeds(3, ADAMW), *runs_with_seeds(3, MUON, optimizer="muon")]))
    assert [(one.name, one.seeds, one.mean) for one in numbers.configurations] == [
        ("muon", (1, 2, 3), pytest.approx(sum(MUON) / 3)),
        ("adamw", (1, 2, 3), pytest.approx(sum(ADAMW) / 3)),
    ]


def test_a_pending_seed_belongs_to_the_group_of_the_finished_ones(tmp_path):
    first, second = runs_with_seeds(2, [3.2, 3.3])
    (one,) = analyse(make_matrix(tmp_path, [first], planned=[second])).configurations
    assert (one.name, len(one.runs), one.seeds, one.pending) == ("adamw", 2, (1,), 1)


def test_a_finished_run_with_unknown_data_is_not_ranked(tmp_path):
    first, second = runs_with_seeds(2, [3.2, 3.3])
    silent = FakeRun(seed=2, axes=second.axes, train={"data_sha256": ""})
    numbers = analyse(make_matrix(tmp_path, [first, silent]))
    assert [len(one.counted) for one in numbers.configurations] == [1, 1]
    assert len(numbers.rankings) == 1
    assert any("does not record the training data" in warning for warning in numbers.warnings)


def test_runs_on_different_data_are_never_ranked_together(tmp_path):
    other = FakeRun(optimizer="muon", data_sha256=OTHER_DATA)
    runs = [FakeRun(), other, FakeRun(optimizer="sgd", final_loss=4.0)]
    numbers = analyse(make_matrix(tmp_path, runs))
    ranked = {ranking.data_sha256: ranking.order for ranking in numbers.rankings}
    assert ranked == {DATA: ("adamw", "sgd"), OTHER_DATA: ("muon",)}
    assert any("different data" in warning for warning in numbers.warnings)


def test_different_tokens_or_models_of_ranked_runs_are_reported(tmp_path):
    runs = [FakeRun(), FakeRun(gpus=2), FakeRun(optimizer="muon", train={"model": "124m"})]
    notes = " ".join(analyse(make_matrix(tmp_path, runs)).rankings[0].notes)
    assert "differ in tokens (102,400, 204,800)" in notes
    assert "differ in model (124m, tiny)" in notes


def test_scaling_is_relative_to_the_smallest_number_of_gpus(tmp_path):
    speeds = {1: 1000.0, 2: 1900.0, 4: 3000.0}
    runs = [FakeRun(gpus=n, device="cuda", tokens_per_s=speed, mfu=0.4) for n, speed in speeds.items()]
    rows = analyse(make_matrix(tmp_path, runs)).scaling
    assert [row.configuration for row in rows] == ["adamw, 1 GPU", "adamw, 2 GPUs", "adamw, 4 GPUs"]
    assert [(row.world_size, row.speedup, row.efficiency) for row in rows] == [
        (1, 1.0, 1.0),
        (2, pytest.approx(1.9), pytest.approx(0.95)),
        (4, pytest.approx(3.0), pytest.approx(0.75)),
    ]


def test_what_a_trainer_changed_is_a_warning(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(optimizer="muon")])
    (run,) = matrix.runs()
    change = {"field": "batch_size", "from": 8, "to": 4, "why": "out of memory"}
    write_json(run.result, json.loads(run.result.read_text()) | {"adjusted": [change]})
    assert analyse(matrix).warnings == ("gpt2_muon_1cpu was trained with batch_size 8 -> 4: out of memory",)


def test_a_failed_run_carries_the_end_of_its_log(tmp_path):
    lines = tuple(f"line {n}" for n in range(30))
    failed = FakeRun(status="failed", reason="exit status 1", stop_at=20, result=False, log_tail=lines)
    run = only(analyse(make_matrix(tmp_path, [failed])))
    assert run.log_tail == lines[-20:]
    assert run.log == "gpt2_adamw_1cpu/output.log"


def test_without_a_matrix_the_message_shows_how_to_make_one(tmp_path):
    with pytest.raises(RecordError, match="hint: run `make test-matrix`") as raised:
        find_matrix(tmp_path, None)
    assert str(tmp_path) in str(raised.value)


def test_an_unknown_target_is_refused_with_the_known_ones(tmp_path):
    make_matrix(tmp_path, [FakeRun()], name="test_matrix_results_20261119_000000")
    with pytest.raises(RecordError, match="test_matrix_results_20261119_000000"):
        find_matrix(tmp_path, "test_matrix_results_20261119")


def test_a_run_ended_by_a_budget_is_counted_and_named(tmp_path):
    runs = [FakeRun(stop_at=40, ended_by="time"), FakeRun(optimizer="muon", ended_by="max_iters")]
    numbers = analyse(make_matrix(tmp_path, runs))
    assert [run.counts for run in numbers.runs] == [True, True]
    assert numbers.runs[0].ended_by == "time"
    (warning,) = [text for text in numbers.warnings if "learning rate schedule" in text]
    assert warning.endswith(": gpt2_adamw_1cpu")


@pytest.mark.parametrize(("dollars", "spent"), [("1", True), ("0", False), ("1000000", False)])
def test_an_open_comparison_has_the_spent_budget_of_its_matrix_as_its_reason(tmp_path, dollars, spent):
    price = {"device": "cuda", "train": {"gpu_hour_price": 3600.0}}
    losses = {"adamw": [3.28, 3.27, 3.29], "muon": [3.27, 3.29, 3.28]}
    runs = [run for one, known in losses.items() for run in runs_with_seeds(3, known, optimizer=one, **price)]
    later = [FakeRun(optimizer=one, seed=4, axes={"seed": "4"}) for one in losses]
    rules = {"seeds_auto": True, "seeds": list(range(1, 7)), "seeds_min": 3}
    runs, later = ([replace(run, symbols={"BUDGET_DOLLARS": dollars}) for run in some] for some in (runs, later))
    matrix = make_matrix(tmp_path, runs, planned=later, verdict=rules)
    (pair,) = analyse(matrix).rankings[0].pairs
    assert pair.outcome is PairOutcome.OPEN
    assert (pair.no_more is NoMoreSeeds.BUDGET) is spent
    for run in matrix.runs()[:2]:  # the budget is that of the matrix, whatever became of its first runs
        run.run_json.write_text("{")
    assert analyse(matrix).rankings[0].pairs == (pair,)


def test_results_that_no_round_of_adaptive_seeds_asked_for_are_in_no_mean(tmp_path):
    """Three seeds decide it; the fourth and the fifth are there, of another matrix, and would move the means."""
    runs = [*runs_with_seeds(5, [*ADAMW, 9.0, 9.1]), *runs_with_seeds(5, [*MUON, 1.0, 1.1], optimizer="muon")]
    rules = {"seeds_auto": True, "seeds": [*range(1, 11)], "seeds_min": 3}
    results = analyse(make_matrix(tmp_path, runs, verdict=rules))
    (ranking,) = results.rankings
    assert (ranking.seeds_auto.rounds, ranking.seeds_auto.unused) == ((3,), 4)
    assert {one.name: one.mean for one in results.configurations} == {
        "muon": pytest.approx(sum(MUON) / 3),
        "adamw": pytest.approx(sum(ADAMW) / 3),
    }


def test_compared_runs_of_different_code_are_named_in_one_warning(tmp_path):
    runs = [FakeRun(code="a" * 64), FakeRun(optimizer="muon", code="b" * 64), FakeRun(optimizer="sgd")]
    (warning,) = [text for text in analyse(make_matrix(tmp_path / "one", runs)).warnings if "code" in text]
    named = "aaaaaaaa: gpt2_adamw_1cpu; bbbbbbbb: gpt2_muon_1cpu"
    assert warning == f"runs of this matrix were trained by different code ({named})"
    same = [replace(run, code="a" * 64) for run in runs]
    matrix = make_matrix(tmp_path / "two", same)
    assert not [text for text in analyse(matrix).warnings if "code" in text]
    edit_attempt(matrix.run(runs[1].name), 2)  # it went on with the same code, after steps with another one
    edit_attempt(matrix.run(runs[1].name), 1, code="b" * 64, end={"kind": "stopped"})
    assert [text for text in analyse(matrix).warnings if "bbbbbbbb: gpt2_muon_1cpu" in text]
