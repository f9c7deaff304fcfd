"""Read HellaSwag, and the tasks of CORE from a zip file or folder; refuse what is damaged or foreign."""

from __future__ import annotations

import json
import re

import pytest

from core_files import bundle_files, original_lines, write_folder, write_zip
from gpt2.benchmarks.bundle import read_hellaswag, read_tasks
from hellaswag_files import jsonl
from kmatrix.errors import DataError

LABELS = ["choices", "choices-3-shot", "schema", "exact", "language-2-shot"]


def refused(path, most=0):
    with pytest.raises(DataError) as error:
        read_tasks(path, most)
    return str(error.value)


def with_file(tmp_path, name, text):
    files = bundle_files()
    assert name in files
    files[name] = text
    return write_zip(tmp_path / "bundle.zip", files)


@pytest.mark.parametrize("form", ["zip", "zip without a folder", "folder", "folder in a folder"])
def test_a_bundle_is_a_zip_file_or_a_folder(tmp_path, form):
    path = {
        "zip": lambda: write_zip(tmp_path / "a.zip"),
        "zip without a folder": lambda: write_zip(tmp_path / "a.zip", folder=""),
        "folder": lambda: write_folder(tmp_path / "a"),
        "folder in a folder": lambda: write_folder(tmp_path / "a" / "eval_bundle").parent,
    }[form]()

    tasks = read_tasks(path)

    assert [task.label for task in tasks] == LABELS
    assert [task.shots for task in tasks] == [0, 3, 0, 0, 2]
    assert [task.baseline for task in tasks] == [0.25, 0.5, 0.5, 0, 0]
    assert [task.delimiter for task in tasks] == [" ", "\nAnswer: ", " ", "", " "]


def test_a_task_is_cut_after_its_lines_were_shuffled(tmp_path):
    whole = read_tasks(write_zip(tmp_path / "a.zip"))[1]
    cut = read_tasks(tmp_path / "a.zip", 4)[1]

    assert cut.items == whole.items[:4]
    assert [item.contexts[0] for item in cut.items] != [line["query"] for line in original_lines("choices-3-shot")][:4]


def test_fewer_examples_than_a_task_shows_are_refused(tmp_path):
    text = refused(write_zip(tmp_path / "a.zip"), 3)

    assert "choices-3-shot shows 3 other examples, but 3 of 6 are used" in text
    assert "CORE_EXAMPLES=0" in text


@pytest.mark.parametrize("content", [b"", b"no zip file", b"PK\x03\x04" + bytes(100)])
def test_an_invalid_zip_file_is_refused(tmp_path, content):
    path = tmp_path / "eval_bundle.zip"
    path.write_bytes(content)

    assert f"{path} cannot be read" in refused(path)


def test_a_missing_file_is_refused(tmp_path):
    assert "No such file" in refused(tmp_path / "nowhere.zip")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'NoneType' object is not subscriptable"),
        ("a: [", "ParserError"),
        ("icl_tasks: [1]", "TypeError"),
        ("icl_tasks: [{label: choices}]", "KeyError: 'dataset_uri'"),
        ("icl_tasks: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    ],
)
def test_tasks_that_cannot_be_read_are_refused(tmp_path, text, reason):
    assert reason in refused(with_file(tmp_path, "core.yaml", text))


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "7",
        '{"query": "a", "choices": ["b", "c"]}',
        '{"query": "a", "choices": ["b", "c"], "gold": 2}',
        '{"query": "a", "choices": ["b", "c"], "gold": -1}',
        '{"query": null, "choices": ["b", "c"], "gold": 0}',
        '{"query": "a", "choices": [], "gold": 0}',
        '{"query": "a", "choices": 7, "gold": 0}',
        "[" * 100_000,
    ],
)
def test_an_invalid_line_is_refused_with_its_number(tmp_path, line):
    good = json.dumps(original_lines("choices")[0])

    text = refused(with_file(tmp_path, "eval_data/own/choices.jsonl", f"{good}\n\n{line}\n"))

    assert "eval_data/own/choices.jsonl:3 is not an example of its task" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not an example of its task"),
        ("[1]", "is not an example of its task"),
        ('{"ctx": "a", "endings": ["b"]}', "KeyError: 'label'"),
        ('{"ctx": "a", "endings": ["b"], "label": 3}', "answer 3 of 1"),
        ('{"ctx": "", "endings": ["b"], "label": 0}', "no context"),
    ],
)
def test_an_invalid_line_of_hellaswag_is_refused_with_its_number(tmp_path, line, message):
    path = jsonl(tmp_path)
    number = len(path.read_text().splitlines()) + 1
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=f"(?s)hellaswag_val.jsonl:{number} .*{re.escape(message)}"):
        read_hellaswag(path)


def test_a_missing_or_empty_file_of_hellaswag_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_hellaswag(tmp_path / "nowhere")
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match="has no examples"):
        read_hellaswag(tmp_path / "empty")
