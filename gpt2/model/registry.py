"""Build a model by the name of its architecture, and configure the process that trains it."""

from __future__ import annotations

import torch

from gpt2.model.attention_kernel import choose_kernel
from gpt2.model.base import LanguageModel
from gpt2.model.fp8 import check_device
from gpt2.model.gpt2 import GPT
from gpt2.model.nanochat import NanoChat
from gpt2.model.precision import configure_determinism, configure_precision
from kmatrix.errors import ConfigError
from kmatrix.records.train_config import TrainConfig

# CONFIG_GPT2_ARCH_X is the entry x; how to add one: docs/developing.md, "A model of your own".
MODELS: dict[str, type[LanguageModel]] = {"gpt2": GPT, "nanochat": NanoChat, "nanochat2025": NanoChat}


def build_model(config: TrainConfig) -> LanguageModel:
    """Return the model with its initial weights, which only the seed decides."""
    if config.arch not in MODELS:
        raise ConfigError(f"arch is {config.arch!r}", why=f"gpt2/model/registry.py has {', '.join(MODELS)}")
    return MODELS[config.arch](
        config.shape,
        dropout=config.dropout,
        vocab_multiple=config.vocab_multiple,
        seed=config.seed,
        recompute=config.recompute,
        loss_chunk=config.loss_chunk,
        bf16_stream=bool(config.bf16_stream),
        fp8=bool(config.fp8),
    )


def configure(config: TrainConfig, device: torch.device) -> None:
    """Set precision, determinism and attention kernel of this process.

    Raises ConfigError if the device or the installation lacks what is configured.
    """
    if config.fp8:
        check_device(device)
    configure_determinism(deterministic=config.deterministic)
    choose_kernel(config, device)
    configure_precision(device.type)
