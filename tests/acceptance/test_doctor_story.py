"""Use `make doctor` before a run: the state of the machine."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest

pytestmark = pytest.mark.accept


def test_the_doctor_describes_this_machine(clone):
    completed = clone.make("doctor")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert clone.python in completed.stdout
    assert "PyTorch" in completed.stdout
    value = json.loads(clone.kmatrix("doctor", "JSON=1").stdout)
    version = next(check["said"] for check in value["checks"] if check["name"] == "Python")
    assert version.startswith(".".join(map(str, sys.version_info[:3])))


def test_the_doctor_works_without_torch(bare_clone):
    """`make doctor` installs only the core packages into .venv."""
    completed = bare_clone.make("doctor")
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert re.search(r"^warning +PyTorch ", completed.stdout, re.MULTILINE), completed.stdout
    assert "not installed" in completed.stdout


@pytest.fixture
def broken_torch(clone):
    """A torch package that fails to import, before the real one on the path."""
    folder = clone.root / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('libcudart.so: cannot open')", encoding="utf-8")
    yield
    shutil.rmtree(folder)


@pytest.mark.usefixtures("broken_torch")
def test_a_torch_that_fails_to_import_is_reported_with_its_error(clone):
    completed = clone.kmatrix("doctor")
    assert completed.returncode == 1, completed.stdout + completed.stderr
    assert re.search(r"^broken +PyTorch ", completed.stdout, re.MULTILINE), completed.stdout
    assert "libcudart.so" in completed.stdout
