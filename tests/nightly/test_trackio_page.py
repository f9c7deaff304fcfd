"""Show a run in Trackio and TensorBoard in a real browser during training; screenshots are in test-artifacts/."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from browsing import Browser, browser
from gpu_stage import background_process, load_jsonl
from refusing_server import busy_port
from served_page import Served, serve_page
from story import only
from waiting import wait_until

pytestmark = pytest.mark.nightly

PROJECT = "gpt2-page"
RUN = "gpt2_adamw_1cpu"
ENDLESS = (
    *("OPTIMIZER=adamw", "NUM_GPUS=1", "MAX_ITERS=100000", "LOG_INTERVAL=1", "EVAL_SAMPLES=12", "SIMULATE=2"),
    "TRACKER_LIMIT=600",  # seconds: trackers that work are never late
)
SAVE = 'button[title*="CSV"]'  # of a chart on Trackio's page
LOSS = f'[data-metric="train/loss"] {SAVE}'
BALANCE = f'[data-metric="gpu_load_balance_cv"] {SAVE}'
DEVICES = '[data-metric="value"]'  # a chart with a line per device


def serve_target(clone, *arguments: str) -> AbstractContextManager[Served]:
    """Run a make target that serves a page, without a display on which it could open a browser."""
    env = {name: text for name, text in clone.environment.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    return serve_page(["make", "--no-print-directory", *arguments], cwd=clone.root, env=env)


@pytest.fixture
def window(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "downloads") as opened:
        yield opened


def test_a_browser_shows_a_run_during_and_after_training(clone, window, tmp_path):
    results = tmp_path / "results"
    results_arg = f"RESULTS_DIR={results}"
    assert (
        clone.make("defconfig-gpt2-cpu-quick", "TRACKER=trackio,tensorboard", f"TRACKER_PROJECT={PROJECT}").returncode
        == 0
    )
    with background_process(clone, "make", "--no-print-directory", "test-matrix", results_arg, *ENDLESS) as running:
        wait_until((results / "trackio" / f"{PROJECT}.db").exists, "the first point is stored", 900)
        with busy_port() as taken, serve_target(clone, "trackio-view", results_arg, f"PORT={taken}") as page:
            assert f"(port {taken} is in use)" in page.output
            check_curve_grows(window, page)
            check_devices(window, page)
            check_single_server(clone, results_arg, results, page)
            assert clone.make("stop", results_arg).returncode == 0
            assert running.wait(timeout=300) != 0
            matrix = only(results.glob("test_matrix_results_*"))
            steps = {line["step"] for line in load_jsonl(matrix / RUN / "metrics.jsonl") if "train/loss" in line}
            window.open(page.url)
            window.wait_until(
                lambda: window.count(LOSS) and len(window.download_csv(LOSS)) == len(steps), "every step is drawn"
            )
            assert "stopped Trackio" in page.interrupt()
    check_trackio_content(clone, results, steps)
    check_tensorboard(clone, window, results_arg)


def check_curve_grows(window: Browser, page: Served) -> None:
    """Check that points are added without a reload and that the loss falls."""
    window.open(page.url)
    window.wait_until(lambda: RUN in window.text and window.count(f"{LOSS}"), "the run and its curve are drawn")
    window.wait_until(lambda: window.attributes("data-metric")[:1] == ["train/loss"], "the loss is the first chart")
    before = len(window.download_csv(LOSS))
    window.wait_until(lambda: len(window.download_csv(LOSS)) >= before + 10, "ten more points are drawn")

    def falls() -> bool:  # only after some steps: the learning rate begins at 0
        losses = [float(row["train/loss"]) for row in window.download_csv(LOSS)]
        return losses[-1] < losses[0]

    window.wait_until(falls, "the loss falls")
    window.save_screenshot("trackio-metrics")


def check_devices(window: Browser, page: Served) -> None:
    """Check that each GPU has a line and that the balance of the load is drawn over time."""
    window.open(f"{page.base}system?project={PROJECT}&smoothing=0")
    window.wait_until(lambda: "Devices (2)" in window.text, "two devices can be chosen")
    assert {"GPU 0", "GPU 1"} <= set(window.text.splitlines())
    window.wait_until(lambda: window.count(f"{DEVICES} canvas"), "a chart of the devices is drawn")
    assert {row["device"] for row in window.download_csv(f"{DEVICES} {SAVE}")} >= {"GPU 0", "GPU 1"}
    before = len(window.download_csv(BALANCE))
    window.wait_until(lambda: len(window.download_csv(BALANCE)) > before, "the balance chart grows")
    window.save_screenshot("trackio-devices")


def check_single_server(clone, results_arg: str, results: Path, page: Served) -> None:
    second = clone.make("trackio-view", results_arg)
    assert second.returncode == 0
    assert second.stdout.splitlines()[0] == f"URL: {page.url}"
    assert "write_token" not in second.stdout
    assert stat.S_IMODE(only((results / "trackio").glob(".page-*.json")).stat().st_mode) == 0o600
    refused = clone.make("trackio-view", results_arg, "PROJECT=gpt2-other")
    assert refused.returncode == 2
    assert f"known projects, newest last: {PROJECT}" in refused.stderr


def check_trackio_content(clone, results: Path, steps: set[int]) -> None:
    """Check with Trackio's own program that each step, the devices and their balance are stored once."""

    def get(kind: str, metric: str) -> list[dict]:
        arguments = ("get", kind, "--project", PROJECT, "--run", RUN, "--metric", metric, "--json")
        program = str(clone.root / ".venv" / "bin" / "trackio")
        completed = clone.run(program, *arguments, TRACKIO_DIR=str(results / "trackio"), HF_HUB_OFFLINE="1")
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return json.loads(completed.stdout)["values"]

    assert sorted(row["step"] for row in get("metric", "train/loss")) == sorted(steps)
    for metric in ("gpu/0/memory_used", "gpu/1/power", "gpu_load_balance_cv"):
        assert len({row["timestamp"] for row in get("system-metric", metric)}) > 5, metric


def check_tensorboard(clone, window: Browser, results_arg: str) -> None:
    with serve_target(clone, "tensorboard", results_arg, "PORT=21006") as page:
        window.open(page.url)
        window.wait_until(lambda: {RUN, "Pinned", "2 cards"} <= set(window.text.splitlines()), "the losses are pinned")
        window.save_screenshot("tensorboard-opened")
        window.open(f"{page.base}?tagFilter=train%2Floss#timeseries")
        window.wait_until(lambda: {RUN, "/loss"} <= set(window.text.splitlines()), "the run and the chart are visible")
        window.wait_until(lambda: window.count_colored_pixels("line-chart canvas") > 100, "the curve is painted")
        window.save_screenshot("tensorboard")
        assert "stopped TensorBoard" in page.interrupt()
