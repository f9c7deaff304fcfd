"""Download Hugging Face datasets with the real client from a local server: resume, verify, and report errors."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from factories import ROOT, environment
from gpt2.data import shards
from hub_preparing import PER_SHARD, error_of, result_of, run, shard
from hub_server import HubServer
from waiting import wait_until

PREBUILT = "kjj0/finewebedu10B-gpt2"
TEXT = "HuggingFaceFW/fineweb-edu"


def parquet(start, count=30):
    buffer = io.BytesIO()
    pages = [
        f"Page {number} of the web: " + "words and words. " * (number % 9) for number in range(start, start + count)
    ]
    pq.write_table(pa.table({"text": pages}), buffer)
    return buffer.getvalue()


@pytest.fixture
def hub():
    names = {f"finewebedu_train_{number:06d}.bin": shard(number) for number in range(1, 6)}
    pages = {f"sample/10BT/{number:03d}_00000.parquet": parquet(1000 * number, 100) for number in range(3)}
    datasets = {
        PREBUILT: {**names, "finewebedu_val_000000.bin": shard(0), "README.md": b"# shards"},
        TEXT: {**pages, "data/CC-MAIN/0.parquet": parquet(900), "README.md": b"# text"},
        "me/mine": {"a.txt": b"one text. " * 50, "b.txt": b"another text. " * 50},
    }
    with HubServer(datasets) as server:
        yield server


def run_prepare(hub, data, *arguments, **variables):
    return run(hub, data, "finewebedu", "--tokenizer", "gpt2", *arguments, **variables)


@pytest.mark.process
def test_only_the_needed_shards_are_downloaded_and_announced_first(hub, tmp_path):
    completed = run_prepare(hub, tmp_path, "--tokens", "70000", "--block-size", "1000")
    result = result_of(completed)
    assert result["shards"] == 2
    assert result["train_tokens"] == 2 * PER_SHARD
    names = sorted(path.name for path in Path(result["path"]).glob("*"))
    train = [f"finewebedu_train_{number:06d}.bin" for number in (1, 2)]
    assert names == ["dataset.json", *train, "finewebedu_val_000000.bin"]
    first = completed.stderr.splitlines()[0]
    assert "2 of 5 training shards (80.0k tokens) for the 70.0k tokens of the longest run" in first
    assert f"downloading 3 files, {3 * (1024 + 2 * PER_SHARD) / 1000:.3g} kB, from {PREBUILT}" in first
    assert not hub.fetched_ranges(f"{PREBUILT}/README.md")


@pytest.mark.nightly
def test_a_second_call_sends_no_request_and_a_longer_run_downloads_the_rest(hub, tmp_path):
    first = result_of(run_prepare(hub, tmp_path, "--tokens", "70000"))
    count = len(hub.requests)
    assert result_of(run_prepare(hub, tmp_path, "--tokens", "60000"))["sha256"] == first["sha256"]
    assert len(hub.requests) == count
    longer = result_of(run_prepare(hub, tmp_path, "--tokens", "150000"))
    assert (longer["shards"], longer["made"]) == (4, True)
    assert len(hub.fetched_ranges(f"{PREBUILT}/finewebedu_train_000001.bin")) == 1
    all_shards = result_of(run_prepare(hub, tmp_path))
    assert (all_shards["shards"], all_shards["train_tokens"]) == (5, 5 * PER_SHARD)
    assert result_of(run_prepare(hub, tmp_path, "--tokens", "70000"))["sha256"] == first["sha256"]


@pytest.mark.process
def test_an_interrupted_download_resumes(hub, tmp_path):
    hub.cut[f"cdn/{PREBUILT}/finewebedu_train_000001.bin"] = [30_000, 20_000]
    result = result_of(run_prepare(hub, tmp_path, "--tokens", "30000"))
    ranges = hub.fetched_ranges(f"{PREBUILT}/finewebedu_train_000001.bin")
    assert [byte_range.partition("-")[0] for byte_range in ranges[1:]] == ["bytes=30000", "bytes=50000"]
    path = Path(result["path"]) / "finewebedu_train_000001.bin"
    assert path.read_bytes() == shard(1)


@pytest.mark.nightly
def test_a_temporary_server_error_is_retried(hub, tmp_path):
    hub.failing[f"cdn/{PREBUILT}/finewebedu_train_000001.bin"] = 2
    assert result_of(run_prepare(hub, tmp_path, "--tokens", "30000"))["shards"] == 1


@pytest.mark.process
def test_a_wrong_hash_is_refused_and_the_file_deleted(hub, tmp_path):
    name = "finewebedu_train_000002.bin"
    hub.corrupt.add(f"cdn/{PREBUILT}/{name}")
    message = error_of(run_prepare(hub, tmp_path, "--tokens", "70000"))
    assert f"{name} differs from the repository's listing" in message
    assert not list((tmp_path / "data").rglob(name))
    hub.corrupt.clear()
    result = result_of(run_prepare(hub, tmp_path, "--tokens", "70000"))
    assert (Path(result["path"]) / name).read_bytes() == shard(2)
    assert all(hub.fetched_ranges(f"{PREBUILT}/finewebedu_train_000001.bin")[1:]), "what had come of the others is kept"


@pytest.mark.nightly
def test_ctrl_c_ends_a_download_at_once_and_keeps_the_received_bytes(hub, tmp_path):
    hub.stalled.add(f"cdn/{PREBUILT}/finewebedu_train_000001.bin")
    command = [sys.executable, "-m", "gpt2.prepare", "finewebedu", "--tokenizer", "gpt2", "--tokens", "30000"]
    process = subprocess.Popen(
        [*command, "--data-dir", str(tmp_path / "data")],
        env={**environment(), **hub.environment(tmp_path / "home")},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    partial_file = tmp_path / "data/finewebedu/.fetched/.finewebedu_train_000001.bin.part"
    wait_until(lambda: partial_file.exists() and partial_file.stat().st_size > 0)
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped: partial downloads" in output
    assert partial_file.stat().st_size > 0
    hub.stalled.clear()
    result_of(run_prepare(hub, tmp_path, "--tokens", "30000"))


@pytest.mark.nightly
def test_shards_of_another_vocabulary_are_refused_with_the_offset(hub, tmp_path):
    body = bytearray(shard(1))
    body[1024 + 8 : 1024 + 10] = (60000).to_bytes(2, "little")
    hub.datasets[PREBUILT]["finewebedu_train_000001.bin"] = bytes(body)
    hub.files[f"cdn/{PREBUILT}/finewebedu_train_000001.bin"] = bytes(body)
    assert "has the token 60000 at byte 1032" in error_of(run_prepare(hub, tmp_path, "--tokens", "30000"))


@pytest.mark.nightly
def test_existing_shards_are_verified_and_not_downloaded(hub, tmp_path):
    folder = tmp_path / "data" / "finewebedu"
    folder.mkdir(parents=True)
    (folder / "finewebedu_val_000000.bin").write_bytes(shard(0))
    (folder / "finewebedu_train_000001.bin").write_bytes(shard(1)[:-2])
    result_of(run_prepare(hub, tmp_path, "--tokens", "30000"))
    assert hub.fetched_ranges(f"{PREBUILT}/finewebedu_val_000000.bin") == []
    assert (folder / "finewebedu_train_000001.bin").read_bytes() == shard(1)


@pytest.mark.nightly
def test_offline_mode_is_reported_and_sends_no_request(hub, tmp_path):
    message = error_of(run_prepare(hub, tmp_path, HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE is set" in message
    assert hub.requests == []


@pytest.mark.process
def test_a_gated_dataset_needs_a_token_that_is_never_printed(hub, tmp_path):
    hub.token = "hf_secret"
    assert "HF_TOKEN" in error_of(run_prepare(hub, tmp_path))
    error = error_of(run_prepare(hub, tmp_path, HF_TOKEN="hf_wrong"))
    assert "hf_wrong" not in error
    completed = run_prepare(hub, tmp_path, "--tokens", "30000", HF_TOKEN="hf_secret")
    result_of(completed)
    assert (
        "hf_secret" not in completed.stderr + completed.stdout + (tmp_path / "data/finewebedu/dataset.json").read_text()
    )


@pytest.mark.nightly
def test_shards_of_any_repository_are_given_by_their_url(hub, tmp_path):
    result = result_of(
        run(hub, tmp_path, "shards", "--data-path", f"hf://{PREBUILT}", "--tokenizer", "gpt2", "--tokens", "9")
    )
    assert result["shards"] == 1
    assert "kjj0--finewebedu10B-gpt2" in result["path"]


@pytest.mark.nightly
def test_shards_of_the_same_name_are_refused_unless_one_directory_is_named(tmp_path):
    files = {f"{size}/x_{kind}_000000.bin": shard(0) for size in ("10B", "100B") for kind in ("train", "val")}
    with HubServer({"me/sizes": files}) as hub:
        arguments = ("--tokenizer", "gpt2", "--tokens", "9")
        answer = error_of(run(hub, tmp_path, "shards", "--data-path", "hf://me/sizes", *arguments))
        assert "me/sizes has several shards named x_" in answer
        one = result_of(run(hub, tmp_path, "shards", "--data-path", "hf://me/sizes:10B/*.bin", *arguments))
    assert one["train_tokens"] == PER_SHARD


@pytest.mark.nightly
def test_text_is_downloaded_file_by_file_as_needed(hub, tmp_path):
    arguments = ("--tokenizer", "byte", "--shard-tokens", "2000", "--val-percent", "20")
    result = result_of(run(hub, tmp_path, "finewebedu", *arguments, "--tokens", "2500"))
    assert result["shards"] == 2
    assert hub.fetched_ranges(f"{TEXT}/sample/10BT/000_00000.parquet")
    assert not hub.fetched_ranges(f"{TEXT}/sample/10BT/001_00000.parquet")
    longer = result_of(run(hub, tmp_path, "finewebedu", *arguments))
    assert hub.fetched_ranges(f"{TEXT}/sample/10BT/002_00000.parquet")
    assert not hub.fetched_ranges(f"{TEXT}/data/CC-MAIN/0.parquet")
    first = [path.read_bytes() for path in shards.find(Path(result["path"]), "train", 2)]
    assert first[0] == shards.find(Path(longer["path"]), "train")[0].read_bytes()
    assert not list(Path(longer["path"]).rglob("*.parquet"))


@pytest.mark.nightly
def test_shards_added_for_a_longer_run_equal_those_of_one_preparation(hub, tmp_path):
    arguments = ("--tokenizer", "byte", "--shard-tokens", "2000", "--val-percent", "20")
    result_of(run(hub, tmp_path / "a", "finewebedu", *arguments, "--tokens", "2500"))
    grown = result_of(run(hub, tmp_path / "a", "finewebedu", *arguments))
    single = result_of(run(hub, tmp_path / "b", "finewebedu", *arguments))
    assert grown["sha256"] == single["sha256"]


@pytest.mark.nightly
def test_any_dataset_can_be_given_by_owner_and_name(hub, tmp_path):
    result = result_of(run(hub, tmp_path, "hub", "--data-path", "me/mine", "--val-percent", "10"))
    assert "me--mine" in result["path"]
    assert result["train_tokens"] == 2 + (500 + 700) * 9 // 10


@pytest.mark.nightly
@pytest.mark.parametrize(
    "path, message",
    [
        ("me/nothing", "cannot download the dataset me/nothing"),
        ("me/mine@v2", "cannot download the dataset me/mine"),
        ("me/mine:*.parquet", "me/mine has no files that match *.parquet"),
        ("mine", "is not a Hugging Face dataset"),
    ],
)
def test_a_missing_repository_or_file_is_refused_by_name(hub, tmp_path, path, message):
    assert message in error_of(run(hub, tmp_path, "hub", "--data-path", path))


@pytest.mark.nightly
def test_a_path_that_leaves_the_directory_is_not_followed(hub, tmp_path):
    hub.datasets["me/mine"] = {"../../outside.txt": b"one text. " * 50, "/outside.txt": b"one text. " * 50}
    assert "me/mine has no files" in error_of(run(hub, tmp_path, "hub", "--data-path", "me/mine:*.txt"))
    assert not list(tmp_path.rglob("outside.txt"))
