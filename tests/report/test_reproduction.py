"""A run and its repetition are equal bit for bit, or the first difference is reported."""

from __future__ import annotations

import json

import pytest
import torch

from gpt2.checkpoint import compare, weights_sha256
from kmatrix.records import attempts
from kmatrix.records.files import append_jsonl, write_json
from kmatrix.records.matrix import CODE
from kmatrix.records.paths import RunDir
from kmatrix.report.reproduction import changes, repetition

PROVENANCE = {"code": "c0de", "python": "3.11.7", "cpu": "EPYC", "host": "n1"}
PROVENANCE |= {"versions": {"torch": "2.13.0"}, "environment": {}}
SETTING_FIELDS = {"device": "cpu", "seed": 1, "batch_size": 4, "data_path": "/a", "keep_checkpoints": 3}


@pytest.fixture
def runs(tmp_path):
    """Two runs of four steps with the same log, each in its own matrix."""
    found = [RunDir(tmp_path / f"matrix_{name}" / "gpt2_adamw_1cpu") for name in "ab"]
    for number, run in enumerate(found):
        run.path.mkdir(parents=True)
        write_json(run.run_json, {"run_id": "id", "train": SETTING_FIELDS, "provenance": PROVENANCE})
        write_json(run.result, {"status": "finished"})
        for step in range(4):
            line = {"step": step, "attempt": 1, "time": 100.0 * number + step, "elapsed_s": step * (1 + number)}
            numbers = {"train/loss": 5.0 - 0.1 * step, "train/lr": 1e-3, "throughput/mfu": 0.1 * number}
            append_jsonl(run.metrics, {**line, **numbers})
    return found


def change_metrics(run, step, **numbers):
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    lines = [line | numbers if line["step"] == step else line for line in lines]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_run_json(run, **changes):
    """Change nested values in run.json."""
    record = json.loads(run.run_json.read_text())
    write_json(
        run.run_json,
        {key: value | changes.get(key, {}) if isinstance(value, dict) else value for key, value in record.items()},
    )


def test_runs_with_the_same_log_are_equal_whatever_time_they_took(runs):
    found = repetition(*runs)
    assert found.equal
    assert found.lines() == ["equal bit for bit: 8 values in 4 steps"]


def test_a_difference_in_the_last_bit_of_a_loss_is_found_and_printed_exactly(runs):
    change_metrics(runs[1], 2, **{"train/loss": 4.800000000000001})
    assert repetition(*runs).lines() == [
        "not equal: 1 of 8 values in 4 steps differ",
        "first at step 2: train/loss 4.8 -> 4.800000000000001",
    ]


def test_the_first_and_the_last_difference_are_printed(runs):
    change_metrics(runs[1], 1, **{"train/loss": 4.9001})
    change_metrics(runs[1], 3, **{"train/loss": 4.5})
    first, last = repetition(*runs).lines()[1:]
    assert first.startswith("first at step 1: train/loss 4.9 -> 4.9001")
    assert last.startswith("last at step 3: train/loss 4.7 -> 4.5")


def test_an_unfinished_run_is_compared_up_to_its_last_logged_step(runs):
    append_jsonl(runs[1].metrics, {"step": 4, "attempt": 1, "train/loss": 4.6})
    assert repetition(*runs).values[4, "train/loss"] == (None, 4.6)
    write_json(runs[0].result, {"status": "stopped"})
    assert repetition(*runs).lines() == ["equal bit for bit: 8 values in 4 steps"]


def test_lines_that_a_resume_made_void_are_not_compared(runs):
    append_jsonl(runs[1].metrics, {"step": 2, "attempt": 2, "resumed": True})
    append_jsonl(runs[1].metrics, {"step": 3, "attempt": 2, "train/loss": 5.0 - 0.1 * 3, "train/lr": 1e-3})
    assert repetition(*runs).equal


def test_two_runs_without_numbers_do_not_count_as_equal(tmp_path):
    found = repetition(RunDir(tmp_path / "a"), RunDir(tmp_path / "b"))
    assert found.lines() == ["nothing to compare: no values were logged"]


