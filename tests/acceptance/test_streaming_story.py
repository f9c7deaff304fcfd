"""Train while the data are downloaded and tokenized: kill everything, stop the server, and get the same run."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clones import environment
from hub_server import HubServer
from story import complete_lines, kill, only, processes_below
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

REPOSITORY = "HuggingFaceFW/fineweb-edu"
FILES = 6
SMALL = (
    *("DEVICE=cpu", "MODEL=tiny", "BLOCK_SIZE=32", "BATCH_SIZE=4", "MAX_ITERS=400", "EVAL_SAMPLES=8"),
    *("EVAL_INTERVAL=100", "CHECKPOINT_INTERVAL=20", "LOG_INTERVAL=1", "WARMUP_STEPS=5", "CPU_THREADS=1"),
    *("DATASET=finewebedu", "TOKENIZER=byte", "SHARD_TOKENS=4000", "VAL_PERCENT=20", "DATA_STREAMING=y"),
)
WORDS = ["rain", "sun", "tree", "river", "stone", "cloud", "light", "wind", "road", "sea"]


def parquet(number: int) -> bytes:
    rng = random.Random(number)
    buffer = io.BytesIO()
    rows = [" ".join(rng.choices(WORDS, k=rng.randint(5, 40))) for _ in range(100)]
    pq.write_table(pa.table({"text": rows}), buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def hub():
    files = {f"sample/10BT/{number:03}_00000.parquet": parquet(number) for number in range(FILES)}
    with HubServer({REPOSITORY: files}) as server:
        yield server


def path_of(number: int) -> str:
    return f"{REPOSITORY}/sample/10BT/{number:03}_00000.parquet"


def variables(hub, tmp_path) -> dict[str, str]:
    return {**hub.environment(tmp_path / "home"), "KMATRIX_DOWNLOAD_TIMEOUT": "1"}


def run_of(folder: Path) -> Path:
    return only(path.parent for path in folder.glob("test_matrix_results_*/gpt2_*/run.json"))


def losses(run: Path) -> dict[int, float]:
    """Return the training loss of each step; of repeated ones the last."""
    lines = complete_lines(run / "metrics.jsonl")
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def last_step(folder: Path) -> int:
    found = [*folder.glob("test_matrix_results_*/gpt2_*/run.json")]
    return max(losses(found[0].parent), default=0) if found else 0


def producers(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if "gpt2.prepare.producer" in command and any(str(folder) in part for part in command):
            found += [process] if process.info["status"] != psutil.STATUS_ZOMBIE else []
    return found


def places(folder: Path, data: Path) -> tuple[str, ...]:
    return (f"DATA_DIR={data}", f"RESULTS_DIR={folder}")


@pytest.fixture(scope="module")
def expected(session_clone, hub, tmp_path_factory):
    """The losses of a run whose shards were all prepared before."""
    folder = tmp_path_factory.mktemp("prepared")
    clone, data = session_clone, folder / "data"
    assert clone.make("defconfig").returncode == 0
    at_once = [word for word in SMALL if word != "DATA_STREAMING=y"]
    made = clone.make("prepare-data", *at_once, *places(folder, data), **variables(hub, folder))
    assert made.returncode == 0, made.stderr
    requests = len(hub.requests)
    trained = clone.make("train", *SMALL, *places(folder, data), **variables(hub, folder))
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert not [url for _, url, _ in hub.requests[requests:] if "cdn" in url]  # nothing was downloaded again
    found = losses(run_of(folder))
    assert sorted(found) == list(range(400))
    return found


def test_a_run_starts_before_the_text_is_downloaded_and_survives_a_server_that_stalls_and_kills(
    clone, hub, expected, tmp_path
):
    """The losses are those of prepared shards, to the last bit."""
    assert clone.make("defconfig").returncode == 0
    hub.stalled.update({f"cdn/{path_of(number)}" for number in range(3, FILES)})
    hub.requests.clear()
    arguments = [*SMALL, *places(tmp_path, tmp_path / "data"), "DATA_CACHE=drop"]
    command = [str(clone.root / ".venv/bin/kmatrix"), "train", *arguments]
    with subprocess.Popen(
        command, cwd=clone.root, env=environment(**variables(hub, tmp_path)), stdout=subprocess.DEVNULL
    ) as runner:
        try:
            # It trains while half of the files cannot be downloaded, and then waits and says so.
            wait_until(lambda: last_step(tmp_path) > 30, "steps")
            run = run_of(tmp_path)
            events = run / "events.jsonl"
            wait_until(
                lambda: any(
                    line["event"] == "data" and "waits for shard" in line["text"] for line in complete_lines(events)
                ),
                "the wait",
            )
            assert not hub.fetched_ranges(path_of(FILES - 1))
            waited_at = last_step(tmp_path)
            assert waited_at < 399
            # Kill the producer: it is started again. Then kill the runner: its guard ends the rest.
            kill(producers(tmp_path))
            wait_until(lambda: len(producers(tmp_path)) == 1, "a new producer")
            runner.send_signal(signal.SIGKILL)
            wait_until(lambda: not processes_below(tmp_path), "the end of the trainer")
            wait_until(lambda: not producers(tmp_path), "the end of the producer")
        finally:
            runner.kill()
    hub.stalled.clear()
    folder = only((tmp_path / "data").glob("finewebedu-byte-*-stream"))
    for path in folder.glob("*_train_*.bin"):
        path.unlink()
    continued = clone.make("continue", f"TARGET={run.parent}", **variables(hub, tmp_path))
    assert continued.returncode == 0, continued.stdout + continued.stderr
    assert json.loads((run / "result.json").read_text())["status"] == "finished"
    assert losses(run) == expected
    assert (
        len(list(folder.glob("*_train_*.bin"))) < len(json.loads((folder / "dataset.json").read_text())["shards"]) - 1
    )
    assert not producers(tmp_path)


def test_runs_of_a_matrix_share_the_shards_and_two_ranks_read_what_one_does(clone, hub, expected, tmp_path):
    assert clone.make("defconfig").returncode == 0
    hub.stalled.clear()
    hub.requests.clear()
    arguments = [word for word in SMALL if not word.startswith(("BATCH_SIZE", "MAX_ITERS"))]
    trained = clone.make(
        "test-matrix",
        *(*arguments, "BATCH_SIZE=2", "PARALLEL_BATCH_SIZE=4", "MAX_ITERS=400", "NUM_GPUS=1,2"),
        *places(tmp_path, tmp_path / "data"),
        **variables(hub, tmp_path),
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    for run in tmp_path.glob("test_matrix_results_*/gpt2_*/run.json"):
        found = losses(run.parent)
        assert found == pytest.approx(expected, abs=1e-3)
    assert all(len(hub.fetched_ranges(path_of(number))) <= 1 for number in range(FILES))


def test_data_that_cannot_be_streamed_are_refused_before_anything_starts(clone, tmp_path):
    assert clone.make("defconfig").returncode == 0
    text = ("DATASET=folder", "DATA_PATH=notes")
    where = places(tmp_path / "results", tmp_path / "data")
    for more, message in (
        ((*text, "TOKENIZER=char"), "DATA_STREAMING needs TOKENIZER=gpt2 or TOKENIZER=byte"),
        ((*text, "TOKENIZER=byte", "EPOCHS=2"), "EPOCHS needs DATA_STREAMING=n"),
        (("DATASET=shards", "DATA_PATH=here"), "has its shards already"),
    ):
        refused = clone.kmatrix("test-matrix-dry-run", "DATA_STREAMING=y", *where, *more)
        assert refused.returncode == 2
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
    assert not (tmp_path / "results").exists()
