"""`make continue` and `make test-rerun` write what is asked, and start what is due."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kmatrix import locks
from kmatrix.cli.run import print_next_steps
from kmatrix.records import control
from kmatrix.records.matrix import make_files, read_plan
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status, read_run_file
from kmatrix.runner import background
from kmatrix.status.look import look
from programs import give_gpus, run
from records_factory import FakeRun, make_matrix

RUNS = [
    FakeRun(optimizer="adamw"),
    FakeRun(optimizer="lion", status="stopped", reason="asked by user"),
    FakeRun(optimizer="muon", status="failed", kind="nan", reason="the loss is not finite"),
]


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the matrices that were executed."""
    found = list[str]()
    give_gpus(monkeypatch, 1)
    monkeypatch.setattr(background, "start", lambda path: found.append(path.name) or 0)
    monkeypatch.setattr(background, "said", lambda *_: "")
    monkeypatch.setattr("kmatrix.cli.run.watch", lambda path, **_: look(path))
    return found


def due(matrix: MatrixDir) -> list[str]:
    return [name for name, state in look(matrix.path).states.items() if state.is_due]


def test_what_was_stopped_goes_on_and_what_failed_stays(tmp_path: Path, executed: list[str]) -> None:
    matrix = make_matrix(tmp_path, RUNS, planned=[FakeRun(optimizer="sgd")])
    control.stop(matrix.path)
    result = run("continue", f"TARGET={matrix.path}")
    assert (result.status, executed) == (130, [matrix.name])  # as nothing trained here
    assert due(matrix) == ["gpt2_lion_1cpu", "gpt2_sgd_1cpu"]
    assert "2 runs to run, 1 finished, 1 failed" in result.out
    run("continue", f"TARGET={matrix.path}", "RETRY_FAILED=1")
    assert due(matrix) == ["gpt2_lion_1cpu", "gpt2_muon_1cpu", "gpt2_sgd_1cpu"]


def test_nothing_is_left_to_run(tmp_path: Path, executed: list[str]) -> None:
    matrix = make_matrix(tmp_path, [RUNS[0], RUNS[2]])
    matrix.page.write_text("")
    result = run("continue", f"TARGET={matrix.path}")
    assert (result.status, executed) == (1, [])  # one has failed
    assert "nothing to run" in result.out
    assert "RETRY_FAILED=1" in result.out


def test_a_damaged_run_is_named_and_no_retry_is_offered(tmp_path: Path, executed: list[str]) -> None:
    matrix = make_matrix(tmp_path, RUNS[:1])
    (matrix.path / RUNS[0].name / "result.json").write_text("{")
    result = run("continue", f"TARGET={matrix.path}")
    assert f"{RUNS[0].name} stays: result.json is damaged: " in result.out
    assert "RETRY_FAILED" not in result.out


def test_the_next_step_of_a_spent_budget_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    symbols = {"BUDGET_DOLLARS": "5"}
    runs = [FakeRun(status="stopped", seconds=7236.0, train={"machine_hour_price": 2.5}, symbols=symbols)]
    matrix = make_matrix(tmp_path, runs)
    print_next_steps(look(matrix.path), 130)
    assert "BUDGET_DOLLARS=0, or with a larger one" in capsys.readouterr().out
    print_next_steps(look(matrix.path), 0)  # all have finished
    assert not capsys.readouterr().out


