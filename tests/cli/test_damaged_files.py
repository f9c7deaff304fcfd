"""A field of another type in any JSON file ends no command with a traceback."""

import functools
import os
import random

import pytest

from damage import OPTIONS, DamagedMatrix
from kmatrix.cli import results, run

SAMPLE = 300
CASES = int(os.environ.get("KMATRIX_DAMAGES", "10000"))
SEED = 12
# Correct, or refused with one error. 1: a run failed or is lost, and the others would have been run (docs/running.md).
ENDS = {**dict.fromkeys(OPTIONS, (0, 2)), "continue": (0, 1, 2), "test-rerun": (0, 1, 2)}


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    return DamagedMatrix(tmp_path_factory.mktemp("damaged"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Do not train, flush to disk or parse Kconfig again: none of them depends on the damage."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(results, "open_tree", functools.cache(results.open_tree))
    monkeypatch.setattr(run, "_run_and_report", lambda matrix, plan, **options: 0)
    monkeypatch.setattr(run, "need_torch", lambda: None)


def check(damaged, count):
    """Check this many cases, drawn from all fields, values and commands."""
    cases = random.Random(SEED).sample(list(damaged.cases()), count)
    wrong = []
    for case in cases:
        result = damaged.check(case)
        if result.status not in ENDS[case.command] or "Traceback" in result.err:
            wrong.append(f"{case}\n{result.err[-600:]}")
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n".join(wrong[:20])


def test_a_sample_of_damaged_fields_ends_no_command_with_a_traceback(damaged):
    check(damaged, SAMPLE)


@pytest.mark.slow
def test_no_damaged_field_ends_a_command_with_a_traceback(damaged):
    check(damaged, CASES)
