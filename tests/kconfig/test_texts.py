"""Texts of configurations that were not rendered by kconfiglib are those that it would render."""

from __future__ import annotations

import pytest

from kmatrix.experiment import make
from kmatrix.kconfig import texts
from kmatrix.kconfig.texts import ConfigTexts
from kmatrix.matrix.expand import assign_run
from programs import Program

AXES = (
    "SEED=1337,1,2,3",  # the first is the default
    "OPTIMIZER=adamw,sgd",
    "LR=0.1,0.02,3e-3",
    "MAX_ITERS=10,20",
)


@pytest.fixture
def plan(tmp_path):
    program = Program(tmp_path)
    program.write("CONFIG_GPT2_DEVICE_CPU=y", "CONFIG_GPT2_MODEL_TINY=y", "CONFIG_GPT2_NUM_GPUS=1")
    return program.plan


@pytest.mark.parametrize("axes", [AXES[:1], AXES[1::-1], AXES[:4], AXES[3::-1], ("TOKENIZER=byte,gpt2", AXES[0])])
def test_texts_are_those_of_kconfiglib(plan, axes, monkeypatch):
    made = plan(*axes)
    rendered, render = [], ConfigTexts.render
    monkeypatch.setattr(texts.ConfigTexts, "render", lambda *words: rendered.append(1) or render(*words))
    found = make._texts(made)
    assert len(rendered) < len(found)
    for planned in made.runs:
        assign_run(made.tree, made.base, planned.run)
        assert found[planned.name].config == made.tree.config_text()
