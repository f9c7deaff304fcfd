"""The provenance of a run: its code, its machine, and no secrets."""

from __future__ import annotations

import subprocess

import pytest

from kmatrix.experiment.provenance import (
    Code,
    code_of,
    copy_code,
    keys_in_code,
    provenance,
    variables,
)
from kmatrix.records.paths import ROOT

IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")


def git(root, *arguments):
    return subprocess.run(
        ["git", "-C", str(root), *IDENTITY, *arguments], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path):
    """A repository with the sources of the trainer, all committed."""
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


@pytest.mark.process
def test_the_code_is_known_by_its_commit_and_a_copy_of_it_has_the_same_hash(repository, tmp_path_factory):
    code = code_of(repository, repository)
    assert (code.commit, code.dirty) == (git(repository, "rev-parse", "HEAD").strip(), False)
    (repository / "gpt2/train.py").write_text("two\n")
    changed, copy = code_of(repository, repository), tmp_path_factory.mktemp("m") / "code"
    assert (changed.dirty, changed.sha256 == code.sha256) == (True, False)
    copy_code(repository, changed, copy)
    assert (copy / "gpt2/train.py").read_text() == "two\n"
    assert code_of(repository, copy).sha256 == changed.sha256


@pytest.mark.process
def test_the_code_hash_covers_only_the_sources_of_the_trainer(repository):
    before = code_of(repository, repository)
    for name in ("tests.py", "lib/kmatrix/packing.py"):
        (repository / name).write_text("new\n")
    assert code_of(repository, repository).sha256 == before.sha256
    (repository / "lib/kmatrix/errors.py").write_text("two\n")
    assert code_of(repository, repository).sha256 != before.sha256


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
    (repository / "gpt2/train.py").write_text("two\n")
    value = provenance(code_of(repository, repository), "kmatrix train", ())
    assert (value["git_dirty"], value["command"]) == (True, "kmatrix train")
    assert value["versions"]["torch"]
    assert value["driver"] is None  # no GPU is used, so the driver is not queried
    assert value["kernel"]
    assert value["cpu"]


@pytest.mark.process
def test_outside_a_repository_the_code_is_identified_by_its_hash(repository):
    (repository / ".git").rename(repository / "git-is-gone")
    code = code_of(repository, repository)
    assert (code.commit, code.dirty) == (None, None)
    assert len(code.sha256) == 64


def code_with(*files):
    return Code(commit=None, dirty=None, files=files, sha256="")


def test_a_key_in_the_sources_is_named_by_its_file(tmp_path):
    for name in ("gpt2", "lib"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(f"import torch\ntoken = 'hf_{'aB3' * 12}'\n")
    assert keys_in_code(tmp_path, code_with("gpt2/a.py", "lib/a.py")) == ["gpt2/a.py"]
    assert keys_in_code(ROOT, code_with(*(str(path.relative_to(ROOT)) for path in ROOT.glob("gpt2/**/*.py")))) == []
