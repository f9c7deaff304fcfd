"""Preflight, packed runs and ON_FINISH through make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_stage import load_json
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]

FAULT = '''
"""A trainer with sgd fails in its first step."""
import json, sys
words = sys.orig_argv
if "gpt2.train" in words and "torch.distributed.run" not in words:
    with open(words[words.index("gpt2.train") + 1] + "/run.json") as file:
        optimizer = json.load(file)["train"]["optimizer"]
    if optimizer == "sgd":
        import torch

        def broken(self, *args, **more):
            raise RuntimeError("the cable was pulled")

        torch.Tensor.backward = broken
'''
TINY = (
    *("NUM_GPUS=1", "GLOBAL_BATCH=4", "DEVICE=cpu", "LR=1e-3", "LOG_INTERVAL=10", "CPU_THREADS=1", "REUSE=n"),
    *("MODEL=custom", "N_LAYER=2", "N_HEAD=2", "N_EMBD=32", "BLOCK_SIZE=32", "BATCH_SIZE=4", "EVAL_SAMPLES=8"),
)
REPORT_VARIABLES = (
    "import json, os; print(json.dumps({name: os.environ[name] for name in os.environ if name.startswith('KMATRIX_')}))"
)


@pytest.fixture(autouse=True)
def configured_clone(clone):
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0


def matrices(folder: Path) -> list[Path]:
    return sorted(folder.glob("test_matrix_results_*"))


def test_a_bad_cell_fails_within_seconds_and_the_printed_hint_works(clone, tmp_path):
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "sitecustomize.py").write_text(FAULT, encoding="utf-8")
    (tmp_path / "say.py").write_text(REPORT_VARIABLES, encoding="utf-8")
    results = tmp_path / "results"
    arguments = (*TINY, "SEED=1,2", "MAX_ITERS=20", "EVAL_INTERVAL=20", "GPU_MONITOR=n", f"RESULTS_DIR={results}")
    variables = {"PYTHONPATH": str(tmp_path / "faults")}
    completed = clone.kmatrix("test-matrix", *arguments, "OPTIMIZER=adamw,sgd", "PREFLIGHT=1", **variables)
    assert completed.returncode == 2, completed.stdout + completed.stderr
    assert "2 of 4 runs fail; nothing was started" in completed.stderr
    assert "the cable was pulled" in completed.stderr
    assert "leave them out with OPTIMIZER=adamw" in completed.stderr
    assert list(results.iterdir()) == []

    finish = f"ON_FINISH={clone.python} {tmp_path / 'say.py'}"
    completed = clone.kmatrix("test-matrix", *arguments, "OPTIMIZER=adamw", "PREFLIGHT=1", finish, **variables)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "preflight: two steps of 1 shape, for 2 runs" in completed.stdout
    (matrix,) = matrices(results)
    reported = json.loads(next(line for line in completed.stdout.splitlines() if line.startswith('{"KMATRIX_')))
    expected = {"KMATRIX_MATRIX": str(matrix), "KMATRIX_STATUS": "finished"}
    assert reported.items() >= (expected | {"KMATRIX_FINISHED": "2", "KMATRIX_FAILED": "0"}).items()
    assert [load_json(path)["step"] for path in matrix.glob("*/result.json")] == [20, 20]
    assert sorted(path.name for path in results.iterdir()) == [matrix.name]


@pytest.mark.parametrize("text", ["no-such-program x", "'half"])
def test_an_on_finish_command_that_cannot_run_is_refused_before_training(clone, tmp_path, text):
    completed = clone.kmatrix("test-matrix", *TINY, f"ON_FINISH={text}", f"RESULTS_DIR={tmp_path}")
    assert completed.returncode == 2
    assert "ON_FINISH" in completed.stderr
    assert matrices(tmp_path) == []


def test_the_recorder_of_each_packed_run_sees_only_the_gpus_of_that_run(clone, tmp_path):
    arguments = (*TINY, "OPTIMIZER=adamw", "SEED=1,2", "MAX_ITERS=2000000", "EVAL_INTERVAL=1000000", "ALERT_STALL=0")
    packed = ("PARALLEL_JOBS=2", "EXCLUSIVE=n", "SIMULATE=4", f"RESULTS_DIR={tmp_path}", "DETACH=1")
    completed = clone.make("test-matrix", *arguments, *packed)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (matrix,) = matrices(tmp_path)

    def gpus() -> list[dict]:
        view = json.loads(clone.kmatrix("status", f"TARGET={matrix}", "JSON=1").stdout)
        return [gpu for gpu in view["gpus"] if gpu["run"]]

    try:
        found = wait_until(lambda: (found := gpus()) and len(found) >= 2 and found, "both are recorded", 300)
        assert len(found) == len({gpu["run"] for gpu in found}) == len({gpu["uuid"] for gpu in found}) == 2
    finally:
        clone.make("stop", f"TARGET={matrix}")
