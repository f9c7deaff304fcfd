"""results.json validates against its published schema, whatever the matrix is like; the schema misses nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

import kmatrix.report.formats
from gpu_factory import FakeGpus, record
from kmatrix.records.runs import Status
from kmatrix.report.analysis import analyse
from kmatrix.report.numbers import CostQuantity
from kmatrix.report.sentences.values import LineLabel
from kmatrix.report.write import write_summary
from kmatrix.status.alerts import Alert, AlertKind, Severity
from kmatrix.verdict.family import Method, NoMoreSeeds, PairOutcome
from records_factory import FakeRun, edit_attempt, make_matrix, runs_with_seeds, write_alerts

SCHEMA = json.loads((Path(kmatrix.report.formats.__file__).parent / "results.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
AUTO = {"seeds_auto": True, "seeds": list(range(1, 7)), "seeds_min": 3}
MUON, ADAMW = [3.2715, 3.2741, 3.2702], [3.2811, 3.2834, 3.2802]


def seeds(count, **fields):
    return [FakeRun(seed=seed, axes={"seed": str(seed)}, **fields) for seed in range(4, 4 + count)]


MATRICES = {
    "one run": ([FakeRun()], {}),
    "one seed": ([FakeRun(), FakeRun(optimizer="muon")], {}),
    "seeds": (
        runs_with_seeds(3, ADAMW) + runs_with_seeds(3, MUON, optimizer="muon"),
        {"verdict": {"target_loss": 3.3}},
    ),
    "baseline": (
        runs_with_seeds(3, ADAMW) + runs_with_seeds(3, MUON, optimizer="muon"),
        {"verdict": {"baseline": {"optimizer": "adamw"}, "min_difference": 0.5}},
    ),
    "failed": ([FakeRun(status="failed", kind="nan", reason="loss is nan", stop_at=40, log_tail=("a",))], {}),
    "planned": ([], {"planned": [FakeRun()]}),
    "everything": (
        [
            *runs_with_seeds(2, [3.2, 3.3]),
            FakeRun(optimizer="sgd", status="failed", kind="nan", reason="nan", stop_at=40),
            FakeRun(optimizer="adam", status="stopped", reason="stopped by make stop", stop_at=62),
            FakeRun(optimizer="muon", gpus=4, status="skipped", reason="needs 4 GPUs"),
        ],
        {"cuts": [(2, "too many GPUs")], "verdict": {"target_loss": 1.0}},
    ),
    "adaptive": (
        runs_with_seeds(3, ADAMW) + runs_with_seeds(3, MUON, optimizer="muon"),
        {"planned": seeds(3) + seeds(3, optimizer="muon"), "verdict": AUTO},
    ),
    "running": (
        [FakeRun(), FakeRun(optimizer="muon", status="running", stop_at=30, result=False)],
        {"planned": [FakeRun(optimizer="sgd")]},
    ),
    "without a loss": (
        [FakeRun(status="failed", kind="oom", reason="out of memory", stop_at=3, result=False, log_tail=("x",))],
        {"planned": [FakeRun(optimizer="muon")]},
    ),
    "all diverged": (
        runs_with_seeds(2, [11.5, 12.0]) + runs_with_seeds(2, [11.6, 12.1], optimizer="muon"),
        {"verdict": {"target_loss": 3.0}},
    ),
    "other seeds": (
        runs_with_seeds(3, ADAMW) + [replace(run, optimizer="muon") for run in seeds(3)],
        {"verdict": {"confidence": 0.99}},
    ),
    "two sets of data": (
        runs_with_seeds(3, ADAMW, axes={"dataset": "a"})
        + runs_with_seeds(3, MUON, axes={"dataset": "b"}, data_sha256="f" * 64),
        {"verdict": {"target_loss": 3.3}},
    ),
    "an adaptive baseline": (
        runs_with_seeds(3, ADAMW) + runs_with_seeds(3, MUON, optimizer="muon"),
        {
            "planned": seeds(3) + seeds(3, optimizer="muon"),
            "verdict": AUTO | {"baseline": {"optimizer": "adamw"}, "min_difference": 0.004, "target_loss": 3.275},
        },
    ),
    "stopped by a budget": (
        [FakeRun(), FakeRun(optimizer="muon", ended_by="max_time", stop_at=50)],
        {},
    ),
}


def results_of(matrix):
    write_summary(analyse(matrix))
    return json.loads(matrix.results.read_text(encoding="utf-8"))


def test_the_schema_is_valid_itself():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("kind", MATRICES)
def test_results_validate(kind, tmp_path):
    runs, fields = MATRICES[kind]
    VALIDATOR.validate(results_of(make_matrix(tmp_path, runs, **fields)))


def test_results_with_recorded_gpus_validate(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(device="cuda", gpus=2)])
    record(next(iter(matrix.runs())), FakeGpus())
    results = results_of(matrix)
    assert results["runs"][0]["gpu"] is not None
    VALIDATOR.validate(results)


def test_adaptive_seeds_are_in_the_results(tmp_path):
    runs, fields = MATRICES["adaptive"]
    results = results_of(make_matrix(tmp_path, runs, **fields))
    (ranking,) = results["rankings"]
    assert ranking["seeds_auto"]["seeds_max"] == 6
    assert ranking["comparisons"][0]["method"] == "paired by seed, sequential"
    assert len(results["reserve"]) + ranking["seeds_auto"]["wanted"] == 6


def test_every_number_of_a_run_but_counts_has_its_unit():
    counts = {"world_size", "seed", "attempt", "steps", "max_iters", "planned_tokens", "last_val_step", "best_val_step"}
    silent = {
        name
        for name, value in SCHEMA["$defs"]["run"]["properties"].items()
        if {"number", "integer"} & set(value.get("type", ())) and "description" not in value
    }
    assert silent <= counts


@pytest.mark.parametrize(
    ("path", "values"),
    [
        (("$defs", "run", "properties", "status"), Status),
        (("$defs", "attempt", "properties", "status"), Status),
        (("$defs", "alert", "properties", "kind"), AlertKind),
        (("$defs", "alert", "properties", "severity"), Severity),
        (("$defs", "pair", "properties", "outcome"), PairOutcome),
        (("$defs", "pair", "properties", "no_more"), [*NoMoreSeeds, None]),
        (("$defs", "pair", "properties", "method"), [*(one for one in Method if one), None]),
        (("$defs", "cost", "properties", "quantity"), CostQuantity),
        (("$defs", "ranking", "properties", "lines", "items", "properties", "label"), LineLabel),
    ],
)
def test_the_words_of_the_schema_are_those_of_the_program(path, values):
    found = SCHEMA
    for key in path:
        found = found[key]
    assert found["enum"] == list(values)


def test_alerts_attempts_and_devices_validate(tmp_path):
    matrix = make_matrix(tmp_path, [FakeRun(device="cuda", gpus=2)])
    (run,) = matrix.runs()
    record(run, FakeGpus())
    error = {"time": 6.0, "event": "xid", "gpu_index": 1, "text": "A10G (GPU-1): XID 79", "xid": 79, "xid_count": 2}
    run.gpu_events.write_text(json.dumps(error) + "\n")
    alert = Alert(kind=AlertKind.TEMPERATURE, severity=Severity.WARNING, since=5.0, about="GPU 1", value=91.0)
    write_alerts(run, alert)
    edit_attempt(run, 2, end=None, code="c0de")
    edit_attempt(run, 1, end={"kind": "oom", "reason": "out of memory"}, gpus=["GPU-0"])

    results = results_of(matrix)

    assert [len(results["runs"][0][key]) for key in ("alerts", "attempts")] == [1, 2]
    devices = results["runs"][0]["gpu"]["gpus"]
    assert [device["xids"] for device in devices] == [[], [{"code": 79, "count": 2, "first": 6.0, "last": 6.0}], [], []]
    VALIDATOR.validate(results)
