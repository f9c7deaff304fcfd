"""The Dockerfile: pinned packages, no root, and only files that exist and are the project's."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from programs import ROOT

LINES = (
    re.sub(r"(?m)^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8")).replace("\\\n", " ").splitlines()
)
STEPS = [tuple(line.split(None, 1)) for line in LINES if line.strip()]
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()


def steps(name: str) -> list[str]:
    return [rest for step, rest in STEPS if step == name]


def test_the_image_has_pinned_packages_no_root_and_the_files_of_the_project_only():
    (base,), (script,) = steps("FROM"), [step for step in steps("RUN") if "setup.sh" in step]
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", base)
    assert re.findall(r"setup\.sh (\w+)", script) == ["core", "train", "trackers"]
    assert not [step for step in steps("RUN") if "pip install" in step]
    assert steps("USER") == ["1000"]
    for copy in steps("COPY"):
        *sources, _ = [word for word in shlex.split(copy) if not word.startswith("--")]
        assert all((ROOT / source).exists() and source not in IGNORED for source in sources)
    assert {".venv", ".config*", "data", "test_matrix_results_*", ".env", ".netrc"} <= set(IGNORED)
    # The path has the interpreter that manifests name.
    (variables,) = steps("ENV")
    assert "PATH=/opt/kmatrix/.venv/bin:$PATH" in variables
    assert "PYTHONPATH=/opt/kmatrix/lib:/opt/kmatrix" in variables
    assert steps("WORKDIR") == ["/opt/kmatrix"]


@pytest.mark.nightly
def test_hadolint_finds_nothing():
    hadolint = Path(sys.executable).with_name("hadolint")  # of the stage dev, on Linux
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
