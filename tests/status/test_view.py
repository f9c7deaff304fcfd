"""The view of a matrix: what status and estimate show, from its files and the answer of a scheduler."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from kmatrix import locks
from kmatrix.engines.nodes import NodeFile
from kmatrix.gpu.formats.json_array import JsonArrayFile, last_entry
from kmatrix.records.attempts import Attempt, End, path_of
from kmatrix.records.decode import as_json
from kmatrix.records.files import append_jsonl, read_json, write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import Status
from kmatrix.status.alerts import Alert, AlertKind, Severity
from kmatrix.status.look import look
from kmatrix.status.view import WAITS, JobView, Viewer
from records_factory import CREATED, FakeRun, make_matrix
from times import Times, pulse

NOW = CREATED + 50.0


@pytest.fixture
def times(monkeypatch):
    return Times(NOW, monkeypatch)


def view_of(matrix, jobs=None, **options):
    pulse(matrix, NOW)
    return Viewer(path=matrix.path).view(look(matrix.path), jobs, **options)


def run_of(matrix, name, jobs=None):
    return next(run for run in view_of(matrix, jobs).runs if name in run.name)


def write_attempt(folder, number, **fields):
    write_json(path_of(folder.path, number), as_json(Attempt(number=number, host="n1", **fields)))


def test_the_time_left_is_that_of_the_remaining_steps_at_the_pace_of_this_attempt(tmp_path, times):
    matrix = make_matrix(tmp_path, [FakeRun(status="running", stop_at=50, tokens_per_s=1024.0)])
    run = run_of(matrix, "adamw")
    assert (run.elapsed_s, run.left_s) == (60.0, pytest.approx(50.0, abs=5.1))  # one step per second


def test_a_program_without_a_pulse_is_gone(tmp_path, times):
    matrix = make_matrix(tmp_path, [FakeRun(status="running", stop_at=50)])
    assert view_of(matrix).status is Status.RUNNING
    times.unix += 200.0
    view = Viewer(path=matrix.path).view(look(matrix.path))
    assert (view.status, view.running, view.runs[0].kind) == (Status.STOPPED, False, "lost")


def test_the_end_of_the_matrix_is_known_once_that_of_every_run_is(tmp_path, times):
    runs = [FakeRun(seed=seed, axes={"seed": str(seed)}) for seed in (1, 2, 3)]
    matrix = make_matrix(tmp_path, runs[:1], planned=runs[1:])
    handle = locks.try_lock(matrix.path / ".lock")
    view = view_of(matrix)
    assert (view.status, view.running, view.left_s) == (Status.RUNNING, True, pytest.approx(120.0))
    locks.release(handle)
    view = view_of(matrix)
    assert (view.running, view.left_s) == (False, pytest.approx(120.0))  # if it still ran
    write_json(matrix.path / "control" / "requests.json", {"runs": {runs[1].name: {"skip": "why"}}})
    assert view_of(matrix).left_s == pytest.approx(60.0), "a skipped run is not to come"
    write_json(matrix.path / "control" / "requests.json", {"runs": {runs[1].name: {"time": NOW}}})
    assert view_of(matrix).left_s == pytest.approx(60.0), "nor is one that is held"


def test_the_numbers_are_those_of_the_last_attempt(tmp_path, times):
    matrix = make_matrix(tmp_path, [FakeRun(status="running", stop_at=90)])
    folder = matrix.run(FakeRun().name)
    write_attempt(folder, 1, end=End(kind="oom", reason="out of memory", seconds=30.0))
    write_attempt(folder, 2, resume="auto", micro_batch=4, seconds=20.0)
    append_jsonl(folder.metrics, {"step": 40, "time": CREATED + 40, "attempt": 2, "train/loss": 2.0})
    run = run_of(matrix, "adamw")
    assert (run.step, run.loss, run.attempt, run.micro_batch, run.elapsed_s) == (40, 2.0, 2, 4, 50.0)
    assert (run.ends, run.last_end) == (("oom",), "out of memory")


def test_a_stopped_run_without_a_step_of_its_last_attempt_is_at_its_checkpoint(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(status="stopped", stop_at=50)])
    folder = matrix.run(FakeRun().name)
    write_attempt(folder, 2, end=End(kind="signal"))
    write_json(folder.checkpoints / "step_00000050.json", {"step": 50})
    assert run_of(matrix, "adamw").step == 50


def test_unknown_values_are_none_and_never_zero(tmp_path):
    matrix = make_matrix(tmp_path, [], planned=[FakeRun(train={"device": "cpu"})])
    run = run_of(matrix, "adamw")
    values = (run.step, run.loss, run.val_loss, run.tokens_per_second, run.mfu, run.memory_mib, run.elapsed_s)
    assert values == (None,) * 7
    assert (run.left_s, run.dollars, run.epochs, view_of(matrix).left_s) == (None, None, None, None)


def test_a_damaged_file_fails_one_run_and_no_other(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="muon")])
    path_of(matrix.run("gpt2_muon_1cpu").path, 1).write_text("{")
    assert [run.status for run in view_of(matrix).runs] == [Status.FINISHED, Status.FAILED]
    assert "attempts/1.json" in run_of(matrix, "muon").reason


def test_a_reused_run_costs_nothing_and_has_the_time_of_its_training(tmp_path):
    train = {"machine_hour_price": 60.0}
    runs = [FakeRun(reused_from="m/run", seconds=0.0, train=train), FakeRun(optimizer="muon", train=train)]
    matrix = make_matrix(tmp_path, runs)
    run = run_of(matrix, "adamw")
    assert (run.reused_from, run.dollars, run.elapsed_s) == ("m/run", 0.0, pytest.approx(25.6))
    assert view_of(matrix).dollars == pytest.approx(1.0)


def test_active_alerts_are_those_of_runs_that_train(tmp_path, times):
    matrix = make_matrix(tmp_path, [FakeRun(status="running"), FakeRun(optimizer="muon")])
    alert = Alert(kind=AlertKind.MFU, severity=Severity.WARNING, since=CREATED, value=9.5, threshold=15.0)
    for name in ("gpt2_adamw_1cpu", "gpt2_muon_1cpu"):
        append_jsonl(matrix.run(name).alerts, as_json(alert))
    assert [run.alerts for run in view_of(matrix).runs] == [("MFU 9.5%, below 15%",), ()]


def test_epochs_come_from_the_size_of_the_data(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(stop_at=50, status="stopped")])
    plan = read_json(matrix.matrix_json)
    write_json(matrix.matrix_json, plan | {"common": plan["common"] | {"train_tokens": 51_200}})
    run = run_of(matrix, "adamw")
    assert (run.epochs, run.all_epochs) == (1.0, 2.0)


def test_json_has_everything_but_the_path(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun()], planned=[FakeRun(optimizer="muon")])
    value = json.loads(json.dumps(view_of(matrix).to_json()))
    assert value["counts"] == {"planned": 1, "finished": 1}
    assert {"ends", "left_s", "dollars", "all_dollars", "gpus", "engine", "silent"} <= value.keys()
    assert {"alerts", "memory_mib", "mfu", "tokens_per_second", "loss", "step", "gpus"} <= value["runs"][0].keys()
    assert str(tmp_path) not in json.dumps(value)


# Adaptive seeds


def test_runs_in_reserve_are_not_to_come_and_the_most_that_all_seeds_take_is_known(tmp_path):
    runs = [FakeRun(seed=seed, axes={"seed": str(seed)}) for seed in range(1, 6)]
    muon = [FakeRun(optimizer="muon", seed=seed, axes={"seed": str(seed)}) for seed in range(1, 6)]
    rules = {"seeds_auto": True, "seeds": [1, 2, 3, 4, 5], "seeds_min": 3}
    matrix = make_matrix(tmp_path, runs[:1], planned=[*runs[1:], *muon], verdict=rules)
    view = view_of(matrix)
    assert sum(run.reserve for run in view.runs) == 4
    assert (view.left_s, view.most_s) == (pytest.approx(5 * 60.0), pytest.approx(9 * 60.0))


# GPUs


def entry(*indices, at=NOW - 1, memory=17000.0, uuid="GPU-"):
    gpus = [
        {
            **{"gpu_index": index, "gpu_name": "NVIDIA A10G", "uuid": f"{uuid}{index}", "utilization": 97.0},
            **{"memory_used": memory, "memory_total": 23028.0, "power": 228.0, "temperature": 63.0},
        }
        for index in indices
    ]
    return {"timestamp": datetime.fromtimestamp(at, UTC).isoformat(), "multi_gpu_data": gpus}


def record(folder, value):
    folder.path.mkdir(parents=True, exist_ok=True)
    file = JsonArrayFile(folder.gpu_stats_multi)
    file.append(value)
    file.close()


def test_the_gpus_of_the_machine_are_listed_with_their_runs_and_newest_values(tmp_path, times):
    runs = [FakeRun(device="cuda", gpus=2, status="running"), FakeRun(optimizer="muon", device="cuda", gpus=1)]
    matrix = make_matrix(tmp_path, runs)
    name = runs[0].name
    write_attempt(matrix.run(name), 1, gpus=("GPU-0", "GPU-7"))
    record(matrix.run(name), entry(0))
    gpus = view_of(matrix).gpus
    assert [(gpu.index, gpu.uuid, gpu.run, gpu.memory_used) for gpu in gpus] == [
        (0, "GPU-0", name, 17000.0),
        (1, "GPU-1", "", None),
        (None, "GPU-7", name, None),  # not planned for, and not recorded yet
    ]
    assert run_of(matrix, "adamw").memory_mib == 17000.0
    times.unix += 600.0
    pulse(matrix, times.unix)
    gpus = Viewer(path=matrix.path).view(look(matrix.path)).gpus
    assert (gpus[0].run, gpus[0].utilization) == (name, None), "an old recording tells nothing, and it has the GPU"


def test_simulated_gpus_of_a_cpu_run_are_listed_and_ranks_on_the_cpu_are_not(tmp_path, times):
    matrix = make_matrix(tmp_path, [FakeRun(status="running")])
    record(matrix.run(FakeRun().name), entry(0, 1))
    assert [gpu.run for gpu in view_of(matrix).gpus] == ["gpt2_adamw_1cpu"] * 2
    record(matrix.run(FakeRun().name), entry(0, uuid="cpu-rank-"))
    assert view_of(matrix).gpus == ()


def test_the_gpus_of_a_run_over_several_nodes_have_their_hosts(tmp_path, times):
    run = FakeRun(device="cuda", gpus=2, status="running", train={"num_nodes": 2})
    matrix = make_matrix(tmp_path, [run], engine="slurm")
    folder = matrix.run(run.name)
    write_attempt(folder, 1, nodes=2)
    write_json(folder.path / "nodes" / "1.json", as_json(NodeFile(host="n2")))
    record(folder, entry(0, uuid="a"))
    record(RunDir(folder.path / "nodes" / "1"), entry(0, uuid="b"))
    assert [(gpu.host, gpu.uuid, gpu.run) for gpu in view_of(matrix).gpus] == [
        ("n1", "a0", run.name),
        ("n2", "b0", run.name),
    ]


# A cluster


def job(phase, **fields):
    return JobView(id="12_0", phase=phase, state="PENDING", **fields)


def test_a_matrix_whose_jobs_wait_is_planned_and_active(tmp_path, times):
    matrix = make_matrix(tmp_path, [], planned=[FakeRun()], engine="slurm")
    view = view_of(matrix, {FakeRun().name: job(WAITS, starts=NOW + 100.0, reason="Priority")})
    assert (view.status, view.running, view.is_active) == (Status.PLANNED, False, True)
    assert (view.runs[0].starts_s, view.runs[0].ends_s, view.runs[0].job.reason) == (100.0, None, "Priority")


def test_runs_of_a_cluster_do_not_wait_for_each_other(tmp_path, times):
    planned = [FakeRun(optimizer=name) for name in ("muon", "sgd")]
    matrix = make_matrix(tmp_path, [FakeRun()], planned=planned, engine="slurm")
    jobs = {run.name: job(WAITS, starts=NOW + 10.0) for run in planned}
    assert view_of(matrix, jobs).left_s == pytest.approx(70.0)
    assert view_of(matrix, {}).left_s is None, "without a job nobody knows"


def test_a_silent_scheduler_is_named_and_changes_no_state(tmp_path, times):
    matrix = make_matrix(tmp_path, [FakeRun(status="running", stop_at=20)], engine="slurm")
    view = view_of(matrix, silent="Slurm does not answer")
    assert (view.silent, view.status) == ("Slurm does not answer", Status.RUNNING)


# The newest entry of a recording


def test_the_last_complete_entry_is_read_from_the_end_of_a_file_of_any_length(tmp_path):
    file = JsonArrayFile(tmp_path / "a.json")
    for number in range(5000):
        file.append({"number": number, "text": "x" * 100})
    assert last_entry(tmp_path / "a.json")["number"] == 4999
    file.close()


@pytest.mark.parametrize(
    ("text", "value"),
    [('[\n{"number": 1},\n{"numb', {"number": 1}), (None, None), ("", None), ("[\n\n]\n", None), ("nonsense", None)],
)
def test_an_incomplete_entry_is_ignored_and_an_empty_recording_has_none(tmp_path, text, value):
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    assert last_entry(tmp_path / "a.json") == value
