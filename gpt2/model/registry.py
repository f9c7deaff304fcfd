"""The model classes by the name of their architecture."""

from __future__ import annotations

from gpt2.model.base import LanguageModel
from gpt2.model.gpt2 import GPT
from gpt2.model.nanochat import NanoChat

# CONFIG_GPT2_ARCH_X is the entry x; how to add one: docs/developing.md, "A model of your own".
MODELS: dict[str, type[LanguageModel]] = {"gpt2": GPT, "nanochat": NanoChat, "nanochat2025": NanoChat}
