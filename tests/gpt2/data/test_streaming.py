"""Read shards while they are made: the same tokens as prepared ones, whatever is killed, dropped or not answered."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from factories import ROOT, environment, train_fields
from gpt2.data.batches import Batches
from gpt2.data.streaming import StreamClient
from gpt2.dist import World
from gpt2.evaluate import Validation
from gpt2.prepare.dataset import prepare
from hub_server import HubServer
from kmatrix.errors import ConfigError, DataError
from kmatrix.records.dataset import read_dataset
from kmatrix.records.paths import RunDir
from kmatrix.records.train_config import TrainConfig
from waiting import wait_until

pytestmark = pytest.mark.timeout(240)
SHARD = 4000  # tokens
RECIPE = {"shard_tokens": SHARD, "val_percent": 20}
STEP = 4  # sequences
WORDS = ["rain", "sun", "tree", "river", "stone", "cloud", "light", "wind", "road", "sea"]


def texts(count=120, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(5, 60))) + f" {n}" for n in range(count)]


@pytest.fixture
def notes(tmp_path):
    """A folder of 120 texts, about 20,000 bytes: five shards."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for number, text in enumerate(texts()):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def world(rank=0, size=1):
    return World(rank=rank, local_rank=rank, size=size, device=torch.device("cpu"))


def config_of(found, **overrides):
    values = {"data_streaming": True, "shard_tokens": SHARD, "batch_size": STEP, "max_iters": 30, "data_wait": 60}
    values |= {"block_size": 32, "dataset": "folder", **overrides}
    return TrainConfig.from_json(train_fields(Path(found["path"]), found["sha256"], **values))


def stream(tmp_path, notes, mode="keep", **more):
    return prepare("folder", tmp_path / "data", str(notes), stream=mode, **RECIPE, **more)


class Reader:
    """A rank that reads batches without training on them: `with Reader(config, folder) as reader: reader.rows(3)`."""

    def __init__(self, config, folder, rank=0, size=1):
        folder.mkdir(parents=True, exist_ok=True)
        self.batches = Batches(config, world(rank, size))
        self.events: list[str] = []
        self.client = self.batches.open_stream(RunDir(folder), self.events.append)

    def __enter__(self):
        assert self.client.begin(lambda: False)
        return self

    def __exit__(self, *_):
        self.batches.close()

    def rows(self, steps, start=None):
        if start is not None:
            self.batches.seek(start)
        found = []
        for _ in range(steps):
            assert self.batches.wait(lambda: False) is not None
            found += self.batches.next()[0].tolist()
        return found

    @property
    def producer(self):
        return psutil.Process(self.client._process.pid)


def prepared_rows(tmp_path, notes, steps, **overrides):
    """Return what a run reads from shards that were all prepared before."""
    data_dir = tmp_path / "prepared"
    made = prepare("folder", data_dir, str(notes), **RECIPE)
    assert made["train_tokens"] > 3 * SHARD
    found = prepare("folder", data_dir, str(notes), stream="keep", **RECIPE)
    assert found["path"] == made["path"]
    with Reader(config_of(found, **overrides), tmp_path / "prepared_run") as reader:
        rows = reader.rows(steps)
        assert reader.client._process is None  # nothing was missing
    return rows


@pytest.mark.process
def test_streamed_tokens_are_those_of_prepared_shards(tmp_path, notes):
    found = stream(tmp_path, notes)
    assert list(Path(found["path"]).glob("*.bin")) == []
    with Reader(config_of(found), tmp_path / "run") as reader:
        rows = reader.rows(30)
    assert rows == prepared_rows(tmp_path, notes, 30)
    made = {path.name: path.read_bytes() for path in (tmp_path / "prepared").glob("folder-*/*.bin")}
    streamed = {path.name: path.read_bytes() for path in Path(found["path"]).glob("*.bin")}
    assert {"folder_val_000000.bin", "folder_train_000001.bin"} < streamed.keys() < made.keys()
    assert all(made[name] == content for name, content in streamed.items())


