"""Prepare datasets in another process that downloads from a local server."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np

from factories import ROOT, environment

PER_SHARD = 40_000


def shard(seed, tokens=PER_SHARD):
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens
    return header.tobytes() + np.random.default_rng(seed).integers(0, 50257, tokens).astype("<u2").tobytes()


def run(hub, data, dataset, *arguments, timeout=240, **variables):
    """Prepare in another process that uses the local server."""
    command = [sys.executable, "-m", "gpt2.prepare", dataset, "--data-dir", str(data / "data"), *arguments]
    return subprocess.run(
        command,
        env={**environment(), **hub.environment(data / "home"), "TIKTOKEN_CACHE_DIR": str(data / "home"), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def result_of(process):
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def error_of(process):
    assert process.returncode == 2, process.stderr + process.stdout
    assert "Traceback" not in process.stderr
    return process.stderr
