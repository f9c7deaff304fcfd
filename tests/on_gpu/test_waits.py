"""A step does not wait for the GPU, nothing is compiled after the first steps, and little time goes elsewhere."""

from __future__ import annotations

import json

import pytest

from factories import make_data, make_run
from kmatrix.records.files import read_json, read_jsonl

pytestmark = pytest.mark.gpu
PROGRAM = ("tests/support/device_waits.py",)
RUN = {"max_iters": 12, "eval_interval": 5, "eval_samples": 10, "checkpoint_interval": 5, "log_interval": 4}
OPTIONS = {
    "eager": {},
    "bf16": {"dtype": "bf16"},
    "accumulation": {"batch_size": 2, "gradient_accumulation": 4},
    "dropout": {"dropout": 0.1},
    "chunked loss": {"loss_chunk": 64},
}
COMPILED = {
    "one graph": {},
    "bf16": {"dtype": "bf16"},
    "accumulation": {"batch_size": 2, "gradient_accumulation": 4},
    "CUDA graphs": {"compile_mode": "reduce_overhead"},
    "recomputed": {"recompute": True, "recompute_scope": "elementwise"},
}
# The run whose shares of time count: 124M, 32 sequences of 1024 tokens per step, in bf16 and compiled; an evaluation
# of 64 sequences and a checkpoint every 250 of 500 steps.
SHAPE = {"batch_size": 32, "dtype": "bf16", "max_iters": 500, "eval_interval": 250, "eval_samples": 64}
SHAPE |= {"checkpoint_interval": 250, "log_interval": 50, "save_best": False}
MOST_INPUT, MOST_ELSEWHERE = 0.01, 0.02


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return the fields of the tokens that all runs of this module read."""
    folder = tmp_path_factory.mktemp("waits") / "data"
    return {"data_path": folder, "data_sha256": make_data(folder, train=2_000_000, val=200_000)}


def counted(device, folder, **fields):
    """Train a run in which waits are errors, and return its directory and counts."""
    variables = {key: fields.pop(key) for key in ("WAITS",) if key in fields}
    run_dir = make_run(folder, "run", **device.fields(**fields))
    device.train(run_dir, program=PROGRAM, COUNTS=folder / "counts", **variables)
    return run_dir, json.loads((folder / "counts").read_text())


@pytest.mark.parametrize("option", OPTIONS)
def test_a_step_does_not_wait_for_the_device(device, sizes, data, tmp_path, option):
    _, counts = counted(device, tmp_path, **{**data, **sizes, **RUN, **OPTIONS[option]})
    assert counts["checked"] == RUN["max_iters"] - 3


@pytest.mark.parametrize("option", COMPILED)
def test_nothing_is_compiled_after_step_2(device, sizes, data, tmp_path, option):
    """Evaluations, checkpoints and the last micro-batch of an evaluation follow."""
    run = {**data, **sizes, **RUN, **device.compiled(), **COMPILED[option]}
    # The double of the CPU sees operators, and its mode would be a reason to compile again.
    _, counts = counted(device, tmp_path, **run, WAITS=int(device.is_gpu))
    assert counts["graphs_early"] == counts["graphs"] > 0


@pytest.mark.timeout(1800)
def test_input_takes_less_than_1_percent_and_evaluations_and_checkpoints_less_than_2(
    device, large, data, tmp_path, only_on_gpu
):
    shape = SHAPE if device.is_gpu else {**RUN, "batch_size": 2}
    run_dir, counts = counted(device, tmp_path, **{**data, **large, **shape, **device.compiled(), "WAITS": 0})
    phases = list(read_jsonl(run_dir.phases))
    elsewhere = sum(line["end"] - line["begin"] for line in phases if line["phase"] in ("evaluation", "checkpoint"))
    whole = read_json(run_dir.result)["seconds"]
    # The steps of a GPU run ahead of it: the time of the run is what counts, and input is all that the loop waits for.
    shares = (counts["input_s"] / whole, elsewhere / whole)
    assert all(0 <= share < 1 for share in shares)
    only_on_gpu("shares of time count on a GPU alone")
    assert shares[0] < MOST_INPUT
    assert shares[1] < MOST_ELSEWHERE
