"""Tests wait for a condition with a deadline (tests/support/waiting.py), never for a fixed time."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

TESTS = Path(__file__).resolve().parents[1]
# Programs in strings, such as a slowed trainer, are not checked: their sleeps are not waits of a test.
ALLOWED_SLEEPS = {
    "acceptance/test_checkpoints_story.py": "a second signal must arrive while the first one is handled",
    "acceptance/test_kills_story.py": "kills at random times",
    "acceptance/test_recordings_story.py": "kills at random times",
    "acceptance/test_runner_story.py": "kills at random times",
    "acceptance/test_submission_story.py": "kills at random times",
    "acceptance/test_wandb_kill_story.py": "kills at random times",
    "gpt2/test_ddp.py": "a second signal must arrive while the first one is handled",
    "support/fake_kubernetes.py": "a server that answers slowly",
    "support/fakes.py": "a step of the fake trainer",
    "support/instant.py": "a slow creation of a matrix, so that kills come in its middle",
    "support/hub_server.py": "a server that sends its answer slowly",
    "support/rung_trainer.py": "a training that kills come in the middle of",
    "support/scripted_trainer.py": "a training that kills come in the middle of",
    "support/trainer_faults.py": "a slow and a hanging rank",
    "support/waiting.py": "the helper itself",
}


def sleep_lines(path: Path) -> list[int]:
    """Return the lines of calls of time.sleep."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep")
    ]


def test_only_listed_files_call_sleep():
    found = {str(path.relative_to(TESTS)): sleep_lines(path) for path in sorted(TESTS.rglob("*.py"))}
    assert {name: lines for name, lines in found.items() if lines and name not in ALLOWED_SLEEPS} == {}
    assert [name for name in ALLOWED_SLEEPS if not found.get(name)] == [], (
        "these sleep no more: remove them from the list"
    )


def test_a_folder_that_vanishes_while_a_condition_looks_is_not_yet(tmp_path):
    looks = iter([FileNotFoundError(2, "gone"), "", "found"])

    def look() -> str:
        """a file is there"""
        found = next(looks)
        if isinstance(found, FileNotFoundError):
            raise found
        return found

    assert wait_until(look) == "found"


def test_a_condition_that_never_comes_true_names_what_was_waited_for_and_the_last_error():
    with pytest.raises(AssertionError, match="not within 0 s: the file") as caught:
        wait_until(lambda: Path("/nonexistent/file").stat(), "the file", seconds=0)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
