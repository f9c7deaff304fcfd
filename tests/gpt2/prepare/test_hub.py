"""Download Hugging Face datasets with the real client from a local server: resume, verify, and report errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpt2.prepare.catalog import CATALOG, DatasetRequest, repository
from gpt2.prepare.dataset import DATASETS, place_of
from hub_preparing import PER_SHARD, error_of, parquet, result_of, run, shard
from hub_server import HubServer
from kmatrix.config import MIXABLE
from kmatrix.experiment.inputs.data import LARGER, PREBUILT
from kmatrix.records.train_config import BY_LANGUAGE

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
        "me/sizes": {f"{size}/x_{kind}_000000.bin": shard(0) for size in ("10B", "100B") for kind in ("train", "val")},
    }
    with HubServer(datasets) as server:
        yield server


def run_prepare(hub, data, *arguments, **variables):
    return run(hub, data, "finewebedu", "--tokenizer", "gpt2", *arguments, **variables)


@pytest.mark.process
def test_only_the_needed_shards_are_downloaded_retried_and_verified(hub, tmp_path):
    hub.cut[f"cdn/{SHARDS}/finewebedu_train_000001.bin"] = [30_000]
    corrupt = f"cdn/{SHARDS}/finewebedu_train_000002.bin"
    hub.corrupt.add(corrupt)
    arguments = ("--tokens", "70000", "--block-size", "1000")
    message = error_of(run_prepare(hub, tmp_path, *arguments))
    assert "finewebedu_train_000002.bin differs from the repository's listing" in message
    hub.corrupt.clear()
    completed = run_prepare(hub, tmp_path, *arguments)
    result = result_of(completed)
    assert (result["shards"], result["train_tokens"]) == (2, 2 * PER_SHARD)
    folder = Path(result["path"])
    train = [f"finewebedu_train_{number:06d}.bin" for number in (1, 2)]
    assert sorted(path.name for path in folder.iterdir()) == ["dataset.json", *train, "finewebedu_val_000000.bin"]
    assert [(folder / name).read_bytes() for name in train] == [shard(1), shard(2)]
    # Tried again after the broken connection, and not downloaded again after the error.
    assert len(hub.fetched_ranges(f"{SHARDS}/finewebedu_train_000001.bin")) == 2
    assert "2 of 5 training shards; downloading 1 file, 81 kB" in completed.stderr
    assert not hub.fetched_ranges(f"{SHARDS}/README.md")


@pytest.mark.nightly
def test_a_second_call_sends_no_request_and_a_longer_run_downloads_the_rest(hub, tmp_path):
    first = result_of(run_prepare(hub, tmp_path, "--tokens", "70000"))
    count = len(hub.requests)
    assert result_of(run_prepare(hub, tmp_path, "--tokens", "60000"))["sha256"] == first["sha256"]
    assert len(hub.requests) == count
    longer = result_of(run_prepare(hub, tmp_path, "--tokens", "150000"))
    assert (longer["shards"], longer["made"]) == (4, True)
    all_shards = result_of(run_prepare(hub, tmp_path))
    assert (all_shards["shards"], all_shards["train_tokens"]) == (5, 5 * PER_SHARD)
    assert result_of(run_prepare(hub, tmp_path, "--tokens", "70000"))["sha256"] == first["sha256"]


@pytest.mark.process
def test_a_gated_dataset_needs_a_token_that_is_never_printed(hub, tmp_path):
    hub.token = "hf_secret"
    wrong = run_prepare(hub, tmp_path, HF_TOKEN="hf_wrong")
    assert "HF_TOKEN" in error_of(wrong)
    completed = run_prepare(hub, tmp_path, "--tokens", "30000", HF_TOKEN="hf_secret")
    result_of(completed)
    record = (tmp_path / "data/finewebedu/dataset.json").read_text()
    for key in ("hf_secret", "hf_wrong"):
        assert key not in completed.stderr + completed.stdout + wrong.stdout + wrong.stderr + record


@pytest.mark.nightly
def test_text_is_downloaded_file_by_file_and_more_of_it_equals_one_preparation(hub, tmp_path):
    arguments = ("--tokenizer", "byte", "--shard-tokens", "2000", "--val-percent", "20")
    few = result_of(run(hub, tmp_path / "a", "finewebedu", *arguments, "--tokens", "2500"))
    assert few["shards"] == 2
    assert hub.fetched_ranges(f"{TEXT}/sample/10BT/000_00000.parquet")
    assert not hub.fetched_ranges(f"{TEXT}/sample/10BT/001_00000.parquet")
    grown = result_of(run(hub, tmp_path / "a", "finewebedu", *arguments))
    assert hub.fetched_ranges(f"{TEXT}/sample/10BT/002_00000.parquet")
    assert not hub.fetched_ranges(f"{TEXT}/data/CC-MAIN/0.parquet")
    assert not list(Path(grown["path"]).rglob("*.parquet"))
    assert grown["sha256"] == result_of(run(hub, tmp_path / "b", "finewebedu", *arguments))["sha256"]


@pytest.mark.nightly
def test_repositories_are_given_by_owner_and_name(hub, tmp_path):
    text = result_of(run(hub, tmp_path, "hub", "--data-path", "me/mine", "--val-percent", "10"))
    assert "me--mine" in text["path"]
    assert text["train_tokens"] == 2 + (500 + 700) * 9 // 10
    arguments = ("--tokenizer", "gpt2", "--tokens", "9", "--data-path")
    found = result_of(run(hub, tmp_path, "shards", *arguments, f"hf://{SHARDS}"))
    assert found["shards"] == 1
    assert "kjj0--finewebedu10B-gpt2" in found["path"]
    both = error_of(run(hub, tmp_path, "shards", *arguments, "hf://me/sizes"))
    assert "me/sizes is not one dataset of token shards" in both
    one = result_of(run(hub, tmp_path, "shards", *arguments, "hf://me/sizes:10B/*.bin"))
    assert one["train_tokens"] == PER_SHARD


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dataset", "path", "message"),
    [
        ("hub", "me/nothing", "cannot download the dataset me/nothing"),
        ("hub", "me/mine@v2", "cannot download the dataset me/mine"),
        ("hub", "me/mine:*.parquet", "me/mine has no files that match *.parquet"),
        ("hub", "mine", "is not a Hugging Face dataset"),
        ("hub", "me/outside:*.txt", "me/outside has no files"),  # a path that leaves the directory is not followed
    ],
)
def test_what_is_not_there_is_refused_by_name(hub, tmp_path, dataset, path, message):
    assert message in error_of(run(hub, tmp_path, dataset, "--data-path", path))
    assert not list(tmp_path.rglob("outside.txt"))


def test_a_request_for_more_tokens_reads_the_larger_repository_from_a_folder_of_its_own(tmp_path):
    request = DatasetRequest(dataset="finewebedu", tokenizer="gpt2", tokens=10**10).as_named()
    assert request.shards_on_hub.name == "karpathy/fineweb-edu-100B-gpt2-token-shards"
    assert place_of(request, tmp_path)[0] == tmp_path / "karpathy--fineweb-edu-100B-gpt2-token-shards"
    few = replace(request, tokens=10**9).as_named()
    assert (few.shards_on_hub.name, place_of(few, tmp_path)[0]) == (SHARDS, tmp_path / "finewebedu")


def test_named_datasets_have_their_language_column_and_licence():
    german = DatasetRequest(dataset="fineweb2", tokenizer="byte", data_path="deu_Latn")
    assert german.text_on_hub.patterns == ("data/deu_Latn/train/*.parquet",)
    english = DatasetRequest(dataset="finepdfs", tokenizer="byte")
    assert english.text_on_hub.patterns == ("data/eng_Latn/train/*.parquet",)
    assert DatasetRequest(dataset="medqa", tokenizer="byte").as_named().text_column == "question+answer"
    assert CATALOG["climbmix"].terms.startswith("non-commercial")


def test_both_sides_know_the_same_datasets():
    assert set(DATASETS) == {*MIXABLE, "mix"}
    assert {name for name, known in CATALOG.items() if known.by_language} == set(BY_LANGUAGE)
    larger = {name: known for name, known in CATALOG.items() if known.larger}
    assert {name: repository(known.larger).name for name, known in larger.items()} == {
        n: r for n, (r, _) in LARGER.items()
    }
    assert all(known.above == PREBUILT[name].tokens for name, known in larger.items())
    recipe = DatasetRequest(dataset="finewebedu", tokenizer="gpt2", repository="x/y").recipe
    assert recipe == {"dataset": "finewebedu", "tokenizer": "gpt2", "data_path": "", "mix": "", "repository": "x/y"}
