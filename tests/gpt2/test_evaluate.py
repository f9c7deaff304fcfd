"""Evaluate a run by bits per byte, HellaSwag and samples, in every file that reports them."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from core_files import write_zip
from factories import make_data, make_run, train, train_fields
from gpt2.data import shards
from gpt2.data.sequences import Windows
from gpt2.data.tokenizer import load
from gpt2.dist import World
from gpt2.evaluate import Benchmarks, SampleTexts, Validation, load_if_available
from gpt2.log import RunLog
from gpt2.model.gpt2 import GPT
from hellaswag_files import jsonl
from kmatrix.errors import DataError
from kmatrix.records.files import read_json, read_jsonl
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import merged_metrics
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import ModelShape
from models import enlarge_weights
from once import make_once

WORLD = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
TEXT = "Käse, Brot und 3 € für 😀 Leute. " * 400
RUN = {"block_size": 64, "learning_rate": 0.02, "vocab_size": 257}
SAMPLES = {"sample_interval": 6, "sample_prompt": "ab|"}


def dataset(folder, tokenizer, text=TEXT):
    """Write a text with an end of document in the middle as shards; return its tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    half = len(text) // 2
    end = [tokenizer.end_of_document]
    tokens = [*tokenizer.encode(text[:half]).tolist(), *end, *tokenizer.encode(text[half:]).tolist()]
    for kind in ("train", "val"):
        shards.write_shard(folder / f"text_{kind}_000000.bin", tokens)
    return tokens


def test_without_the_vocabulary_there_are_no_bits_per_byte(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    dataset(tmp_path / "data", load("byte"))
    fields = train_fields(tmp_path / "data", "", tokenizer="gpt2", vocab_size=50257)
    assert Validation(TrainConfig.from_json(fields), WORLD).token_bytes is None
    assert load_if_available("bpe", tmp_path / "data") is None  # the directory has no tokenizer.json


def test_bits_per_byte_are_the_bits_of_text_over_its_bytes(tmp_path):
    """Independent count: transformers' GPT-2 gives the nats; ends of documents count neither nats nor bytes."""
    transformers = pytest.importorskip("transformers")
    tokens = dataset(tmp_path / "data", load("byte"))
    fields = train_fields(tmp_path / "data", "", eval_samples=10_000, block_size=64)
    validation = Validation(TrainConfig.from_json(fields), WORLD)
    shape = ModelShape(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=257)
    model = GPT(shape)
    found = validation.measure(model)

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 257}
    hf_model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    state = {
        f"transformer.{name}": value.t() if re.search(r"c_(attn|proj|fc)\.weight", name) else value
        for name, value in model.state_dict().items()
    }
    hf_model.load_state_dict(state, strict=False)
    nats, ends = 0.0, 0.0
    for start in range(0, len(tokens) - 64, 64):
        window = torch.tensor([tokens[start : start + 65]])
        with torch.no_grad():
            log_probs = hf_model(window[:, :-1]).logits.double().log_softmax(-1)
        costs = -log_probs.gather(-1, window[:, 1:, None])[0, :, 0]
        nats, ends = nats + costs.sum().item(), ends + costs[window[0, 1:] == 256].sum().item()
    count = (len(tokens) - 1) // 64 * 64
    text = bytes(token for token in tokens[1 : count + 1] if token < 256)
    assert ends > 0
    assert found.loss == pytest.approx(nats / count, rel=1e-5)
    assert found.bits_per_byte == pytest.approx((nats - ends) / math.log(2) / len(text), rel=1e-5)
    assert validation.measure(model, lambda: True) is None


def config_of(tmp_path, *, with_data=True, **overrides):
    if with_data:
        make_data(tmp_path / "data")
    return TrainConfig.from_json(train_fields(tmp_path / "data", "", **SAMPLES, **overrides))


