"""The provenance of a run: its code, its machine, and no secrets."""

from __future__ import annotations

import subprocess

import pytest

from kmatrix.experiment.provenance import copy_code, keys_in_code, provenance, variables
from kmatrix.records.paths import ROOT

IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def git(root, *arguments):
    return subprocess.run(
        ["git", "-C", str(root), *IDENTITY, *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A checkout with the sources of the trainer, all committed."""
    monkeypatch.setattr("kmatrix.experiment.provenance.ROOT", tmp_path)
    for name in ("README.md", "gpt2/train.py", "lib/kmatrix/records/__init__.py", ".env.example"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one\n")
    (tmp_path / "gpt2/log.py").write_text("def log():\n    from kmatrix.records.files import append\n")
    (tmp_path / "lib/kmatrix/records/files.py").write_text("import kmatrix.errors as errors\n")
    for name in ("errors.py", "packing.py", "records/paths.py", "__init__.py"):
        (tmp_path / "lib/kmatrix" / name).write_text("one\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def origin_of(sources):
    return provenance(sources, "kmatrix train", ())


@pytest.mark.process
def test_the_code_is_known_by_its_commit_and_a_copy_of_it_has_the_same_hash(repository, tmp_path_factory):
    origin = origin_of(repository)
    assert (origin["git_commit"], origin["git_dirty"]) == (git(repository, "rev-parse", "HEAD").strip(), False)
    (repository / "gpt2/train.py").write_text("two\n")
    changed, copy = origin_of(repository), tmp_path_factory.mktemp("m") / "code"
    assert (changed["git_dirty"], changed["code"] == origin["code"]) == (True, False)
    copy_code(repository, copy)
    assert (copy / "gpt2/train.py").read_text() == "two\n"
    assert origin_of(copy)["code"] == changed["code"]


def test_variables_that_may_change_a_result_are_recorded_without_secrets():
    environment = {
        **{"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/home/you"},
        **{"KMATRIX_TOKEN": "correct-horse", "CUDA_PASSWORD": "hunter2", "MY_TOKEN": "repeated-elsewhere"},
        "TORCH_INDEX": "https://you:secret@example.org/simple",
        "TORCH_LOGS": "hf_" + "aB3" * 12,  # a key in a variable with a harmless name
        "NCCL_SOCKET_IFNAME": "repeated-elsewhere",
        "TORCH_EXTRA": "password=hunter2x",
    }
    assert variables(environment) == {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}


@pytest.mark.process
def test_the_provenance_names_versions_and_machine(repository):
    value = origin_of(repository)
    assert value["command"] == "kmatrix train"
    assert value["versions"]["torch"]
    assert value["driver"] is None  # no GPU is used, so the driver is not queried
    assert value["kernel"]
    assert value["cpu"]


@pytest.mark.process
def test_outside_a_repository_the_code_is_identified_by_its_hash(repository):
    (repository / ".git").rename(repository / "git-is-gone")
    origin = origin_of(repository)
    assert (origin["git_commit"], origin["git_dirty"]) == (None, None)
    assert len(origin["code"]) == 64


def test_a_key_in_the_sources_is_named_by_its_line(tmp_path):
    for name in ("gpt2/a.py", "lib/kmatrix/text.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"import torch\ntoken = 'hf_{'aB3' * 12}'\n")
    assert keys_in_code(tmp_path) == ["gpt2/a.py:2"]
    assert keys_in_code(ROOT) == []