@pytest.mark.process
@pytest.mark.parametrize("layout", ["flat", pytest.param("bestfit", marks=pytest.mark.nightly)])
def test_dropped_shards_are_made_again_for_a_resumed_run(tmp_path, notes, layout):
    found = stream(tmp_path, notes, "drop")
    assert found["path"].endswith("-stream")
    config = config_of(found, data_layout=layout, max_iters=300, data_cache="drop")
    with Reader(config, tmp_path / "run") as reader:
        whole = reader.rows(100)  # several epochs
        state = reader.client.record.state_dict()
    for path in Path(found["path"]).glob("*_train_*.bin"):
        path.unlink()
    with Reader(config, tmp_path / "run") as again:
        again.client.record.load_state_dict(state)
        assert again.rows(10, start=20) == whole[20 * STEP : 30 * STEP]
    assert whole[: 30 * STEP] == prepared_rows(tmp_path, notes, 30, data_layout=layout, max_iters=300)


@pytest.mark.process
def test_a_first_shard_waits_for_a_document_for_validation_also_when_it_is_made_again(tmp_path, notes):
    recipe = {"shard_tokens": 600, "val_percent": 3}
    found = prepare("folder", tmp_path / "data", str(notes), stream="drop", **recipe)
    config = config_of(found, max_iters=300, data_cache="drop", shard_tokens=600)
    with Reader(config, tmp_path / "run") as reader:
        rows = reader.rows(60)
    made = read_dataset(Path(found["path"]) / "dataset.json").shards
    sizes = [shard.tokens for shard in made if "train" in shard.name]
    assert sizes[0] > 600 >= max(sizes[1:])
    for path in Path(found["path"]).glob("*_train_*.bin"):
        path.unlink()
    with Reader(config, tmp_path / "run") as again:
        assert again.rows(60, start=0) == rows


@pytest.mark.nightly
def test_shards_that_no_run_needs_are_deleted_if_they_are_dropped(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for number, text in enumerate(texts(600)):
        (folder / f"{number:03}.txt").write_text(text)
    found = stream(tmp_path, folder, "drop")
    most = 0
    with Reader(config_of(found, max_iters=600, data_cache="drop"), tmp_path / "run") as reader:
        for _ in range(600):
            reader.rows(1)
            most = max(most, len(list(Path(found["path"]).glob("*_train_*.bin"))))
        last = len(reader.client.sources[0].counts)
        wait_until(lambda: not (Path(found["path"]) / "folder_train_000001.bin").exists(), "shard 1 to be deleted")
    assert last > 12
    assert most < last


@pytest.mark.process
def test_a_killed_producer_is_started_again_and_the_tokens_stay_the_same(tmp_path, notes):
    found = stream(tmp_path, notes, "drop")
    with Reader(config_of(found, data_cache="drop"), tmp_path / "run") as reader:
        rows = reader.rows(5)
        reader.producer.send_signal(signal.SIGKILL)
        for path in Path(found["path"]).glob("*_train_*.bin"):
            path.unlink()
        rows += reader.rows(25)
    assert any("SIGKILL, and is started again" in event for event in reader.events)
    assert rows == prepared_rows(tmp_path, notes, 30)


@pytest.mark.process
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_all_ranks_read_what_one_rank_would(tmp_path, notes, size):
    found = stream(tmp_path, notes)
    many = config_of(found, batch_size=STEP // size, num_gpus=size)
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Reader(many, tmp_path / "run", rank, size)) for rank in range(size)]
        rows = [row for _ in range(12) for reader in ranks for row in reader.rows(1)]
        assert [reader.client._process is None for reader in ranks] == [False] + [True] * (size - 1)
    assert rows == prepared_rows(tmp_path, notes, 12)


@pytest.mark.nightly
def test_two_runs_share_the_shards(tmp_path, notes):
    found = stream(tmp_path, notes)
    config = config_of(found)
    with Reader(config, tmp_path / "one") as first, Reader(config, tmp_path / "two") as second:
        rows = [first.rows(1) == second.rows(1) for _ in range(30)]
        made = {path.name: path.stat().st_mtime_ns for path in Path(found["path"]).glob("*.bin")}
    assert all(rows)
    with Reader(config, tmp_path / "three") as third:
        assert len(third.rows(30)) == 30 * STEP
        assert third.client._process is None
    assert {path.name: path.stat().st_mtime_ns for path in Path(found["path"]).glob("*.bin")} == made


