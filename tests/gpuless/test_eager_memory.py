"""The stored peaks of eager steps are those that the double of an H100 traces now."""

from __future__ import annotations

import json

import pytest

from factories import ROOT
from gpuless import answer

pytestmark = pytest.mark.gpuless

POINTS = json.loads((ROOT / "tests" / "fixtures" / "gpu_memory.json").read_text(encoding="utf-8"))["eager"]
TRACED = [("124m", 8), ("124m", 32), ("350m", 4), ("350m", 16), ("774m", 4), ("1558m", 1)]


@pytest.mark.parametrize(("name", "batch"), TRACED)
def test_the_stored_peak_is_traced_again(name, batch):
    (stored,) = [point["gib"] for point in POINTS if (point["model"], point["micro_batch"]) == (name, batch)]
    (traced,) = answer("fake_gpu_memory.py", [[name, batch]])
    assert traced["peak"] / 2**30 == pytest.approx(stored, rel=0.01)
