"""Follow docs/developing.md literally: the example is read from the page, added to the table and trained."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from factories import make_run
from gpt2 import train
from gpt2.model.registry import MODELS
from kmatrix.errors import ConfigError
from kmatrix.records.files import read_json
from kmatrix.records.train_config import TrainConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "developing.md"


def example() -> dict[str, Any]:
    """Run the code of the page as a module."""
    (code,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "relu2"}
    exec(compile(code, str(PAGE), "exec"), namespace)
    return namespace


def config_of(tmp_path: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.from_json(read_json(make_run(tmp_path, **changes).run_json)["train"])


def test_the_model_of_the_example_page_learns(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "relu2", example()["ReluSquaredGPT"])
    config = config_of(tmp_path, arch="relu2")
    built, plain = train.build_model(config), train.build_model(config_of(tmp_path / "b", arch="gpt2"))
    assert built.params == plain.params == config.shape.params
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), plain.parameters(), strict=True))
    idx = torch.randint(0, config.vocab_size, (4, config.block_size), generator=torch.Generator().manual_seed(0))
    first = built(idx, idx)[1]
    assert not torch.equal(first, plain(idx, idx)[1])
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        built(idx, idx)[1].backward()
        optimizer.step()
    assert built(idx, idx)[1] < first - 0.5


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="mamba") as raised:
        train.build_model(config_of(tmp_path, arch="mamba"))
    assert "gpt2" in raised.value.why