def test_samples_of_equal_weights_are_equal_and_do_not_affect_training(tmp_path):
    samples = SampleTexts(config_of(tmp_path))
    model = enlarge_weights(GPT(ModelShape(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=257)))
    before = torch.get_rng_state()
    first = samples.texts(model)
    assert first == samples.texts(model)
    assert [sample.prompt for sample in first] == ["ab"]
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_prompts_are_separated_by_bars_and_an_empty_one_starts_a_document(tmp_path):
    config = config_of(tmp_path)
    values = config.to_json()
    assert SampleTexts(config).prompts == ["ab"]
    assert SampleTexts(TrainConfig.from_json(values | {"sample_prompt": "a b|c"})).prompts == ["a b", "c"]
    assert SampleTexts(TrainConfig.from_json(values | {"sample_prompt": ""})).prompts == [""]


def test_a_prompt_that_the_tokenizer_cannot_encode_is_refused_at_once(tmp_path):
    config = config_of(tmp_path)
    from gpt2.data.tokenizer import CharTokenizer

    CharTokenizer("xyz").save(tmp_path / "data" / "tokenizer.json")
    object.__setattr__(config, "tokenizer", "char")
    with pytest.raises(DataError, match="'a'"):
        SampleTexts(config)


def core(folder):
    return {"core": str(write_zip(folder / "bundle.zip")), "core_examples": 0}


@pytest.fixture(scope="module")
def evaluated_run(tmp_path_factory):
    """A run with all evaluations."""

    def train_run(folder):
        hellaswag = {"hellaswag": str(jsonl(folder)), "benchmark_interval": 10}
        run_dir = make_run(folder, **RUN, **SAMPLES, **hellaswag, **core(folder))
        return run_dir, train(run_dir)

    return make_once(tmp_path_factory, "evaluated", train_run)[1]


@pytest.mark.process
def test_bits_per_byte_are_in_the_metrics_the_log_and_the_result(evaluated_run):
    run_dir, process = evaluated_run
    result = read_json(run_dir.result)
    lines = [line for line in read_jsonl(run_dir.metrics) if "val/loss" in line]
    for line in lines:
        assert line["val/bits_per_byte"] == pytest.approx(line["val/loss"] / math.log(2))  # no end of document
    assert result["final_bits_per_byte"] == lines[-1]["val/bits_per_byte"]
    assert f"| bpb {result['final_bits_per_byte']:.4f}" in process.stdout


@pytest.mark.process
def test_hellaswag_is_evaluated_at_its_interval_and_at_the_end(evaluated_run):
    run_dir, process = evaluated_run
    lines = {line.step: line.values for line in merged_metrics(run_dir.metrics) if "hellaswag/accuracy" in line.values}
    assert sorted(lines) == [0, 10, 12]
    result = read_json(run_dir.result)
    assert result["hellaswag_accuracy"] == lines[12]["hellaswag/accuracy"]
    assert result["hellaswag_accuracy_norm"] == lines[12]["hellaswag/accuracy_norm"]
    assert "HellaSwag: 5 examples of " in process.stdout
    assert len(re.findall(r"^Iter \d+ \| HellaSwag 0\.\d{4} \| normalised 0\.\d{4}$", process.stdout, re.M)) == 3


@pytest.mark.process
def test_core_is_evaluated_at_its_interval_and_at_the_end(evaluated_run):
    run_dir, process = evaluated_run
    lines = {line.step: line.values for line in merged_metrics(run_dir.metrics) if "core/metric" in line.values}
    scores = list(read_jsonl(run_dir.core))
    result = read_json(run_dir.result)
    assert sorted(lines) == [score["step"] for score in scores] == [0, 10, 12]
    for score in scores:
        values = lines[score["step"]]
        centered = [task["centered"] for task in score["tasks"].values()]
        assert score["core"] == values["core/metric"] == pytest.approx(math.fsum(centered) / 5)
        assert score["standard_error"] == values["core/standard_error"] > 0
        accuracies = {f"core/{label}": task["accuracy"] for label, task in score["tasks"].items()}
        assert accuracies.items() <= values.items()
    assert result["core_metric"] == scores[-1]["core"]
    assert result["core_standard_error"] == scores[-1]["standard_error"]
    assert "CORE: 5 tasks with 20 examples of " in process.stdout
    assert ", which is not the published bundle" in process.stdout
    text = r"^Iter \d+ \| CORE -?0\.\d{4} \(standard error 0\.\d{4}, 20 examples, \d+ truncated\)$"
    assert len(re.findall(text, process.stdout, re.M)) == 3


