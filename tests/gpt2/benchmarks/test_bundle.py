"""Read HellaSwag, and the tasks of CORE from a zip file or folder; refuse what is damaged or foreign."""

from __future__ import annotations

import pytest

from core_files import bundle_files, original_lines, write_folder, write_zip
from gpt2.benchmarks.bundle import read_hellaswag, read_tasks
from hellaswag_files import jsonl
from kmatrix.errors import DataError


@pytest.mark.parametrize("form", ["zip", "zip without a folder", "folder", "folder in a folder"])
def test_a_bundle_is_a_zip_file_or_a_folder(tmp_path, form):
    path = {
        "zip": lambda: write_zip(tmp_path / "a.zip"),
        "zip without a folder": lambda: write_zip(tmp_path / "a.zip", folder=""),
        "folder": lambda: write_folder(tmp_path / "a"),
        "folder in a folder": lambda: write_folder(tmp_path / "a" / "eval_bundle").parent,
    }[form]()
    assert [(task.label, task.shots, task.baseline, task.delimiter) for task in read_tasks(path)] == [
        ("choices", 0, 0.25, " "),
        ("choices-3-shot", 3, 0.5, "\nAnswer: "),
        ("schema", 0, 0.5, " "),
        ("exact", 0, 0, ""),
        ("language-2-shot", 2, 0, " "),
    ]


def test_a_task_is_cut_after_its_lines_were_shuffled(tmp_path):
    whole = read_tasks(write_zip(tmp_path / "a.zip"))[1]
    cut = read_tasks(tmp_path / "a.zip", 4)[1]
    assert cut.items == whole.items[:4]
    assert [item.contexts[0] for item in cut.items] != [line["query"] for line in original_lines("choices-3-shot")][:4]


CHOICES = "eval_data/own/choices.jsonl"
GOOD = '{"query": "a", "choices": ["b", "c"], "gold": 1}\n\n'
REFUSED = {  # a file of the bundle, its content, and the reason
    "empty tasks": ("core.yaml", "", "'NoneType' object is not subscriptable"),
    "no YAML": ("core.yaml", "a: [", "ParserError"),
    "a task without a name": ("core.yaml", "icl_tasks: [{dataset_uri: a}]", "KeyError: 'label'"),
    "code": ("core.yaml", "icl_tasks: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "no JSON": (CHOICES, GOOD + "{", f"{CHOICES}:3 is not an example of its task"),
    "a list": (CHOICES, GOOD + "[]", f"{CHOICES}:3 is not an example of its task"),
    "no answer": (CHOICES, GOOD + '{"query": "a", "choices": ["b", "c"]}', "KeyError: 'gold'"),
    "another answer": (CHOICES, GOOD + '{"query": "a", "choices": ["b", "c"], "gold": 2}', "answer 2 of 2"),
    "no examples": (CHOICES, "\n", f"{CHOICES} has no examples"),
}


@pytest.mark.parametrize(("name", "content", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_damaged_bundle_is_refused_with_the_line(tmp_path, name, content, reason):
    with pytest.raises(DataError) as error:
        read_tasks(write_zip(tmp_path / "bundle.zip", bundle_files() | {name: content}))
    assert reason in str(error.value)


def test_what_is_no_bundle_or_has_too_few_examples_is_refused(tmp_path):
    (tmp_path / "b.zip").write_bytes(b"PK\x03\x04" + bytes(100))
    for path, most, reason in (
        (tmp_path / "b.zip", 0, "b.zip cannot be read"),
        (tmp_path / "nowhere.zip", 0, "No such file"),
        (write_zip(tmp_path / "a.zip"), 3, "choices-3-shot shows 3 other examples, but 3 of 6 are used"),
    ):
        with pytest.raises(DataError) as error:
            read_tasks(path, most)
        assert reason in str(error.value)


def test_a_damaged_file_of_hellaswag_is_refused_with_the_line(tmp_path):
    lines = jsonl(tmp_path).read_text()
    for more, reason in (
        ("{", "hellaswag_val.jsonl:6 is not an example of its task"),
        ('{"ctx": "a", "endings": ["b"]}', "KeyError: 'label'"),
        ('{"ctx": "a", "endings": ["b"], "label": 3}', "answer 3 of 1"),
    ):
        (tmp_path / "hellaswag_val.jsonl").write_text(lines + more)
        with pytest.raises(DataError) as error:
            read_hellaswag(tmp_path / "hellaswag_val.jsonl")
        assert reason in str(error.value)
    with pytest.raises(DataError, match="nowhere cannot be read"):
        read_hellaswag(tmp_path / "nowhere")
