"""HellaSwag: both file formats, scores by hand and by transformers, and refused files."""

from __future__ import annotations

import json
import math

import pytest
import torch

from factories import make_data, train_fields
from gpt2.benchmarks.hellaswag import Example, HellaSwag, read, rows
from gpt2.data.tokenizer import load
from gpt2.dist import World
from gpt2.model.gpt2 import GPT
from hellaswag_files import LINES, binary, jsonl
from kmatrix.errors import DataError
from kmatrix.records.train_config import TrainConfig
from models import BYTE_SHAPE as SHAPE
from models import _one_thread_and_default_precision, enlarge_weights, hf_twin  # noqa: F401  (a fixture for all tests)

BYTES = load("byte")


def world(rank=0, size=1):
    return World(rank=rank, local_rank=rank, size=size, device=torch.device("cpu"))


def config_of(folder, path, **overrides):
    make_data(folder / "data")
    defaults = {"hellaswag": str(path), "hellaswag_interval": 0, "hellaswag_examples": 0, "block_size": 64}
    return TrainConfig.from_json(train_fields(folder / "data", "", **defaults, **overrides))


def score_by_transformers(model, examples):
    """Return both accuracies from the log-probabilities of transformers' GPT-2 with the same weights, one by one."""
    hf_model = hf_twin(model, model.shape).eval()
    correct = [0, 0]
    for example in examples:
        sums, means = [], []
        for ending in example.endings:
            text = torch.tensor([[*example.context, *ending]])
            with torch.no_grad():
                log_probs = hf_model(text).logits[0].double().log_softmax(-1)
            first = len(example.context)
            costs = [-log_probs[position - 1, text[0, position]].item() for position in range(first, text.shape[1])]
            sums.append(math.fsum(costs))
            means.append(math.fsum(costs) / len(costs))
        correct[0] += sums.index(min(sums)) == example.label
        correct[1] += means.index(min(means)) == example.label
    return correct[0] / len(examples), correct[1] / len(examples)


class PreferenceModel(torch.nn.Module):
    """A model for which one token has the logit of its preference, after any text, and all others 0."""

    def __init__(self, preferences, vocab_size=257):
        super().__init__()
        self.logits = torch.zeros(vocab_size)
        for token, logit in preferences.items():
            self.logits[token] = logit

    def forward(self, idx, targets=None):
        return self.logits.expand(*idx.shape, -1), None


def test_the_score_matches_a_calculation_by_hand(tmp_path):
    """Of endings of 1, 2 and 3 likely letters, the shortest has the lowest total loss, the longest the lowest mean."""
    a, z = ord("a"), ord("z")
    lines = [
        {"ctx": "x", "endings": ["a", "z", "zz", "zzz"], "label": 0},  # " a" has the lowest total and mean loss
        {"ctx": "x", "endings": ["aaaa", "z", "zz", "zzz"], "label": 0},  # mean: 4 cheap letters next to a blank
        *[{"ctx": "x", "endings": ["aaaa", "z", "zz", "zzz"], "label": 1}] * 2,  # total: 1 letter next to a blank
    ]
    benchmark = HellaSwag(config_of(tmp_path, jsonl(tmp_path, lines)), world())
    model = PreferenceModel({a: 2.0, z: 1.0})
    cost = {t: math.log(255 + math.e**2 + math.e) - model.logits[t].item() for t in (a, z, 32)}
    assert cost[32] + cost[z] < cost[32] + 4 * cost[a]
    assert (cost[32] + 4 * cost[a]) / 5 < (cost[32] + cost[z]) / 2
    score = benchmark.score(model)
    assert (score.examples, score.accuracy, score.accuracy_norm) == (4, 3 / 4, 2 / 4)
    assert model.training


@pytest.mark.parametrize("batch", [1, 4, 9, 100])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_score_matches_transformers_for_every_micro_batch(tmp_path, batch, seed):
    model = enlarge_weights(GPT(SHAPE.__class__(**{**shape_fields(), "block_size": 64})), seed=seed)
    benchmark = HellaSwag(config_of(tmp_path, jsonl(tmp_path), batch_size=batch, global_batch=batch), world())
    score = benchmark.score(model)
    assert (score.accuracy, score.accuracy_norm) == pytest.approx(score_by_transformers(model, benchmark._mine))


