"""Files of a results folder are never written through a link."""

from __future__ import annotations

import ast
import os
import re

import pytest

from kmatrix.errors import RecordError
from kmatrix.own_file import (
    IN_PLACE,
    MOST_BYTES,
    listed_once,
    may_exist,
    open_own,
    open_to_read,
    opener,
    private_opener,
    read_descriptor,
    read_file,
)
from kmatrix.records.decode import Record, decode
from kmatrix.records.files import LineTail
from programs import ROOT

MODES = ["w", "a", "r+", "x"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_refused_and_its_target_stays(tmp_path, mode, exists):
    target, link = tmp_path / "target", tmp_path / "link"
    if exists:
        target.write_text("kept")
    link.symlink_to(target)
    with pytest.raises(OSError, match=r"symbolic link|File exists"), open(link, mode, opener=opener):
        pass
    assert target.exists() == exists
    assert not exists or target.read_text() == "kept"


@pytest.mark.parametrize(("mode", "found"), [("w", "new"), ("a", "kept new"), ("r+", "newt ")])
def test_a_file_with_other_names_is_replaced_by_a_copy(tmp_path, mode, found):
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.write_text("kept ")
    original.chmod(0o640)
    copy.hardlink_to(original)
    with open(copy, mode, opener=opener) as file:
        file.write("new")
    assert (original.read_text(), copy.read_text()) == ("kept ", found)
    assert copy.stat().st_mode == original.stat().st_mode
    assert len(list(tmp_path.iterdir())) == 2


def test_only_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a file"):
        open_own(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        open_own(tmp_path)


@pytest.mark.parametrize("read", [read_file, open_to_read, lambda path: LineTail(path, Record).read(), read_descriptor])
def test_only_files_are_read(tmp_path, read):
    """A stranger's folder may have a named pipe, on which a reader waits forever, or a link to an endless device."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        with pytest.raises(OSError, match="not a file"):
            read(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        read(tmp_path)


def test_a_huge_file_is_not_read_as_a_whole(tmp_path):
    (tmp_path / "huge").touch()
    os.truncate(tmp_path / "huge", MOST_BYTES + 1)
    with pytest.raises(OSError, match=r"too large: 2\.0 GiB"):
        read_file(tmp_path / "huge")
    with pytest.raises(RecordError, match="cannot be read"):
        decode(tmp_path / "huge", Record)


def test_a_private_file_is_made_private(tmp_path):
    with open(tmp_path / "key", "w", opener=private_opener) as file:
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600
    os.close(open_own(tmp_path / "new", IN_PLACE))
    assert (tmp_path / "new").stat().st_mode & 0o077 != 0


# Functions that may open for writing themselves: new files below a random or hidden name, and files outside results.
ALLOWED = {
    "lib/kmatrix/own_file.py": {"open_file", "_replace_by_copy"},
    "lib/kmatrix/clock.py": {"age_s"},  # a hidden name of its own
    "lib/kmatrix/records/attempts.py": {"try_lock"},  # follows no link, and writes nothing
    "lib/kmatrix/records/checkpoints.py": {"put"},  # a temporary file of `replacing`
    "lib/kmatrix/redaction/log.py": {"writer"},  # a pipe
    "lib/kmatrix/output.py": {"*"},  # /dev/null
    "lib/kmatrix/cli/commands.py": {"main"},  # /dev/null
    "lib/kmatrix/gpu/recorder/files.py": {"_write_csv"},  # a temporary file of `replacing`
    "lib/kmatrix/simulate/library.py": {"*"},  # a folder of its own below the cache
    "lib/kmatrix/experiment/provenance.py": {"copy_code"},  # a new folder
    "lib/kmatrix/experiment/reuse.py": {"_copy"},  # a new folder
    "lib/kmatrix/track/tensorboard.py": {"_writer"},  # mode x: a new file
    "lib/kmatrix/gpu/formats/json_array.py": {"_make_copies"},  # a name that was deleted just before
}


def opened_for_writing(call: ast.Call) -> bool:
    """Return whether a call opens a file for writing without an opener."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    owner = getattr(getattr(call.func, "value", None), "id", "")
    if name in ("write_text", "write_bytes", "touch") and isinstance(call.func, ast.Attribute) and owner != "files":
        return True
    if (owner, name) in (("shutil", "copyfile"), ("shutil", "copy2"), ("shutil", "copy")):
        return True
    if name != "open" or any(keyword.arg == "opener" for keyword in call.keywords):
        return False
    if owner == "os":
        return any(getattr(node, "attr", "") in ("O_WRONLY", "O_RDWR", "O_CREAT") for node in ast.walk(call.args[1]))
    words = [getattr(node, "value", None) for node in (*call.args, *(keyword.value for keyword in call.keywords))]
    return any(re.fullmatch("[wxa][bt+]*|r[bt]*[+][bt]*", word) for word in words if isinstance(word, str))


def test_every_other_module_opens_files_for_writing_in_this_way():
    wrong = []
    for path in sorted((ROOT / "lib").rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        if not re.search(r"open\(|write_text|write_bytes|touch|copy", text):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        for node in nodes:
            if not isinstance(node, ast.Call) or not opened_for_writing(node):
                continue
            inside = {one.name for one in functions if one.lineno <= node.lineno <= (one.end_lineno or 0)}
            if not ALLOWED.get(place, set()) & {*inside, "*"}:
                wrong.append(f"{place}:{node.lineno}")
    assert not wrong, wrong


def test_a_folder_to_which_nobody_writes_is_listed_once(tmp_path, monkeypatch):
    """Within the context a missing file stays missing without further lists, and after it a new one is found."""
    monkeypatch.setattr("kmatrix.own_file._storage", {"lists names first": True})
    (tmp_path / "a").write_text("")
    lists = []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: lists.append(folder) or real(folder))
    with listed_once(str(tmp_path)):
        assert may_exist(tmp_path / "a")
        (tmp_path / "b").write_text("")
        assert not any(may_exist(tmp_path / "b") for _ in range(3))
        assert len(lists) == 1
    assert may_exist(tmp_path / "b")


def test_the_list_of_a_folder_does_not_count_for_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr("kmatrix.own_file._storage", {"lists names first": True})
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "two" / "a").write_text("")
    with listed_once(str(tmp_path / "one")):
        assert not may_exist(tmp_path / "one" / "a")
        assert may_exist(tmp_path / "two" / "a")
        assert not may_exist(tmp_path / "one" / "a")
