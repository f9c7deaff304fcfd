"""The weights of a checkpoint become the initial weights of a run, if they are those that it was planned with."""

from __future__ import annotations

import json

import pytest
import torch

import forked
from factories import environment, make_data, make_run, train, train_config, train_fields, trainer
from gpt2.checkpoint.files import save_checkpoint
from gpt2.checkpoint.initial import describe, initialize, main
from gpt2.checkpoint.state import snapshot
from gpt2.evaluate import Validation
from gpt2.model.registry import build_model
from kmatrix.errors import DataError
from kmatrix.records.train_config import TrainConfig
from reading import training_state, world


def checkpoint_in(folder, **changes):
    """Write a checkpoint of random weights, and return its path and its model."""
    config = train_config(seed=7, **changes)
    model = build_model(config)
    save_checkpoint(folder / "a.pt", snapshot(training_state(config, model), step=3, run_id="a"))
    return folder / "a.pt", model


NANOCHAT = {
    **{"arch": "nanochat", "bias": False, "weight_tying": False, "dropout": 0.0, "n_kv_head": 0, "norm": "rms"},
    **{"value_embeddings": True, "smear": True, "backout": True, "residual_scales": True, "window_pattern": "SL"},
    **{"qk_scale": 1.2, "rope_base": 1e5, "logit_softcap": 15.0, "activation": "relu2"},
}


@pytest.mark.parametrize("arch", [{}, NANOCHAT])
@pytest.mark.parametrize("multiple", [1, 64])
def test_the_weights_are_loaded_for_any_padding_of_the_vocabulary(tmp_path, multiple, arch):
    path, source = checkpoint_in(tmp_path, vocab_multiple=128, **arch)
    config = train_config(init_from=str(path), init_sha256=describe(path)["sha256"], vocab_multiple=multiple, **arch)
    model = build_model(config)

    initialize(model, config)

    idx = torch.arange(32)[None]
    assert torch.allclose(model.eval()(idx)[0], source.eval()(idx)[0], atol=1e-5)


def test_changed_weights_and_those_of_another_size_are_refused_whatever_the_padding(tmp_path):
    (tmp_path / "b").mkdir()
    (path, _), (padded, _) = checkpoint_in(tmp_path), checkpoint_in(tmp_path / "b", vocab_multiple=64)
    sha256 = describe(path)["sha256"]
    assert describe(padded)["sha256"] == sha256
    for changes, message in (
        ({"init_sha256": "0" * 64}, "changed after the run was"),
        ({"block_size": 16}, "fit"),
    ):
        config = train_config(**{"init_from": str(path), "init_sha256": sha256, **changes})
        with pytest.raises(DataError, match=message):
            initialize(build_model(config), config)


def test_the_program_prints_a_description_or_an_error(tmp_path, capsys):
    path, _ = checkpoint_in(tmp_path)
    (tmp_path / "b.pt").write_bytes(b"text")

    assert main([str(path), str(path)]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == second
    assert first["n_embd"] == 32
    assert main([str(path), str(tmp_path / "b.pt")]) == 2
    assert "is damaged" in json.loads(capsys.readouterr().out)["what"]


@pytest.mark.process
def test_every_rank_starts_from_the_weights_and_resumes_without_them(tmp_path):
    path, source = checkpoint_in(tmp_path)
    sha256 = make_data(tmp_path / "data")
    given = {"data_path": tmp_path / "data", "data_sha256": sha256, "num_gpus": 2, "max_iters": 1}
    run = make_run(tmp_path, init_from=str(path), init_sha256=describe(path)["sha256"], **given)
    completed = train(run)
    assert completed.returncode == 0, completed.stdout + completed.stderr

    config = TrainConfig.from_json(train_fields(tmp_path / "data", sha256))
    expected = Validation(config, world()).measure(source, lambda: False).loss
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert lines[0]["val/loss"] == pytest.approx(expected, abs=1e-5)
    assert "Initial weights: " in completed.stdout
    path.unlink()  # a resumed run does not need them
    resumed = forked.run([*trainer(run, attempt=2), "--resume", "latest"], environment(), ranks=2)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "Initial weights" not in resumed.stdout
