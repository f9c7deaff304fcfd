"""Shared fixtures. A test calls golden("name.txt", text) to compare a text with a golden file."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kmatrix.errors import damaged_files
from running import matrix, plan, start_runner  # noqa: F401  (fixtures for all tests of the runner)

# nohup ignores SIGHUP, and every program that a test starts would inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Before torch loads OpenMP: with more threads than free cores, spinning ones make a step ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Tests start thousands of programs: without bytecode, each would compile kmatrix again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# The settings of the machine for hubs and trackers are not those of a test: a machine without network may set
# HF_HUB_OFFLINE, and then the tests would not reach their own servers either.
for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING_FACE_", "TRACKIO_", "WANDB_"))]:
    del os.environ[name]
# A property must not fail because the machine is busy.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
GOLDEN = Path(__file__).parent / "golden"
# `make check-slow` gives one file after the other to its workers. The first one installs the .venv of the acceptance
# tests, for two minutes, in which the other workers run what needs none; then the longest, so that all end together.
FIRST = "test_runner_story.py"
LONGEST = (
    *("test_slurm_story.py", "test_training_story.py"),
    *("test_tracker_faults_story.py", "test_tracker_choice_story.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files; then read the diff")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _order(item.path))


def _order(path: Path) -> int:
    """Return the position of a file among the others; files with the same one keep their order."""
    if path.parent.name != "acceptance":
        return 1
    if path.name == FIRST:
        return 0
    return 2 + (LONGEST.index(path.name) if path.name in LONGEST else len(LONGEST))


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
