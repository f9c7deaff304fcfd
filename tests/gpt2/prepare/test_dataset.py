"""Tokenize text into shards: whole documents, a validation split, and the same output after interruptions."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from factories import ROOT, environment, make_data, prepare
from gpt2.data import shards
from gpt2.prepare import text, writer
from gpt2.prepare.catalog import DatasetRequest
from gpt2.prepare.dataset import prepare_dataset
from kmatrix.errors import DataError, SchemaError


def documents_of(count, start=0):
    """Return documents of different lengths, all of them unique."""
    return [f"Story {n}: " + f"once upon a time there were {n} words. " * (n % 7) for n in range(start, start + count)]


@pytest.fixture
def notes(tmp_path):
    """A folder of 60 texts, some JSON lines, some Parquet, and files of other types."""
    folder = tmp_path / "notes"
    (folder / "deep").mkdir(parents=True)
    documents = documents_of(60)
    for number, document in enumerate(documents[:40]):
        (folder / f"{number:02}.txt").write_text(document)
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents[40:50])
    (folder / "deep" / "more.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.table({"text": documents[50:], "id": range(10)}), folder / "deep" / "rest.parquet")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (folder / ".hidden.txt").write_text("a secret")
    (folder / "empty.txt").write_text("")
    return folder


def prepare_folder(notes, data_dir, **options):
    return prepare("folder", data_dir, str(notes), "byte", val_percent=20, **options)


def documents_in(result, kind):
    """Return the documents in the shards of one kind, in byte tokens."""
    tokens = [int(t) for path in shard_paths(result, kind) for t in shards.open_shard(path)]
    assert tokens[0] == 256, "a document without its beginning"
    documents, document = [], bytearray()
    for token in [*tokens[1:], 256]:
        if token == 256:
            documents.append(document.decode())
            document = bytearray()
        else:
            document.append(token)
    return documents


def shard_paths(result, kind="train"):
    return shards.find(Path(result["path"]), kind)


def test_text_json_lines_and_parquet_become_documents_and_other_files_are_ignored(notes, tmp_path):
    result = prepare_folder(notes, tmp_path / "data")
    assert sorted(documents_in(result, "train") + documents_in(result, "val")) == sorted(documents_of(60))


def test_no_text_is_in_both_training_and_validation_data_not_even_a_copy(notes, tmp_path):
    for number, content in enumerate(documents_of(60)):
        (notes / f"copy {number}.txt").write_text(content)
    result = prepare_folder(notes, tmp_path / "data")
    train, val = set(documents_in(result, "train")), set(documents_in(result, "val"))
    assert val
    assert not train & val


def test_a_second_call_reads_no_text_and_other_texts_or_damage_are_noticed(notes, tmp_path, monkeypatch):
    first = prepare_folder(notes, tmp_path)
    monkeypatch.setattr(writer, "documents", None)  # reading a text fails
    assert prepare_folder(notes, tmp_path) == {**first, "made": False}
    monkeypatch.undo()
    shard_paths(first)[0].write_bytes(b"cut short")
    assert prepare_folder(notes, tmp_path) == first
    (notes / "03.txt").write_text("another text altogether")
    second = prepare_folder(notes, tmp_path)
    assert (first["path"] != second["path"], first["sha256"] != second["sha256"]) == (True, True)


def test_a_dataset_of_a_newer_version_is_refused_and_kept(notes, tmp_path):
    result = prepare_folder(notes, tmp_path)
    folder = Path(result["path"])
    record = folder / "dataset.json"
    record.write_text(record.read_text().replace('"schema": 1', '"schema": 2'))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(SchemaError, match="has schema 2"):
        prepare_folder(notes, tmp_path)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


class Killed(BaseException):
    """The end of a process."""


def kill_in(monkeypatch, number):
    """Raise Killed in the middle of the shard that is written after this many."""
    write, left = shards.write_shard, list(range(number))

    def write_or_die(path, tokens):
        if not left:
            path.with_name(f".{path.name}.left").write_bytes(bytes(100))
            raise Killed
        left.pop()
        write(path, tokens)

    monkeypatch.setattr(shards, "write_shard", write_or_die)


def test_after_a_kill_finished_shards_are_kept_and_the_rest_is_identical(notes, tmp_path, monkeypatch):
    expected = prepare_folder(notes, tmp_path / "a", shard_tokens=1000)
    train = [shards.open_shard(path) for path in shard_paths(expected)]
    assert all(tokens[0] == 256 and len(tokens) <= 1000 for tokens in train)  # whole documents
    count = 1 + len(train)
    assert count > 4
    for number in range(count):
        kill_in(monkeypatch, number)
        with pytest.raises(Killed):
            prepare_folder(notes, tmp_path / str(number), shard_tokens=1000)
        monkeypatch.undo()
        made = {path: path.stat().st_mtime_ns for path in (tmp_path / str(number)).rglob("*_train_*.bin")}
        assert len(made) == max(0, number - 1)
        assert prepare_folder(notes, tmp_path / str(number), shard_tokens=1000)["sha256"] == expected["sha256"]
        assert all(path.stat().st_mtime_ns == time for path, time in made.items())


def test_a_few_texts_are_split_and_their_ends_become_validation_data(tmp_path):
    (tmp_path / "play.txt").write_text("".join(f"line {number}\n" for number in range(1000)))
    result = prepare("folder", tmp_path, "play.txt", "byte", val_percent=10)
    train, val = documents_in(result, "train"), documents_in(result, "val")
    assert [len(train), len(val)] == [1, 1]
    assert train[0] + val[0] == (tmp_path / "play.txt").read_text()
    assert len(train[0]) == len(train[0] + val[0]) * 9 // 10


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
def test_a_vocabulary_built_from_the_text_is_stored_next_to_the_shards(notes, tmp_path, tokenizer):
    result = prepare("folder", tmp_path, str(notes), tokenizer, val_percent=20, bpe_vocab_size=300)
    second = prepare("folder", tmp_path, str(notes), tokenizer, val_percent=20, bpe_vocab_size=300)
    assert (tmp_path / result["path"] / "tokenizer.json").exists()
    characters = set("".join(documents_of(60)))
    assert result["vocab_size"] == (len(characters) + 1 if tokenizer == "char" else 300) == second["vocab_size"]


def test_only_the_requested_number_of_shards_is_written_and_more_can_be_added_later(notes, tmp_path, monkeypatch):
    monkeypatch.setattr("gpt2.prepare.dataset.WHOLE", ())
    request = DatasetRequest(
        dataset="folder", tokenizer="byte", data_path=str(notes), val_percent=20, shard_tokens=1000
    )
    few = prepare_dataset(replace(request, tokens=1500, block_size=10), tmp_path)
    assert few.shards == 2 == len(shards.find(Path(few.path), "train"))
    longer = prepare_dataset(replace(request, tokens=3500, block_size=10), tmp_path)
    assert (longer.shards, longer.made) == (4, True)
    second = prepare_dataset(replace(request, tokens=1500, block_size=10), tmp_path)
    assert (second.sha256, second.made) == (few.sha256, False)
    all_shards = prepare_dataset(request, tmp_path)
    assert all_shards.train_tokens > longer.train_tokens


def test_parts_of_the_standard_library_that_differ_between_builds_are_excluded(tmp_path, monkeypatch):
    names = ["mod.py", "test/test_x.py", "site-packages/y.py", "pkg/tests/z.py", "_sysconfigdata__linux.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    assert [part.name for part in text.standard_library("Python").parts] == ["mod.py"]


def table(columns):
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "name, content, location, reason",
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "a.jsonl:2 cannot be read", "Expecting value"),
        ("a.jsonl", '{"body": "a"}\n', "a.jsonl:1 cannot be read", "no column 'text'"),
        ("a.parquet", "PAR1", "a.parquet cannot be read as Parquet", ""),
        ("a.parquet", table({"content": ["a"], "id": [1]}), "a.parquet has no column 'text'", "content, id"),
        ("a.jsonl", '{"text": "a"}\n', "has no documents for validation", "7 percent of few documents"),
        ("a.bin", b"\xff\xfe\xfd", "no text in the 1 file of", ""),
    ],
)
def test_an_unreadable_file_is_named_with_its_line(tmp_path, name, content, location, reason):
    (tmp_path / "text").mkdir()
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / "text" / name).write_bytes(content)
    with pytest.raises(DataError) as raised:
        prepare("folder", tmp_path, "text", "byte")
    assert location in raised.value.what
    assert reason in raised.value.why


@pytest.mark.parametrize("name", [b"a\xff.txt", b"\xff/a.txt"])
def test_a_name_that_is_not_utf_8_is_refused_by_one_error(tmp_path, name):
    path = tmp_path / "text" / os.fsdecode(name)
    path.parent.mkdir(parents=True)
    path.write_text("some text")
    with pytest.raises(DataError, match=r"\\xff.*is not a name in UTF-8") as raised:
        prepare("folder", tmp_path, "text", "byte")
    str(raised.value).encode()
    path = tmp_path / "shards" / os.fsdecode(b"\xff_train_000001.bin")
    make_data(path.parent)
    shards.write_shard(path, [1, 2, 3])
    with pytest.raises(DataError, match=r"\\xff_train_000001.bin.*is not a name in UTF-8"):
        prepare("shards", tmp_path, "shards", "byte")


@pytest.mark.parametrize("path", ["nothing", "nothing/*.txt", "empty"])
def test_a_path_without_text_is_refused_with_the_absolute_path(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no text files at") as raised:
        prepare("folder", tmp_path, path, "byte")
    assert str(tmp_path / path) in raised.value.what


def test_shards_of_the_user_are_hashed_by_name_and_content_once(tmp_path, monkeypatch):
    first = make_data(tmp_path / "a")
    assert make_data(tmp_path / "b") == first
    assert make_data(tmp_path / "c", seed=1) != first
    monkeypatch.setattr(shards, "CHUNK_BYTES", None)  # reading a shard fails
    assert prepare("shards", tmp_path, "a")["sha256"] == first
    monkeypatch.undo()
    (tmp_path / "b/random_val_000000.bin").rename(tmp_path / "b/other_val_000000.bin")
    assert prepare("shards", tmp_path, "b")["sha256"] != first


def test_tokens_beyond_the_vocabulary_are_refused_before_any_run(tmp_path):
    make_data(tmp_path)
    shards.write_shard(tmp_path / "more_train_000001.bin", [1, 2, 50256])
    with pytest.raises(DataError, match=r"more_train_000001.bin has the token 50256 at byte 1028"):
        prepare("shards", tmp_path, str(tmp_path), "byte")
    assert prepare("shards", tmp_path, str(tmp_path), "gpt2")["vocab_size"] == 50257


@pytest.mark.process
def test_finding_a_prepared_dataset_imports_neither_torch_nor_a_hub_client_nor_a_tokenizer(notes, tmp_path):
    prepare_folder(notes, tmp_path)
    code = (
        "import sys; from gpt2.prepare.__main__ import main\n"
        f"main(['folder', '--data-dir={tmp_path}', '--data-path={notes}', '--val-percent=20'])\n"
        "sys.exit(len({'torch', 'huggingface_hub', 'pyarrow', 'tiktoken', 'tokenizers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), cwd=ROOT, check=True, capture_output=True, text=True)
    assert not json.loads(done.stdout)["made"]
