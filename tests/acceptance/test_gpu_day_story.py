"""The commands of docs/gpu-day.md on a machine without a GPU: refused in one line, or with the CPU in its place."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess

import pytest

from kmatrix.gpu.nvml.detect import detect
from waiting import wait_until

pytestmark = [pytest.mark.accept, pytest.mark.timeout(900)]

FIRST = ("bench", "PART=first", "ON=cpu")


@pytest.fixture(autouse=True)
def _no_gpu():
    if detect().gpus:
        pytest.skip("this machine has a GPU, and these commands would use it")


@pytest.fixture
def stored(clone):
    """The file of results of the CPU, which does not exist yet."""
    path = clone.root / "artifacts" / "bench-gpu-cpu" / "results.jsonl"
    path.unlink(missing_ok=True)
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("check-gpu",), "no GPU: "),
        (("check-gpu", "ON=tpu"), "unknown ON=tpu"),
        (("bench", "PART=first"), "finds no GPU"),
        (("bench", "PART=all"), "unknown part all"),
        (("bench", "PART=first", "ON=tpu"), "unknown device tpu"),
        (("bench", "PART=peer", "ON=cpu", "PEER=/nowhere"), "/nowhere has no train.py"),
    ],
)
def test_a_command_that_cannot_run_is_refused_with_a_hint(clone, arguments, reason):
    refused = clone.make(*arguments)
    said = [line for line in refused.stderr.splitlines() if not line.startswith("make")]
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert reason in said[0]
    assert len(said) <= 2
    assert re.search("ON=cpu|PART|PEER", "\n".join(said)), said
    assert "Traceback" not in refused.stdout + refused.stderr


def test_the_commands_of_the_page_are_targets_with_an_entry_in_the_help(clone):
    page = (clone.root / "docs" / "gpu-day.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"^    make ([\w-]+)", page, re.MULTILINE))
    assert commands == {"check-gpu", "bench"}
    printed = clone.make("help").stdout
    assert all(re.search(rf"^\s*{name}\b", printed, re.MULTILINE) for name in commands), printed


def test_an_interrupted_measurement_continues_with_the_same_command(clone, stored):
    process = subprocess.Popen(
        ["make", "--no-print-directory", *FIRST],
        cwd=clone.root,
        env=clone.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: stored.exists() and len(lines(stored)) >= 2, "two measurements are stored", 300)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    before = stored.read_text(encoding="utf-8")
    completed = clone.make(*FIRST)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "complete" in completed.stdout
    assert stored.read_text(encoding="utf-8").startswith(before), "a finished measurement was made again"
    names = [line["name"] for line in lines(stored)]
    assert len(names) == len(set(names)) > 15
    again = clone.make(*FIRST)
    assert again.returncode == 0
    assert [line["name"] for line in lines(stored)] == names


def test_a_report_without_measurements_is_of_predictions(clone):
    printed = clone.make("bench", "PART=report")
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.startswith("Nothing was measured")
    assert "not measured, predicted" in printed.stdout


def test_a_report_of_the_stored_measurements_is_that_of_the_page(clone):
    page = (clone.root / "docs" / "gpu-day.md").read_text(encoding="utf-8")
    folder = clone.root / "artifacts" / "bench-gpu"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copy(clone.root / "bench" / "gpu-results.jsonl", folder / "results.jsonl")
        printed = clone.make("bench", "PART=report")
    finally:
        shutil.rmtree(folder)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.strip() in page
