"""A copied checkout runs its own code in every process of a run."""

from __future__ import annotations

import shutil

import pytest

from clones import Clone
from story import matrices, only

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

TINY = (
    *("DEVICE=cpu", "MODEL=custom", "N_LAYER=1", "N_HEAD=2", "N_EMBD=16", "BLOCK_SIZE=32", "BATCH_SIZE=2"),
    *("GLOBAL_BATCH=2", "EVAL_SAMPLES=8", "OPTIMIZER=adamw", "NUM_GPUS=1", "MAX_ITERS=10"),
)
LOG_IMPORT = '\nimport sys\nwith open({path!r}, "a") as file:\n    print({code!r}, *sys.orig_argv, file=file)\n'


@pytest.fixture
def copy(clone, venv, tmp_path) -> Clone:
    """A copy of the clone with its .venv, whose packages log each process that imports them."""
    root = tmp_path / "copy"
    shutil.copytree(clone.root, root, ignore=shutil.ignore_patterns(".venv", "test_matrix_results_*"))
    clone.run("cp", "-r", "--link", str(venv), str(root / ".venv"))  # hard links, because torch takes gigabytes
    for package in ("lib/kmatrix", "gpt2"):
        with (root / package / "__init__.py").open("a") as file:
            file.write(LOG_IMPORT.format(path=str(tmp_path / "processes.txt"), code=f"{package} of the copy:"))
    return Clone(root)


def test_a_changed_string_is_printed_by_the_copy_but_not_by_the_original(clone, copy):
    with (copy.root / "lib" / "kmatrix" / "cli" / "commands.py").open("a") as file:
        file.write('\nprint("a changed string")\n')
    for completed in (copy.make("list-defconfigs"), copy.kmatrix("list-defconfigs")):
        assert completed.returncode == 0, completed.stderr
        assert "a changed string" in completed.stdout
    for completed in (clone.make("list-defconfigs"), clone.kmatrix("list-defconfigs")):
        assert completed.returncode == 0, completed.stderr
        assert "a changed string" not in completed.stdout


def test_every_process_of_a_run_runs_the_code_of_the_copy(copy, tmp_path):
    assert copy.make("defconfig-gpt2-cpu-quick").returncode == 0
    completed = copy.make("train", *TINY, "TRACKER=tensorboard", f"RESULTS_DIR={tmp_path / 'results'}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert list(only(matrices(tmp_path / "results")).glob("tb/*/events.out.tfevents.*"))
    processes = (tmp_path / "processes.txt").read_text()
    for program in ("--make train", "kmatrix.gpu.recorder", "kmatrix.track", "gpt2.train", "gpt2.prepare"):
        lines = [line for line in processes.splitlines() if program in line]
        assert lines, f"{program} ran other code than that of the copy"
    assert "gpt2 of the copy" in processes
