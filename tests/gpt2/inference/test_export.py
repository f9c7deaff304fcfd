"""A checkpoint exported to the Hugging Face layout is the same model there, and bit for bit the same when imported."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from factories import make_data, train_fields
from gpt2.checkpoint import TrainingState, load_checkpoint, save_checkpoint, snapshot
from gpt2.data.tokenizer import BpeTokenizer
from gpt2.dist import World
from gpt2.inference import export
from gpt2.inference.nanochat_layout import SIZES, refuse_parts
from gpt2.inference.restore import load_model
from gpt2.model.registry import build_model
from gpt2.optim.builders import build_optimizers
from kmatrix.errors import KmatrixError
from kmatrix.records.train_config import TrainConfig
from kmatrix.shapes import ModelShape

WORLD = World(rank=0, size=1, device=torch.device("cpu"))
KINDS = {
    "as GPT-2": {},
    "no biases": {"bias": False},
    "an output layer of its own": {"weight_tying": False},
    "a padded vocabulary": {"vocab_multiple": 64, "weight_tying": False},
}


def checkpoint_in(folder, **fields):
    """A checkpoint of a model whose weights, biases and gains are all random."""
    sha256 = make_data(folder / "data", train=2000, val=200)
    config = TrainConfig.from_json(train_fields(folder / "data", sha256, **fields))
    model = build_model(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            rows = config.vocab_size if name in ("wte.weight", "lm_head.weight") else len(parameter)
            parameter[:rows] += 0.1 * torch.randn(parameter[:rows].shape, generator=generator)
    parts = TrainingState(config=config, world=WORLD, model=model, optimizers=build_optimizers(config, model))
    save_checkpoint(folder / "a.pt", snapshot(parts, step=7, run_id="0123456789"))
    return model.eval()


def run(*arguments):
    return export.main([str(argument) for argument in arguments])


@pytest.mark.process
@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_the_logits_match_transformers_and_an_import_restores_every_bit(tmp_path, fields):
    transformers = pytest.importorskip("transformers")
    model = checkpoint_in(tmp_path, **fields)
    assert run(tmp_path / "a.pt", f"--output={tmp_path / 'hf'}") == 0
    hf_model, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    idx = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, _ = model(idx)
        assert (logits - hf_model.eval()(idx).logits).abs().max() < 1e-5
        hf_model.save_pretrained(tmp_path / "theirs")
        for folder in ("theirs", "hf"):
            assert run(tmp_path / folder, f"--output={tmp_path / f'{folder}.pt'}") == 0
            value = load_checkpoint(tmp_path / f"{folder}.pt")
            assert torch.equal(load_model(value, tmp_path).eval()(idx)[0], logits)
    for name, weights in model.state_dict().items():
        assert torch.equal(value["model"][name], weights), name
    assert (value["step"], value["run_id"]) == (7, "0123456789")


def test_the_weights_to_evaluate_and_a_trained_tokenizer_are_exported(tmp_path):
    transformers = pytest.importorskip("transformers")
    checkpoint_in(tmp_path)
    value = load_checkpoint(tmp_path / "a.pt")
    value["evaluation"] = {name: weights + 1 for name, weights in value["model"].items()}
    value["config"] |= {"tokenizer": "bpe", "data_path": str(tmp_path / "data")}
    trained = BpeTokenizer.trained(["the quick brown fox jumps over the lazy dog"] * 20, 300)
    trained.save(tmp_path / "data/tokenizer.json")
    save_checkpoint(tmp_path / "b.pt", value)
    assert run(tmp_path / "b.pt", f"--output={tmp_path / 'hf'}") == 0
    imported = export.read_folder(tmp_path / "hf")
    assert torch.equal(imported["model"]["wpe.weight"], value["model"]["wpe.weight"] + 1)
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert hf_tokenizer("the lazy fox")["input_ids"] == trained.encode("the lazy fox").tolist()


CHANGES = {
    "activation_function is 'relu'": {"activation_function": "relu"},
    "model_type is 'llama'": {"model_type": "llama"},
    "n_inner is 100": {"n_inner": 100},
    "is not divisible": {"n_head": 3},
    "layer_norm_epsilon is 1e-06": {"layer_norm_epsilon": 1e-6},
    "h.2.ln_1.weight": {"n_layer": 5},
    "h.1.": {"n_layer": 1},
}


def test_another_model_is_refused_by_name_and_nothing_is_overwritten(tmp_path):
    checkpoint_in(tmp_path)
    run(tmp_path / "a.pt", f"--output={tmp_path / 'hf'}")
    path = tmp_path / "hf/config.json"
    original = json.loads(path.read_text())
    for expected, change in CHANGES.items():
        path.write_text(json.dumps(original | change))
        with pytest.raises(KmatrixError, match=f"(?s){tmp_path / 'hf'}.*{expected}"):
            run(tmp_path / "hf", f"--output={tmp_path / 'b.pt'}")
    with pytest.raises(KmatrixError, match=r"OUTPUT=.*hf exists"):
        run(tmp_path / "a.pt", f"--output={tmp_path / 'hf'}")
    with pytest.raises(KmatrixError, match="is not a GPT-2 in Hugging Face's format"):
        run(tmp_path, f"--output={tmp_path / 'b.pt'}")


@pytest.mark.process
def test_nanochat_of_2025_is_exported_and_parts_that_transformers_lacks_are_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    arch = {"arch": "nanochat2025", "bias": False, "weight_tying": False, "logit_softcap": 15.0}
    model = checkpoint_in(tmp_path, **arch)
    assert run(tmp_path / "a.pt", f"--output={tmp_path / 'hf'}") == 0
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    idx = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (model(idx)[0] - twin(idx).logits).abs().max() < 1e-5
    (tmp_path / "new").mkdir()
    checkpoint_in(tmp_path / "new", **arch | {"arch": "nanochat", "smear": True})
    with pytest.raises(KmatrixError, match=r"(?s)cannot compute.*smear is True"):
        run(tmp_path / "new/a.pt", f"--output={tmp_path / 'hf2'}")


def test_a_part_that_gpt2_of_transformers_lacks_is_refused():
    shape = ModelShape(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=257)
    refuse_parts(shape, SIZES, {"arch": "gpt2"})
    for name, part in {"arch": "mine", "activation": "relu2", "smear": True}.items():
        with pytest.raises(KmatrixError, match=f"{name} is {part}"):
            refuse_parts(replace(shape, **{name: part}), SIZES, {"arch": "gpt2"})
