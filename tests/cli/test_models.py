"""make sample and make serve: the selected checkpoint, the options passed on, and the output."""

from __future__ import annotations

import shutil

import pytest
import torch

from checkpoints import best_of, final_of
from factories import list_runs, make_run, note_end
from gpt2.inference import generate
from gpt2.inference.restore import restore
from kmatrix.cli import models
from kmatrix.cli.commands import parse
from kmatrix.errors import ConfigError, KmatrixError, LaunchError, RecordError
from kmatrix.records.files import read_json, write_json
from training import train_here

FAST = {"learning_rate": 0.01, "max_iters": 12}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """A matrix of two finished runs, the second of which is better, and a third that has not started."""
    folder = tmp_path_factory.mktemp("models") / "test_matrix_results_20261120_010101"
    folder.mkdir()
    data = folder.parent / "data"
    train_here(note_end(make_run(folder, "gpt2_sgd_1cpu", data_path=data)))
    train_here(note_end(make_run(folder, "gpt2_adamw_1cpu", data_path=data, **FAST)))
    make_run(folder, "gpt2_new_1cpu", data_path=data)
    list_runs(folder)
    return folder


def checkpoint_of(*arguments):
    return models.find_checkpoint(parse("sample", list(arguments))[1])


def test_the_best_run_of_the_newest_matrix_a_run_or_a_file_selects_a_checkpoint(matrix):
    best = best_of(matrix / "gpt2_adamw_1cpu")
    assert checkpoint_of(f"RESULTS_DIR={matrix.parent}").samefile(best)
    assert checkpoint_of(f"TARGET={matrix}") == checkpoint_of(f"CHECKPOINT={matrix}")
    other = checkpoint_of(f"CHECKPOINT={matrix / 'gpt2_sgd_1cpu'}")
    assert other.samefile(best_of(matrix / "gpt2_sgd_1cpu"))
    assert checkpoint_of(f"CHECKPOINT={other}") == other


def test_runs_on_different_data_are_compared_by_bits_per_byte(matrix, tmp_path):
    folder = tmp_path / matrix.name
    shutil.copytree(matrix, folder)
    other = folder / "gpt2_sgd_1cpu"
    changed = read_json(other / "run.json")
    changed["train"]["data_sha256"] = "ab" * 32
    write_json(other / "run.json", changed)
    list_runs(folder)
    result = read_json(other / "result.json")
    write_json(other / "result.json", result | {"best_bits_per_byte": result["best_bits_per_byte"] / 4})
    assert checkpoint_of(f"TARGET={folder}").parent.parent.name == "gpt2_sgd_1cpu"
    (other / "metrics.jsonl").write_text("")
    write_json(other / "result.json", result | {"best_bits_per_byte": None})
    with pytest.raises(ConfigError, match="their datasets differ"):
        checkpoint_of(f"TARGET={folder}")


def test_what_has_no_checkpoint_is_refused(matrix, tmp_path):
    empty = tmp_path / "test_matrix_results_20261120_020202"
    empty.mkdir()
    make_run(empty)
    list_runs(empty)
    for argument, message in (
        ("CHECKPOINT=/nowhere", "is not a checkpoint, a run or a matrix"),
        (f"CHECKPOINT={matrix / 'gpt2_new_1cpu'}", "no checkpoint in"),
        (f"TARGET={empty}", "no checkpoint of an evaluated run in"),
    ):
        with pytest.raises(KmatrixError, match=message):
            checkpoint_of(argument)


def test_arguments_become_options_of_the_program(matrix):
    checkpoint = f"CHECKPOINT={matrix / 'gpt2_sgd_1cpu'}"
    for words, options in (
        (("PROMPT=a b", "TOKENS=3"), ["--prompt=a b", "--tokens=3"]),
        (("PROMPT=", "TOKENS="), ["--prompt="]),
    ):
        assert models.command_line(parse("sample", [checkpoint, *words])[1], ("PROMPT", "TOKENS"))[1:] == options


def test_the_text_is_printed_with_its_checkpoint(matrix, capsys):
    def sample(*options):
        _, arguments = parse("sample", [f"CHECKPOINT={matrix / 'gpt2_adamw_1cpu'}", "PROMPT=ab", "TOKENS=12"])
        assert generate.main([*models.command_line(arguments, ("PROMPT", "TOKENS")), *options]) == 0
        return capsys.readouterr()

    words = ("--seed=3", "--temperature=1")
    printed = sample(*words)
    assert printed.out == sample(*words).out
    assert printed.out.startswith("ab")
    for part in ("gpt2_adamw_1cpu, step 12, on cpu", "12 tokens", "seed 3"):
        assert part in printed.err
    for word, message in (("--tokens=-1", "max_tokens=-1"), ("--device=tpu", "DEVICE=tpu is not available")):
        with pytest.raises(KmatrixError, match=message):
            sample(word)


def test_a_restored_model_has_the_weights_to_evaluate(matrix, tmp_path):
    path = final_of(matrix / "gpt2_adamw_1cpu")
    found = restore(path, "cpu")
    assert (found.name, found.step, found.model.training) == ("gpt2_adamw_1cpu", 12, False)
    saved = torch.load(path, weights_only=True)
    assert all(torch.equal(value, saved["model"][name]) for name, value in found.model.state_dict().items())
    saved["evaluation"] = {name: tensor + 1 for name, tensor in saved["model"].items()}
    torch.save(saved, tmp_path / "averaged.pt")
    averaged = restore(tmp_path / "averaged.pt", "cpu").model.state_dict()
    assert all(torch.equal(averaged[name], tensor + 1) for name, tensor in saved["model"].items())
    saved["config"]["arch"] = "mamba"
    torch.save(saved, tmp_path / "mamba.pt")
    with pytest.raises(RecordError, match=r"(?s)is damaged.*mamba"):
        restore(tmp_path / "mamba.pt", "cpu")


def test_a_missing_gpu_is_refused(monkeypatch, tmp_path):
    # The machine of the test may have a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LaunchError, match=r"(?s)DEVICE=cuda is not available.*pass DEVICE=cpu"):
        restore(tmp_path / "none.pt", "cuda")