@pytest.mark.process
def test_a_changed_text_is_refused(tmp_path, notes):
    found = stream(tmp_path, notes, "drop")
    config = config_of(found, data_cache="drop")
    with Reader(config, tmp_path / "run") as reader:
        reader.rows(3)
    for path in Path(found["path"]).glob("*_train_*.bin"):
        path.unlink()
    (notes / "000.txt").write_text("Something else.")
    with Reader(config, tmp_path / "run") as again, pytest.raises(DataError, match="changed while it is read"):
        again.rows(1)


@pytest.mark.process
def test_a_resumed_run_refuses_other_shards_than_it_has_read(tmp_path, notes):
    found = stream(tmp_path, notes)
    with Reader(config_of(found), tmp_path / "run") as reader:
        reader.rows(10)
        state = reader.client.record.state_dict()
        assert state["folder"][0] >= 1
    path = Path(found["path"]) / "dataset.json"
    record = json.loads(path.read_text())
    record["shards"] = [{**shard, "sha256": "0" * 64} for shard in record["shards"]]
    path.write_text(json.dumps(record))
    with Reader(config_of(found), tmp_path / "run") as again:
        again.client.record.load_state_dict(state)
        with pytest.raises(DataError, match="are not those that the run has read"):
            again.rows(1, start=10)


@pytest.mark.nightly
def test_the_producer_ends_when_the_trainer_is_killed(tmp_path, notes):
    found = stream(tmp_path, notes)
    config = config_of(found, max_iters=10_000)
    program = (
        "import json, sys, time\n"
        "sys.path[:0] = sys.argv[1].split(':')\n"
        "from pathlib import Path\n"
        "from test_streaming import Reader\n"
        "from kmatrix.records.train_config import TrainConfig\n"
        "config = TrainConfig.from_json(json.loads(sys.argv[2]))\n"
        "reader = Reader(config, Path(sys.argv[3])).__enter__()\n"
        "reader.rows(2)\n"
        "print(reader.producer.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    paths = ":".join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", program, paths, json.dumps(config.to_json()), str(tmp_path / "run")]
    with subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout
        pid = int(trainer.stdout.readline())
        assert psutil.pid_exists(pid)
        trainer.kill()
    wait_until(lambda: not psutil.pid_exists(pid), "the producer to end")


def parquet(start, count=200):
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": texts(count, seed=start)}), buffer)
    return buffer.getvalue()


FILES = {f"data/{number:03}.parquet": parquet(number) for number in range(4)}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with HubServer({"me/pages": FILES, "me/empty": {"a.txt": b""}}) as server:
        for name, value in server.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("KMATRIX_DOWNLOAD_TIMEOUT", "0.5")
        yield server


def stream_hub(tmp_path, server, repository="me/pages:data/*.parquet"):
    # In another process: huggingface_hub reads its variables when it is imported.
    command = [sys.executable, "-m", "gpt2.prepare", "hub", "--data-dir", str(tmp_path / "data")]
    command += ["--data-path", repository, "--stream", "keep", "--shard-tokens", str(SHARD), "--val-percent", "20"]
    variables = {**environment(), **os.environ}
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.nightly
def test_training_starts_before_all_is_downloaded_and_waits_for_a_server_that_stalls(tmp_path, hub):
    found = stream_hub(tmp_path, hub)
    second = "cdn/me/pages/data/001.parquet"
    hub.stalled.add(second)
    config = config_of(found, dataset="hub", max_iters=400)
    with Reader(config, tmp_path / "run") as reader:
        rows = reader.rows(20)
        assert not hub.fetched_ranges("me/pages/data/002.parquet")
        waits = []

        def stopping():
            if not waits and any("waits for shard" in event for event in reader.events):
                waits.append(len(rows))
                hub.stalled.clear()  # the server answers again, and the same wait goes on
            return False

        for _ in range(180):
            assert reader.batches.wait(stopping) is not None
            rows += reader.batches.next()[0].tolist()
    assert len(waits) == 1
    assert any("data/001.parquet" in event for event in reader.events)
    assert any("the data are there: waited" in event for event in reader.events)
    with Reader(config, tmp_path / "again") as again:
        assert again.rows(200) == rows


