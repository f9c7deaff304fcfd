"""Prepare datasets in another process that downloads from a local server."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from factories import ROOT, environment

PER_SHARD = 40_000


def shard(seed, tokens=PER_SHARD):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens
    return header.tobytes() + np.random.default_rng(seed).integers(0, 50257, tokens).astype("<u2").tobytes()


def parquet(name, count=60):
    buffer = io.BytesIO()
    pages = [f"{name} page {number}. " + "Many words. " * (number % 9) for number in range(count)]
    pq.write_table(pa.table({"text": pages}), buffer)
    return buffer.getvalue()


def run(hub, data, dataset, *arguments, **variables):
    """Prepare in another process that uses the local server."""
    # huggingface_hub reads its variables when it is imported.
    command = [sys.executable, "-m", "gpt2.prepare", dataset, "--data-dir", str(data / "data"), *arguments]
    return subprocess.run(
        command,
        env={**environment(), **hub.environment(data / "home"), "TIKTOKEN_CACHE_DIR": str(data / "home"), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def result_of(process):
    assert process.returncode == 0, process.stderr + process.stdout
    return json.loads(process.stdout)


def error_of(process):
    """Return the message of an error, which is printed as JSON."""
    assert process.returncode == 2, process.stderr + process.stdout
    assert "Traceback" not in process.stderr
    return " ".join(json.loads(process.stdout).values())
