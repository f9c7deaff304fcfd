"""Every damaged checkpoint is refused with one error that names the file: seeded damage of bytes, keys and values."""

from __future__ import annotations

import copy
import errno
import io
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from factories import make_data, train_fields
from gpt2.checkpoint.files import load_checkpoint
from gpt2.checkpoint.state import TrainingState, restore, rng_state, snapshot
from gpt2.data import tokenizer
from gpt2.dist import World
from gpt2.inference import export, generate, weights
from gpt2.inference import restore as inference
from gpt2.optim.builders import build_optimizers
from gpt2.train import build_model
from kmatrix.errors import KmatrixError, LaunchError, RecordError, SchemaError
from kmatrix.records.train_config import TrainConfig

WORLD = World(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
DEEP: list[object] = []
for _ in range(300):
    DEEP = [DEEP]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Yield the value of a sound checkpoint of a run with two steps, and its configuration."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("sound")
    sha256 = make_data(folder)
    config = TrainConfig.from_json(train_fields(folder, sha256, n_embd=16, n_layer=1, block_size=8))
    model = build_model(config)
    optimizers = build_optimizers(config, model)
    model(torch.zeros(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.long))[1].backward()
    optimizers.step()
    parts = TrainingState(config=config, world=WORLD, model=model, optimizers=optimizers)
    value = snapshot(parts, step=1, run_id="a", rng=[rng_state(WORLD)])
    stream = io.BytesIO()
    torch.save(value, stream)
    yield config, torch.load(io.BytesIO(stream.getvalue()), weights_only=True), stream.getvalue()
    torch.set_num_threads(threads)


def use(path, config):
    """Read a checkpoint as sampling, comparing, exporting and resuming do. Raises what they raise."""
    value = load_checkpoint(path)
    inference.load_model(value, path)
    tokenizer.load(str(value["config"].get("tokenizer")), Path(str(value["config"].get("data_path"))))
    json.dumps(export.config_of(value), allow_nan=False)
    weights.compare(value["model"], value["model"])
    model = build_model(config)
    restore(value, TrainingState(config=config, world=WORLD, model=model, optimizers=build_optimizers(config, model)))


def refused(path, config):
    """Return the KmatrixError of a damaged checkpoint, None if it can be used. Other exceptions fail the test."""
    try:
        use(path, config)
    except KmatrixError as error:
        return error
    return None


def paths(value, prefix=()):
    """Yield the place of every value in nested dictionaries and lists."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield (*prefix, key)
            yield from paths(item, (*prefix, key))


def at(value, place):
    for key in place:
        value = value[key]
    return value


class Hostile:
    def __reduce__(self):
        return os.system, ("touch /tmp/kmatrix-hostile",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"root:x:0:0:root:/root:/bin/bash\n" * 40,
        b"\x80",
        b"\x80\x05K\x07.",
        pickle.dumps({"schema": 2}),
        pickle.dumps(Hostile()),
        pickle.dumps([1, 2, 3], protocol=0),
        b"PK\x03\x04" + bytes(100),
        b"PK\x05\x06" + bytes(18),
        os.urandom(0) + bytes(range(256)) * 8,
        b"(" * 5000 + b".",
        b"]" * 100_000,
        json.dumps({"schema": 2, "model": {}}).encode(),
    ],
)
def test_a_file_of_another_program_is_refused(data, sound, tmp_path):
    (tmp_path / "passwd").write_bytes(data)

    error = refused(tmp_path / "passwd", sound[0])

    assert isinstance(error, RecordError)
    assert str(tmp_path / "passwd") in error.what
    assert "\n" not in error.what + error.why


def test_a_file_that_could_run_code_is_refused_without_advice_to_load_it(sound, tmp_path):
    torch.save({"schema": 2, "model": Hostile()}, tmp_path / "c.pt")
    error = refused(tmp_path / "c.pt", sound[0])
    assert "could run code" in error.why
    assert "weights_only" not in str(error)


@pytest.mark.parametrize(
    "program",
    [
        lambda path: generate.main([str(path), "--tokens=2"]),
        lambda path: export.main([str(path), f"--output={path}-out"]),
        lambda path: weights.main([str(path), str(path)]),
    ],
)
def test_the_programs_print_one_error_and_exit_with_2(program, sound, tmp_path, capsys):
    value = copy.deepcopy(sound[1])
    value["model"]["wpe.weight"] = torch.zeros(3, 3)
    value["schema"] = 2.5
    torch.save(value, tmp_path / "c.pt")

    assert program(tmp_path / "c.pt") == 2

    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {tmp_path / 'c.pt'} is damaged")
    assert "Traceback" not in printed


def test_weights_of_another_shape_are_named(sound, tmp_path):
    value = copy.deepcopy(sound[1])
    value["model"]["wpe.weight"] = torch.zeros(3, 16)
    torch.save(value, tmp_path / "c.pt")

    error = refused(tmp_path / "c.pt", sound[0])

    assert "wpe.weight" in error.why
    assert "3 x 16" in error.why


def test_lack_of_memory_is_not_damage(sound, tmp_path, monkeypatch):
    (tmp_path / "c.pt").write_bytes(sound[2])

    def no_memory(*_, **__):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "load", no_memory)
    with pytest.raises(LaunchError, match="not enough memory"):
        load_checkpoint(tmp_path / "c.pt")


def test_a_file_that_cannot_be_read_is_not_damaged(sound, tmp_path, monkeypatch):
    (tmp_path / "c.pt").write_bytes(sound[2])

    def denied(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(torch, "load", denied)
    with pytest.raises(LaunchError, match=r"(?s)c\.pt cannot be read.*Permission denied"):
        load_checkpoint(tmp_path / "c.pt")


def test_a_checkpoint_of_a_newer_version_is_refused_as_such(sound, tmp_path):
    torch.save(sound[1] | {"schema": 99}, tmp_path / "c.pt")

    with pytest.raises(SchemaError):
        load_checkpoint(tmp_path / "c.pt")
