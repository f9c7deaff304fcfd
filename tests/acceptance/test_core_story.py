"""CORE and HellaSwag through make, from a fresh clone: scored, killed and continued, missing without a network."""

from __future__ import annotations

import csv
import json
import math
import signal
from pathlib import Path

import pytest
import torch

from core_files import NUMBERS, write_zip
from gpt2.inference.restore import restore
from hellaswag_files import jsonl
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

SMALL = (
    *("DEVICE=cpu", "MODEL=tiny", "BLOCK_SIZE=160", "NUM_GPUS=1", "BATCH_SIZE=8", "PARALLEL_BATCH_SIZE=8"),
    *("EVAL_SAMPLES=20", "MAX_ITERS=40", "EVAL_INTERVAL=10", "WARMUP_STEPS=4", "LEARNING_RATE=3e-3", "LOG_INTERVAL=1"),
    *("DATASET=folder", "DATA_PATH=texts", "TOKENIZER=byte", "OPTIMIZER=adamw"),
)
MEASURED = ("CORE=bundle.zip", "CORE_INTERVAL=10", "CORE_EXAMPLES=0", "HELLASWAG=own.jsonl")
OFFLINE = dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")  # nothing listens there


def load_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def scores(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "core.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Some text, a bundle of tasks, and examples of HellaSwag."""
    folder = tmp_path_factory.mktemp("core") / "data"
    (folder / "texts").mkdir(parents=True)
    for number in range(40):
        text = f"Rain falls from clouds, and {number} is a number. Is {number} even? " * 40
        (folder / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    write_zip(folder / "bundle.zip")
    jsonl(folder, name="own.jsonl")
    return folder


@pytest.fixture(scope="module")
def matrix(session_clone, data):
    """A matrix of two architectures that is measured."""
    session_clone.config.unlink(missing_ok=True)
    assert session_clone.make("defconfig").returncode == 0
    places = (f"DATA_DIR={data}", f"RESULTS_DIR={data.parent / 'whole'}")
    completed = session_clone.make("test-matrix", *SMALL, *MEASURED, *places, "ARCH=gpt2,nanochat2025")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (found,) = (data.parent / "whole").glob("test_matrix_results_*")
    return found


def runs_of(matrix: Path) -> list[Path]:
    return sorted(path.parent for path in matrix.glob("*/result.json"))


def independent_score(run: Path) -> float:
    """Return CORE of the final weights from the prompts of the fixture, one row at a time, with plain log-softmax."""
    model = restore(run / "checkpoints" / "final.pt", "cpu").model
    context = model.shape.block_size
    centered = []
    for task in NUMBERS["tasks"].values():
        correct = 0
        for example in task["examples"]:
            exact = task["task_type"] == "language_modeling"
            rows = example["prompts"][1:] if exact else example["prompts"]
            means, hit = [], True
            for prompt, start, end in zip(rows, example["start"], example["end"], strict=True):
                tokens = [256, *prompt.encode()]
                assert len(tokens) == end
                tokens, cut = tokens[-context:], max(0, len(tokens) - context)
                with torch.no_grad():
                    logits = model(torch.tensor([tokens]))[0][0].double().log_softmax(-1)
                places = range(start - cut, end - cut)
                means.append(math.fsum(-logits[at - 1, tokens[at]].item() for at in places) / len(places))
                hit = hit and all(int(logits[at - 1].argmax()) == tokens[at] for at in places)
            correct += hit if exact else means.index(min(means)) == example["item"]["gold"]
        floor = task["baseline"] / 100
        centered.append((correct / len(task["examples"]) - floor) / (1 - floor))
    return math.fsum(centered) / len(centered)


def test_the_score_of_the_final_weights_equals_an_independent_one(matrix):
    runs = runs_of(matrix)
    assert len(runs) == 2
    for run in runs:
        found = scores(run)
        assert [score["step"] for score in found] == [0, 10, 20, 30, 40]
        assert found[-1]["core"] == pytest.approx(independent_score(run), abs=1e-12)
        assert load_json(run / "result.json")["core_metric"] == found[-1]["core"]


def test_the_report_shows_core_with_its_noise_and_ranks_by_loss(matrix):
    summary = " ".join((matrix / "summary_report.txt").read_text(encoding="utf-8").split())
    results = load_json(matrix / "results.json")["runs"]
    page = (matrix / "report.html").read_text(encoding="utf-8")

    assert "HellaSwag normalized CORE std. error" in summary
    assert "standard deviation of 0.005 to 0.012" in summary
    assert "configurations are ranked by their losses" in summary
    assert "configurations are ranked by their losses" in page
    with (matrix / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    for run in results:
        result = load_json(matrix / run["name"] / "result.json")
        assert run["core_metric"] == result["core_metric"] == pytest.approx(float(rows[run["name"]]["core_metric"]))
        assert run["core_standard_error"] == result["core_standard_error"] > 0
        assert run["text_bits_per_byte"] == result["text_bits_per_byte"] > 0
        assert f"{result['core_metric']:z.4f} {result['core_standard_error']:.4f}" in summary
        assert f"{result['core_metric']:z.4f}".replace("-", "\u2212") in page
    best = min(results, key=lambda run: run["final_val_loss"])
    assert f"leader: {best['name']}" in summary


def test_a_killed_run_continues_with_the_same_scores(matrix, data, clone, background, tmp_path):
    places = (f"DATA_DIR={data}", f"RESULTS_DIR={tmp_path}")
    assert clone.make("defconfig").returncode == 0
    runner = background("test-matrix", *SMALL, *MEASURED, *places, "CHECKPOINT_INTERVAL=10")

    def measured() -> bool:
        assert runner.poll() is None, (tmp_path / "output_0.txt").read_text()
        return any(len(scores(path.parent)) >= 2 for path in tmp_path.glob("*/*/core.jsonl"))

    wait_until(measured, "CORE was measured twice")
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    (interrupted,) = tmp_path.glob("test_matrix_results_*")
    completed = clone.make("continue", f"TARGET={interrupted}")
    assert completed.returncode == 0, completed.stdout + completed.stderr

    (run,) = runs_of(interrupted)
    whole = next(path for path in runs_of(matrix) if load_json(path / "run.json")["train"]["arch"] == "gpt2")
    newest = {score["step"]: score["core"] for score in scores(run)}
    assert newest == {score["step"]: score["core"] for score in scores(whole)}
    names = ("core_metric", "core_standard_error", "text_bits_per_byte", "hellaswag_accuracy", "final_val_loss")
    results = [load_json(path / "result.json") for path in (run, whole)]
    assert [results[0][name] for name in names] == [results[1][name] for name in names]


@pytest.mark.parametrize("asked", [("CORE", "eval_bundle.zip"), ("HELLASWAG", "hellaswag_val.jsonl")])
@pytest.mark.parametrize("target", ["train", "prepare-data"])
def test_without_a_network_the_missing_file_and_its_place_are_named(clone, data, tmp_path, asked, target):
    name, file = asked
    own = tmp_path / "data"
    own.mkdir()
    (own / "texts").symlink_to(data / "texts")
    arguments = (*SMALL, f"{name}={file}", f"DATA_DIR={own}", f"RESULTS_DIR={tmp_path / 'results'}")
    assert clone.make("defconfig").returncode == 0

    planned = clone.make("test-matrix-dry-run", *arguments, **OFFLINE)
    completed = clone.make(target, *arguments, **OFFLINE)

    assert planned.returncode == 0
    assert f"note: {name}: {file} is downloaded into DATA_DIR before the first run" in planned.stdout + planned.stderr
    assert completed.returncode == 2
    said = " ".join(completed.stderr.split())
    assert f"{file} is missing, and cannot download https://" in said
    assert f"at {own / file} (SHA-256 " in said
    assert "Traceback" not in completed.stdout + completed.stderr
    assert not list((tmp_path / "results").glob("*"))


def test_a_damaged_bundle_ends_the_run_at_once_with_the_reason(clone, data, tmp_path):
    damaged = tmp_path / "damaged.zip"
    content = (data / "bundle.zip").read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    assert clone.make("defconfig").returncode == 0

    completed = clone.make("train", *SMALL, f"CORE={damaged}", f"DATA_DIR={data}", f"RESULTS_DIR={tmp_path}")

    assert "Error 1" in completed.stderr
    assert "damaged.zip cannot be read" in completed.stdout + completed.stderr
    (result,) = tmp_path.glob("*/*/result.json")
    assert (load_json(result)["kind"], load_json(result)["step"]) == ("data", 0)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("CORE=nowhere.zip",), "nowhere.zip not found"),
        (("HELLASWAG=texts",), "texts is a folder"),
        (("CORE=bundle.zip", "CORE_EXAMPLES=5"), "CORE_EXAMPLES=5 is too few"),
        (("CORE=bundle.zip", "TOKENIZER=char"), "TOKENIZER=char cannot encode them"),
        (("CORE_INTERVAL=5",), 'depends on GPT2_CORE != ""'),
    ],
)
def test_wrong_values_are_one_error(clone, data, tmp_path, words, reason):
    given = {word.partition("=")[0] for word in words}
    small = [word for word in SMALL if word.partition("=")[0] not in given]
    assert clone.make("defconfig").returncode == 0

    completed = clone.make("train", *small, *words, f"DATA_DIR={data}", f"RESULTS_DIR={tmp_path}")

    assert completed.returncode == 2
    assert reason in completed.stderr
    assert completed.stderr.count("error:") == 1
    assert not list(tmp_path.glob("test_matrix_results_*"))
