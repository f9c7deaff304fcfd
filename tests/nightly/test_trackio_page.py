"""Show a run in Trackio and TensorBoard in a real browser during training; screenshots are in test-artifacts/."""

from __future__ import annotations

import csv
import io
import json
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from PIL import Image
from selenium.webdriver.common.by import By

from browsing import SCREENSHOTS, Browser, browser
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
PRESS_AGAIN_S = 5.0  # after a click that saved nothing
GREY = 20  # maximum difference between red, green and blue
DEVICES = '[data-metric="value"]'  # a chart with a line per device


def serve_target(clone, *arguments: str) -> AbstractContextManager[Served]:
    """Run a make target that serves a page, without a display on which it could open a browser."""
    env = {name: text for name, text in clone.environment.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    return serve_page(["make", "--no-print-directory", *arguments], cwd=clone.root, env=env)


def count(window: Browser, selector: str) -> int:
    return len(window.find_elements(By.CSS_SELECTOR, selector))


def first_metric(window: Browser) -> str | None:
    return window.find_element(By.CSS_SELECTOR, "[data-metric]").get_attribute("data-metric")


def download_csv(window: Browser, selector: str) -> list[dict[str, str]]:
    """Press a button that downloads a CSV file, and return its rows."""
    for old in window.downloads.iterdir():
        old.unlink()
    pressed = 0.0

    def newest() -> Path | None:
        # The page replaces its charts with each new point: a click on a button that was just replaced is lost.
        nonlocal pressed
        if time.monotonic() > pressed + PRESS_AGAIN_S:
            window.execute_script("arguments[0].click()", window.find_element(By.CSS_SELECTOR, selector))
            pressed = time.monotonic()
        return max(window.downloads.glob("*.csv"), key=lambda path: path.stat().st_mtime_ns, default=None)

    path = window.wait_until(newest, f"{selector} saves a file")
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def coloured_pixels(window: Browser, selector: str) -> int:
    """Return the number of pixels of an element that are not grey as axes and frames are."""
    shot = window.find_element(By.CSS_SELECTOR, selector).screenshot_as_png
    colours = Image.open(io.BytesIO(shot)).convert("RGB").getcolors(maxcolors=1 << 24) or []
    return sum(number for number, rgb in colours if max(rgb) - min(rgb) > GREY)


def save_screenshot(window: Browser, name: str) -> None:
    SCREENSHOTS.mkdir(exist_ok=True)
    assert window.save_screenshot(str(SCREENSHOTS / f"{name}.png"))


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
            window.get(page.url)
            window.wait_until(
                lambda: count(window, LOSS) and len(download_csv(window, LOSS)) == len(steps), "every step is drawn"
            )
            assert "stopped Trackio" in page.interrupt()
    check_trackio_content(clone, results, steps)
    check_tensorboard(clone, window, results_arg)


def check_curve_grows(window: Browser, page: Served) -> None:
    """Check that points are added without a reload and that the loss falls."""
    window.get(page.url)
    window.wait_until(lambda: RUN in window.text and count(window, LOSS), "the run and its curve are drawn")
    window.wait_until(lambda: first_metric(window) == "train/loss", "the loss is the first chart")
    before = len(download_csv(window, LOSS))
    window.wait_until(lambda: len(download_csv(window, LOSS)) >= before + 10, "ten more points are drawn")

    def falls() -> bool:  # only after some steps: the learning rate begins at 0
        losses = [float(row["train/loss"]) for row in download_csv(window, LOSS)]
        return losses[-1] < losses[0]

    window.wait_until(falls, "the loss falls")
    save_screenshot(window, "trackio-metrics")


def check_devices(window: Browser, page: Served) -> None:
    """Check that each GPU has a line and that the balance of the load is drawn over time."""
    window.get(f"{page.base}system?project={PROJECT}&smoothing=0")
    window.wait_until(lambda: "Devices (2)" in window.text, "two devices can be chosen")
    assert {"GPU 0", "GPU 1"} <= set(window.text.splitlines())
    window.wait_until(lambda: count(window, f"{DEVICES} canvas"), "a chart of the devices is drawn")
    assert {row["device"] for row in download_csv(window, f"{DEVICES} {SAVE}")} >= {"GPU 0", "GPU 1"}
    before = len(download_csv(window, BALANCE))
    window.wait_until(lambda: len(download_csv(window, BALANCE)) > before, "the balance chart grows")
    save_screenshot(window, "trackio-devices")


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
        window.get(page.url)
        window.wait_until(lambda: {RUN, "Pinned", "2 cards"} <= set(window.text.splitlines()), "the losses are pinned")
        save_screenshot(window, "tensorboard-opened")
        window.get(f"{page.base}?tagFilter=train%2Floss#timeseries")
        window.wait_until(lambda: {RUN, "/loss"} <= set(window.text.splitlines()), "the run and the chart are visible")
        window.wait_until(lambda: coloured_pixels(window, "line-chart canvas") > 100, "the curve is painted")
        save_screenshot(window, "tensorboard")
        assert "stopped TensorBoard" in page.interrupt()
