"""The data of a matrix: how much its runs need, how many epochs they train, and the command that prepares it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from factories import train_config
from kmatrix.experiment.inputs.data import arguments_for, epochs, key, overfitting, prepared, to_download
from kmatrix.records.dataset import Dataset
from kmatrix.records.files import write_json
from programs import Program, prepare_here

RUN = train_config(
    dataset="finewebedu", tokenizer="gpt2", data_path="", data_tokens=0, max_iters=100, batch_size=12, block_size=64
)
SMALL = ("DEVICE=cpu", "MODEL=tiny", "BLOCK_SIZE=64", "BATCH_SIZE=4")


@pytest.fixture
def program(tmp_path):
    (tmp_path / "data" / "notes").mkdir(parents=True)
    for number in range(60):
        (tmp_path / "data" / "notes" / f"{number}.txt").write_text(f"note {number} " * (number + 9))
    program = Program(tmp_path)
    program.check("defconfig")
    return program


def prepare_arguments(program, *more):
    return (*SMALL, f"DATA_DIR={program.folder / 'data'}", *more)


@pytest.mark.parametrize(
    ("runs", "tokens"),
    [
        ([{}, {"max_iters": 300}, {"block_size": 32}], 300 * 12 * 64),  # the longest run
        ([{"data_tokens": 10**9}], 10**9),  # whatever the runs read
        ([{}, {"max_iters": 0}], 0),  # all: the length of one depends on the data
        ([{"max_iters": 0}, {}], 0),
        ([{"data_layout": "bestfit"}], round(1.6 * 100 * 12 * 64)),  # packed rows drop a third of the text
        ([{"data_layout": "bestfit", "data_tokens": 500}], 500),
    ],
)
def test_as_much_is_prepared_as_the_longest_run_reads(tmp_path, runs, tokens):
    arguments = arguments_for(tmp_path, [replace(RUN, **changes) for changes in runs])
    assert arguments[:2] == ["finewebedu", f"--data-dir={tmp_path}"]
    assert {"--tokenizer=gpt2", f"--tokens={tokens}", "--block-size=64", "--shards=0"} <= {*arguments}


def test_runs_on_different_data_are_prepared_separately():
    runs = [RUN, replace(RUN, tokenizer="byte"), replace(RUN, dataset="fineweb"), replace(RUN, seed=7)]
    assert len({key(run) for run in runs}) == 3


def dataset(**fields):
    empty = {"path": "", "sha256": "", "vocab_size": 257, "val_tokens": 0, "shards": 0}
    return Dataset(**{**empty, **fields})


def test_epochs_of_a_mix_are_counted_for_each_dataset():
    mixed = dataset(train_tokens=1100, parts=(("a", 0.75, 1000), ("b", 0.25, 100)))
    tokens = 100 * 12 * 64
    assert epochs([(RUN, mixed)]) == {"a": (tokens * 0.75 / 1000, 1000), "b": (tokens * 0.25 / 100, 100)}
    assert epochs([(RUN, dataset(train_tokens=tokens))]) == {"finewebedu": (1.0, tokens)}


def test_the_overfitting_warning_names_the_run_with_the_most_epochs():
    data = dataset(train_tokens=10_000)
    highest = epochs([(replace(RUN, max_iters=iters), data) for iters in (10, 443, 100)])
    assert highest == {"finewebedu": (pytest.approx(34.0, abs=0.1), 10_000)}
    assert overfitting(highest)[0].startswith("35 epochs of finewebedu: overfitting is likely")
    assert overfitting({"finewebedu": (4.0, 10_000)}) == []


def test_a_plan_identifies_data_by_their_recipe_and_knows_if_they_are_enough(tmp_path):
    recipe = {"dataset": "finewebedu", "tokenizer": "gpt2", "data_path": "", "mix": ""}
    shards = [
        {"name": f"x_train_{number}.bin", "tokens": 50_001, "sha256": "", "size": 1, "mtime_ns": 0, "max_token": 1}
        for number in range(3)
    ]
    about = {"recipe": recipe, "vocab_size": 50257}
    write_json_in(tmp_path / "finewebedu", {**about, "shards": shards, "complete": False})
    assert prepared(tmp_path, RUN).train_shards == (50_001, 50_001)  # of 76,800 tokens
    assert prepared(tmp_path, replace(RUN, tokenizer="byte")) is None
    longer = replace(RUN, max_iters=300)
    assert prepared(tmp_path, longer) is None
    assert prepared(tmp_path, replace(longer, data_streaming=True)).shards == 1
    write_json_in(tmp_path / "finewebedu", {**about, "shards": shards, "complete": True})
    assert prepared(tmp_path, longer).train_tokens == 150_003
    assert prepared(tmp_path, replace(longer, max_iters=20_000_000)) is None  # read from the larger repository
    write_json_in(tmp_path / "finewebedu", {"recipe": []})
    assert prepared(tmp_path, RUN) is None
    assert prepared(tmp_path / "nothing", RUN) is None


def write_json_in(folder, value):
    folder.mkdir(exist_ok=True)
    write_json(folder / "dataset.json", value)


@pytest.mark.process
def test_prepare_data_prepares_the_data_of_every_run_and_prints_the_epochs(program, capfd):
    axes = ("TOKENIZER=byte,char", "DATASET=folder", "DATA_PATH=notes", "MAX_ITERS=600")
    out = program.check("prepare-data", *prepare_arguments(program, *axes)).out
    folders = sorted(path.name for path in (program.folder / "data").glob("folder-*"))
    assert [name.rsplit("-", 1)[0] for name in folders] == ["folder-byte", "folder-char"]
    record = json.loads((program.folder / "data" / folders[0] / "dataset.json").read_text())
    assert f"{record['train_tokens']:,} training and {record['val_tokens']:,} validation tokens" in out
    assert "epochs of folder: overfitting" in out
    assert "60 files" in capfd.readouterr().err


@pytest.mark.process
def test_the_vocabulary_size_of_the_text_is_used_once_it_is_known(program):
    run = prepare_arguments(program, "TOKENIZER=char", "DATASET=folder", "DATA_PATH=notes", "MAX_ITERS=60")
    before, first = program.check("plan", *run), program.plan(*run)
    assert "note: the vocabulary of the tokenizer char is assumed to be 256" in before.out
    program.check("prepare-data", *run)
    after = program.plan(*run)
    assert "is assumed to be" not in program.check("plan", *run).out
    assert [run.run_id for run in first.runs] == [run.run_id for run in after.runs]
    assert first.runs[0].config.train.vocab_size == 256 > after.runs[0].config.train.vocab_size


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("DATASET=hub",), "DATASET=hub needs a path: OWNER/NAME (DATA_PATH)"),
        (("DATASET=folder",), "DATASET=folder needs a path: <folder or pattern> (DATA_PATH)"),
        (("DATASET=mix", "DATA_MIX=stdlib"), "'stdlib' is not DATASET:WEIGHT"),
        (("DATASET=mix",), "DATASET=mix needs DATA_MIX="),
        (("DATA_PATH=notes",), "DATA_PATH"),
        (("DATASET=mix", "DATA_MIX=stdlib:1", "TOKENIZER=char"), "TOKENIZER=char"),
        (("SHARD_TOKENS=5",), "SHARD_TOKENS"),
    ],
)
def test_an_impossible_dataset_is_refused_before_any_file_is_written(program, arguments, message):
    assert message in program.refused("prepare-data", *prepare_arguments(program, *arguments))
    assert not list((program.folder / "data").glob("*-*"))


@pytest.mark.process
def test_data_that_cannot_be_prepared_is_refused_with_the_original_message(program, capfd):
    message = program.refused("prepare-data", *prepare_arguments(program, "DATASET=folder", "DATA_PATH=nothing"))
    assert "no text files at" in message
    assert "error" not in capfd.readouterr().err  # one mistake, one error


@pytest.mark.parametrize(
    ("fields", "shards"),
    [
        ({"data_tokens": 10**9}, (10, 99)),
        ({"data_tokens": 9_853_989_344}, (99, 99)),
        ({"data_tokens": 10**10}, (100, 1000)),  # another repository
        ({"max_iters": 0}, (99, 99)),
        ({"dataset": "fineweb", "data_tokens": 10**12}, (103, 103)),
        ({"dataset": "tinystories"}, None),
        ({"tokenizer": "byte"}, None),
    ],
)
def test_as_many_prebuilt_shards_are_downloaded_as_contain_the_tokens(fields, shards):
    assert to_download(replace(RUN, **fields)) == shards


@pytest.mark.parametrize(
    ("words", "lacks"),
    [(["BLOCK_SIZE=1024"], "BLOCK_SIZE=1024"), (["BLOCK_SIZE=64", "BATCH_SIZE=400"], "GLOBAL_BATCH=400")],
)
def test_too_little_text_for_a_step_is_refused_by_preparation_and_plan(program, monkeypatch, words, lacks):
    prepare_here(monkeypatch)
    folder = program.folder / "small"
    folder.mkdir()
    for number in range(25):
        (folder / f"{number}.txt").write_text("a short text " * 8 + str(number))
    arguments = (
        "DATASET=folder",
        f"DATA_PATH={folder}",
        "TOKENIZER=byte",
        "VAL_PERCENT=20",
        "DEVICE=cpu",
        "MODEL=tiny",
    )
    arguments += (f"DATA_DIR={program.folder / 'data'}", *words)
    for target in ("prepare-data", "plan"):  # of the plan, as the data are prepared then
        message = program.refused(target, *arguments)
        assert "folder has" in message
        assert lacks in message
        assert "fix" in message or "hint" in message


def test_the_layout_and_streaming_are_part_of_the_id(program):
    def run_id(*more):
        return program.plan(*SMALL, *more).runs[0].run_id

    plain = run_id()
    assert run_id("DATA_LAYOUT=flat", "DATA_STREAMING=n") == plain
    assert len({plain, run_id("DATA_LAYOUT=bestfit"), run_id("DATA_STREAMING=y")}) == 3


def test_only_the_first_shard_of_streamed_data_is_prepared_before_the_runs(program, monkeypatch):
    prepare_here(monkeypatch)
    arguments = prepare_arguments(program, "DATASET=folder", "DATA_PATH=notes", "TOKENIZER=byte", "DATA_STREAMING=y")
    printed = program.check("prepare-data", *arguments, "SHARD_TOKENS=1000").out
    assert "data: folder, prepared while the runs read it" in printed
    (folder,) = (program.folder / "data").glob("folder-byte-*")
    assert len([*folder.glob("*.bin")]) == 2
    assert not json.loads((folder / "dataset.json").read_text())["complete"]
