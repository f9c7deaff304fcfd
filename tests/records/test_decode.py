"""Typed records: what a damaged file does, and how it is named."""

import importlib
import json

import msgspec
import pytest

from kmatrix.errors import RecordError, damaged_files
from kmatrix.records.decode import (
    Amount,
    Count,
    Record,
    decode,
    decode_lines,
    decode_optional,
    field,
    indented_text,
)
from kmatrix.records.files import write_json


class Part(Record, frozen=True, kw_only=True):
    size: Count = 0


class Example(Record, frozen=True, kw_only=True):
    name: str
    seconds: Amount | None = None
    part: Part = field(default_factory=Part)


DEEP = b"[" * 100_000
DAMAGED = [
    (b'{"schema": null, "name": "a"}', "schema: expected int, got null"),
    (b'{"schema": -1, "name": "a"}', "schema: expected int >= 0"),
    (b'{"name": 3}', "name: expected str, got int"),
    (b'{"name": "a", "part": {"size": "12"}}', "part.size: expected int, got str"),
    (b'{"name": "a", "part": {"size": true}}', "part.size: expected int, got bool"),
    (b'{"name": "a", "part": {"size": -1}}', "part.size: expected int >= 0"),
    (b'{"name": "a", "part": {"size": ' + b"9" * 400 + b"}}", "part.size: expected int <= 9007199254740992"),
    (b'{"name": "a", "seconds": ' + b"9" * 400 + b"}", "seconds: number out of range"),
    (b'{"name": "a", "seconds": NaN}', "JSON is malformed: invalid character (byte 25)"),
    (b'{"name": "a", "seconds": -Infinity}', "JSON is malformed: invalid character (byte 26)"),
    (b'{"name": "a", "x": ' + DEEP + b"}", "nested too deeply"),
    (b'{"seconds": 1}', "object missing required field name"),
    (b'{"name": "\xff"}', "'utf-8' codec can't decode"),
    (b"[]", "expected object, got array"),
    (b"", "input data was truncated"),
    (b'{"name": "a"', "input data was truncated"),
    (b"\xff\x00", "JSON is malformed"),
]


@pytest.mark.parametrize(("data", "why"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_required_file_is_refused_with_its_field(tmp_path, data, why):
    path = tmp_path / "a.json"
    path.write_bytes(data)
    with pytest.raises(RecordError) as caught:
        decode(path, Example)
    assert caught.value.what == f"{path} is damaged"
    assert caught.value.why.lower().startswith(why.lower())


def test_a_damaged_optional_file_counts_as_missing_and_is_named_once(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"name": []}')
    damaged_files()
    assert decode_optional(path, Example) is None
    assert decode_optional(path, Example) is None
    assert damaged_files() == [f"{path} is damaged and was ignored: name: expected str, got array"]
    assert damaged_files() == []


def test_a_missing_optional_file_is_not_damage(tmp_path):
    damaged_files()
    assert decode_optional(tmp_path / "a.json", Example) is None
    assert damaged_files() == []


def test_a_directory_in_place_of_a_file_is_damage(tmp_path):
    damaged_files()
    assert decode_optional(tmp_path, Example) is None
    assert damaged_files() == [f"{tmp_path} is damaged and was ignored: Is a directory"]


def test_a_newer_schema_is_refused_whatever_the_file_holds(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"schema": 2, "name": []}')
    with pytest.raises(RecordError, match="has schema 2"):
        decode(path, Example)


def test_unknown_keys_are_ignored(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"schema": 1, "name": "a", "of_tomorrow": [{}], "part": {"size": 3, "more": 1}}')
    assert decode(path, Example) == Example(name="a", part=Part(size=3))


def test_damaged_lines_are_skipped_counted_and_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"size": 1}\n{"size": NaN}\n\x00\xff\n\n{"size": "2"}\n' + DEEP + b'\n{"size": 3}\n{"size": 4')
    damaged_files()
    assert decode_lines(path, Part) == [Part(size=1), Part(size=3)]
    assert damaged_files() == [f"{path}: 4 of 6 lines are damaged and were skipped"]


def test_a_line_without_its_end_is_not_damage(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"size": 1}\n{"si')
    damaged_files()
    assert decode_lines(path, Part) == [Part(size=1)]
    assert decode_lines(tmp_path / "missing.jsonl", Part) == []
    assert damaged_files() == []


def test_a_name_that_is_not_utf_8_is_read_back_as_python_wrote_it(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"name": "caf\udce9"})
    assert decode(path, Example).name == "caf\udce9"
    path.write_text('{"name": "caf\\udce9", "seconds": NaN}')
    with pytest.raises(RecordError, match="is damaged"):
        decode(path, Example)
    path.write_text('{"name": "caf\\udce9", "seconds": "1"}')
    with pytest.raises(RecordError) as caught:
        decode(path, Example)
    assert caught.value.why.startswith("seconds: expected float")


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": [], "b": {}, "c": [1, 2.5, 1e-05, 1e300, True, None], "d": {"e": [{"f": 'ü "\\ \n'}]}},
        {"a": float("nan"), "b": [float("inf")]},
        {"": ["", "\u2028", "\ud800"]},
    ],
)
def test_indented_text_is_that_of_json(value):
    assert indented_text(value) == json.dumps(value, indent=2)


def records(parent=Record):
    """Yield all types of records below one."""
    for record in parent.__subclasses__():
        yield record
        yield from records(record)


def test_a_field_of_another_type_is_one_error_with_its_name(tmp_path):
    wrong, seen = [[[["x"]]]], 0
    for module in ("runs", "events", "checkpoints", "tracking", "attempts", "control", "matrix"):
        importlib.import_module(f"kmatrix.records.{module}")
    for record in set(records()):
        if record.__struct_config__.forbid_unknown_fields:  # a request, not a file with a schema
            continue
        for one in msgspec.structs.fields(record):
            if "Any" in str(one.type):
                continue
            (tmp_path / "a.json").write_text(json.dumps({"schema": 1, one.encode_name: wrong}))
            with pytest.raises(RecordError) as caught:
                decode(tmp_path / "a.json", record)
            assert caught.type is RecordError
            assert "a.json is damaged" in caught.value.what, record
            why = caught.value.why
            assert one.encode_name in why or "missing required field" in why, (record, why)
            seen += 1
    assert seen > 100
