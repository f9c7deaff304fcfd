"""Read the tasks of CORE from a zip file or folder, and refuse what is damaged or foreign."""

from __future__ import annotations

import json
import zipfile

import pytest

from core_files import bundle_files, original_lines, write_folder, write_zip
from gpt2.benchmarks.bundle import read_tasks
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


@pytest.mark.parametrize("where", range(5))
def test_a_damaged_zip_file_is_refused(tmp_path, where):
    path = write_zip(tmp_path / "bundle.zip")
    data = bytearray(path.read_bytes())
    begin = len(data) * where // 6
    data[begin : begin + 200] = bytes(len(data[begin : begin + 200]))
    path.write_bytes(data)

    assert str(path) in refused(path)


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.99])
def test_a_truncated_zip_file_is_refused(tmp_path, kept):
    path = write_zip(tmp_path / "bundle.zip")
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])

    assert "cannot be read" in refused(path)


@pytest.mark.parametrize("name", list(bundle_files()))
def test_each_file_is_needed(tmp_path, name):
    files = bundle_files()
    del files[name]

    assert f"it has no {name}" in refused(write_zip(tmp_path / "bundle.zip", files))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "core.yaml is not a list of tasks"),
        ("a: [", "core.yaml is not a list of tasks"),
        ("icl_tasks: []", "core.yaml has no tasks"),
        ("icl_tasks: [1]", "core.yaml is not a list of tasks"),
        ("icl_tasks: [{label: choices}]", "core.yaml has an incomplete task"),
        ("icl_tasks: !!python/object/apply:os.system ['true']", "core.yaml is not a list of tasks"),
    ],
)
def test_tasks_that_cannot_be_read_are_refused(tmp_path, text, reason):
    assert reason in refused(with_file(tmp_path, "core.yaml", text))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("label: choices\n", 'label: "a b"\n', "'a b' is not the label of a task"),
        ("label: choices\n", "label: other\n", "has no baseline of other"),
        ("own/choices.jsonl", "../../etc/passwd", "is outside eval_data"),
        ("own/choices.jsonl", "/etc/passwd", "is outside eval_data"),
        ("multiple_choice", "generation", "incomplete task"),
        ("[0]", "[-1]", "is not the label of a task"),
    ],
)
def test_a_foreign_task_is_refused(tmp_path, old, new, reason):
    files = bundle_files()
    assert reason in refused(with_file(tmp_path, "core.yaml", files["core.yaml"].replace(old, new, 1)))


@pytest.mark.parametrize("text", ["", "Eval Task\nchoices\n", "Eval Task,Random baseline\nchoices,many\n"])
def test_baselines_that_cannot_be_read_are_refused(tmp_path, text):
    assert "baseline" in refused(with_file(tmp_path, "eval_meta_data.csv", text))


def test_a_baseline_of_100_percent_is_refused(tmp_path):
    text = bundle_files()["eval_meta_data.csv"].replace("choices,25.0", "choices,100")

    assert "less than 100 percent" in refused(with_file(tmp_path, "eval_meta_data.csv", text))


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


def test_a_file_without_lines_is_refused(tmp_path):
    assert "has no examples" in refused(with_file(tmp_path, "eval_data/own/choices.jsonl", "\n"))


def test_a_small_file_that_unpacks_to_more_than_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("gpt2.benchmarks.bundle.MOST_BYTES", 1 << 20)
    path = with_file(tmp_path, "eval_data/own/choices.jsonl", " " * (2 << 20))

    assert path.stat().st_size < 1 << 20
    assert "eval_data/own/choices.jsonl has more than" in refused(path)


def test_invalid_utf_8_is_refused(tmp_path):
    path = write_zip(tmp_path / "bundle.zip", {"core.yaml": "icl_tasks: []"})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("core.yaml", b"\xff\xfe")

    assert "cannot be read" in refused(path)
