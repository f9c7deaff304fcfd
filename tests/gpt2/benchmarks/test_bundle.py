"""Read HellaSwag, and the tasks of CORE from a zip file or folder; refuse what is damaged; download the published."""

from __future__ import annotations

import hashlib
import json

import pytest

from core_files import bundle_files, original_lines, write_folder, write_zip
from gpt2.benchmarks import __main__ as program
from gpt2.benchmarks.bundle import read_hellaswag, read_tasks
from hellaswag_files import jsonl
from kmatrix.errors import DataError
from kmatrix.experiment.inputs.benchmarks import PUBLISHED
from local_server import LocalServer


@pytest.mark.parametrize("folder", ["eval_bundle/", "", None])
def test_a_bundle_is_a_zip_file_or_a_folder_whose_tasks_are_cut_after_they_were_shuffled(tmp_path, folder):
    path = write_folder(tmp_path / "a") if folder is None else write_zip(tmp_path / "a.zip", folder=folder)
    tasks, cut = read_tasks(path), read_tasks(path, 4)[1]
    assert [(task.label, task.shots, task.baseline, task.delimiter) for task in tasks] == [
        ("choices", 0, 0.25, " "),
        ("choices-3-shot", 3, 0.5, "\nAnswer: "),
        ("schema", 0, 0.5, " "),
        ("exact", 0, 0, ""),
        ("language-2-shot", 2, 0, " "),
    ]
    assert cut.items == tasks[1].items[:4]
    assert [item.contexts[0] for item in cut.items] != [line["query"] for line in original_lines("choices-3-shot")][:4]


CHOICES = "eval_data/own/choices.jsonl"
GOOD = '{"query": "a", "choices": ["b", "c"], "gold": 1}\n\n'
REFUSED = {  # reason -> a file of the bundle, and its content
    "'NoneType' object is not subscriptable": ("core.yaml", ""),
    "ParserError": ("core.yaml", "a: ["),
    "KeyError: 'label'": ("core.yaml", "icl_tasks: [{dataset_uri: a}]"),
    "could not determine a constructor": ("core.yaml", "icl_tasks: !!python/object/apply:os.system ['true']"),
    "JSONDecodeError": (CHOICES, GOOD + "{"),
    "TypeError": (CHOICES, GOOD + "[]"),
    "KeyError: 'gold'": (CHOICES, GOOD + '{"query": "a", "choices": ["b", "c"]}'),
    "answer 2 of 2": (CHOICES, GOOD + '{"query": "a", "choices": ["b", "c"], "gold": 2}'),
    "without examples": (CHOICES, "\n"),
    "shows 3 other examples, but 1 of 1": ("eval_data/own/choices-3-shot.jsonl", GOOD),
}


def test_what_is_damaged_is_refused_with_the_reason(tmp_path):
    cases = [
        (read_tasks, write_zip(tmp_path / f"{number}.zip", bundle_files() | {name: content}), reason)
        for number, (reason, (name, content)) in enumerate(REFUSED.items())
    ]
    lines = jsonl(tmp_path).read_text()
    for reason, more in (("JSON", "{"), ("'label'", '{"ctx": "a", "endings": ["b"]}'), ("without", "")):
        path = tmp_path / f"{len(cases)}.jsonl"
        path.write_text(lines + more if more else "")
        cases.append((read_hellaswag, path, reason))
    (tmp_path / "cut.zip").write_bytes(b"PK\x03\x04" + bytes(100))
    cases += [(read_tasks, tmp_path / "cut.zip", "BadZipFile"), (read_tasks, tmp_path / "none", "No such file")]
    for read, path, reason in (*cases, (read_hellaswag, tmp_path / "none", "No such file")):
        with pytest.raises(DataError) as error:
            read(path)
        assert error.value.what == f"{path} cannot be read"
        assert reason in error.value.why


@pytest.mark.process
def test_a_file_is_downloaded_once_and_one_that_is_there_is_kept(tmp_path, capsys, monkeypatch):
    assert {name: url.rpartition("/")[2] for name, (url, _) in program.URLS.items()} == PUBLISHED
    body, path = b"PK" + bytes(range(256)) * 200, tmp_path / "data" / PUBLISHED["core"]

    def run():
        return program.main(["core", "--data-dir", str(path.parent)])

    with LocalServer({path.name: body}) as server:
        monkeypatch.setitem(program.URLS, "core", (server.url(path.name), hashlib.sha256(body).hexdigest()))
        server.cut[path.name] = [1000]
        assert run() == 2  # broken off
        server.files[path.name] = body[:-1] + b"?"
        assert run() == 2
        assert "has changed" in json.loads(capsys.readouterr().out.splitlines()[-1])["what"]
        assert not path.exists()
        server.files[path.name] = body
        assert run() == 0
        assert path.read_bytes() == body
        path.write_bytes(b"own")
        assert run() == 0
        assert (path.read_bytes(), len(server.requests)) == (b"own", 3)
