"""Train from a fresh clone to a comparison, with the real make, torchrun and trainer on the CPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from PIL import Image

from slow_training import SlowTraining
from story import load_json, matrices, processes_below
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

QUICK = ("DEVICE=cpu", "MODEL=tiny", "EVAL_SAMPLES=20", "BATCH_SIZE=4", "GLOBAL_BATCH=8")


def check_picture(path: Path) -> None:
    with Image.open(path) as picture:
        picture.verify()
    with Image.open(path) as picture:
        assert picture.width >= 800
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 10, f"{path.name} is blank"


def test_the_quickstart_compares_two_optimizers_from_a_fresh_clone(fresh_clone):
    """Without a configuration, one command trains two optimizers on one and two ranks and compares them.

    A third of its steps, because all of them take six minutes of processor time.
    """
    completed = fresh_clone.make("quickstart", "MAX_ITERS=100")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (matrix,) = matrices(fresh_clone.root)
    runs = [load_json(path) for path in sorted(matrix.glob("*/result.json"))]
    planned = [load_json(path) for path in sorted(matrix.glob("*/run.json"))]
    assert sorted((run["axes"]["optimizer"], run["train"]["num_gpus"]) for run in planned) == [
        ("adamw", 1),
        ("adamw", 2),
        ("muon", 1),
        ("muon", 2),
    ]
    assert len({run["train"]["data_sha256"] for run in planned}) == 1
    for run in runs:
        assert run["status"] == "finished"
        assert run["initial_val_loss"] - run["final_val_loss"] > 1.0
    summary = (matrix / "summary_report.txt").read_text()
    assert f"{matrix.name}: 4 finished" in completed.stdout
    assert "summary_report.txt" in completed.stdout
    assert "one seed per configuration is not evidence" in summary
    assert "CPU ranks" in summary
    assert "Balance (training): CV = " in summary
    for name in ("loss_vs_steps", "loss_vs_tokens", "loss_vs_time", "final_loss_by_run", "throughput_by_run"):
        check_picture(matrix / "graphs" / f"{name}.png")
    assert not (fresh_clone.root / ".config").exists()
    duration = max(run["ended"] for run in runs) - min(run["provenance"]["created"] for run in planned)
    print(f"quickstart: {duration:.0f} s after set-up")


def test_two_optimizers_on_one_rank_are_two_runs(clone, tmp_path):
    """The runs of the dry run are those that are trained, and .config is unchanged."""
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    before = (clone.root / ".config").read_bytes()
    arguments = ("MAX_ITERS=20", "OPTIMIZER=sgd,adamw", "NUM_GPUS=1", f"RESULTS_DIR={tmp_path}")
    dry = clone.make("test-matrix-dry-run", *arguments)
    completed = clone.make("test-matrix", *arguments)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (matrix,) = matrices(tmp_path)
    listed = [line.split()[1:3] for line in dry.stdout.splitlines() if line.startswith("run ")]
    trained = [[run["run_id"], run["name"]] for run in load_json(matrix / "matrix.json")["runs"]]
    assert trained == listed
    assert len(trained) == 2
    assert all(load_json(matrix / name / "result.json")["step"] == 20 for _, name in trained)
    assert (clone.root / ".config").read_bytes() == before
    refused = clone.make("test-matrix", "MAX_ITER=20")
    assert refused.returncode == 2
    assert "did you mean MAX_ITERS" in refused.stderr
    assert (clone.root / ".config").read_bytes() == before


def test_a_run_with_a_nan_loss_fails_without_affecting_the_others(clone, tmp_path):
    """The failed run reports its reason and its log, the other finishes, and the status is 1."""
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    completed = clone.kmatrix(
        "test-matrix",
        "LEARNING_RATE=6e-4,1e9",
        "OPTIMIZER=adamw",
        "NUM_GPUS=1",
        "MAX_ITERS=30",
        f"RESULTS_DIR={tmp_path}",
    )
    assert completed.returncode == 1, completed.stdout + completed.stderr
    (matrix,) = matrices(tmp_path)
    by_rate = {load_json(path)["axes"]["lr"]: path.parent for path in matrix.glob("*/run.json")}
    assert load_json(by_rate["6e-4"] / "status.json")["status"] == "finished"
    failed = load_json(by_rate["1e9"] / "status.json")
    assert failed["status"] == "failed"
    assert "nan" in failed["reason"]
    assert any("Iter 0" in line for line in failed["log_tail"])
    summary = (matrix / "summary_report.txt").read_text()
    assert failed["reason"] in summary
    assert load_json(matrix / "status.json")["status"] == "failed"


def test_ctrl_c_leaves_no_process_and_no_damaged_file(clone, background, tmp_path):
    """Finished runs stay complete, the current one is stopped with a checkpoint, the rest stays planned."""
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    slow = SlowTraining(tmp_path / "slow", 'inf if steps > 2 and "seed2" in " ".join(sys.orig_argv) else 0')
    results = tmp_path / "results"
    runner = background(
        "test-matrix",
        f"RESULTS_DIR={results}",
        "OPTIMIZER=adamw",
        "NUM_GPUS=2",
        "SEED=1,2,3",
        "MAX_ITERS=60",
        "EVAL_SAMPLES=20",
        **slow.environment,
    )

    def second_run_trains():
        """the second run has logged a step"""
        folder = matrices(results)[0] if matrices(results) else None
        metrics = sorted(folder.glob("*seed2*/metrics.jsonl")) if folder else []
        return metrics and "train/loss" in metrics[0].read_text()

    wait_until(second_run_trains, seconds=900)
    os.killpg(runner.pid, signal.SIGINT)
    assert runner.wait(timeout=600) == 130
    assert slow.has_begun()
    (matrix,) = matrices(results)
    assert processes_below(matrix) == []
    statuses = {path.parent.name: load_json(path)["status"] for path in sorted(matrix.glob("*/status.json"))}
    assert list(statuses.values()) == ["finished", "stopped", "planned"]
    first, second, _ = statuses
    assert load_json(matrix / first / "result.json")["status"] == "finished"
    assert list((matrix / second / "checkpoints").glob("*.pt"))
    assert load_json(matrix / "status.json")["status"] == "stopped"
    kept = (matrix / first / "result.json").read_bytes()
    assert clone.make("summary", f"TARGET={matrix}").returncode == 0
    assert (matrix / first / "result.json").read_bytes() == kept


def test_two_matrices_at_the_same_time_do_not_affect_each_other(clone, background, tmp_path):
    """Two directories and two sets of processes, and both finish."""
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    arguments = ("OPTIMIZER=adamw", "NUM_GPUS=2", "MAX_ITERS=30", "EVAL_SAMPLES=20")
    both = [background("test-matrix", *arguments, f"SEED={seed}", f"RESULTS_DIR={tmp_path}") for seed in (1, 2)]
    assert [process.wait(timeout=1200) for process in both] == [0, 0]
    assert len(matrices(tmp_path)) == 2
    losses = [load_json(path)["final_val_loss"] for path in sorted(tmp_path.glob("*/*/result.json"))]
    assert len(set(losses)) == 2


def test_reports_are_rebuilt_from_the_run_directories(clone, tmp_path):
    """Text reports and graphs can be deleted and rebuilt from the runs."""
    assert clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    arguments = ("OPTIMIZER=adamw,sgd", "NUM_GPUS=1", "MAX_ITERS=20", "EVAL_SAMPLES=20", f"RESULTS_DIR={tmp_path}")
    assert clone.make("test-matrix", *arguments).returncode == 0
    (matrix,) = matrices(tmp_path)
    kept = {path: path.read_bytes() for path in matrix.rglob("*") if path.is_file() and path.parent.parent == matrix}
    before = load_json(matrix / "results.json")
    pictures = sorted(path.name for path in (matrix / "graphs").iterdir())
    shutil.rmtree(matrix / "graphs")
    for name in ("summary_report.txt", "results.json", "all_results.json"):
        (matrix / name).unlink()
    completed = clone.make("summary", "update-graphs", f"TARGET={matrix}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    after = load_json(matrix / "results.json")
    assert after["runs"] == before["runs"]
    assert len(json.loads((matrix / "all_results.json").read_text())) == 2
    assert sorted(path.name for path in (matrix / "graphs").iterdir()) == pictures
    for name in pictures:
        check_picture(matrix / "graphs" / name)
    for path, content in kept.items():
        if path.parent.name != "graphs":
            assert path.read_bytes() == content, f"{path} was changed by a report"


def test_the_benchmarks_run_without_a_peer(clone):
    """Without a peer; with --peer PATH the same script prints the ratio."""
    commands = (("config.py", "1"), ("matrix.py", "100"), ("train_vs_peer.py", "--rounds", "1", "--steps", "30"))
    for script, *arguments in commands:
        completed = clone.run(clone.python, f"bench/{script}", *arguments)
        assert completed.returncode == 0, f"{script}\n{completed.stdout}{completed.stderr}"
        assert completed.stdout.strip()


def test_a_custom_optimizer_and_a_custom_model_take_three_edits_each(fresh_clone, tmp_path):
    """Follows docs/optimizers.md and docs/developing.md literally, up to a matrix over both."""
    root, edit = fresh_clone.root, insert_before
    signsgd, relu2 = (example(root / "docs" / page) for page in ("optimizers.md", "developing.md"))
    edit(root / "gpt2/optim/builders.py", "BUILDERS: dict[str, Builder] = {", f"{signsgd}\n\n")
    edit(root / "gpt2/optim/builders.py", '    "sgd": sgd,', '    "signsgd": signsgd,\n')
    (root / "gpt2/model/relu2.py").write_text(relu2, encoding="utf-8")
    registry = root / "gpt2/model/registry.py"
    edit(registry, "from gpt2.model.nanochat", "from gpt2.model.relu2 import ReluSquaredGPT\n")
    edit(registry, '"gpt2": GPT', '"relu2": ReluSquaredGPT, ')
    kconfig = root / "gpt2/Kconfig"
    edit(
        kconfig,
        "config GPT2_OPTIMIZER_ADAM\n",
        'config GPT2_OPTIMIZER_SIGNSGD\n\tbool "signsgd: the sign of the gradient"\n\n',
    )
    edit(kconfig, "config GPT2_ARCH_GPT2\n", 'config GPT2_ARCH_RELU2\n\tbool "relu2: GPT-2 with squared ReLUs"\n\n')
    arguments = (
        "OPTIMIZER=signsgd",
        "ARCH=gpt2,relu2",
        "LEARNING_RATE=1e-3",
        "NUM_GPUS=1",
        "MAX_ITERS=30",
        "EVAL_SAMPLES=20",
    )
    assert fresh_clone.make("defconfig-gpt2-cpu-quick").returncode == 0
    completed = fresh_clone.make("test-matrix", *arguments, f"RESULTS_DIR={tmp_path}")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    results = {
        load_json(path.parent / "run.json")["train"]["arch"]: load_json(path)
        for path in tmp_path.glob("*/*/result.json")
    }
    assert set(results) == {"gpt2", "relu2"}
    assert results["gpt2"]["final_val_loss"] != results["relu2"]["final_val_loss"]
    assert all(result["initial_val_loss"] - result["final_val_loss"] > 0.5 for result in results.values())


def example(page: Path) -> str:
    (code,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return code


def insert_before(path: Path, mark: str, text: str) -> None:
    """Insert a text before a mark in a file, as a reader of the page does."""
    content = path.read_text(encoding="utf-8")
    position = content.index(mark)
    path.write_text(content[:position] + text + content[position:], encoding="utf-8")


def test_missing_data_is_refused_with_the_expected_path(clone, tmp_path):
    """A run with missing or unavailable shards starts nothing and reports the expected path."""
    assert clone.make("defconfig-gpt2-finewebedu-a10gx4").returncode == 0
    arguments = (
        "DEVICE=cpu",
        "NUM_GPUS=1",
        "DDP_BACKEND=gloo",
        f"DATA_DIR={tmp_path / 'data'}",
        f"RESULTS_DIR={tmp_path}",
    )
    unfetched = clone.kmatrix("test-matrix", *arguments, HF_ENDPOINT="http://127.0.0.1:9")
    missing = clone.kmatrix("test-matrix", *arguments, "DATASET=shards", "DATA_PATH=nowhere")
    for completed, message in (
        (unfetched, "cannot download the dataset kjj0/finewebedu10B-gpt2"),
        (missing, "_train_"),
    ):
        assert completed.returncode == 2
        assert message in completed.stderr
        assert "Traceback" not in completed.stderr
    assert matrices(tmp_path) == []
