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

from hub_server import HubServer
from story import complete_lines, kill, only, processes_below
from waiting import wait_until

pytestmark = pytest.mark.story

REPOSITORY = "HuggingFaceFW/fineweb-edu"
FILES = 6
SMALL = (
    *("DEVICE=cpu", "MODEL=tiny", "BLOCK_SIZE=32", "BATCH_SIZE=4", "MAX_ITERS=200", "EVAL_SAMPLES=8"),
    *(
        "EVAL_INTERVAL=100",
        "CHECKPOINT_INTERVAL=20",
        "AUTO_GENERATE_GRAPHS=n",
        "GPU_MONITOR=n",
        "LOG_INTERVAL=1",
        "WARMUP_STEPS=5",
        "CPU_THREADS=1",
    ),
    *("DATASET=finewebedu", "TOKENIZER=byte", "SHARD_TOKENS=4000", "VAL_PERCENT=20", "DATA_STREAMING=y"),
)
WORDS = ["rain", "sun", "tree", "river", "stone", "cloud", "light", "wind", "road", "sea"]


def parquet(number: int) -> bytes:
    rng = random.Random(number)
    buffer = io.BytesIO()
    rows = [" ".join(rng.choices(WORDS, k=rng.randint(5, 40))) for _ in range(100)]
    pq.write_table(pa.table({"text": rows}), buffer)
    return buffer.getvalue()


@pytest.fixture
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


def losses_of_prepared_shards(clone, hub, folder: Path) -> dict[int, float]:
    """Return the losses of a run whose shards were all prepared before."""
    data = folder / "data"
    at_once = [word for word in SMALL if word != "DATA_STREAMING=y"]
    made = clone.make("prepare-data", *at_once, *places(folder, data), **variables(hub, folder))
    assert made.returncode == 0, made.stderr
    requests = len(hub.requests)
    trained = clone.make("train", *SMALL, *places(folder, data), **variables(hub, folder))
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert not [url for _, url, _ in hub.requests[requests:] if "cdn" in url]  # nothing was downloaded again
    found = losses(run_of(folder))
    assert sorted(found) == list(range(200))
    return found


def test_a_run_starts_before_the_text_is_downloaded_and_survives_a_server_that_stalls_and_kills(clone, hub, tmp_path):
    """The losses are those of prepared shards, to the last bit."""
    clone.check("defconfig")
    expected, tmp_path = losses_of_prepared_shards(clone, hub, tmp_path / "prepared"), tmp_path / "streamed"
    hub.stalled.update({f"cdn/{path_of(number)}" for number in range(2, FILES)})
    hub.requests.clear()
    arguments = [*SMALL, *places(tmp_path, tmp_path / "data"), "DATA_CACHE=drop"]
    command = [clone.python, "-m", "kmatrix", "train", *arguments]
    with subprocess.Popen(
        command, cwd=clone.root, env=clone.environment | variables(hub, tmp_path), stdout=subprocess.DEVNULL
    ) as runner:
        try:
            # It trains while most of the files cannot be downloaded, and then waits and says so.
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
            assert waited_at < 199
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
