"""Evaluate, sample, serve, export, import and start from a trained model, through make."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints import final_of
from gpt2.data.shards import find, open_shard
from gpt2.data.tokenizer import load
from gpt2.inference.restore import restore
from story import complete_lines, load_json, matrices, only

pytestmark = pytest.mark.story

WORDS = ["the", "cat", "sat", "on", "mat", "while", "dog", "slept", "near", "old", "door", "rain", "fell", "roof"]
EXAMPLES = (
    {"ctx": "the cat sat on", "endings": ["a mat", "zzzz", "qqqqqqq", "x9#"], "label": 0},
    {"ctx": "rain fell on the", "endings": ["0000", "roof of the house", "ZZ", "!!!"], "label": 1},
    {"ctx": "the dog slept", "endings": ["WWWWW", "~~~~", "near the old door", "9"], "label": 2},
)
SMALL = (
    *("DEVICE=cpu", "MODEL=tiny", "BLOCK_SIZE=64", "NUM_GPUS=1", "BATCH_SIZE=8", "EVAL_SAMPLES=30"),
    *("DATASET=folder", "DATA_PATH=texts", "GPU_MONITOR=n", "AUTO_GENERATE_GRAPHS=n"),
    *("EVAL_INTERVAL=40", "WARMUP_STEPS=10", "LEARNING_RATE=3e-3", "OPTIMIZER=adamw"),
)
MEASURED = (
    "MAX_ITERS=80",
    "HELLASWAG=hellaswag.jsonl",
    "BENCHMARK_INTERVAL=40",
    "SAMPLE_INTERVAL=40",
    "SAMPLE_PROMPT=the cat",
)


@pytest.fixture(scope="module")
def matrix(module_clone, tmp_path_factory) -> Path:
    """A matrix with the same text as bytes and as BPE tokens, with HellaSwag and samples."""
    folder = tmp_path_factory.mktemp("models")
    rng = np.random.default_rng(1)
    (folder / "data" / "texts").mkdir(parents=True)
    for number in range(60):
        (folder / "data" / "texts" / f"{number}.txt").write_text(" ".join(rng.choice(WORDS, 300)), encoding="utf-8")
    (folder / "data" / "hellaswag.jsonl").write_text("".join(json.dumps(line) + "\n" for line in EXAMPLES))
    places = (f"DATA_DIR={folder / 'data'}", f"RESULTS_DIR={folder}")
    module_clone.check("defconfig")
    module_clone.check("test-matrix", *SMALL, *MEASURED, *places, "TOKENIZER=byte,bpe", "BPE_VOCAB_SIZE=300")
    return only(matrices(folder))


def run_of(matrix: Path, tokenizer: str) -> Path:
    runs = [path.parent for path in matrix.glob("*/run.json")]
    return only(run for run in runs if load_json(run / "run.json")["train"]["tokenizer"] == tokenizer)


def tokens_of(run: Path) -> np.ndarray:
    (path,) = find(Path(load_json(run / "run.json")["train"]["data_path"]), "val")
    return np.asarray(open_shard(path), dtype=np.int64)


def nats_and_bytes(run: Path, exported: Path) -> tuple[float, int]:
    """Return nats and bytes of the validation text, computed by transformers with the exported model."""
    transformers = pytest.importorskip("transformers")
    train, tokens = load_json(run / "run.json")["train"], tokens_of(run)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported).eval()
    shape = restore(final_of(run), "cpu").model.shape
    tokenizer, block = load(train["tokenizer"], Path(train["data_path"])), shape.block_size
    total = (len(tokens) - 1) // block
    count = min(train["eval_samples"], total)
    nats, length = 0.0, 0
    for number in range(count):
        start = number * total // count * block
        window = torch.tensor(tokens[None, start : start + block + 1])
        with torch.no_grad():
            logits = theirs(window[:, :-1]).logits[..., : shape.vocab_size].double()
        targets = window[0, 1:]
        text = targets != tokenizer.end_of_document  # ends of documents count neither nats nor bytes
        nats -= logits.log_softmax(-1)[0].gather(-1, targets[:, None])[text].sum().item()
        length += len(tokenizer.decode(targets[text].tolist()).encode())
    return nats, length


def test_bits_per_byte_of_two_tokenizers_are_those_of_transformers(module_clone, matrix, tmp_path):
    """Of the exported models, and runs are ranked by bits per byte instead of loss."""
    for tokenizer in ("byte", "bpe"):
        run, exported = run_of(matrix, tokenizer), tmp_path / tokenizer
        module_clone.check("export", f"CHECKPOINT={final_of(run)}", f"OUTPUT={exported}")
        result = load_json(run / "result.json")
        nats, length = nats_and_bytes(run, exported)
        assert result["final_bits_per_byte"] == pytest.approx(nats / math.log(2) / length, rel=1e-5)
        log = (run / "output.log").read_text()
        assert len(re.findall(r"^Iter \d+ \| hellaswag/accuracy (?:0.0000|0.3333|0.6667|1.0000) ", log, re.M)) == 3
        assert len(re.findall(r"^sample: 'the cat': ", log, re.M)) == 3
    assert "Ranking by mean bits per byte" in (matrix / "summary_report.txt").read_text()


def test_an_imported_model_samples_the_same_text_and_runs_start_from_its_weights(module_clone, matrix, tmp_path):
    run, model, imported = run_of(matrix, "byte"), tmp_path / "model", tmp_path / "imported.pt"
    module_clone.check("export", f"CHECKPOINT={run}", f"OUTPUT={model}")
    module_clone.check("import-model", f"MODEL={model}", f"OUTPUT={imported}")
    words = ("PROMPT=the cat", "TOKENS=40")
    texts = [module_clone.check("sample", f"CHECKPOINT={path}", *words) for path in (run, imported)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("the cat")
    assert len(set(texts[0].split()) & set(WORDS)) >= 3

    start = (*SMALL, "TOKENIZER=byte", "MAX_ITERS=2", f"DATA_DIR={matrix.parent / 'data'}", f"RESULTS_DIR={tmp_path}")
    smaller = [word.replace("BLOCK_SIZE=64", "BLOCK_SIZE=32") for word in start]
    refused = module_clone.refused("test-matrix-dry-run", *smaller, f"INIT_FROM={imported}")
    assert "block_size is 64 there and 32 here" in refused
    module_clone.check("train", *start, f"INIT_FROM={imported}")
    started = only(only(matrices(tmp_path)).glob("gpt2_*"))
    first = next(line["val/loss"] for line in complete_lines(started / "metrics.jsonl") if "val/loss" in line)
    assert first == pytest.approx(load_json(run / "result.json")["best_val_loss"], abs=1e-6)
    assert len(load_json(started / "run.json")["train"]["init_sha256"]) == 64


def test_the_real_openai_client_can_use_a_served_model(module_clone, matrix):
    openai = pytest.importorskip("openai")
    process = subprocess.Popen(
        ["make", "--no-print-directory", "serve", f"CHECKPOINT={matrix}", "PORT=0"],
        cwd=module_clone.root, env=module_clone.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        url = re.search(r"http://127\.0\.0\.1:\d+/v1", process.stdout.readline())[0]
        client = openai.OpenAI(base_url=url, api_key="none", timeout=600, max_retries=20)
        (model,) = client.models.list()
        options = {"model": model.id, "prompt": "the cat", "max_tokens": 20, "seed": 1}
        text = client.completions.create(**options).choices[0].text
        assert "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)) == text
        with pytest.raises(openai.APIStatusError) as error:
            client.completions.create(model=model.id, prompt="x" * 2**20)
        assert error.value.status_code == 400
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait() != 0
        assert "Traceback" not in process.stderr.read()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
