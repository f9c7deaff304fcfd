"""Evaluate, sample and serve a trained model through make, from a fresh clone."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2.data.shards import find, open_shard
from gpt2.data.tokenizer import load
from gpt2.inference.restore import restore

pytestmark = [pytest.mark.accept, pytest.mark.timeout(1500)]

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "while",
    "dog",
    "slept",
    "near",
    "old",
    "door",
    "rain",
    "fell",
    "roof",
    "house",
]
EXAMPLES = (
    {"ctx": "the cat sat on", "endings": ["a mat", "zzzz", "qqqqqqq", "x9#"], "label": 0},
    {"ctx": "rain fell on the", "endings": ["0000", "roof of the house", "ZZ", "!!!"], "label": 1},
    {"ctx": "the dog slept", "endings": ["WWWWW", "~~~~", "near the old door", "9"], "label": 2},
)
SMALL = ("DEVICE=cpu", "MODEL=tiny", "BLOCK_SIZE=64", "NUM_GPUS=1", "BATCH_SIZE=8", "EVAL_SAMPLES=30")


def load_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def write_texts(folder: Path) -> None:
    """Write a folder of small texts that a model learns within some steps."""
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True)
    for number in range(60):
        (folder / f"{number}.txt").write_text(" ".join(rng.choice(WORDS, 300)), encoding="utf-8")


def nats_and_bytes(run: Path) -> tuple[float, int]:
    """Return nats and bytes of the validation data, computed with transformers' GPT-2 and the weights of the run."""
    transformers = pytest.importorskip("transformers")
    train = load_json(run / "run.json")["train"]
    found = restore(run / "checkpoints" / "final.pt", "cpu")
    shape = found.model.shape
    hf_model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=shape.n_layer, n_head=shape.n_head, n_embd=shape.n_embd, n_positions=shape.block_size,
            vocab_size=len(found.model.wte.weight),
        )
    ).eval()  # fmt: skip
    state = {
        f"transformer.{name}": value.t() if re.search(r"c_(attn|proj|fc)\.weight", name) else value
        for name, value in found.model.state_dict().items()
    }
    hf_model.load_state_dict(state, strict=False)
    (path,) = find(Path(train["data_path"]), "val")
    tokens = np.asarray(open_shard(path), dtype=np.int64)
    tokenizer, block = load(train["tokenizer"], Path(train["data_path"])), shape.block_size
    total = (len(tokens) - 1) // block
    count = min(train["eval_samples"], total)
    nats, length = 0.0, 0
    for number in range(count):
        start = number * total // count * block
        window = torch.tensor(tokens[None, start : start + block + 1])
        with torch.no_grad():
            logits = hf_model(window[:, :-1]).logits[..., : shape.vocab_size].double()
        nats -= logits.log_softmax(-1).gather(-1, window[:, 1:, None]).sum().item()
        targets = [int(token) for token in window[0, 1:] if token != tokenizer.end_of_document]
        length += len(tokenizer.decode(targets).encode())
    return nats, length


@pytest.fixture(scope="module")
def evaluated_matrix(session_clone, tmp_path_factory):
    """A matrix with the same text as bytes and as BPE tokens, with HellaSwag and samples."""
    folder = tmp_path_factory.mktemp("judged")
    write_texts(folder / "data" / "texts")
    (folder / "data" / "hellaswag.jsonl").write_text("".join(json.dumps(line) + "\n" for line in EXAMPLES))
    session_clone.config.unlink(missing_ok=True)
    arguments = [
        *SMALL, "DATASET=folder", "DATA_PATH=texts", "TOKENIZER=byte,bpe", "BPE_VOCAB_SIZE=300", "MAX_ITERS=120",
        "EVAL_INTERVAL=60", "WARMUP_STEPS=10", "LEARNING_RATE=3e-3", "HELLASWAG=hellaswag.jsonl",
        "SAMPLE_INTERVAL=60", "SAMPLE_PROMPT=the cat", f"DATA_DIR={folder / 'data'}", f"RESULTS_DIR={folder}",
    ]  # fmt: skip
    for command in (["defconfig"], ["test-matrix", *arguments]):
        completed = subprocess.run(
            ["make", "--no-print-directory", *command],
            cwd=session_clone.root, capture_output=True, text=True, check=False, timeout=900,
            env=session_clone.environment,
        )  # fmt: skip
        assert completed.returncode == 0, completed.stdout + completed.stderr
    (matrix,) = folder.glob("test_matrix_results_*")
    return matrix


def test_bits_per_byte_of_two_tokenizers_match_an_independent_count(evaluated_matrix):
    """Both tokenizers match an independent count, and runs are ranked by bits per byte instead of loss."""
    tokenizers = []
    for run in sorted(path.parent for path in evaluated_matrix.glob("*/result.json")):
        result = load_json(run / "result.json")
        nats, length = nats_and_bytes(run)
        assert result["final_bits_per_byte"] == pytest.approx(nats / math.log(2) / length, rel=1e-5)
        tokenizers.append(load_json(run / "run.json")["train"]["tokenizer"])
        assert result["hellaswag_accuracy"] in (0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1)
        log = (run / "output.log").read_text()
        assert "HellaSwag: 3 examples" in log
        assert len(re.findall(r'^Iter \d+ \| Sample of "the cat": ', log, re.M)) == 3
    assert sorted(tokenizers) == ["bpe", "byte"]
    assert "Ranking by mean bits per byte" in (evaluated_matrix / "summary_report.txt").read_text()


def test_make_sample_generates_text_from_the_best_run(clone, evaluated_matrix):
    completed = clone.make(
        "sample", f"RESULTS_DIR={evaluated_matrix.parent}", "PROMPT=the cat", "TOKENS=40", "TEMPERATURE=0.5"
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("the cat")
    assert len(set(completed.stdout.split()) & set(WORDS)) >= 3, completed.stdout


def test_the_real_openai_client_can_use_a_served_model(clone, evaluated_matrix):
    """With and without streaming, fifty requests at once, one that is too large, and Ctrl+C."""
    openai = pytest.importorskip("openai")
    process = subprocess.Popen(
        ["make", "--no-print-directory", "serve", f"CHECKPOINT={evaluated_matrix}", "PORT=0"],
        cwd=clone.root, env=clone.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        first_line = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/v1", first_line)[0]
        client = openai.OpenAI(base_url=url, api_key="none", timeout=600)
        deadline = time.monotonic() + 240
        while True:
            try:
                (model,) = client.models.list()
                break
            except openai.APIConnectionError:
                assert time.monotonic() < deadline, first_line
        options = {"model": model.id, "prompt": "the cat", "max_tokens": 20, "seed": 1}
        text = client.completions.create(**options).choices[0].text
        assert "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)) == text
        with ThreadPoolExecutor(50) as pool:
            responses = list(pool.map(lambda seed: client.completions.create(**options | {"seed": seed}), range(50)))
        assert len(responses) == 50
        assert responses[1].choices[0].text == text
        with pytest.raises(openai.APIStatusError) as error:
            client.completions.create(model=model.id, prompt="x" * 2**20)
        assert error.value.status_code == 413
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(240) != 0
        assert "Traceback" not in process.stderr.read()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
