"""Tokenize text into shards: whole documents, a validation split, and the same output after interruptions."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from factories import ROOT, environment, make_data, prepare
from gpt2.data import shards
from gpt2.prepare import text, writer
from kmatrix.errors import DataError

DOCUMENTS = [f"Story {n}: " + f"once upon a time there were {n} words. " * (n % 7) for n in range(60)]


def table(**columns):
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


@pytest.fixture
def notes(tmp_path):
    """A folder of 60 texts, some JSON lines, some Parquet, and files of other types."""
    folder = tmp_path / "notes"
    (folder / "deep").mkdir(parents=True)
    for number, document in enumerate(DOCUMENTS[:40]):
        (folder / f"{number:02}.txt").write_text(document)
    lines = "".join(json.dumps({"text": document}) + "\n" for document in DOCUMENTS[40:50])
    (folder / "deep" / "more.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "deep" / "rest.parquet").write_bytes(table(text=DOCUMENTS[50:], id=range(10)))
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / ".hidden.txt").write_text("a secret")
    (folder / "empty.txt").write_text("")
    return folder


def prepare_folder(notes, data_dir, tokenizer="byte", **options):
    return prepare("folder", data_dir, str(notes), tokenizer, val_percent=20, **options)


def tokens_in(result, kind):
    return [shards.open_shard(path) for path in shards.find(Path(result["path"]), kind)]


def documents_in(result, kind):
    """Return the documents in the shards of one kind, in byte tokens."""
    found = []
    for tokens in tokens_in(result, kind):
        assert tokens[0] == 256, "a document without its beginning"
        starts = [*(tokens == 256).nonzero()[0], len(tokens)]
        found += [bytes(tokens[a + 1 : b].astype("u1")).decode() for a, b in itertools.pairwise(starts)]
    return found


def test_texts_become_documents_of_which_no_copy_is_in_both_training_and_validation(notes, tmp_path):
    result = prepare_folder(notes, tmp_path / "data")
    assert sorted(documents_in(result, "train") + documents_in(result, "val")) == sorted(DOCUMENTS)
    for number, content in enumerate(DOCUMENTS):
        (notes / f"copy {number}.txt").write_text(content)
    result = prepare_folder(notes, tmp_path / "data")
    train, val = set(documents_in(result, "train")), set(documents_in(result, "val"))
    assert val
    assert train | val == set(DOCUMENTS)
    assert not train & val


def test_a_second_call_reads_no_text_and_other_texts_or_damage_are_noticed(notes, tmp_path, monkeypatch):
    first = prepare_folder(notes, tmp_path)
    monkeypatch.setattr(writer, "documents", None)  # reading a text fails
    assert prepare_folder(notes, tmp_path) == first
    monkeypatch.undo()
    shards.find(Path(first["path"]), "train")[0].write_bytes(b"cut short")
    assert prepare_folder(notes, tmp_path) == first
    (notes / "03.txt").write_text("another text altogether")
    second = prepare_folder(notes, tmp_path)
    assert not {first["path"], first["sha256"]} & {second["path"], second["sha256"]}


def test_after_a_kill_finished_shards_are_kept_and_the_rest_is_identical(notes, tmp_path, monkeypatch):
    expected = prepare_folder(notes, tmp_path / "a", shard_tokens=1000)
    train = tokens_in(expected, "train")
    assert all(tokens[0] == 256 and len(tokens) <= 1000 for tokens in train)  # whole documents
    assert len(train) > 3
    write = shards.write_shard
    for number in range(1 + len(train)):
        left = [write] * number  # shards before the kill

        def write_or_die(path, tokens, left=left):
            path.with_name(f".{path.name}.left").write_bytes(bytes(100))
            left.pop()(path, tokens)

        monkeypatch.setattr(shards, "write_shard", write_or_die)
        with pytest.raises(IndexError):
            prepare_folder(notes, tmp_path / str(number), shard_tokens=1000)
        monkeypatch.undo()
        made = {path: path.stat().st_mtime_ns for path in (tmp_path / str(number)).rglob("*_train_*.bin")}
        assert len(made) == max(0, number - 1)
        found = prepare_folder(notes, tmp_path / str(number), shard_tokens=1000)
        assert found["sha256"] == expected["sha256"]
        assert all(path.stat().st_mtime_ns == time for path, time in made.items())


def test_a_few_texts_are_split_and_their_ends_become_validation_data(tmp_path):
    (tmp_path / "play.txt").write_text("".join(f"line {number}\n" for number in range(1000)))
    result = prepare("folder", tmp_path, "play.txt", val_percent=10)
    (train,), (val,) = documents_in(result, "train"), documents_in(result, "val")
    assert train + val == (tmp_path / "play.txt").read_text()
    assert len(train) == len(train + val) * 9 // 10


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_a_vocabulary_built_from_the_text_is_stored_next_to_the_shards(notes, tmp_path, tokenizer):
    result = prepare_folder(notes, tmp_path, tokenizer, bpe_vocab_size=300)
    assert Path(result["path"], "tokenizer.json").exists()
    assert result["vocab_size"] == (len(set("".join(DOCUMENTS))) + 1 if tokenizer == "char" else 300)
    assert prepare_folder(notes, tmp_path, tokenizer, bpe_vocab_size=300) == result


def test_only_the_requested_number_of_shards_is_written_and_more_can_be_added_later(notes, tmp_path):
    few, more, again, everything = (
        prepare_folder(notes, tmp_path, shard_tokens=1000, tokens=tokens, block_size=10)
        for tokens in (1500, 3500, 1500, 0)
    )
    assert (few["shards"], more["shards"], again) == (2, 4, few)
    assert everything["train_tokens"] > more["train_tokens"]


def test_parts_of_the_standard_library_that_differ_between_builds_are_excluded(tmp_path, monkeypatch):
    names = ["mod.py", "test/test_x.py", "site-packages/y.py", "pkg/tests/z.py", "_sysconfigdata__linux.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    assert [part.name for part in text.standard_library().parts] == ["mod.py"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl cannot be read"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl cannot be read"),
        ("a.jsonl", b'{"body": "a"}\n', "a.jsonl cannot be read.*no column 'text'"),
        ("a.jsonl.gz", b"\x1f\x8b", "a.jsonl.gz cannot be read"),
        ("a.parquet", b"PAR1", "a.parquet cannot be read"),
        ("a.parquet", table(content=["a"]), "a.parquet cannot be read.*no column"),
        ("a.jsonl", b'{"text": "a"}\n', "has no documents for validation"),
        ("a.bin", b"\xff\xfe\xfd", "has no documents for validation"),
        (b"a\xff.txt", b"a", r"\\xff.*is not a name in UTF-8"),
        (b"\xff/a.txt", b"a", r"\\xff.*is not a name in UTF-8"),
        ("../b.txt", b"a", "no text files at .*/text"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused_by_one_error_that_names_it(tmp_path, name, content, expected):
    path = tmp_path / "text" / os.fsdecode(name)
    (tmp_path / "text").mkdir()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(DataError) as raised:
        prepare("folder", tmp_path, "text")
    assert re.search(expected, str(raised.value), re.DOTALL)
    str(raised.value).encode()


def test_shards_of_the_user_are_hashed_by_name_and_content_once(tmp_path, monkeypatch):
    first = make_data(tmp_path / "a")
    assert make_data(tmp_path / "b") == first
    assert make_data(tmp_path / "c", seed=1) != first
    monkeypatch.setattr(shards, "open_shard", None)  # reading a shard fails
    assert prepare("shards", tmp_path, "a")["sha256"] == first
    monkeypatch.undo()
    (tmp_path / "b/random_val_000000.bin").rename(tmp_path / "b/other_val_000000.bin")
    assert prepare("shards", tmp_path, "b")["sha256"] != first
    shards.write_shard(tmp_path / "a/more_train_000001.bin", [1, 2, 50256])
    with pytest.raises(DataError, match=r"more_train_000001.bin has the token 50256"):
        prepare("shards", tmp_path, "a")
    assert prepare("shards", tmp_path, "a", "gpt2")["vocab_size"] == 50257
    shards.write_shard(tmp_path / "a" / os.fsdecode(b"\xff_train_000001.bin"), [1, 2, 3])
    with pytest.raises(DataError, match=r"\\xff_train_000001.bin.*is not a name in UTF-8"):
        prepare("shards", tmp_path, "a")


@pytest.mark.process
def test_finding_a_prepared_dataset_imports_neither_torch_nor_a_hub_client_nor_a_tokenizer(notes, tmp_path):
    prepare_folder(notes, tmp_path)
    code = (
        "import sys; from gpt2.prepare.__main__ import main\n"
        f"main(['folder', '--data-dir={tmp_path}', '--data-path={notes}', '--val-percent=20'])\n"
        "sys.exit(len({'torch', 'huggingface_hub', 'pyarrow', 'tiktoken', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), cwd=ROOT, check=True, capture_output=True)
    assert json.loads(done.stdout)["vocab_size"] == 257