@pytest.mark.nightly
def test_a_server_that_is_gone_is_asked_again_until_it_answers(tmp_path, hub):
    found = stream_hub(tmp_path, hub)
    hub.failing = {f"cdn/me/pages/data/{number:03}.parquet": 10_000 for number in range(1, 4)}
    config = config_of(found, dataset="hub", max_iters=400)
    with Reader(config, tmp_path / "run") as reader:
        rows, steps = [], 0

        def stopping():
            return any("asks again in" in event for event in reader.events)

        while reader.batches.wait(stopping) is not None:
            rows += reader.batches.next()[0].tolist()
            steps += 1
        assert 0 < steps < 200
        hub.failing.clear()
        rows += reader.rows(200 - steps)
        assert len(rows) == 200 * STEP


@pytest.mark.nightly
def test_a_server_that_never_answers_ends_the_run_after_the_limit(tmp_path, hub):
    found = stream_hub(tmp_path, hub)
    hub.failing = {f"cdn/me/pages/data/{number:03}.parquet": 10_000 for number in range(4)}
    reader = Reader(config_of(found, dataset="hub", data_wait=25), tmp_path / "run")
    with pytest.raises(DataError, match="waited 2") as raised, reader:
        pass
    reader.batches.close()
    assert "503" in raised.value.why


@pytest.mark.nightly
def test_a_dataset_that_cannot_be_read_fails_at_once(tmp_path, hub):
    found = stream_hub(tmp_path, hub)
    hub.corrupt.add("cdn/me/pages/data/000.parquet")
    reader = Reader(config_of(found, dataset="hub"), tmp_path / "run")
    with pytest.raises(DataError, match="differs from the repository's listing"), reader:
        pass
    reader.batches.close()


@pytest.mark.process
def test_a_mix_is_streamed_from_all_its_datasets(tmp_path, notes):
    other = tmp_path / "other"
    other.mkdir()
    for number, text in enumerate(texts(80, seed=5)):
        (other / f"{number}.txt").write_text(text)
    mix = f"folder={notes}:3 folder={other}:1"

    def rows(data_dir, run, *, first):
        if first:
            prepare("mix", data_dir, mix=mix, **RECIPE)
        found = prepare("mix", data_dir, mix=mix, stream="keep", **RECIPE)
        with Reader(config_of(found, dataset="mix"), tmp_path / run) as reader:
            assert len(Validation(reader.batches.config, world()).parts) == 2
            return reader.rows(30)

    assert rows(tmp_path / "data", "run", first=False) == rows(tmp_path / "prepared", "other_run", first=True)


def test_a_vocabulary_that_the_text_decides_cannot_be_streamed(tmp_path, notes):
    with pytest.raises(ConfigError, match="cannot be streamed"):
        stream(tmp_path, notes, tokenizer="char")


@pytest.mark.process
def test_a_run_that_is_stopped_while_it_waits_has_not_read_the_shard(tmp_path, notes):
    config = config_of(stream(tmp_path, notes), max_iters=300)
    with Reader(config, tmp_path / "run") as reader:
        reader.batches.seek(10**6)  # far beyond what is known
        reader.client.sources[0].complete = False
        assert reader.batches.wait(lambda: True) is None
        assert reader.client.record.state_dict() == {}
        reader.rows(5, start=0)
        state = reader.client.record.state_dict()
    assert state["folder"][0] == 1
    with Reader(config, tmp_path / "run") as again:
        again.client.record.load_state_dict(state)
        assert len(again.rows(20, start=5)) == 20 * STEP


def test_a_stop_ends_the_wait(tmp_path, notes):
    found = stream(tmp_path, notes)
    reader = Reader(config_of(found), tmp_path / "run")
    assert reader.client.begin(lambda: True) is False
    reader.batches.close()
    assert isinstance(reader.client, StreamClient)
