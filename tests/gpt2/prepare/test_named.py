"""Named datasets: their repositories, languages, columns and licences, from a local server."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpt2.data import shards
from gpt2.prepare.catalog import CATALOG, DatasetRequest, Repository
from gpt2.prepare.dataset import DATASETS
from hub_preparing import error_of, result_of, run, shard
from hub_server import HubServer
from kmatrix.errors import ConfigError
from kmatrix.experiment.inputs.data import LARGER, PREBUILT
from kmatrix.records.train_config import BY_LANGUAGE, CHOICES


def parquet(name, count=60, **columns):
    rows = {"text": [f"{name} page {number}. " + "Many words. " * 9 for number in range(count)]} | columns
    buffer = io.BytesIO()
    pq.write_table(pa.table(rows), buffer)
    return buffer.getvalue()


def text_of(result):
    """Return the training and validation text of a prepared dataset in byte tokens."""
    found = b""
    for kind in ("train", "val"):
        for path in shards.find(Path(result["path"]), kind):
            tokens = np.asarray(shards.open_shard(path))
            found += bytes(tokens[tokens < 256].astype(np.uint8)) + b"\n"
    return found.decode()


@pytest.fixture(scope="module")
def hub():
    questions = [
        {"question": f"Which drug, case {n}?", "answer": f"Drug {n}", "options": {"A": "x"}, "answer_idx": "A"}
        for n in range(80)
    ]
    lines = "\n".join(json.dumps(question) for question in questions).encode()
    datasets = {
        "HuggingFaceFW/fineweb-2": {
            "data/deu_Latn/train/000_00000.parquet": parquet("Deutsch"),
            "data/deu_Latn/test/000_00000.parquet": parquet("Test"),
            "data/fra_Latn/train/000_00000.parquet": parquet("Francais"),
        },
        "HuggingFaceFW/finepdfs": {
            "data/eng_Latn/train/000_00000.parquet": parquet("English"),
            "data/deu_Latn/train/000_00000.parquet": parquet("Deutsch"),
        },
        "HuggingFaceTB/cosmopedia": {"data/stories/train-00000-of-00001.parquet": parquet("Story")},
        "karpathy/climbmix-400b-shuffle": {"shard_00000.parquet": parquet("Climb")},
        "GBaker/MedQA-USMLE-4-options": {
            "phrases_no_exclude_train.jsonl": lines,
            "phrases_no_exclude_test.jsonl": b'{"question": "A test question", "answer": "no"}\n' * 50,
        },
    }
    with HubServer(datasets) as server:
        yield server


def prepared(hub, tmp_path, dataset, *arguments):
    completed = run(hub, tmp_path, dataset, "--val-percent", "20", *arguments)
    return result_of(completed), completed.stderr


@pytest.mark.nightly
def test_a_language_selects_its_pages(hub, tmp_path):
    german, _ = prepared(hub, tmp_path, "fineweb2", "--data-path", "deu_Latn")
    text = text_of(german)
    assert "Deutsch page" in text
    assert "Test page" not in text
    assert "Francais page" not in text
    assert "Francais page" in text_of(prepared(hub, tmp_path, "fineweb2", "--data-path", "fra_Latn")[0])
    assert german["path"].rsplit("/", 1)[-1].startswith("fineweb2-deu_Latn-byte-")
    assert "English page" in text_of(prepared(hub, tmp_path, "finepdfs")[0])
    assert "Deutsch page" in text_of(prepared(hub, tmp_path, "finepdfs", "--data-path", "deu_Latn")[0])


@pytest.mark.nightly
def test_a_question_is_followed_by_its_answer_and_test_questions_are_left_out(hub, tmp_path):
    text = text_of(prepared(hub, tmp_path, "medqa")[0])
    assert "Which drug, case 7?\nDrug 7" in text
    assert "test question" not in text


@pytest.mark.nightly
def test_the_licence_of_climbmix_is_printed_whenever_it_is_prepared(hub, tmp_path):
    terms = "climbmix: licence CC BY-NC 4.0, non-commercial, for research and development only"
    assert terms in prepared(hub, tmp_path, "climbmix")[1]
    assert terms in prepared(hub, tmp_path, "climbmix")[1]
    assert "cosmopedia: licence" not in prepared(hub, tmp_path, "cosmopedia")[1]


@pytest.mark.nightly
@pytest.mark.parametrize("language", ["german", "../../etc", "deu_Latn/*"])
def test_a_path_that_is_not_a_language_is_refused(hub, tmp_path, language):
    message = error_of(run(hub, tmp_path, "fineweb2", "--data-path", language))
    assert "is not a language of HuggingFaceFW/fineweb-2" in message


def test_a_dataset_without_languages_keeps_its_patterns():
    text = CATALOG["cosmopedia"].text
    assert CATALOG["cosmopedia"].text_of("") is text
    with pytest.raises(ConfigError):
        CATALOG["fineweb2"].text_of("")


def test_more_tokens_than_the_usual_repository_has_come_from_the_larger_one():
    usual = DatasetRequest(dataset="finewebedu", tokenizer="gpt2", tokens=9_853_989_344)
    longer = DatasetRequest(dataset="finewebedu", tokenizer="gpt2", tokens=9_853_989_345)
    assert usual.larger is None
    assert isinstance(longer.larger, Repository)
    assert longer.larger.name == "karpathy/fineweb-edu-100B-gpt2-token-shards"
    assert longer.recipe == {**usual.recipe, "repository": longer.larger.name}
    assert DatasetRequest(dataset="finewebedu", tokenizer="byte", tokens=10**11).larger is None


@pytest.mark.process
def test_the_shards_of_the_larger_repository_have_their_own_folder(tmp_path, monkeypatch):
    names = {f"edu_fineweb_train_{number:06d}.bin": shard(number) for number in range(1, 4)}
    repository = {**names, "edu_fineweb_val_000000.bin": shard(0)}
    with HubServer({"karpathy/fineweb-edu-100B-gpt2-token-shards": repository}) as hub:
        # All three, because they hold fewer tokens than are requested.
        result = result_of(run(hub, tmp_path, "finewebedu", "--tokenizer", "gpt2", "--tokens", "10000000000"))
    assert result["path"].endswith("/karpathy--fineweb-edu-100B-gpt2-token-shards")
    assert result["shards"] == 3


def test_both_sides_know_the_same_datasets():
    assert set(DATASETS) == set(CHOICES["dataset"])
    assert {name for name, known in CATALOG.items() if known.by_language} == set(BY_LANGUAGE)
    larger = {name: known.larger for name, known in CATALOG.items() if known.larger}
    assert {name: found.shards.name for name, found in larger.items()} == {n: r for n, (r, _) in LARGER.items()}
    assert all(found.above == PREBUILT[name].tokens for name, found in larger.items())
