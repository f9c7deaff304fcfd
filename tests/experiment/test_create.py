"""A matrix is made whole: its plan, its code, its reused runs; `make add` extends it."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest

from instant import Killed, killed_at
from kmatrix.experiment.create import create, forget_reuse
from kmatrix.experiment.make import contents_of, make_matrix
from kmatrix.records.attempts import Attempt, End, write
from kmatrix.records.control import requests_of
from kmatrix.records.files import read_json, write_json
from kmatrix.records.matrix import CODE, make_files, read_plan, run_files
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.status.look import look
from programs import Program, give_gpus, prepare_here

ARGUMENTS = ("NUM_GPUS=1", "LR=1e-3", "OPTIMIZER=adamw,sgd", "MAX_ITERS=30")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    give_gpus(monkeypatch, 0)
    prepare_here(monkeypatch)
    made = Program(tmp_path)
    made.check("defconfig-gpt2-cpu-quick")
    return made


def make(program: Program, *arguments: str, reuse: bool = True) -> MatrixDir:
    plan = program.plan(*(arguments or ARGUMENTS), f"RESULTS_DIR={program.folder / 'results'}")
    return make_matrix(plan, reuse=reuse)


def finish(matrix: MatrixDir, name: str) -> None:
    """Write the files of a run that has finished."""
    make_files(matrix.path, name)
    (matrix.path / name / "attempts").mkdir()
    write(matrix.path / name, Attempt(number=1, end=End(kind="finished", seconds=60.0)))
    run = matrix.run(name)
    about = {"run_id": read_json(run.run_json)["run_id"], "attempt": 1, "status": "finished", "final_val_loss": 3.5}
    write_json(run.result, about)
    run.metrics.write_text('{"schema": 1, "step": 0, "val/loss": 3.5}\n')


@pytest.mark.process
def test_a_matrix_has_its_plan_and_the_code_that_its_runs_will_train(program: Program) -> None:
    matrix = make(program)
    plan = read_plan(matrix.path)
    assert [run.name for run in plan.runs] == ["gpt2_adamw_1cpu", "gpt2_sgd_1cpu"]
    assert {state.status for state in look(matrix.path).states.values()} == {Status.PLANNED}
    assert [plan.train_of(run)["optimizer"] for run in plan.runs] == ["adamw", "sgd"]
    assert (matrix.path / CODE / "gpt2/train.py").is_file()
    assert (matrix.path / CODE / "gpt2/prepare/catalog.toml").is_file()
    assert (matrix.path / CODE / "lib/kmatrix/records/attempts.py").is_file()
    assert not (matrix.path / CODE / "lib/kmatrix/cli").exists()
    assert not list(matrix.path.parent.glob(".*"))


@pytest.mark.process
def test_the_config_of_a_run_plans_this_run_again(program: Program) -> None:
    matrix = make(program)
    for name, record in run_files(matrix.path).items():
        make_files(matrix.path, name)
        shutil.copy(matrix.run(name).config, program.config)
        (planned,) = program.plan().runs
        assert planned.run_id == record.run_id


@pytest.mark.process
def test_a_finished_run_of_another_matrix_is_reused_and_costs_nothing(program: Program) -> None:
    first = make(program)
    finish(first, "gpt2_sgd_1cpu")
    second = make(program)
    seen = look(second.path)
    assert [state.status for state in seen.states.values()] == [Status.PLANNED, Status.FINISHED]
    assert seen.states["gpt2_sgd_1cpu"].attempts[0].end == End(
        kind="finished",
        reason=f"reused from {first.name}/gpt2_sgd_1cpu",
        at=seen.states["gpt2_sgd_1cpu"].attempts[0].end.at,
    )
    assert run_files(second.path)["gpt2_sgd_1cpu"].reused_from == f"{first.name}/gpt2_sgd_1cpu"
    assert read_json(second.run("gpt2_sgd_1cpu").run_json)["reused_from"] == f"{first.name}/gpt2_sgd_1cpu"
    assert run_files(make(program).path)["gpt2_sgd_1cpu"].reused_from == f"{first.name}/gpt2_sgd_1cpu"


@pytest.mark.process
def test_a_rerun_of_a_reused_run_is_trained_here(program: Program) -> None:
    finish(make(program), "gpt2_sgd_1cpu")
    matrix = make(program)
    forget_reuse(matrix, ["gpt2_sgd_1cpu"])
    assert not any(run.reused_from for run in read_plan(matrix.path).runs)


@pytest.mark.process
@pytest.mark.parametrize("change", ["code", "torch", "train", "log", "processor", "REUSE=n"])
def test_a_run_that_may_differ_or_logged_something_else_is_trained_again(program: Program, change: str) -> None:
    first = make(program)
    finish(first, "gpt2_sgd_1cpu")
    record = read_json(first.matrix_json)
    origin = record["common"]["provenance"]
    if change == "train":
        record["common"]["train"]["grad_clip"] = 7.0
    if change == "log":
        record["common"]["train"]["log_norms"] = True
    origin |= {"code": {"code": "0" * 64}, "torch": {"versions": {"torch": "1.0"}}, "processor": {"cpu": "x"}}.get(
        change, {}
    )
    write_json(first.matrix_json, record)
    second = make(program, reuse=change != "REUSE=n")
    assert {state.status for state in look(second.path).states.values()} == {Status.PLANNED}


@pytest.mark.process
def test_runs_that_cannot_run_here_are_skipped_with_the_reason(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_gpus(monkeypatch, 1)
    matrix = make(program, "DEVICE=cuda", "NUM_GPUS=1,2", "OPTIMIZER=adamw", "LR=1e-3")
    seen = look(matrix.path)
    assert [(state.status, state.reason) for state in seen.states.values()] == [
        (Status.PLANNED, ""),
        (Status.SKIPPED, "needs 2 GPUs, found 1"),
    ]
    assert list(requests_of(matrix.path).runs) == ["gpt2_adamw_2gpu"]


@pytest.mark.process
def test_added_cells_leave_the_runs_of_a_matrix_as_they_are(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = make(program)
    before = read_json(matrix.matrix_json)
    done: list[str] = []
    monkeypatch.setattr("kmatrix.cli.run.start", lambda *_: done.append("executed") or 0)
    result = program.check("add", f"TARGET={matrix.path}", "OPTIMIZER=muon")
    assert f"added 1 run to {matrix.path}" in result.out.replace("\n", " ")
    assert done == ["executed"]
    after = read_json(matrix.matrix_json)
    assert after["runs"][:2] == before["runs"]
    assert after["common"] == before["common"]
    assert [axis["values"] for axis in after["axes"] if axis["label"] == "optimizer"] == [["adamw", "sgd", "muon"]]
    assert run_files(matrix.path)["gpt2_muon_1cpu"].train.optimizer == "muon"
    assert requests_of(matrix.path).settings == {"RUN": "gpt2_muon_1cpu"}
    make_files(matrix.path, "gpt2_muon_1cpu")
    assert "CONFIG_GPT2_OPTIMIZER_MUON=y" in matrix.run("gpt2_muon_1cpu").config.read_text()


@pytest.mark.process
def test_a_matrix_that_cannot_be_written_leaves_nothing(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kmatrix.experiment.create.copy_code", full)
    with pytest.raises(OSError, match="No space left on device"):
        make(program)
    assert list((program.folder / "results").iterdir()) == []


@pytest.mark.process
def test_two_matrices_of_one_name_never_share_a_folder_of_checkpoints(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kmatrix.experiment.create.next_path", lambda results, _now: results / "test_matrix_results_1")
    disk = program.folder / "disk"
    for results in ("a", "b"):
        plan = program.plan(*ARGUMENTS, f"RESULTS_DIR={program.folder / results}", f"CHECKPOINT_DIR={disk}")
        if results == "a":
            assert read_plan(make_matrix(plan).path).checkpoints == str(disk / "test_matrix_results_1")
        else:
            with pytest.raises(FileExistsError):
                make_matrix(plan)
    assert list((program.folder / "b").iterdir()) == []


@pytest.mark.process
def test_a_creation_that_is_killed_anywhere_leaves_no_half_matrix(program: Program, tmp_path: Path) -> None:
    contents = contents_of(program.plan(*ARGUMENTS), command="")
    for number in itertools.count(0, 7):
        results = tmp_path / str(number)
        results.mkdir()
        try:
            with killed_at(number):
                create(contents, results)
            break
        except Killed:
            assert not list(results.glob("test_matrix_results_*"))
            assert len(look(create(contents, results).path).states) == 2  # what is left is in nobody's way
    assert number > 50


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["ON_FINISH=no-such-program"], "no-such-program"),
        (["TRACKER=wandb"], "wandb"),
        (["CHECKPOINT_DIR=Kconfig/x"], "Not a directory"),
        (["DATASET=folder", "DATA_PATH=nothing"], "no text files at"),
        (["DEVICE=cuda"], "no run of this matrix can run on this machine"),
        ([], "torch is not installed"),
    ],
)
def test_what_would_fail_later_is_refused_before_anything_is_made(
    program: Program, monkeypatch: pytest.MonkeyPatch, words: list[str], what: str
) -> None:
    if not words:
        monkeypatch.setattr("kmatrix.experiment.inputs.ask.find_spec", lambda _: None)
    monkeypatch.setattr("kmatrix.track.available.find_spec", lambda _: None)
    results = program.folder / "results"
    assert what in program.refused("test-matrix", *ARGUMENTS, f"RESULTS_DIR={results}", *words)
    assert not results.exists() or not list(results.iterdir())


@pytest.mark.process
def test_a_matrix_whose_cells_have_changed_is_not_extended(program: Program) -> None:
    matrix = make(program)
    record = read_json(matrix.matrix_json)
    record["runs"][1]["run_id"] = "0" * 10
    write_json(matrix.matrix_json, record)
    message = program.refused("add", f"TARGET={matrix.path}", "OPTIMIZER=muon")
    assert "cannot be extended: its configuration now gives other runs" in message
    assert read_json(matrix.matrix_json) == record
