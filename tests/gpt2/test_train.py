"""One run in its own process: the files it writes and how it ends."""

from __future__ import annotations

import math
import re
import socket
from dataclasses import replace

import pytest
import torch

import forked
from checkpoints import final_of
from factories import environment, make_data, make_run, train_fields
from gpt2 import dist
from gpt2.checkpoint import load_checkpoint
from gpt2.data.batches import Batches
from gpt2.dist import World
from gpt2.log import RunLog
from gpt2.model.registry import build_model
from gpt2.schedule import scale
from gpt2.steps import StepNumbers
from gpt2.train import leave_together
from kmatrix.locks import release, try_lock
from kmatrix.records.attempts import path_of
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import merged_metrics
from kmatrix.records.train_config import TrainConfig
from recordings import read_jsonl
from training import train_here

WORLD = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A finished run of 12 steps that logs every second step, and its output."""
    run_dir = make_run(tmp_path_factory.mktemp("finished"), log_interval=2, checkpoint_interval=4)
    return run_dir, train_here(run_dir)


def test_a_run_finishes_and_writes_its_result(finished_run):
    run_dir, process = finished_run
    result = read_json(run_dir.result)
    assert process.returncode == 0, process.stdout
    assert (result["status"], result["kind"], result["reason"], result["run_id"]) == (
        "finished",
        None,
        None,
        "0123456789",
    )
    assert (result["step"], result["tokens"], result["mfu"]) == (12, 12 * 4 * 32, None)
    assert result["final_val_loss"] < result["initial_val_loss"]
    assert result["peak_memory_mib"] > 50
    assert result["used"] == read_json(run_dir.run_json)["train"]
    assert (result["adjusted"], len(result["devices"]), result["hosts"]) == ([], 1, [socket.gethostname()])
    assert load_checkpoint(final_of(run_dir.path))["step"] == 12
    assert [event["step"] for event in read_jsonl(run_dir.events)] == [4, 5, 8, 10, 12]  # interval, best and final


def test_metrics_and_the_log_have_a_line_at_the_interval_and_at_the_last_step(finished_run):
    run_dir, process = finished_run
    lines = list(read_jsonl(run_dir.metrics))
    assert [line["step"] for line in lines if "train/loss" in line] == [0, 2, 4, 6, 8, 10, 11]
    assert [line["step"] for line in lines if "val/loss" in line] == [0, 5, 10, 12]
    assert [line.step for line in merged_metrics(run_dir.metrics)] == [0, 2, 4, 5, 6, 8, 10, 11, 12]
    assert all(line["tokens"] == line["step"] * 128 and line["attempt"] == 1 for line in lines)
    number = r"-?[\d.]+"
    train = (
        rf"epoch \d+ \| loss {number} \| lr \d\.\d\de-\d\d \| norm {number} \| dt {number}ms \| tok/s \d+ \| mfu n/a"
    )
    for text, count in ((train, 7), (rf"Validation loss {number} \| bpb {number}", 4)):
        assert len(re.findall(rf"^Iter \d+ \| {text}$", process.stdout, re.MULTILINE)) == count
    assert re.search(r"\nFinal .*: \d\.\d{4}\nBest validation loss: \d\.\d{4} \(Iter \d+\)\n$", process.stdout)


def test_the_phases_of_a_run_begin_with_its_set_up_and_end_with_its_ending(finished_run):
    run_dir, _ = finished_run
    phases = [(line["phase"], line["begin"], line["end"]) for line in read_jsonl(run_dir.phases)]
    assert [phases[0][0], phases[-1][0]] == ["set-up", "ending"]
    assert {name for name, _, _ in phases[1:-1]} == {"evaluation", "checkpoint"}
    assert phases[-2][2] <= phases[-1][1], "the training ends after its last checkpoint"


def test_the_first_lines_are_the_losses_of_the_initial_weights(finished_run):
    config = TrainConfig.from_json(read_json(finished_run[0].run_json)["train"])
    with torch.no_grad():
        _, loss = build_model(config)(*Batches(config, WORLD).next())
    first = merged_metrics(finished_run[0].metrics)[0].values
    assert first["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert first["val/loss"] == pytest.approx(math.log(257), abs=0.2)
    assert first["train/lr"] == pytest.approx(config.learning_rate * scale(config, 0))


def test_a_diverging_run_fails_with_its_reason_and_no_final_checkpoint(tmp_path):
    run_dir = make_run(tmp_path, learning_rate=1e9, warmup_steps=0, grad_clip=0.0, max_iters=50, eval_interval=1000)
    process = train_here(run_dir)
    result = read_json(run_dir.result)
    assert (process.returncode, result["status"], result["kind"]) == (1, "failed", "nan")
    assert re.fullmatch(r"(loss|gradient norm) is (nan|inf) at step \d+", result["reason"])
    assert result["step"] < 50
    assert not run_dir.checkpoints.exists()
    assert [event["event"] for event in read_jsonl(run_dir.events)] == ["failed"]
    for path in (run_dir.result, run_dir.metrics):
        assert not re.search("NaN|Infinity", path.read_text())


@pytest.mark.process
def test_a_full_disk_costs_the_checkpoints_but_not_the_metrics(tmp_path):
    run_dir = make_run(tmp_path, checkpoint_interval=4, save_best=False)
    process = forked.run(["tests/support/trainer_faults.py", str(run_dir.path)], {**environment(), "FAULT": "full:0:0"})
    result = read_json(run_dir.result)
    assert (result["status"], result["kind"], result["step"]) == ("failed", "error", 12), process.stderr
    assert "the checkpoint of step 12 could not be written" in result["reason"]
    assert result["final_val_loss"] == merged_metrics(run_dir.metrics)[-1].values["val/loss"] > 0
    events = [(event["step"], event["event"]) for event in read_jsonl(run_dir.events)]
    assert events == [(4, "checkpoint failed"), (8, "checkpoint failed"), (12, "failed")]
    assert not list(run_dir.checkpoints.iterdir())


@pytest.mark.parametrize(
    ("fields", "options", "kind", "reason"),
    [
        ({"data_sha256": "ab" * 32}, {}, "data", "changed after the run was planned"),
        ({"hellaswag": "nowhere", "benchmark_interval": 0}, {}, "data", "cannot be read"),
        ({}, {"micro_batch": 3}, "error", "it does not divide the 4 sequences of a rank"),
    ],
)
def test_a_run_that_is_not_as_planned_is_refused_with_a_result_that_has_no_numbers(
    tmp_path, fields, options, kind, reason
):
    make_data(tmp_path / "data")
    run_dir = make_run(tmp_path, **fields)
    process = train_here(run_dir, **options)
    result = read_json(run_dir.result)
    assert (process.returncode, result["status"], result["kind"], result["step"]) == (1, "failed", kind, 0)
    assert reason in result["reason"]
    assert not {"final_val_loss", "tokens_per_second", "peak_memory_mib"} & result.keys()


@pytest.mark.process
def test_a_run_without_run_json_is_refused(tmp_path):
    process = forked.run(["-m", "gpt2.train", str(tmp_path)], environment())
    assert process.returncode == 2
    assert "run.json is missing" in process.stderr


def test_an_attempt_that_was_replaced_publishes_neither_a_checkpoint_nor_a_result(tmp_path, monkeypatch):
    """Its node was cut off, and comes back while a newer attempt trains."""
    run_dir, codes = make_run(tmp_path, checkpoint_interval=4, save_best=False), []
    write_json(path_of(run_dir.path, 2), {"number": 2})

    def leave(code):
        codes.append(code)
        raise SystemExit

    monkeypatch.setattr("gpt2.log.exit_now", leave)
    with pytest.raises(SystemExit):
        train_here(run_dir, attempt=1)

    assert codes == [1]
    assert Checkpoints(run_dir.checkpoints).all() == []
    assert not run_dir.result.exists()


@pytest.mark.process
def test_a_rank_that_was_started_by_hand_leaves_a_run_alone_that_is_being_trained(tmp_path):
    run_dir = make_run(tmp_path)
    lock = try_lock(run_dir.lock)

    process = forked.run(["-m", "gpt2.train", str(run_dir.path)], environment())

    assert (process.returncode, f"{run_dir.name} is being trained" in process.stderr) == (2, True)
    assert not run_dir.metrics.exists()
    release(lock)


def log_of(tmp_path, **overrides):
    log = RunLog(RunDir(tmp_path), "a", 1, main=True)
    log.begin(TrainConfig.from_json(train_fields(tmp_path, "", **overrides)), WORLD)
    return log


def test_the_speed_is_the_mean_since_the_line_before_and_of_the_attempt_without_its_warm_up(tmp_path):
    log = log_of(tmp_path, log_interval=2, peak_tflops=0.001)
    for step, seconds in enumerate((9.0, 1.0, 3.0, *[60.0] * 7, *[0.5] * 21)):
        log.training(StepNumbers(step, 1e-3, 3.0, 1.0, stop=False, seconds=seconds, compute_s=seconds / 2), 0)
    lines = list(read_jsonl(log.dir.metrics))
    assert [line["throughput/step_ms"] for line in lines[:2]] == [9000, 2000]
    assert lines[1]["throughput/tokens_per_s"] == 64
    assert lines[1]["throughput/mfu"] == pytest.approx(64 * log.config.shape.flops_per_token / 1e9)
    timing = read_jsonl(log.dir.timings(0))[0]
    assert (timing["step"], timing["steps"], timing["compute_ms"], timing["step_ms"]) == (2, 2, 1000, 2000)
    result = log.result("finished")
    assert (result["tokens_per_second"], result["step_ms"]) == (256, 500)


def test_a_truncated_line_of_any_log_is_ended_by_the_next_attempt(tmp_path):
    run_dir = RunDir(tmp_path)
    paths = (run_dir.metrics, run_dir.events, run_dir.phases, run_dir.timings(0))
    run_dir.rank(0).mkdir(parents=True)
    for path in paths:
        path.write_text('{"step": 1, "att')
    log_of(tmp_path)
    assert {path.name: path.read_text()[-1] for path in paths} == {path.name: "\n" for path in paths}


def test_a_rank_that_is_lost_after_the_result_does_not_change_it(tmp_path, monkeypatch):
    def lost(*_):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "gather", lost)  # by this name, train calls it only at the end
    run_dir = make_run(tmp_path, max_iters=1)
    process = train_here(run_dir)
    assert (process.returncode, read_json(run_dir.result)["status"]) == (0, "finished")
    assert "a rank was lost after the end of the run: RuntimeError: Connection closed" in process.stdout
    with pytest.raises(RuntimeError):  # there may be no result: this rank says so
        leave_together(replace(WORLD, rank=1), RunLog(run_dir, "a", 1, main=False))
