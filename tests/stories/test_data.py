"""Train on a folder of text, as bytes and as characters, and on shards of which one is damaged."""

from __future__ import annotations

import numpy as np
import pytest

from story import load_json, matrices

pytestmark = pytest.mark.story

SMALL = (
    *("DEVICE=cpu", "MODEL=tiny", "BLOCK_SIZE=64", "BATCH_SIZE=4", "MAX_ITERS=6", "EVAL_SAMPLES=8", "EVAL_INTERVAL=3"),
    *("NUM_GPUS=1", "AUTO_GENERATE_GRAPHS=n"),
)


def run_json(results):
    (path,) = matrices(results)[-1].glob("*/run.json")
    return load_json(path)["train"]


def test_a_folder_of_text_is_tokenized_and_a_corrupt_shard_is_named_with_its_offset(clone, tmp_path):
    folder = tmp_path / "data" / "notes"
    folder.mkdir(parents=True)
    for number in range(50):
        text = f"Note {number}. " + "It rains again, and nobody minds. " * (number + 5)
        (folder / f"{number:02}.txt").write_text(text)
    places = (f"DATA_DIR={tmp_path / 'data'}", f"RESULTS_DIR={tmp_path}")
    data = ("DATASET=folder", "DATA_PATH=notes", *places, *SMALL)
    clone.check("defconfig")

    made = clone.make("prepare-data", *data, "TOKENIZER=byte")
    assert made.returncode == 0, made.stderr
    assert "50 files" in made.stderr
    (train,) = (tmp_path / "data").glob("folder-byte-*/folder_train_000001.bin")
    raw = train.read_bytes()
    header = np.frombuffer(raw[:1024], "<i4").tolist()
    assert header == [20240520, 1, (len(raw) - 1024) // 2] + [0] * 253
    tokens = np.frombuffer(raw[1024:], "<u2")
    assert tokens[0] == 256
    assert bytes(tokens[1:6].astype(np.uint8)) == b"Note "

    assert "epochs in the longest run" in clone.check("train", *data, "TOKENIZER=byte")
    record = run_json(tmp_path)
    assert record["data_sha256"] == load_json(train.parent / "dataset.json")["sha256"]
    assert record["vocab_size"] == 257

    # The vocabulary of characters is known once the text was read.
    clone.check("train", *data, "TOKENIZER=char")
    characters = set("".join(path.read_text() for path in folder.iterdir()))
    assert run_json(tmp_path)["vocab_size"] == len(characters) + 1

    train.write_bytes(raw[:-3])
    known, damaged = matrices(tmp_path), ("DATASET=shards", f"DATA_PATH={train.parent}", "TOKENIZER=byte")
    refused = clone.refused("train", *damaged, *places, *SMALL)
    assert f"{train} is damaged" in refused
    assert f"{len(raw) - 3} bytes with the header 20240520, 1, {header[2]}" in refused
    assert matrices(tmp_path) == known
