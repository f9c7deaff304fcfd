"""CORE equals nanochat's scores of the same model and examples, HellaSwag those by transformers; bits per byte too."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

import nanochat_numbers as public
from core_files import NUMBERS, bundle_files, write_zip
from factories import make_data, train_fields
from gpt2.benchmarks.bundle import read_tasks
from gpt2.benchmarks.tasks import Evaluator, answer, cropped, prompts, question
from gpt2.data.tokenizer import load
from gpt2.dist import World
from gpt2.evaluate import text_costs
from gpt2.model.gpt2 import GPT
from hellaswag_files import LINES, jsonl
from kmatrix.records.train_config import TrainConfig
from models import BYTE_SHAPE as SHAPE
from models import _one_thread_and_default_precision, enlarge_weights, hf_twin  # noqa: F401  (a fixture for all)

BYTES = load("byte")
TOLERANCE = 1e-5  # relative to max(1, |x|)


@pytest.fixture
def model():
    return public.model_of({"config": NUMBERS["config"], "variant": "now"}).eval()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return read_tasks(write_zip(tmp_path_factory.mktemp("core") / "bundle.zip"))


def evaluator(folder, rank=0, size=1, **fields):
    """An evaluator of byte tokens: of CORE, unless a file of HellaSwag is given."""
    make_data(folder / "data")
    files = {} if "hellaswag" in fields else {"core": str(write_zip(folder / "bundle.zip")), "core_examples": 0}
    given = {"benchmark_interval": 0, "block_size": 1024, "vocab_size": 257, **files, **fields}
    config = TrainConfig.from_json(train_fields(folder / "data", "", **given))
    return Evaluator(config, World(rank=rank, size=size, device=torch.device("cpu")))


def cases():
    return [(label, index) for label, task in NUMBERS["tasks"].items() for index in range(len(task["examples"]))]


@pytest.mark.parametrize(("label", "index"), cases())
def test_prompts_spans_losses_and_answers_equal_the_public_code(model, tasks, label, index):
    task = next(task for task in tasks if task.label == label)
    wanted = NUMBERS["tasks"][label]["examples"][index]

    assert prompts(task, index) == wanted["prompts"]
    one = question(task, index, BYTES)
    assert one.spans == tuple(zip(wanted["start"], wanted["end"], strict=True))
    (found,) = answer(model, [one], dtype="fp32", padding=256)
    assert found.correct == wanted["correct"]
    if "mean_losses" in wanted:
        assert found.losses == pytest.approx(wanted["mean_losses"], rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_the_score_equals_the_public_code_for_every_micro_batch(model, tmp_path, batch_size):
    score = evaluator(tmp_path, batch_size=batch_size).score(model)
    variance = 0.0
    for label, task in NUMBERS["tasks"].items():
        accuracy, room = score.pop(f"core/{label}"), 1 - task["baseline"] / 100
        assert accuracy == pytest.approx(task["accuracy"], abs=1e-7)
        variance += accuracy * (1 - accuracy) / len(task["examples"]) / room**2
    assert score == {
        "core/metric": pytest.approx(NUMBERS["core_metric"], abs=1e-7),
        "core/standard_error": pytest.approx(math.sqrt(variance) / 5),  # of a mean of binomials
    }


def test_ranks_share_the_examples_and_a_stop_ends_a_measurement_without_a_score(model, tmp_path):
    parts = []
    for rank in range(3):
        one = evaluator(tmp_path, rank, 3)
        one.world = SimpleNamespace(**asdict(one.world), sum=lambda counts: parts.append(counts.clone()) or counts)
        one.score(model)
    wanted = [sum(one["correct"] for one in task["examples"]) for task in NUMBERS["tasks"].values()]
    assert sum(parts)[:, 0].tolist() == wanted
    assert min(part[:, 2].sum() for part in parts) > 0
    asked = iter([False, False, True])
    assert evaluator(tmp_path, batch_size=1).score(model, lambda: next(asked)) is None
    assert model.training


def test_a_row_that_is_too_long_loses_its_beginning(model, tasks):
    """As in the public code for models with a greatest length."""
    whole = question(tasks[1], 0, BYTES)
    one = cropped(whole, 16)
    assert one.rows == tuple(row[-16:] for row in whole.rows)
    assert [row[first:end] for row, (first, end) in zip(one.rows, one.spans, strict=True)] == [
        row[first:end] for row, (first, end) in zip(whole.rows, whole.spans, strict=True)
    ]
    assert cropped(whole, 1000) == whole
    # Even if only the end of an answer fits: its first token has no token before it, and no cost.
    (found,) = answer(model, [cropped(whole, 2)], dtype="fp32", padding=256)
    assert all(math.isfinite(loss) for loss in found.losses)


def test_of_equal_answers_the_first_wins_as_in_the_public_code(model, tmp_path):
    line = '{"query": "Water is", "choices": ["wet", "wet"], "gold": 0}\n'
    files = bundle_files() | {"eval_data/own/choices.jsonl": line * 3}
    task = read_tasks(write_zip(tmp_path / "equal.zip", files))[0]
    (found,) = answer(model, [question(task, 0, BYTES)], dtype="fp32", padding=256)
    assert found.correct


def score_by_transformers(model, items):
    """Return both accuracies from the log-probabilities of transformers' GPT-2 with the same weights, one by one."""
    hf_model = hf_twin(model, model.shape).eval()
    correct = [0, 0]
    for item in items:
        costs = []
        for context, ending in zip(item.contexts, item.continuations, strict=True):
            text, first = torch.tensor([list((context + ending).encode())]), len(context.encode())
            with torch.no_grad():
                log_probs = hf_model(text).logits[0].double().log_softmax(-1)
            costs.append([-log_probs[at - 1, text[0, at]].item() for at in range(first, text.shape[1])])
        sums, means = [sum(cost) for cost in costs], [sum(cost) / len(cost) for cost in costs]
        correct[0] += sums.index(min(sums)) == item.correct
        correct[1] += means.index(min(means)) == item.correct
    return correct[0] / len(items), correct[1] / len(items)