def test_a_full_disk_names_the_command_that_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = make_matrix(tmp_path, RUNS)
    monkeypatch.setattr("kmatrix.cli.run.shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    print_next_steps(look(matrix.path), 1)
    assert f"is full: free some space, then make continue TARGET={matrix.path}" in capsys.readouterr().out


def test_orders_and_arguments_of_the_processes_are_those_of_the_last_command(
    tmp_path: Path, executed: list[str]
) -> None:
    matrix = make_matrix(tmp_path, RUNS)
    run("continue", f"TARGET={matrix.path}", "RUN=*lion*", "RESUME=none", "MICRO_BATCH=4", "CODE=checkout")
    asked = control.requests_of(matrix.path)
    assert asked.settings == {"CODE": "checkout", "RUN": "gpt2_lion_1cpu"}
    assert asked.again["gpt2_lion_1cpu"] == control.Again(after=1, resume="none", micro_batch=4)
    run("continue", f"TARGET={matrix.path}")
    assert control.requests_of(matrix.path).settings == {}
    assert executed == [matrix.name] * 2


def test_settings_that_change_no_result_hold_for_all_later_attempts(tmp_path: Path, executed: list[str]) -> None:
    matrix = make_matrix(tmp_path, [replace(run, train={"checkpoint_interval": 5}) for run in RUNS])
    matrix.config.write_text("CONFIG_GPT2_DEVICE_CPU=y\nCONFIG_MATRIX=y\nCONFIG_MATRIX_GPT2_OPTIMIZER_MUON=y\n")
    words = (
        "TRACKER=tensorboard",
        "BUDGET_HOURS=5",
        "RUN_TIMEOUT=60",
        "CHECKPOINT_INTERVAL=7",
        "TRAINER_ENV=NCCL_DEBUG=INFO",
    )
    run("continue", f"TARGET={matrix.path}", *words)
    run("continue", f"TARGET={matrix.path}", "BUDGET_HOURS=6")
    for name in ("GPT2_CHECKPOINT_INTERVAL", "CHECKPOINT_INTERVAL"):  # two names of one symbol
        assert run("continue", f"TARGET={matrix.path}", f"{name}=7").status == 130
    assert executed == [matrix.name] * 4
    plan = read_plan(matrix.path)
    assert (plan.common.symbols["BUDGET_HOURS"], plan.common.timeout_s) == ("6", 60.0)
    assert "GPT2_MUON_MOMENTUM" not in plan.common.symbols  # nothing but settings
    assert plan.overrides == ("MAX_ITERS=100", *words[:1], words[2], words[4], "BUDGET_HOURS=6", words[3])
    (was,) = (plan.train_of(run) for run in plan.runs if run.name == RUNS[0].name)
    assert was["checkpoint_interval"] == 5  # it has finished
    make_files(matrix.path, RUNS[1].name)  # as its next attempt does
    record = read_run_file(matrix.run(RUNS[1].name))
    assert record.tracking.trackers == ("tensorboard",)
    assert (record.train.checkpoint_interval, record.environment) == (7, {"NCCL_DEBUG": "INFO"})
    assert record.train.optimizer == "lion"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RESUME=best.pt"], "RESUME=best.pt: no such checkpoint"),
        (["MICRO_BATCH=0"], "MICRO_BATCH=0"),
        (["MICRO_BATCH=7"], "a micro-batch of 7"),
        (["BUDGET_HOURS=2.5"], "BUDGET_HOURS=2.5"),
        (["BUDGET_HOURS=99999999"], "BUDGET_HOURS=99999999"),
        (["BUDGET_HOUR=2"], "did you mean BUDGET_HOURS"),
        (["LR=1"], "only a setting that changes no result"),
        (["MATRIX_CONFIDENCE=0.9"], "only a setting that changes no result"),
        (["NODE=1"], "NODE"),
        (["CODE=main"], "CODE=main"),
        (["RUN=gpt2_adam_1cpu"], "matches no run"),
        (["SLURM_TIME=1h"], "SLURM_TIME"),
        (["SIMULATE=4"], "SIMULATE= needs GPU_MONITOR=y"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_asked(
    tmp_path: Path, executed: list[str], words: list[str], message: str
) -> None:
    matrix = make_matrix(tmp_path, RUNS)
    matrix.config.write_text("CONFIG_GPT2_DEVICE_CPU=y\n")
    planned = matrix.matrix_json.read_bytes()
    result = run("continue", f"TARGET={matrix.path}", *words)
    assert (result.status, executed) == (2, [])
    assert message in result.err
    assert not (matrix.path / "control").exists()
    assert matrix.matrix_json.read_bytes() == planned


def test_a_spent_budget_starts_nothing_and_names_the_argument(tmp_path: Path, executed: list[str]) -> None:
    runs = [FakeRun(optimizer="adamw", seconds=7200.0), RUNS[1]]
    matrix = make_matrix(tmp_path, runs)
    matrix.config.write_text("CONFIG_GPT2_DEVICE_CPU=y\n")
    refused = run("continue", f"TARGET={matrix.path}", "BUDGET_HOURS=1")
    assert (refused.status, executed) == (2, [])
    assert "BUDGET_HOURS=" in refused.err
    run("continue", f"TARGET={matrix.path}", "BUDGET_HOURS=4")
    assert executed == [matrix.name]


def test_a_run_that_needs_more_gpus_waits_for_them(
    tmp_path: Path, executed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [FakeRun(device="cuda", gpus=2, optimizer="adamw"), FakeRun(device="cuda", optimizer="lion")]
    matrix = make_matrix(tmp_path, [], planned=runs)
    run("continue", f"TARGET={matrix.path}")
    seen = look(matrix.path).states["gpt2_adamw_2gpu"]
    assert (seen.status, seen.reason) == (Status.SKIPPED, "needs 2 GPUs, found 1")
    give_gpus(monkeypatch, 2)
    run("continue", f"TARGET={matrix.path}")
    assert len(due(matrix)) == len(executed) == 2


def test_a_matrix_that_somebody_runs_is_refused(tmp_path: Path, executed: list[str]) -> None:
    matrix = make_matrix(tmp_path, RUNS)
    lock = locks.lock(matrix.path / ".lock")
    assert lock is not None
    try:
        for command in ("continue", "test-rerun", "add"):
            result = run(command, f"TARGET={matrix.path}", *(["SEED=3"] if command == "add" else []))
            assert result.status == 2
            assert "is being run" in result.err
        assert executed == []
    finally:
        locks.release(lock)


def test_a_rerun_archives_results_and_starts_these_runs_alone(tmp_path: Path, executed: list[str]) -> None:
    matrix = make_matrix(tmp_path, RUNS)
    result = run("test-rerun", f"TARGET={matrix.path}", "RUN=*a*m*", "STATUS=finished")
    assert executed == [matrix.name]
    assert due(matrix) == ["gpt2_adamw_1cpu"]
    assert control.requests_of(matrix.path).settings == {"RUN": "gpt2_adamw_1cpu"}
    assert (matrix.path / "gpt2_adamw_1cpu/archive/2/result.json").exists()
    assert "archived its result in" in result.out
    assert run("test-rerun", f"TARGET={matrix.path}", "STATUS=skipped").out.startswith("no run of")


def test_held_runs_stay_held_until_they_are_released(tmp_path: Path, executed: list[str]) -> None:
    matrix = make_matrix(tmp_path, RUNS, planned=[FakeRun(optimizer="sgd")])
    assert run("hold", f"TARGET={matrix.path}", "RUN=*lion*").out.startswith("gpt2_lion_1cpu: held\n")
    assert "already held" in run("hold", f"TARGET={matrix.path}", "RUN=*lion*").out
    assert "held; it has failed" in run("hold", f"TARGET={matrix.path}", "STATUS=failed").out
    run("continue", f"TARGET={matrix.path}")
    assert due(matrix) == ["gpt2_sgd_1cpu"]
    assert "released" in run("release", f"TARGET={matrix.path}", "RUN=*lion*").out
    assert due(matrix) == ["gpt2_lion_1cpu", "gpt2_sgd_1cpu"]
    assert "needs runs" in run("hold", f"TARGET={matrix.path}").err
    assert executed == [matrix.name]


@pytest.mark.parametrize(("engine", "message"), [("local", "takes effect"), ("kubernetes", "continue: make continue")])
def test_a_released_run_of_a_cluster_has_no_job_until_continue(
    tmp_path: Path, executed: list[str], engine: str, message: str
) -> None:
    matrix = make_matrix(tmp_path, RUNS, engine=engine)
    lock = locks.lock(matrix.path / ".lock")
    assert lock is not None
    try:
        assert "takes effect" in run("hold", f"TARGET={matrix.path}", "RUN=*lion*").out
        assert message in run("release", f"TARGET={matrix.path}", "RUN=*lion*").out
    finally:
        locks.release(lock)


def test_stop_without_a_running_matrix_is_refused_and_so_are_two(tmp_path: Path) -> None:
    names = ["test_matrix_results_20260101_000000", "test_matrix_results_20260101_000001"]
    matrices = [make_matrix(tmp_path, RUNS, name=name) for name in names]
    assert "no matrix is running in" in run("stop", f"RESULTS_DIR={tmp_path}").err
    assert run("stop", f"TARGET={matrices[0].path}").status == 2
    held = [locks.lock(matrix.path / ".lock") for matrix in matrices]
    try:
        result = run("stop", f"RESULTS_DIR={tmp_path}")
        assert result.status == 2
        assert all(name in result.err for name in names)
    finally:
        for lock in held:
            assert lock is not None
            locks.release(lock)
