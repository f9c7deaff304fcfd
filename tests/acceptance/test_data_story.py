"""Use every source of data: a folder of text, a Hugging Face dataset, prebuilt shards and a mix."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hub_server import HubServer

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

SMALL = (
    "DEVICE=cpu",
    "MODEL=tiny",
    "BLOCK_SIZE=64",
    "BATCH_SIZE=4",
    "MAX_ITERS=6",
    "EVAL_SAMPLES=8",
    "EVAL_INTERVAL=3",
)
PREBUILT = "kjj0/finewebedu10B-gpt2"
TEXT = "HuggingFaceFW/fineweb-edu"
TOKENS = 3000  # tokens per prebuilt shard


def shard(seed: int) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, TOKENS
    return header.tobytes() + np.random.default_rng(seed).integers(0, 50257, TOKENS).astype("<u2").tobytes()


def configure(clone) -> None:
    assert clone.make("defconfig").returncode == 0


def matrix_of(folder: Path) -> Path:
    return max(folder.glob("test_matrix_results_*"))


def run_json(folder: Path) -> dict:
    return json.loads(next(matrix_of(folder).glob("*/run.json")).read_text())


@pytest.fixture
def text_folder(tmp_path):
    """A folder of 50 texts."""
    folder = tmp_path / "data" / "notes"
    folder.mkdir(parents=True)
    for number in range(50):
        (folder / f"{number:02}.txt").write_text(
            f"Note {number}. " + "It rains again, and nobody minds. " * (number + 5)
        )
    return folder


def test_a_folder_of_text_is_tokenized_and_trained_on_and_a_corrupt_shard_is_reported_with_its_offset(
    clone, text_folder, tmp_path
):
    configure(clone)
    data = ("DATASET=folder", "DATA_PATH=notes", "TOKENIZER=byte", f"DATA_DIR={tmp_path / 'data'}")
    data = (*data, f"RESULTS_DIR={tmp_path}")

    made = clone.make("prepare-data", *data, *SMALL)
    assert made.returncode == 0, made.stderr
    assert "50 files" in made.stderr
    train = next((tmp_path / "data").glob("folder-byte-*/folder_train_000001.bin"))
    raw = train.read_bytes()
    header = np.frombuffer(raw[:1024], "<i4").tolist()
    assert header == [20240520, 1, (len(raw) - 1024) // 2] + [0] * 253
    tokens = np.frombuffer(raw[1024:], "<u2")
    assert tokens[0] == 256
    assert bytes(tokens[1:6].astype(np.uint8)) == b"Note "

    trained = clone.make("train", *data, *SMALL)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "epochs in the longest run" in trained.stdout
    record = run_json(tmp_path)
    dataset = json.loads((train.parent / "dataset.json").read_text())
    assert record["train"]["data_sha256"] == dataset["sha256"]
    assert record["train"]["vocab_size"] == 257

    train.write_bytes(raw[:-3])
    damaged = ("DATASET=shards", f"DATA_PATH={train.parent}", "TOKENIZER=byte", f"RESULTS_DIR={tmp_path}")
    refused = clone.make("train", *damaged, *SMALL)
    assert refused.returncode == 2
    assert f"{train} is damaged" in refused.stderr
    assert f"{len(raw) - 3} bytes, expected {len(raw)} for {header[2]} tokens" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_character_vocabulary_reaches_the_run_after_the_text_is_tokenized(clone, text_folder, tmp_path):
    configure(clone)
    data = ("DATASET=folder", "DATA_PATH=notes", f"DATA_DIR={tmp_path / 'data'}", f"RESULTS_DIR={tmp_path}")
    before = clone.make("test-matrix-dry-run", *data, *SMALL, "TOKENIZER=char")
    assert "is assumed to be 256" in before.stdout
    assert clone.make("train", *data, *SMALL, "TOKENIZER=char").returncode == 0
    characters = set("".join(path.read_text() for path in text_folder.iterdir()))
    assert run_json(tmp_path)["train"]["vocab_size"] == len(characters) + 1
    after = clone.make("test-matrix-dry-run", *data, *SMALL, "TOKENIZER=char")
    assert "is assumed to be 256" not in after.stdout


def test_prebuilt_shards_are_downloaded_as_needed_and_interrupted_downloads_resume(clone, tmp_path):
    configure(clone)
    names = {f"finewebedu_train_{number:06d}.bin": shard(number) for number in range(1, 5)}
    arguments = (
        *("DATASET=finewebedu", "TOKENIZER=gpt2", f"DATA_DIR={tmp_path / 'data'}", f"RESULTS_DIR={tmp_path}"),
        *SMALL,
        "GRADIENT_ACCUMULATION=3",
    )
    with HubServer({PREBUILT: {**names, "finewebedu_val_000000.bin": shard(0)}}) as hub:
        variables = hub.environment(tmp_path / "home")
        hub.corrupt.add(f"cdn/{PREBUILT}/finewebedu_train_000001.bin")
        hub.cut[f"cdn/{PREBUILT}/finewebedu_train_000002.bin"] = [2000]
        refused = clone.make("prepare-data", *arguments, **variables)
        assert refused.returncode == 2
        assert "finewebedu_train_000001.bin differs from the repository's listing" in refused.stderr
        hub.corrupt.clear()
        trained = clone.make(
            "train", *arguments, **variables
        )  # 6 steps x 12 sequences x 64 tokens = 4608 tokens: 2 shards
        assert trained.returncode == 0, trained.stdout + trained.stderr
        assert "2 of 4 training shards (6.00k tokens) for the 4.61k tokens of the longest run" in trained.stderr
        assert any(
            byte_range.startswith("bytes=")
            for byte_range in hub.fetched_ranges(f"{PREBUILT}/finewebedu_train_000002.bin")
        )
        assert not hub.fetched_ranges(f"{PREBUILT}/finewebedu_train_000003.bin")
    assert run_json(tmp_path)["train"]["data_shards"] == 2
    folder = tmp_path / "data" / "finewebedu"
    assert (folder / "finewebedu_train_000002.bin").read_bytes() == shard(2)

    run, places = next(matrix_of(tmp_path).glob("gpt2_*")), (f"DATA_DIR={tmp_path / 'data'}", f"RESULTS_DIR={tmp_path}")
    repeated = clone.make("reproduce", f"RUN={run}", *places)  # the server is closed
    assert repeated.returncode == 0, repeated.stdout + repeated.stderr


def test_a_mix_of_hub_text_and_local_text_reports_a_loss_per_dataset(clone, text_folder, tmp_path):
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    configure(clone)
    buffer = io.BytesIO()
    pq.write_table(pa.table({"text": [f"Page {n}. " + "A page of the web. " * 9 for n in range(300)]}), buffer)
    with HubServer({TEXT: {"sample/10BT/000_00000.parquet": buffer.getvalue()}}) as hub:
        completed = clone.make(
            "train",
            *("DATASET=mix", "DATA_MIX=finewebedu:65+folder=notes:34+stdlib:1", "TOKENIZER=byte", "VAL_PERCENT=10"),
            *(f"DATA_DIR={tmp_path / 'data'}", f"RESULTS_DIR={tmp_path}", "NUM_GPUS=2", *SMALL),
            **hub.environment(tmp_path / "home"),
        )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    folder = next(matrix_of(tmp_path).glob("gpt2_*"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = next(line for line in lines if "val/loss" in line)
    parts = [losses[f"val/loss/{name}"] for name in ("finewebedu", "folder", "stdlib")]
    mean = sum(loss * weight for loss, weight in zip(parts, (65, 34, 1), strict=True)) / 100
    assert losses["val/loss"] == pytest.approx(mean)


def test_an_unknown_name_in_a_mix_is_refused_with_the_nearest_names_before_anything_is_written(clone, tmp_path):
    configure(clone)
    before = clone.config.read_bytes()
    mix = ("DATASET=mix", "DATA_MIX=fineweb:65+finepdf:34+medqa:1", f"RESULTS_DIR={tmp_path / 'results'}")
    for command in ("defconfig-gpt2-cpu-quick", "test-matrix-dry-run", "prepare-data", "train"):
        refused = clone.kmatrix(command, *mix, f"DATA_DIR={tmp_path / 'data'}")
        assert refused.returncode == 2, command
        assert "unknown dataset 'finepdf': did you mean finepdfs" in refused.stderr
        assert "Traceback" not in refused.stderr
    assert clone.config.read_bytes() == before
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "results").exists()


def test_three_epochs_take_exactly_their_steps_and_each_shuffle_is_in_the_log(clone, text_folder, tmp_path):
    configure(clone)
    places = (f"DATA_DIR={tmp_path / 'data'}", f"RESULTS_DIR={tmp_path}")
    data = ("DATASET=folder", "DATA_PATH=notes", "TOKENIZER=byte", *places)
    small = [word for word in SMALL if not word.startswith("MAX_ITERS")]
    trained = clone.make("train", *data, *small, "EPOCHS=3", "MAX_ITERS=0")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    record = run_json(tmp_path)["train"]
    tokens = json.loads(next((tmp_path / "data").glob("folder-*/dataset.json")).read_text())["train_tokens"]
    sequences = (tokens - 1) // 64
    assert record["max_iters"] == 3 * sequences // record["global_batch"]
    run = next(matrix_of(tmp_path).glob("gpt2_*"))
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "finished"
    log = (run / "output.log").read_text()
    for epoch in range(3):
        assert f" | epoch {epoch} of folder: 1 shard with {sequences:,} sequences in a new random order" in log
    assert "epoch 3 of" not in log


def test_packed_rows_are_never_ranked_against_the_flat_stream_and_the_report_says_why(clone, text_folder, tmp_path):
    configure(clone)
    places = (f"DATA_DIR={tmp_path / 'data'}", f"RESULTS_DIR={tmp_path}")
    data = ("DATASET=folder", "DATA_PATH=notes", "TOKENIZER=byte", *places, *SMALL)
    refused = clone.kmatrix("test-matrix-dry-run", *data, "DATA_LAYOUT=bestfit", "EPOCHS=2")
    assert refused.returncode == 2
    assert "EPOCHS needs DATA_LAYOUT=flat" in refused.stderr

    trained = clone.make("test-matrix", *data, "DATA_LAYOUT=flat,bestfit", "LR=1e-3,2e-3", "MATRIX=y")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    summary = (matrix_of(tmp_path) / "summary_report.txt").read_text()
    reason = "different row layouts (bestfit, flat): they are ranked separately, because packing lowers the loss"
    assert reason in " ".join(summary.split())
    results = json.loads((matrix_of(tmp_path) / "results.json").read_text())
    runs = {run["name"]: run for run in results["runs"]}
    hashes = {("bestfit" in name, run["data_sha256"]) for name, run in runs.items()}
    assert len(runs) == 4
    assert len(hashes) == 2
    assert len(results["rankings"]) == 2