@pytest.mark.process
def test_samples_are_written_at_their_interval_and_at_the_end(evaluated_run):
    run_dir, process = evaluated_run
    samples = list(read_jsonl(run_dir.samples))
    assert [sample["step"] for sample in samples] == [0, 6, 12]
    assert {sample["prompt"] for sample in samples} == {"ab"}
    assert len({sample["text"] for sample in samples}) > 1
    assert len(re.findall(r'^Iter \d+ \| Sample of "ab": ".*"$', process.stdout, re.M)) == 3


@pytest.mark.process
def test_evaluations_do_not_change_the_training(evaluated_run, tmp_path):
    run_dir, process = evaluated_run
    plain = make_run(tmp_path, **RUN)
    train(plain)
    assert process.returncode == 0, process.stderr
    assert read_json(plain.result)["final_val_loss"] == read_json(run_dir.result)["final_val_loss"]


@pytest.mark.process
def test_two_ranks_give_the_same_score_and_bits_as_one(evaluated_run, tmp_path):
    run_dir, _ = evaluated_run
    hellaswag = {"hellaswag": str(jsonl(tmp_path)), "benchmark_interval": 10}
    two_ranks = make_run(tmp_path, **RUN, num_gpus=2, batch_size=2, **SAMPLES, **hellaswag, **core(tmp_path))
    assert train(two_ranks).returncode == 0
    single, double = read_json(run_dir.result), read_json(two_ranks.result)
    assert single["hellaswag_accuracy"] == double["hellaswag_accuracy"]
    assert single["core_metric"] == double["core_metric"]
    assert double["final_bits_per_byte"] == pytest.approx(single["final_bits_per_byte"], rel=1e-4)


@pytest.mark.process
def test_an_invalid_hellaswag_file_ends_the_run_at_once_with_the_reason(tmp_path):
    run_dir = make_run(tmp_path, hellaswag=str(tmp_path / "nowhere"), benchmark_interval=0)
    train(run_dir)
    result = read_json(run_dir.result)
    assert (result["status"], result["kind"], result["step"]) == ("failed", "data", 0)
    assert "cannot be read" in result["reason"]


def test_the_bytes_of_a_window_are_those_of_its_targets(tmp_path):
    tokens = dataset(tmp_path, load("byte"))
    windows = Windows(tmp_path, "val", block_size=32, vocab_size=257)
    _, targets = windows.read([(0, 3)])
    assert np.array_equal(targets[0], tokens[97:129])


def test_benchmark_results_survive_a_resume_without_a_second_evaluation(tmp_path):
    hellaswag = {"hellaswag": str(jsonl(tmp_path)), "benchmark_interval": 10}
    config = config_of(tmp_path, block_size=64, vocab_size=257, **hellaswag, **core(tmp_path))
    judges = []
    for attempt in (1, 2):
        log = RunLog(RunDir(tmp_path), "id", attempt, main=True)
        log.begin(config, WORLD, 1)
        judges.append(Benchmarks(config, WORLD, log))
    first, second = judges
    first.measure(10, GPT(config.shape))
    assert None not in first.log.benchmarks.values()
    assert second.due(10)
    second.load_state_dict(first.state_dict())
    assert second.log.benchmarks == first.log.benchmarks
    assert (second.due(10), second.due(20), second.due(6)) == (False, True, True)


def test_a_benchmark_that_is_asked_to_stop_leaves_its_step_to_the_next_attempt(tmp_path):
    hellaswag = {"hellaswag": str(jsonl(tmp_path)), "benchmark_interval": 10}
    config = config_of(tmp_path, block_size=64, **hellaswag)
    log = RunLog(RunDir(tmp_path), "id", 1, main=True)
    log.begin(config, WORLD, 1)
    judge = Benchmarks(config, WORLD, log)
    judge.measure(10, GPT(config.shape), lambda: True)
    assert set(log.benchmarks.values()) == {None}
    assert judge.due(10)
    assert not log.dir.samples.exists()
