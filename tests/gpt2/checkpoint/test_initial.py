"""The weights of a checkpoint become the initial weights of a run, if they are those that it was planned with."""

from __future__ import annotations

import json

import pytest
import torch

from factories import make_data, make_run, train_config, train_fields
from gpt2.checkpoint import describe, initialize, main, save_checkpoint, snapshot
from gpt2.evaluate import Validation
from gpt2.model.registry import build_model
from kmatrix.errors import DataError
from kmatrix.records.runs import merged_metrics
from reading import training_state, world
from training import train_here

NANOCHAT = {
    **{"arch": "nanochat", "bias": False, "weight_tying": False, "dropout": 0.0, "n_kv_head": 0, "norm": "rms"},
    **{"value_embeddings": True, "smear": True, "backout": True, "residual_scales": True, "window_pattern": "SL"},
    **{"qk_scale": 1.2, "rope_base": 1e5, "logit_softcap": 15.0, "activation": "relu2"},
}


def checkpoint_in(folder, **changes):
    """Write a checkpoint of random weights, and return its path and its model."""
    config = train_config(seed=7, **changes)
    model = build_model(config)
    save_checkpoint(folder / "a.pt", snapshot(training_state(config, model), step=3, run_id="a"))
    return folder / "a.pt", model


@pytest.mark.parametrize("arch", [{}, NANOCHAT])
@pytest.mark.parametrize("multiple", [1, 64])
def test_the_weights_are_loaded_for_any_padding_of_the_vocabulary_and_refused_if_they_changed(tmp_path, multiple, arch):
    path, source = checkpoint_in(tmp_path, vocab_multiple=128, **arch)
    given = {"init_from": str(path), "init_sha256": describe(path)["sha256"], "vocab_multiple": multiple, **arch}
    model = build_model(train_config(**given))
    initialize(model, train_config(**given))
    idx = torch.arange(32)[None]
    assert torch.allclose(model.eval()(idx)[0], source.eval()(idx)[0], atol=1e-5)
    with pytest.raises(DataError, match="changed after the run was planned"):
        initialize(model, train_config(**given | {"init_sha256": "0" * 64}))


def test_the_program_prints_a_description_whatever_the_padding_or_an_error(tmp_path, capsys):
    (tmp_path / "b").mkdir()
    (path, _), (padded, _) = checkpoint_in(tmp_path), checkpoint_in(tmp_path / "b", vocab_multiple=64)
    assert main(["describe", str(path), str(padded)]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == second
    assert first["n_embd"] == 32
    path.write_bytes(b"text")
    assert main(["describe", str(padded), str(path)]) == 2
    assert "is damaged" in json.loads(capsys.readouterr().out)["what"]


def test_a_run_starts_from_the_weights_and_resumes_without_them(tmp_path):
    path, source = checkpoint_in(tmp_path)
    sha256 = make_data(tmp_path / "data")
    given = {"data_path": tmp_path / "data", "data_sha256": sha256, "max_iters": 1}
    run = make_run(tmp_path, init_from=str(path), init_sha256=describe(path)["sha256"], **given)
    first = train_here(run)
    expected = Validation(train_config(**train_fields(tmp_path / "data", sha256)), world()).measure(source).loss
    assert merged_metrics(run.metrics)[0].values["val/loss"] == pytest.approx(expected, abs=1e-5)
    path.unlink()  # a resumed run does not need them
    resumed = train_here(run, attempt=2, resume="latest")
    assert ["Initial weights: " in one.stdout for one in (first, resumed)] == [True, False]
    assert resumed.returncode == 0
