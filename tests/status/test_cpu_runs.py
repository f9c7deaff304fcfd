"""The speed of this machine's CPU, from finished runs in the results directory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from factories import make_run, train_config
from kmatrix.packing import usable_cores
from kmatrix.plan.cpu import FASTER, SLOWER, cpu_speed
from kmatrix.records.files import read_json, write_json
from kmatrix.shapes import ModelShape, cpu_name
from kmatrix.status.cpu_runs import CpuRuns

TRAIN = train_config(cpu_threads=1)
SHAPE = ModelShape(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=257)
RATE = 1000.0  # tokens/s
MEASURED = RATE * SHAPE.flops_per_token


@pytest.fixture
def run(tmp_path):
    """A finished run on this machine, in a matrix of a results directory."""
    made = make_run(tmp_path / "test_matrix_results_20260101_000000", data_path=tmp_path / "data")
    about = read_json(made.run_json)
    about["provenance"] |= {"cpu": cpu_name(), "cores": usable_cores()}
    write_json(made.run_json, about)
    write_json(made.result, {"status": "finished", "step": 12, "tokens_per_second": RATE})
    return made


def test_the_speed_is_that_of_an_earlier_run_like_it(run, tmp_path):
    speed = CpuRuns(tmp_path).speed(SHAPE, TRAIN)
    assert speed.slow == pytest.approx(MEASURED / SLOWER)
    assert speed.fast == pytest.approx(MEASURED * FASTER)
    assert speed.source == "from 1 earlier run on this machine"
    assert run.result.is_file()


@pytest.mark.parametrize(
    ("shape", "train"),
    [(replace(SHAPE, n_layer=20, n_embd=64), TRAIN), (SHAPE, replace(TRAIN, dtype="bf16"))],
    ids=["larger", "another precision"],
)
@pytest.mark.usefixtures("run")
def test_a_run_of_another_size_or_precision_does_not_count(tmp_path, shape, train):
    assert CpuRuns(tmp_path).speed(shape, train) == cpu_speed(train)


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("result", {"status": "failed"}),
        ("result", {"tokens_per_second": None}),
        ("run_json", {"provenance": {"cpu": "another processor", "cores": usable_cores()}}),
        ("run_json", {"provenance": {}}),
    ],
)
def test_a_run_that_failed_or_was_on_another_machine_does_not_count(run, tmp_path, file, values):
    path = getattr(run, file)
    write_json(path, read_json(path) | values)
    assert CpuRuns(tmp_path).speed(SHAPE, TRAIN) == cpu_speed(TRAIN)


def test_damaged_files_and_a_missing_directory_are_skipped(run, tmp_path):
    run.result.write_text("{", encoding="utf-8")
    assert CpuRuns(tmp_path).speed(SHAPE, TRAIN) == cpu_speed(TRAIN)
    assert CpuRuns(tmp_path / "missing").speed(SHAPE, TRAIN) == cpu_speed(TRAIN)
