"""The scripts run with a Python that lacks the packages, and end cleanly whatever their output is."""

import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
BARE = [sys.executable, "-S"]  # without site-packages
ONE_LINER = "import scripts.gputop; m = scripts.gputop.GPUMonitor(); m.initialize(); print('GPUs:', m.gpu_count)"
SCRIPTS = ("gputop.py", "generate_consolidated_gpu_summary.py", "generate_gpu_memory_comparison.py")


@pytest.fixture
def checkout(tmp_path):
    """A checkout without an environment."""
    for name in ("lib", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    # Path.resolve would follow the link to the real checkout.
    (tmp_path / "scripts").unlink()
    (tmp_path / "scripts").mkdir()
    for path in (ROOT / "scripts").glob("*.py"):
        (tmp_path / "scripts" / path.name).write_text(path.read_text())
    return tmp_path


def add_environment(checkout):
    packages = checkout / ".venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.parent.mkdir(parents=True)
    packages.symlink_to(sysconfig.get_path("purelib"))


def run(checkout, *arguments, shell=""):
    command = [*BARE, *arguments]
    if shell:
        command = ["sh", "-c", f"{shlex.join(command)} {shell}"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("name", SCRIPTS)
def test_without_an_environment_one_line_says_what_to_run(checkout, name):
    ended = run(checkout, f"scripts/{name}")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert "run `make setup`, then use" in ended.stderr
    assert "msgspec" in ended.stderr


def test_scripts_find_the_environment_of_the_checkout(checkout):
    add_environment(checkout)
    for name in SCRIPTS:
        ended = run(checkout, f"scripts/{name}", "--help")
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.startswith("usage:")


def test_the_one_liner_finds_the_environment_or_says_what_to_run(checkout):
    ended = run(checkout, "-c", ONE_LINER)
    assert ended.returncode == 1
    assert "ImportError" in ended.stderr.splitlines()[-1]
    assert "run `make setup`" in ended.stderr
    add_environment(checkout)
    ended = run(checkout, "-c", ONE_LINER)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("GPUs: ")
