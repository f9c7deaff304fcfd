"""On a login node nothing is downloaded."""

from __future__ import annotations

import json

import pytest

from factories import train_config
from kmatrix.errors import DataError
from kmatrix.experiment.inputs.data import refuse_downloads

LONG = {"max_iters": 20_000, "batch_size": 32, "block_size": 1024, "gradient_accumulation": 1, "data_tokens": 0}
GPT2 = {"tokenizer": "gpt2"}


@pytest.mark.parametrize(
    "fields",
    [
        {"dataset": "stdlib"},
        {"dataset": "folder", "data_path": "notes"},
        {"dataset": "mix", "data_mix": "stdlib:1 shakespeare:2"},
        {"dataset": "openwebtext", **GPT2},  # prepared
    ],
)
def test_small_local_and_prepared_data_are_prepared_where_the_command_runs(tmp_path, fields):
    (tmp_path / "web").mkdir()
    about = {"recipe": {"dataset": "openwebtext", **GPT2}, "complete": True, "vocab_size": 50257, "train_tokens": 10**8}
    shard = {"name": "x_train_000000.bin", "tokens": 10**8, "sha256": "", "size": 1, "mtime_ns": 0, "max_token": 1}
    (tmp_path / "web" / "dataset.json").write_text(json.dumps({**about, "shards": [shard]}))
    refuse_downloads(tmp_path, [train_config(**fields)])


@pytest.mark.parametrize(
    "fields",
    [
        {"dataset": "finewebedu", **GPT2, **LONG},
        {"dataset": "tinystories", **GPT2},  # of unknown size
        {"dataset": "hub", "data_path": "a/b", **GPT2},
        {"dataset": "mix", "data_mix": "tinystories:1 stdlib:1", **GPT2},
    ],
)
def test_downloads_are_refused_outside_a_job_with_the_command_for_another_node(tmp_path, monkeypatch, fields):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(DataError, match=f"the data are not prepared: {fields['dataset']}") as caught:
        refuse_downloads(tmp_path, [train_config(**fields)])
    assert "srun -c 8 make prepare-data" in caught.value.hint
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    refuse_downloads(tmp_path, [train_config(**fields)])
