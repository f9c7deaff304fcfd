"""A dry run and a run call functions of few files and rarely return to an earlier one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from factories import ROOT, make_data

TWO_RUNS = (
    *("CONFIG_GPT2_DEVICE_CPU=y", "CONFIG_GPT2_MODEL_CUSTOM=y", "CONFIG_GPT2_N_LAYER=1", "CONFIG_GPT2_N_HEAD=2"),
    *("CONFIG_GPT2_N_EMBD=16", "CONFIG_GPT2_BLOCK_SIZE=32", "CONFIG_GPT2_BATCH_SIZE=4", "CONFIG_GPT2_NUM_GPUS=1"),
    *("CONFIG_GPT2_MAX_ITERS=10", "CONFIG_GPT2_EVAL_INTERVAL=5", "CONFIG_GPT2_EVAL_SAMPLES=12"),
    *("CONFIG_GPT2_TOKENIZER_BYTE=y", "CONFIG_GPT2_DATASET_SHARDS=y", 'CONFIG_GPT2_DATA_PATH="random"'),
    *("CONFIG_MATRIX=y", "CONFIG_MATRIX_GPT2_OPTIMIZER_ADAMW=y", "CONFIG_MATRIX_GPT2_OPTIMIZER_MUON=y"),
    "CONFIG_AUTO_GENERATE_GRAPHS=n",
)


# bench/trace_files.py with a trainer without torch: the runner's own path is the same.
TRACED = """
import functools, sys
sys.path[:0] = [{root!r} + part for part in ("/lib", "", "/bench")]
import kmatrix.runner.execute
from kmatrix.engines.local.engine import LocalEngine
kmatrix.runner.execute.LocalEngine = functools.partial(LocalEngine, torchrun=(sys.executable, {trainer!r}))
import trace_files
trace_files.main()
"""
TRAINER = """
import sys
sys.path.insert(0, {support!r})
sys.argv = [word for word in sys.argv if word not in ("-m", "gpt2.train")] + ["--behave=quick"]
import fakes
fakes.train()
"""


@pytest.fixture
def count_files(tmp_path):
    """Return a function that runs a command and counts the files it visits and its returns to earlier ones."""

    def trace(command: str, part: str) -> tuple[int, int]:
        trainer = tmp_path / "trainer.py"
        trainer.write_text(TRAINER.format(support=str(ROOT / "tests" / "support")))
        program = TRACED.format(root=str(ROOT), trainer=str(trainer))
        options = (f"O={tmp_path}", f"DATA_DIR={tmp_path / 'data'}", f"RESULTS_DIR={tmp_path}")
        completed = subprocess.run(
            [sys.executable, "-c", program, ROOT, "--", command, *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
        print(completed.stdout)
        (found,) = re.findall(rf"^{part}: (\d+) files, (\d+) returns", completed.stdout, re.MULTILINE)
        return int(found[0]), int(found[1])

    return trace


def test_a_dry_run_of_the_quickstart_visits_at_most_30_files_with_23_returns(count_files, tmp_path):
    shutil.copy(ROOT / "defconfigs" / "gpt2-cpu-quick", tmp_path / ".config")
    files, returns = count_files("test-matrix-dry-run", "all")
    assert files <= 30  # four of them resolve and check the rules of the verdict
    assert returns <= 23  # two of them to the rows of logits, which the plan and the trainer share


def test_a_run_visits_at_most_44_files_with_50_returns(count_files, tmp_path):
    (tmp_path / ".config").write_text("\n".join([*TWO_RUNS, ""]))
    make_data(tmp_path / "data" / "random")
    files, returns = count_files("test-matrix", "running")
    # Six of them thin the curves of a run that ended; two more, or not, depending on the first sample of the devices.
    assert files <= 44
    # Three of them ask whether a verdict or a rung wants further runs: of every matrix.
    assert returns <= 50
