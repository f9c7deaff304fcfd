"""Data that are too large for a login node."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from factories import train_config
from kmatrix.errors import DataError
from kmatrix.experiment.cluster import data
from kmatrix.experiment.cluster.data import commands, large_data, refuse_large_data

LONG = {"max_iters": 20_000, "batch_size": 32, "block_size": 1024, "gradient_accumulation": 1, "data_tokens": 0}


def sizes(tmp_path, *runs):
    return {one.dataset: one.size for one in large_data(tmp_path, runs).values()}


def prepare(folder: Path, *, complete: bool = True, shards: int = 1, **recipe: object) -> None:
    entries = [
        {"name": f"x_train_{n:06}.bin", "tokens": 10**8, "sha256": "", "size": 1, "mtime_ns": 0, "max_token": 1}
        for n in range(shards)
    ]
    about = {"recipe": recipe, "complete": complete, "vocab_size": 50257, "train_tokens": shards * 10**8}
    folder.mkdir()
    (folder / "dataset.json").write_text(json.dumps({**about, "shards": entries}))


@pytest.mark.parametrize("dataset", ["stdlib", "shakespeare"])
def test_small_texts_are_prepared_where_the_command_runs(tmp_path, dataset):
    assert sizes(tmp_path, train_config(dataset=dataset)) == {}


def test_a_download_of_prebuilt_shards_is_large_if_it_is_above_a_gigabyte(tmp_path):
    short, long = (
        train_config(dataset="finewebedu", tokenizer="gpt2", **{**LONG, "max_iters": n}) for n in (9, 20_000)
    )

    assert sizes(tmp_path, short) == {}
    assert sizes(tmp_path, short, long)["finewebedu"] == pytest.approx(1.6e9, rel=0.1)


def test_only_the_rest_of_a_download_counts(tmp_path):
    prepare(tmp_path / "fwe", complete=False, shards=6, dataset="finewebedu", tokenizer="gpt2")

    assert sizes(tmp_path, train_config(dataset="finewebedu", tokenizer="gpt2", **LONG)) == {}


def test_prepared_data_are_not_prepared_again(tmp_path):
    prepare(tmp_path / "web", dataset="openwebtext", tokenizer="gpt2")

    assert sizes(tmp_path, train_config(dataset="openwebtext", tokenizer="gpt2")) == {}


def test_text_of_unknown_size_is_for_a_job(tmp_path):
    assert sizes(tmp_path, train_config(dataset="hub", data_path="a/b", tokenizer="gpt2")) == {"hub": None}


def test_own_text_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MOST_BYTES", 1000)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_bytes(b"x" * 900)
    run = train_config(dataset="folder", data_path="notes")

    assert sizes(tmp_path, run) == {}
    (tmp_path / "notes" / "b.txt").write_bytes(b"x" * 900)
    assert sizes(tmp_path, run) == {"folder": 1800}
    assert sizes(tmp_path, train_config(dataset="folder", data_path="notes/*.md")) == {}


def test_a_mix_is_as_large_as_its_parts(tmp_path):
    small = train_config(dataset="mix", data_mix="stdlib:1 shakespeare:2", tokenizer="byte")
    large = train_config(dataset="mix", data_mix="finewebedu:65 stdlib:35", tokenizer="gpt2", **LONG)
    unknown = train_config(dataset="mix", data_mix="tinystories:1 stdlib:1", tokenizer="gpt2")

    assert sizes(tmp_path, small) == {}
    assert sizes(tmp_path, large)["mix"] == pytest.approx(1.2e9, rel=0.2)
    assert sizes(tmp_path, unknown) == {"mix": None}


def test_large_data_are_refused_with_the_command_for_a_job(tmp_path):
    with pytest.raises(DataError) as caught:
        refuse_large_data(tmp_path, [train_config(dataset="tinystories", tokenizer="gpt2")])

    assert str(caught.value.what) == "the data are not prepared: tinystories: unknown size"
    assert "prepare-data ENGINE=slurm" in caught.value.hint


def test_the_job_prepares_as_much_as_the_longest_run_reads(tmp_path):
    runs = [train_config(dataset="tinystories", tokenizer="gpt2", **{**LONG, "max_iters": n}) for n in (9, 90)]

    (command,) = commands(Path(sys.executable), tmp_path, runs, list(large_data(tmp_path, runs)))

    assert command[1:5] == ["-m", "gpt2.prepare", "tinystories", "--data-dir"]
    assert f"--tokens={90 * runs[0].tokens_per_step}" in command