def test_equality_is_promised_for_the_same_code_torch_and_processor_on_the_cpu(runs):
    assert changes(*runs).promised


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        ({"provenance": {"versions": {"torch": "2.14.0"}}}, "torch 2.13.0 -> 2.14.0"),
        ({"provenance": {"cpu": "Xeon"}}, "device EPYC -> Xeon"),
        ({"provenance": {"environment": {"MKL_CBWR": "AVX2"}}}, "MKL_CBWR (none) -> AVX2"),
    ],
)
def test_a_different_torch_processor_or_setting_voids_the_promise_and_is_named(runs, cause, expected):
    change_run_json(runs[1], **cause)
    found = changes(*runs)
    assert (found.promised, found.others) == (False, (expected,))


@pytest.mark.parametrize(("device", "expected"), [("EPYC", ()), ("Xeon", ("device EPYC -> Xeon",))])
def test_on_a_cluster_the_devices_of_the_nodes_count_and_not_their_hosts_or_the_submitter(runs, device, expected):
    for run, host, name in zip(runs, ("n1", "n2"), ("EPYC", device), strict=True):
        write_json(run.result, {"status": "finished", "hosts": [host] * 2, "devices": [name] * 2})
    change_run_json(runs[1], provenance={"cpu": "processor of the login node", "host": "login2"})
    assert changes(*runs).others == expected
    assert changes(*runs).configuration == ()


def test_on_gpus_equality_is_not_promised(runs):
    for run in runs:
        change_run_json(run, train={"device": "cuda"})
    assert (changes(*runs).gpu, changes(*runs).promised) == (True, False)


def test_with_a_fixed_order_of_additions_equality_is_promised_on_gpus_of_one_name(runs):
    for run, name in zip(runs, ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"), strict=True):
        change_run_json(run, train={"device": "cuda", "deterministic": True})
        gpu = {"name": name, "uuid": "GPU-0"}
        write_json(run.result, {"status": "finished", "hosts": ["n1"], "devices": [name], "gpus": [gpu]})
    assert changes(*runs).promised
    write_json(runs[1].result, {"status": "finished", "hosts": ["n1"], "devices": ["NVIDIA A100"], "gpus": [gpu]})
    assert changes(*runs).others == ("device NVIDIA H100 80GB HBM3 -> NVIDIA A100",)


def test_changed_files_of_the_trainer_are_named(runs):
    change_run_json(runs[1], provenance={"code": "other"})
    assert changes(*runs).code == ("an attempt with CODE=checkout",)
    for run, files in zip(runs, ({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"}), strict=True):
        for name, text in files.items():
            path = run.path.parent / CODE / "gpt2" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    assert changes(*runs).code == ("gpt2/b.py", "gpt2/c.py", "gpt2/d.py")
    for run in runs:  # both were continued with the same code
        write_json(attempts.path_of(run.path, 1), {"number": 1, "code": "c0de"})
    assert changes(*runs).code == ()


def test_a_differing_field_is_named_unless_it_is_a_path_or_neutral(runs):
    change_run_json(runs[1], train={"seed": 2, "data_path": "/b", "keep_checkpoints": 9})
    assert changes(*runs, {"keep_checkpoints"}).configuration == ("seed 1 -> 2",)


def test_a_micro_batch_halved_by_out_of_memory_is_named(runs):
    write_json(runs[0].result, {"status": "finished", "used": {"batch_size": 2}})
    assert changes(*runs).configuration == ("batch_size 2 -> 4",)


def test_weights_are_equal_only_bit_for_bit():
    tensors = {"a": torch.zeros(2, 3), "b": torch.tensor(1.0), "c": torch.ones(2, dtype=torch.bfloat16)}
    same = compare(tensors, {name: value.clone() for name, value in tensors.items()})
    assert (same["equal"], same["tensors"], same["differing"]) == (True, 3, 0)
    assert same["sha256"] == weights_sha256(dict(reversed(tensors.items())))
    other = tensors | {"b": torch.tensor(1.25), "c": tensors["c"] * 2}
    found = compare(tensors, other)
    assert (found["equal"], found["differing"], found["most"], found["by"]) == (False, 2, "c", 1.0)
    assert found["sha256"] != same["sha256"]
