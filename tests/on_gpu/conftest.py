"""Fixtures of `make check-gpu`, and the table that closes it."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

import on_gpu_runs
from check_gpu import missing
from kmatrix.gpu.nvml.detect import detect
from kmatrix.text import plural
from on_gpu_runs import Place

WIDTH = 24  # columns of the first column
TABLES = "tables"  # of the tests, printed at the end: user properties of this name


@pytest.fixture(scope="session")
def device() -> Place:
    """The device of the tests: a GPU, or the CPU with ON=cpu. Without either, the session ends."""
    found = on_gpu_runs.place()
    if found.is_gpu and (why := missing(detect())):
        pytest.exit(f"error: {why}", returncode=2)
    return found


@pytest.fixture(scope="session")
def gpus(device: Place) -> int:
    """The number of GPUs, or of ranks on the CPU that stand for them."""
    return device.gpus


@pytest.fixture
def only_on_gpu(device: Place) -> Any:
    """Return a function that skips the rest of a test on the CPU, with the reason."""

    def require(reason: str) -> None:
        if not device.is_gpu:
            pytest.skip(f"executed up to the GPU: {reason}")

    return require


@pytest.fixture(scope="session")
def sizes(device: Place) -> dict[str, Any]:
    """The fields of a small model: of the size that the CPU trains for 20 steps in seconds, too."""
    if device.is_gpu:
        return {"n_layer": 4, "n_head": 4, "n_embd": 256, "block_size": 256, "batch_size": 8, "vocab_multiple": 64}
    return {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "batch_size": 8, "vocab_multiple": 64}


@pytest.fixture(scope="session")
def large(device: Place) -> dict[str, Any]:
    """The fields of a model of 124M parameters; on the CPU a tiny one in its place."""
    if device.is_gpu:
        return {"model": "124m", "n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_multiple": 64}
    return {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64, "vocab_multiple": 64}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one line per module: its tests by outcome and its seconds; then the reasons of skips, and tables."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: dict[str, float] = defaultdict(float)
    reasons: Counter[str] = Counter()
    lines: list[str] = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if "on_gpu" not in getattr(report, "nodeid", ""):
                continue
            module = report.nodeid.partition("::")[0].rpartition("/")[2]
            counts[module][outcome] += 1
            lines += [line for name, line in getattr(report, "user_properties", []) if name == TABLES]
            if outcome == "skipped":
                reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    for reports in terminalreporter.stats.values():
        for report in reports:
            if "on_gpu" in getattr(report, "nodeid", "") and hasattr(report, "duration"):
                seconds[report.nodeid.partition("::")[0].rpartition("/")[2]] += report.duration
    if not counts:
        return
    write = terminalreporter.write_line
    terminalreporter.section(f"check-gpu on {_about()}")
    write(f"{'module':{WIDTH}}{'passed':>8}{'failed':>8}{'skipped':>8}{'seconds':>9}")
    for module in sorted(counts):
        found = counts[module]
        failed = found["failed"] + found["error"]
        write(f"{module:{WIDTH}}{found['passed']:8}{failed:8}{found['skipped']:8}{seconds[module]:9.0f}")
    for reason, number in sorted(reasons.items()):
        write(f"skipped: {plural(number, 'test')}: {reason}")
    for line in lines:
        write(line)


def _about() -> str:
    place = on_gpu_runs.place()
    if not place.is_gpu:
        return "the CPU, in the place of a GPU"
    import torch

    return f"{place.gpus} x {torch.cuda.get_device_name(0)}"
