"""A fresh clone installs what it needs, and works."""

from __future__ import annotations

import re

import pytest

from clones import make_clone

pytestmark = pytest.mark.nightly


def test_the_doctor_needs_the_core_alone_and_set_up_installs_the_rest(tmp_path):
    clone = make_clone(tmp_path / "kmatrix", with_venv=False)
    assert re.search(r"^warning +PyTorch ", clone.check("doctor"), re.MULTILINE)
    clone.check("setup", "setup-trackers", timeout=1700)
    clone.check("quickstart", "MAX_ITERS=20", "EVAL_SAMPLES=20")
    assert "Nothing to be done" in clone.check("setup"), "nothing is installed twice"
