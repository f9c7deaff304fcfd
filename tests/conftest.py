"""Shared fixtures. A test calls golden("name.txt", text) to compare a text with a golden file."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import guard
import kept_trees
from kmatrix.errors import damaged_files
from kmatrix.records.paths import MatrixDir

# nohup and `&` ignore these signals, and every program that a test starts would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before torch loads OpenMP: with more threads than free cores, spinning ones make a step ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Tests start thousands of programs: without bytecode, each would compile kmatrix again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# No test outlives a crash of the machine, and the disk would set the pace.
os.fsync = lambda descriptor: None
# The settings of the machine for hubs and trackers are not those of a test: a machine without network may set
# HF_HUB_OFFLINE, and then the tests would not reach their own servers either.
for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING_FACE_", "TRACKIO_", "WANDB_"))]:
    del os.environ[name]
# The gate draws the same examples each time: a failure is of the change. Nightly they are new, and TIMES as many.
NIGHTLY = os.environ.get("KMATRIX_NIGHTLY") == "1"
TIMES = 20
quiet = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("gate", derandomize=True, database=None, **quiet)
settings.register_profile("nightly", **quiet)
settings.load_profile("nightly" if NIGHTLY else "gate")
GOLDEN = Path(__file__).parent / "golden"
TIMEOUTS_S = {"process": 120, "story": 900, "nightly": 1800}  # only to end a hang
repeated: list[str] = []  # stories that passed only on their second run


@pytest.fixture
def matrix(tmp_path: Path) -> MatrixDir:
    """Return the empty folder of a matrix."""
    folder = MatrixDir(tmp_path / "test_matrix_results_20260101_000000")
    folder.path.mkdir()
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files; then read the diff")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def pytest_configure(config: pytest.Config) -> None:
    guard.install()
    kept_trees.install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its time limit, and stories their one repetition; shuffle with --shuffle."""
    for item in items:
        limits = [seconds for marker, seconds in TIMEOUTS_S.items() if item.get_closest_marker(marker)]
        if limits and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(max(limits)))
        if item.get_closest_marker("story") and not NIGHTLY:
            item.add_marker(pytest.mark.flaky(reruns=1))
    if NIGHTLY:
        for function in {getattr(item, "function", None) for item in items}:
            if own := getattr(function, "_hypothesis_internal_use_settings", None):
                function._hypothesis_internal_use_settings = settings(own, max_examples=own.max_examples * TIMES)
    if (seed := config.getoption("--shuffle")) is not None:
        random.Random(seed).shuffle(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    guard.begin(item)
    try:
        return (yield)
    finally:
        guard.end()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome == "rerun":
        repeated.append(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Name the repeated stories in the last line."""
    if repeated and not hasattr(config, "workerinput"):
        print(f"ran a second time: {', '.join(sorted(set(repeated)))}")


@pytest.fixture(autouse=True)
def warnings_of_this_test_only() -> None:
    """Forget which damaged files earlier tests of this process have read: the next command would name them."""
    list(damaged_files())


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with a golden file, character by character."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: pytest --update-golden writes it"
        assert text == path.read_text(encoding="utf-8"), f"{name} differs: pytest --update-golden, then read the diff"

    return check