@pytest.mark.parametrize(("seed", "batch"), [(1, 1), (1, 4), (2, 9), (3, 100)])
def test_hellaswag_matches_transformers_for_every_micro_batch(tmp_path, seed, batch):
    model = enlarge_weights(GPT(replace(SHAPE, block_size=64)), seed=seed)
    one = evaluator(tmp_path, hellaswag=str(jsonl(tmp_path)), block_size=64, batch_size=batch)
    assert tuple(one.score(model).values()) == pytest.approx(score_by_transformers(model, one.tasks[0].items))


def test_a_context_of_hellaswag_that_is_too_long_is_cut_so_that_its_last_token_is_a_target_only(tmp_path):
    one = evaluator(tmp_path, hellaswag=str(jsonl(tmp_path)), block_size=32)
    rows = [row for _, group in one._groups() for question in group for row in question.rows]
    texts = [f"{line['ctx']} {ending}".encode() for line in LINES for ending in line["endings"]]
    assert [bytes(row) for row in rows] == [text[-33:] for text in texts]
    assert max(map(len, texts)) > 33


def test_bits_per_byte_equal_the_public_code():
    numbers = public.read("bpb")
    case = public.read("now-tiny")
    model = public.model_of(case).eval()
    sizes = torch.tensor(numbers["token_bytes"])
    total = torch.zeros(2, dtype=torch.float64)
    for step in range(numbers["batches"]):
        idx, targets = public.batch(step, case)
        with torch.no_grad():
            losses, _ = model(idx, targets)
        if step == 1:
            targets[:, 5:9] = -1
        total += text_costs(losses, targets.reshape(-1), sizes)

    nats, size = total.tolist()
    assert nats / math.log(2) / size == pytest.approx(numbers["bpb"], rel=TOLERANCE)
