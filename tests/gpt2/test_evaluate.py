"""Evaluate a run by bits per byte, HellaSwag and samples, in every file that reports them."""

from __future__ import annotations

import math
import re

import pytest
import torch

from core_files import write_zip
from factories import make_data, make_run, train_fields
from gpt2.data.tokenizer import CharTokenizer
from gpt2.dist import World
from gpt2.evaluate import Benchmarks, Validation
from gpt2.log import RunLog
from gpt2.model.gpt2 import GPT
from hellaswag_files import jsonl
from kmatrix.errors import DataError
from kmatrix.records.files import read_json
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import merged_metrics
from kmatrix.records.train_config import TrainConfig
from models import enlarge_weights
from recordings import read_jsonl
from training import train_here

WORLD = World(rank=0, size=1, device=torch.device("cpu"))
RUN = {"block_size": 64, "learning_rate": 0.02, "vocab_size": 257}
SAMPLES = {"sample_interval": 6, "sample_prompt": "ab"}


def test_without_the_vocabulary_there_are_no_bits_per_byte(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    make_data(tmp_path / "data")
    fields = train_fields(tmp_path / "data", "", tokenizer="gpt2", vocab_size=50257)
    assert Validation(TrainConfig.from_json(fields), WORLD).token_bytes is None


def benchmarks_of(tmp_path, attempt=1, **fields):
    make_data(tmp_path / "data")
    config = TrainConfig.from_json(train_fields(tmp_path / "data", "", **RUN | SAMPLES | fields))
    log = RunLog(RunDir(tmp_path), "id", attempt, main=True)
    log.begin(config, WORLD)
    return Benchmarks(config, WORLD, log), enlarge_weights(GPT(config.shape))


def test_samples_of_equal_weights_are_equal_and_do_not_affect_training(tmp_path):
    benchmarks, model = benchmarks_of(tmp_path)
    before = torch.get_rng_state()
    first = benchmarks.samples(model)
    assert first == benchmarks.samples(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_prompts_are_separated_by_bars_and_must_be_text_of_the_tokenizer(tmp_path):
    for text, prompts in (("ab", ["ab"]), ("a b|c", ["a b", "c"]), ("", [""])):
        benchmarks, _ = benchmarks_of(tmp_path, sample_prompt=text)
        assert [prompt for prompt, _ in benchmarks.prompts] == prompts
    CharTokenizer("xyz").save(tmp_path / "data" / "tokenizer.json")
    with pytest.raises(DataError, match="'a'"):
        benchmarks_of(tmp_path, tokenizer="char")


def core(folder):
    return {"core": str(write_zip(folder / "bundle.zip")), "core_examples": 0}


@pytest.fixture(scope="module")
def evaluated_run(tmp_path_factory):
    """A run with all evaluations, and its output."""
    folder = tmp_path_factory.mktemp("evaluated")
    run_dir = make_run(folder, **RUN, **SAMPLES, hellaswag=str(jsonl(folder)), benchmark_interval=10, **core(folder))
    return run_dir, train_here(run_dir)


def lines_with(run_dir, key):
    return {line.step: line.values for line in merged_metrics(run_dir.metrics) if key in line.values}


LINES = {  # of the output, with their number: at the interval and at the end
    r"Iter \d+ \| hellaswag/accuracy 0\.\d{4} \| hellaswag/accuracy_norm 0\.\d{4} \| core/metric ": 3,
    r"sample: 'ab': '.*'$": 3,
}


def test_each_evaluation_is_in_the_metrics_and_the_log(evaluated_run):
    run_dir, process = evaluated_run
    losses = lines_with(run_dir, "val/loss").values()
    for line in losses:
        assert line["val/bits_per_byte"] == pytest.approx(line["val/loss"] / math.log(2))  # no end of document
    assert read_json(run_dir.result)["final_bits_per_byte"] == list(losses)[-1]["val/bits_per_byte"]
    scores = lines_with(run_dir, "core/metric")
    assert sorted(lines_with(run_dir, "hellaswag/accuracy")) == sorted(scores) == [0, 10, 12]
    for values in scores.values():
        assert values["core/standard_error"] > 0
        assert len([name for name in values if name.startswith("core/")]) == 2 + 5
    samples = [event for event in read_jsonl(run_dir.events) if event["event"] == "sample"]
    assert [sample["step"] for sample in samples] == [0, 6, 12]
    assert len({sample["text"] for sample in samples}) > 1
    for pattern, number in LINES.items():
        assert len(re.findall(f"^{pattern}", process.stdout, re.M)) == number, pattern


def test_evaluations_do_not_change_the_training(evaluated_run, tmp_path):
    run_dir, process = evaluated_run
    plain = make_run(tmp_path, **RUN)
    train_here(plain)
    assert process.returncode == 0, process.stdout
    assert read_json(plain.result)["final_val_loss"] == read_json(run_dir.result)["final_val_loss"]


def test_a_benchmark_is_not_repeated_after_a_resume_unless_a_stop_ended_it(tmp_path):
    given = {"hellaswag": str(jsonl(tmp_path)), "benchmark_interval": 10, **core(tmp_path)}
    (first, model), (second, _) = (benchmarks_of(tmp_path, attempt, **given) for attempt in (1, 2))
    first.measure(10, model, lambda: True)
    assert first.due(10)
    assert not first.log.dir.metrics.exists()
    first.measure(10, model)
    assert second.due(10)
    second.load_state_dict(first.state_dict())
    assert (second.due(10), second.due(20), second.due(6)) == (False, True, True)