def shape_fields():
    return {name: getattr(SHAPE, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}


def test_ranks_divide_the_examples_without_gaps_or_repetitions(tmp_path):
    config = config_of(tmp_path, jsonl(tmp_path))
    single = HellaSwag(config, world())
    parts = [HellaSwag(config, world(rank, 3))._mine for rank in range(3)]
    assert [len(part) for part in parts] == [2, 2, 1]
    assert sorted(example.context for part in parts for example in part) == sorted(e.context for e in single._mine)


def test_an_interrupted_evaluation_has_no_score(tmp_path):
    benchmark = HellaSwag(config_of(tmp_path, jsonl(tmp_path)), world())
    assert benchmark.score(PreferenceModel({}), lambda: True) is None


def test_the_first_examples_are_used_if_not_all_are_requested(tmp_path):
    path = jsonl(tmp_path)
    config = TrainConfig.from_json({**config_of(tmp_path, path).to_json(), "hellaswag_examples": 2})
    assert HellaSwag(config, world()).examples == 2


def test_the_llm_c_file_has_the_same_examples_as_the_text_file(tmp_path):
    tokens = [
        (list(BYTES.encode(line["ctx"])), [list(BYTES.encode(" " + e)) for e in line["endings"]], line["label"])
        for line in LINES
    ]
    found = read(binary(tmp_path / "h.bin", tokens), "gpt2", tmp_path)
    assert found == read(jsonl(tmp_path), "byte", tmp_path)
    assert found[1] == Example(
        tuple(b"She cuts an onion and"), (*map(tuple, (b" flies.", b" cries.")), *found[1].endings[2:]), 1
    )


def test_a_context_that_is_too_long_is_truncated_at_its_start(tmp_path):
    example = Example(tuple(range(50)), ((100, 101), (102,)), 0)
    idx, targets, mask = rows([example], 8)
    assert idx[0].tolist() == [43, 44, 45, 46, 47, 48, 49, 100]
    assert targets[0].tolist() == [44, 45, 46, 47, 48, 49, 100, 101]
    assert mask.tolist() == [[0] * 6 + [1, 1], [0] * 7 + [1]]
    benchmark = HellaSwag(config_of(tmp_path, jsonl(tmp_path)), world())
    assert benchmark.truncated == 0
    short_config = TrainConfig.from_json({**benchmark.config.to_json(), "block_size": 32})
    assert (
        HellaSwag(short_config, world()).truncated
        == sum(len(e.context) + max(map(len, e.endings)) > 33 for e in benchmark._mine)
        > 0
    )


def test_an_ending_longer_than_the_context_is_refused(tmp_path):
    config = TrainConfig.from_json({**config_of(tmp_path, jsonl(tmp_path)).to_json(), "block_size": 16})
    with pytest.raises(DataError, match=r"(?s)example 1 has an ending of 19 tokens.*the model's context is 16"):
        HellaSwag(config, world())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a HellaSwag example"),
        ("[1]", "not a HellaSwag example"),
        ('{"ctx": "a", "endings": ["b"]}', "KeyError: 'label'"),
        ('{"ctx": "a", "endings": ["b"], "label": 3}', "no ending of that label"),
        ('{"ctx": "", "endings": ["b"], "label": 0}', "no context"),
        ('{"ctx": 3, "endings": ["b"], "label": 0}', "not a HellaSwag example"),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(tmp_path, line, message):
    path = tmp_path / "h.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    with pytest.raises(DataError, match=r"(?s)h.jsonl:2 is not a HellaSwag example.*") as error:
        read(path, "byte", tmp_path)
    assert message in str(error.value)


def test_a_missing_or_empty_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read(tmp_path / "nowhere", "byte", tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="has no examples"):
        read(tmp_path / "empty", "byte", tmp_path)


def test_the_llm_c_file_is_refused_for_other_tokenizers_than_gpt2(tmp_path):
    path = binary(tmp_path / "h.bin", [([1], [[2], [3]], 0)])
    with pytest.raises(DataError, match=r"(?s)has gpt2 tokens.*the run uses byte"):
        read(path, "byte", tmp_path)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 14])
def test_a_truncated_llm_c_file_is_refused_with_the_offset(tmp_path, length):
    path = binary(tmp_path / "h.bin", [([1, 2], [[2], [3]], 0), ([5], [[6], [7, 8]], 1)])
    path.write_bytes(path.read_bytes()[:-length])
    with pytest.raises(DataError, match=r"example 1, at byte 1048, is incomplete"):
        read(path, "gpt2", tmp_path)


def test_a_token_outside_the_vocabulary_is_refused(tmp_path):
    path = binary(tmp_path / "h.bin", [([1, 2], [[2], [50257]], 0)])
    config = config_of(tmp_path, path, tokenizer="gpt2", vocab_size=50257)
    with pytest.raises(DataError, match="example 0 has the token 50257"):
        HellaSwag(config, world())
