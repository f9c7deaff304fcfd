"""Datasets made ready: the standard library's shards, and shards that are looked up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from factories import ROOT, environment, make_data

from gpt2 import prepare, shards
from kmatrix.errors import ConfigError, DataError

SMALL = """
import os, signal, sys, sysconfig
from gpt2 import prepare, shards
library = sys.argv.pop()
prepare.sysconfig.get_path = lambda name: library
{patch}
sys.exit(prepare.main(sys.argv[1:]))
"""
KILL_HALF_WAY = """
written = shards.write_shard
def write_half(path, tokens):
    written(path, tokens[: len(tokens) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
shards.write_shard = write_half
"""


@pytest.fixture
def library(tmp_path):
    """A standard library of 60 modules, and folders that are no part of it."""
    root = tmp_path / "python3"
    for name in [f"mod{i:02}.py" for i in range(60)] + ["test/test_x.py", "site-packages/y.py", "pkg/tests/z.py"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'"""{name}"""\n')
    (root / "latin.py").write_bytes(b"# \xe9\n")
    (root / "_sysconfigdata__linux.py").write_text("build_time = 1\n")
    return root


def command(library, data, patch=""):
    return [sys.executable, "-c", SMALL.format(patch=patch), "stdlib", "--data-dir", str(data), str(library)]


def run(library, data, patch=""):
    return subprocess.run(
        command(library, data, patch), env=environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )


def folder_of(process):
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def texts(folder, kind):
    """Return the documents in the shards of one kind."""
    tokens = [int(t) for path in shards.find(folder, kind) for t in shards.open_shard(path)]
    documents, document = [], bytearray()
    for token in tokens:
        if token == 256:
            documents.append(document.decode())
            document = bytearray()
        else:
            document.append(token)
    assert not document, "a document without its end"
    return documents


def test_the_real_standard_library_becomes_shards_of_which_3_to_15_percent_are_validation(tmp_path):
    answer = prepare.prepare("stdlib", tmp_path)
    share = answer["val_tokens"] / (answer["train_tokens"] + answer["val_tokens"])
    assert answer["made"]
    assert 0.03 < share < 0.15
    assert answer["train_tokens"] > 5_000_000
    assert answer["vocab_size"] == 257


def test_modules_are_split_by_file_and_no_file_is_in_both(library, tmp_path):
    answer = folder_of(run(library, tmp_path / "data"))
    folder = next((tmp_path / "data").glob("stdlib-*"))
    train, val = texts(folder, "train"), texts(folder, "val")
    assert sorted(train + val) == [f'"""mod{i:02}.py"""\n' for i in range(60)]
    assert val
    assert not set(train) & set(val)
    assert answer["path"] == str(folder)


def test_the_same_library_gives_the_same_hash_and_a_second_call_makes_nothing(library, tmp_path):
    first, second, elsewhere = (folder_of(run(library, tmp_path / data)) for data in ("a", "a", "b"))
    assert first["made"]
    assert not second["made"]
    assert first["sha256"] == second["sha256"] == elsewhere["sha256"]


def test_two_processes_at_once_make_it_once(library, tmp_path):
    both = [
        subprocess.Popen(
            command(library, tmp_path / "data"), env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in both]
    assert sorted(answer["made"] for answer in answers) == [False, True]
    assert answers[0]["sha256"] == answers[1]["sha256"]


def test_a_kill_half_way_leaves_nothing_that_is_taken_for_data(library, tmp_path):
    killed = run(library, tmp_path / "data", KILL_HALF_WAY)
    assert killed.returncode == -signal.SIGKILL
    assert list((tmp_path / "data").glob(".stdlib-*.partial.*"))
    assert not list((tmp_path / "data").glob("stdlib-*"))
    after, fresh = (folder_of(run(library, tmp_path / data)) for data in ("data", "fresh"))
    assert after["sha256"] == fresh["sha256"]
    assert not list((tmp_path / "data").glob(".stdlib-*.partial.*"))


def test_dataset_json_says_what_the_data_are(library, tmp_path):
    answer = folder_of(run(library, tmp_path / "data"))
    about = json.loads((next((tmp_path / "data").glob("stdlib-*")) / "dataset.json").read_text())
    assert about["schema"] == 1
    assert about["dataset"] == "stdlib"
    assert about["tokenizer"] == "byte"
    assert about["source"].endswith("standard library")
    assert about["sha256"] == answer["sha256"]
    assert {shard["name"] for shard in about["shards"]} == {"stdlib_train_000000.bin", "stdlib_val_000000.bin"}
    assert all(shard["tokens"] > 0 and len(shard["sha256"]) == 64 for shard in about["shards"])


def test_missing_shards_are_refused_with_the_glob_and_with_where_to_get_them(tmp_path, capsys):
    assert prepare.main(["finewebedu", "--data-dir", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "error: " in message
    assert str(tmp_path / "finewebedu" / "*_train_*.bin") in message
    assert "kjj0/finewebedu10B-gpt2" in message


def test_the_hash_of_shards_depends_on_names_and_contents_and_not_on_times(tmp_path):
    first = make_data(tmp_path / "a")
    assert make_data(tmp_path / "b") == first
    assert make_data(tmp_path / "c", seed=1) != first
    (tmp_path / "b/random_val_000000.bin").rename(tmp_path / "b/other_val_000000.bin")
    assert prepare.prepare("shards", tmp_path, "b", "byte")["sha256"] != first


def test_a_changed_shard_is_hashed_again(tmp_path):
    before = make_data(tmp_path)
    path = tmp_path / "random_train_000000.bin"
    tokens = shards.open_shard(path).copy()
    tokens[7] ^= 1
    shards.write_shard(path, tokens)
    os.utime(path, ns=(1, 1))
    assert shards.recorded_sha256(tmp_path) is None
    assert prepare.prepare("shards", tmp_path, str(tmp_path), "byte")["sha256"] != before


def test_an_unchanged_shard_is_not_read_again(tmp_path, monkeypatch):
    before = make_data(tmp_path)
    monkeypatch.setattr(shards, "CHUNK_BYTES", None)  # reading a shard fails on it
    assert prepare.prepare("shards", tmp_path, str(tmp_path), "byte")["sha256"] == before


def test_tokens_beyond_the_vocabulary_are_refused_before_any_run(tmp_path):
    make_data(tmp_path)
    shards.write_shard(tmp_path / "more_train_000001.bin", [1, 2, 50256])
    with pytest.raises(DataError, match=r"more_train_000001.bin holds the token 50256 at byte 1028"):
        prepare.prepare("shards", tmp_path, str(tmp_path), "byte")
    assert prepare.prepare("shards", tmp_path, str(tmp_path), "gpt2")["vocab_size"] == 50257


def test_the_standard_library_has_no_gpt2_tokens(tmp_path):
    with pytest.raises(ConfigError, match="no tokens of the tokenizer gpt2"):
        prepare.prepare("stdlib", tmp_path, tokenizer="gpt2")


def test_prepare_needs_no_torch():
    code = "import sys, gpt2.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, check=False).returncode == 0
