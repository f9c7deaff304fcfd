"""Download Hugging Face datasets with the real client from a local server: resume, verify, and report errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt2.prepare.catalog import CATALOG, DatasetRequest
from gpt2.prepare.dataset import DATASETS, place_of
from hub_preparing import PER_SHARD, error_of, parquet, result_of, run, shard
from hub_server import HubServer
from kmatrix.forms import BY_LANGUAGE
from kmatrix.rules import MIXABLE

SHARDS = "kjj0/finewebedu10B-gpt2"
TEXT = "HuggingFaceFW/fineweb-edu"


@pytest.fixture
def hub():
    names = {f"finewebedu_train_{number:06d}.bin": shard(number) for number in range(1, 6)}
    pages = {f"sample/10BT/{number:03d}_00000.parquet": parquet(f"File {number}", 100) for number in range(3)}
    datasets = {
        SHARDS: {**names, "finewebedu_val_000000.bin": shard(0), "README.md": b"# shards"},
        TEXT: {**pages, "data/CC-MAIN/0.parquet": parquet("Other"), "README.md": b"# text"},
        "me/mine": {"a.txt": b"one text. " * 50, "b.txt": b"another text. " * 50},
        "me/outside": {"../../outside.txt": b"one text. " * 50, "/outside.txt": b"one text. " * 50},
    }
    with HubServer(datasets) as server:
        yield server


def run_prepare(hub, data, *arguments, **variables):
    return run(hub, data, "finewebedu", "--tokenizer", "gpt2", *arguments, **variables)


@pytest.mark.process
def test_only_the_needed_shards_are_downloaded_retried_and_verified_with_a_token_that_is_never_printed(hub, tmp_path):
    hub.token = "hf_secret"
    wrong = run_prepare(hub, tmp_path, HF_TOKEN="hf_wrong")
    assert "HF_TOKEN" in error_of(wrong)
    hub.cut[f"cdn/{SHARDS}/finewebedu_train_000001.bin"] = [30_000]
    hub.corrupt.add(f"cdn/{SHARDS}/finewebedu_train_000002.bin")
    arguments = ("--tokens", "70000", "--block-size", "1000")
    message = error_of(run_prepare(hub, tmp_path, *arguments, HF_TOKEN="hf_secret"))
    assert "finewebedu_train_000002.bin differs from the repository's listing" in message
    hub.corrupt.clear()
    completed = run_prepare(hub, tmp_path, *arguments, HF_TOKEN="hf_secret")
    result = result_of(completed)
    assert (result["shards"], result["train_tokens"]) == (2, 2 * PER_SHARD)
    folder = Path(result["path"])
    train = [f"finewebedu_train_{number:06d}.bin" for number in (1, 2)]
    assert sorted(path.name for path in folder.iterdir()) == ["dataset.json", *train, "finewebedu_val_000000.bin"]
    assert [(folder / name).read_bytes() for name in train] == [shard(1), shard(2)]
    # Tried again after the broken connection, and not downloaded again after the error.
    assert len(hub.fetched_ranges(f"{SHARDS}/finewebedu_train_000001.bin")) == 2
    assert f"2 of 5 training shards of {SHARDS}; 81 kB to download" in completed.stderr
    assert not hub.fetched_ranges(f"{SHARDS}/README.md")
    count = len(hub.requests)
    assert result_of(run_prepare(hub, tmp_path, "--tokens", "60000"))["sha256"] == result["sha256"]
    assert len(hub.requests) == count
    assert result_of(run_prepare(hub, tmp_path, "--tokens", "150000", HF_TOKEN="hf_secret"))["shards"] == 4
    printed = completed.stderr + completed.stdout + wrong.stdout + wrong.stderr + (folder / "dataset.json").read_text()
    assert not [key for key in ("hf_secret", "hf_wrong") if key in printed]


@pytest.mark.nightly
def test_text_is_downloaded_file_by_file_and_more_of_it_equals_one_preparation(hub, tmp_path):
    arguments = ("--shard-tokens", "2000", "--val-percent", "20")
    assert result_of(run(hub, tmp_path / "a", "finewebedu", *arguments, "--tokens", "2500"))["shards"] == 2
    assert not hub.fetched_ranges(f"{TEXT}/sample/10BT/001_00000.parquet")
    grown = result_of(run(hub, tmp_path / "a", "finewebedu", *arguments))
    assert hub.fetched_ranges(f"{TEXT}/sample/10BT/002_00000.parquet")
    assert not hub.fetched_ranges(f"{TEXT}/data/CC-MAIN/0.parquet")
    assert not list(Path(grown["path"]).rglob("*.parquet"))
    assert grown["sha256"] == result_of(run(hub, tmp_path / "b", "finewebedu", *arguments))["sha256"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("me/mine", 2 + (500 + 700) * 93 // 100),
        ("me/mine:a.*", 1 + 500 * 93 // 100),
        ("me/nothing", "cannot download the dataset me/nothing"),
        ("me/mine@v2", "cannot download the dataset me/mine"),
        ("me/mine:*.parquet", "me/mine has no files that match *.parquet"),
        ("mine", "cannot download the dataset mine"),
        ("me/outside:*.txt", "me/outside has no files"),  # a path that leaves the directory is not followed
    ],
)
def test_a_repository_is_read_or_refused_by_name(hub, tmp_path, path, expected):
    done = run(hub, tmp_path, "hub", "--data-path", path)
    if isinstance(expected, int):
        assert result_of(done)["train_tokens"] == expected
    else:
        assert expected in error_of(done)
    assert not list(tmp_path.rglob("outside.txt"))


def test_named_datasets_have_their_repository_language_and_column(tmp_path):
    many = DatasetRequest(dataset="finewebedu", tokenizer="gpt2", tokens=10**10).as_named()
    assert many.shards_on_hub == "karpathy/fineweb-edu-100B-gpt2-token-shards:edu_fineweb_*.bin"
    assert place_of(many, tmp_path)[0] == tmp_path / "karpathy--fineweb-edu-100B-gpt2-token-shards"
    few = DatasetRequest(dataset="finewebedu", tokenizer="gpt2", tokens=10**9).as_named()
    assert (few.shards_on_hub, place_of(few, tmp_path)[0]) == (f"{SHARDS}:finewebedu_*.bin", tmp_path / "finewebedu")
    german = DatasetRequest(dataset="fineweb2", data_path="deu_Latn")
    assert german.text_on_hub == "HuggingFaceFW/fineweb-2:data/deu_Latn/train/*.parquet"
    assert DatasetRequest(dataset="finepdfs").text_on_hub.endswith("data/eng_Latn/train/*.parquet")
    assert DatasetRequest(dataset="medqa").as_named().text_column == "question+answer"


def test_both_sides_know_the_same_datasets():
    assert set(DATASETS) == {*MIXABLE, "mix"}
    assert {name for name, known in CATALOG.items() if "{language}" in known.get("text", "")} == set(BY_LANGUAGE)
    recipe = DatasetRequest(dataset="finewebedu", tokenizer="gpt2", repository="x/y").recipe
    assert recipe == {"dataset": "finewebedu", "tokenizer": "gpt2", "data_path": "", "mix": "", "repository": "x/y"}
