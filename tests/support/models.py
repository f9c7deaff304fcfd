"""Small models with weights large enough to expose mistakes, the same models of transformers, and random tokens."""

from __future__ import annotations

import pytest
import torch

from kmatrix.shapes import ModelShape

SHAPE = ModelShape(n_layer=3, n_head=4, n_embd=32, block_size=24, vocab_size=61)
BYTE_SHAPE = ModelShape(n_layer=3, n_head=4, n_embd=32, block_size=24, vocab_size=257)


@pytest.fixture(autouse=True)
def _one_thread_and_default_precision():
    """Use one thread: small matrices are slower on several, even more so while other tests run."""
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


def random_tokens(shape=SHAPE, batch=3, length=None, seed=5):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(shape.vocab_size, (batch, (length or shape.block_size) + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:].contiguous()


def enlarge_weights(model, seed=11):
    """Enlarge every weight so that mistakes show: fresh weights give nearly flat attention and zero biases."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if ".ln_" in f".{name}" and name.endswith("weight") else 0.0
            rows = SHAPE.vocab_size if name in ("wte.weight", "lm_head.weight") else len(parameter)
            parameter[:rows] = mean + 0.15 * torch.randn(parameter[:rows].shape, generator=generator)
    return model


def to_hf(name, tensor):
    """Return a parameter with its name and layout in transformers, whose Conv1D is transposed."""
    conv = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return name if name.startswith("lm_head") else f"transformer.{name}", tensor.t() if conv else tensor


def hf_twin(model, shape):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=shape.vocab_size, n_positions=shape.block_size, n_embd=shape.n_embd, n_layer=shape.n_layer,
        n_head=shape.n_head, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager",
        tie_word_embeddings=shape.weight_tying,
    )  # fmt: skip
    twin = transformers.GPT2LMHeadModel(config)
    state = dict(to_hf(name, tensor) for name, tensor in model.state_dict().items())
    missing, unexpected = twin.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return twin
