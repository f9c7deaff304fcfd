"""A fresh clone installs what it needs, and works."""

from __future__ import annotations

import re

import pytest

from clones import copied, make_clone

pytestmark = pytest.mark.nightly


def test_the_doctor_needs_the_core_alone_a_copy_runs_its_own_code_and_set_up_installs_the_rest(tmp_path):
    clone = make_clone(tmp_path / "kmatrix", with_venv=False)
    assert re.search(r"^warning +PyTorch ", clone.check("doctor"), re.MULTILINE)
    copy = copied(clone.root, tmp_path / "copy" / "kmatrix")
    (copy.root / "lib" / "kmatrix" / "__main__.py").write_text("print('the code of the copy')\n")
    assert copy.run(".venv/bin/kmatrix").stdout == "the code of the copy\n"
    clone.check("setup", "setup-trackers", timeout=1700)
    clone.check("quickstart", "MAX_ITERS=20", "EVAL_SAMPLES=20")
    assert "Nothing to be done" in clone.check("setup"), "nothing is installed twice"
