"""The sources of the trainer: an attempt runs a copy, and records its hash."""

from __future__ import annotations

import shutil

from kmatrix import ROOT
from kmatrix.sources import sha256_of_copy, trainer_files, whole


def test_a_copy_has_the_hash_of_its_sources_until_it_is_edited(tmp_path):
    files = trainer_files(ROOT)
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert sha256_of_copy(tmp_path) == whole(files)
    assert {"gpt2/train.py", "lib/kmatrix/records/attempts.py"} <= files.keys()
    assert "lib/kmatrix/runner/supervisor.py" not in files

    (tmp_path / "gpt2/train.py").write_text("print()")
    assert sha256_of_copy(tmp_path) != whole(files)
