"""make sample and make serve: the selected checkpoint, the options passed on, and the output."""

from __future__ import annotations

import subprocess

import pytest
import torch

import forked
from checkpoints import best_of, final_of
from factories import environment, make_run, train
from gpt2.inference.restore import choose_device, restore
from kmatrix.cli import models
from kmatrix.cli.commands import parse
from kmatrix.errors import ConfigError, LaunchError, RecordError
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import find_matrix
from kmatrix.report.analysis import analyse
from once import make_once
from programs import run

pytestmark = pytest.mark.process

FAST = {"learning_rate": 0.01, "max_iters": 12}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """A matrix of two finished runs, the second of which is better, and a third that has not started."""

    def train_both(results_dir):
        folder = results_dir / "test_matrix_results_20261120_010101"
        folder.mkdir()
        data = results_dir / "data"
        train(make_run(folder, "gpt2_sgd_1cpu", data_path=data))
        train(make_run(folder, "gpt2_adamw_1cpu", data_path=data, **FAST))
        make_run(folder, "gpt2_new_1cpu", data_path=data)
        write_json(folder / "matrix.json", {"runs": [{"name": "gpt2_sgd_1cpu"}, {"name": "gpt2_adamw_1cpu"}]})
        return folder

    return make_once(tmp_path_factory, "models", train_both)[1]


def checkpoint_of(*arguments):
    return models.find_checkpoint(parse("sample", list(arguments))[1])


def test_the_default_is_the_best_checkpoint_of_the_best_run_of_the_newest_matrix(matrix):
    assert checkpoint_of(f"RESULTS_DIR={matrix.parent}").parent == matrix / "gpt2_adamw_1cpu" / "checkpoints"
    assert checkpoint_of(f"TARGET={matrix}") == checkpoint_of(f"CHECKPOINT={matrix}")


def test_a_run_selects_its_best_checkpoint_and_a_file_selects_itself(matrix):
    best = checkpoint_of(f"CHECKPOINT={matrix / 'gpt2_sgd_1cpu'}")
    assert best.samefile(best_of(matrix / "gpt2_sgd_1cpu"))
    assert checkpoint_of(f"CHECKPOINT={best}") == best


def test_runs_on_different_data_are_compared_by_bits_per_byte(matrix, tmp_path):
    folder = tmp_path / matrix.name
    subprocess.run(["cp", "-r", str(matrix), str(folder)], check=True)
    other = folder / "gpt2_sgd_1cpu"
    changed = read_json(other / "run.json")
    changed["train"]["data_sha256"] = "ab" * 32
    write_json(other / "run.json", changed)
    result = read_json(other / "result.json")
    bits = result["best_bits_per_byte"] / 4
    write_json(other / "result.json", result | {"best_bits_per_byte": bits})
    numbers = {run.name: run.best_bits_per_byte for run in analyse(find_matrix(tmp_path, None)).runs}
    assert numbers["gpt2_sgd_1cpu"] < numbers["gpt2_adamw_1cpu"]
    assert checkpoint_of(f"TARGET={folder}").parent.parent.name == "gpt2_sgd_1cpu"
    (other / "metrics.jsonl").write_text("")
    write_json(other / "result.json", result | {"best_bits_per_byte": None})
    with pytest.raises(ConfigError, match="their datasets differ"):
        checkpoint_of(f"TARGET={folder}")


def test_a_file_that_is_not_a_checkpoint_is_refused(matrix, tmp_path):
    with pytest.raises(ConfigError, match="is not a checkpoint, a run or a matrix"):
        checkpoint_of("CHECKPOINT=/nowhere")
    with pytest.raises(RecordError, match="no checkpoint in"):
        checkpoint_of(f"CHECKPOINT={matrix / 'gpt2_new_1cpu'}")
    empty = tmp_path / "test_matrix_results_20261120_020202"
    empty.mkdir()
    make_run(empty)
    with pytest.raises(RecordError, match="no checkpoint of an evaluated run in"):
        checkpoint_of(f"TARGET={empty}")


def test_arguments_become_options_of_the_program_and_invalid_ones_are_refused(matrix):
    arguments = [f"CHECKPOINT={matrix / 'gpt2_sgd_1cpu'}", "PROMPT=a b", "TOKENS=3", "TOP_P=0.5", "SEED="]
    line = models.command_line(parse("sample", arguments)[1], models.SAMPLE)
    assert line[1:] == ["--prompt=a b", "--tokens=3", "--top-p=0.5"]
    assert models.command_line(parse("sample", [arguments[0], "PROMPT="])[1], models.SAMPLE)[1:] == ["--prompt="]
    for argument, kind in (("TOKENS=many", "an integer"), ("TEMPERATURE=hot", "a number")):
        result = run("sample", arguments[0], argument)
        assert result.status == 2
        assert f"invalid {argument}\n  why: expected {kind}\n" in result.err
    assert "invalid PORT=x" in run("serve", arguments[0], "PORT=x").err


def run_sample(*arguments):
    """Run `make sample`, with the trainer's program in a forked process."""
    _, parsed = parse("sample", list(map(str, arguments)))
    return forked.run(["-m", "gpt2.inference.generate", *models.command_line(parsed, models.SAMPLE)], environment())


def test_the_text_is_printed_with_its_checkpoint(matrix):
    arguments = (f"CHECKPOINT={matrix / 'gpt2_adamw_1cpu'}", "PROMPT=ab", "TOKENS=12", "SEED=3", "TEMPERATURE=1")
    first, second = run_sample(*arguments), run_sample(*arguments)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stdout.startswith("ab")
    assert "gpt2_adamw_1cpu, step " in first.stderr
    assert "12 tokens" in first.stderr
    assert "seed 3" in first.stderr


def test_invalid_values_are_refused_with_status_2(matrix):
    checkpoint = f"CHECKPOINT={matrix / 'gpt2_adamw_1cpu'}"
    for argument, message in (("TOKENS=-1", "max_tokens is -1"), ("DEVICE=tpu", "DEVICE=tpu is not available")):
        completed = run_sample(checkpoint, argument)
        assert completed.returncode == 2
        assert message in completed.stderr
        assert "Traceback" not in completed.stderr


def test_a_restored_model_has_the_weights_to_evaluate(matrix, tmp_path):
    run_dir = matrix / "gpt2_adamw_1cpu"
    found = restore(final_of(run_dir), "cpu")
    assert (found.name, found.step, found.model.training) == ("gpt2_adamw_1cpu", 12, False)
    saved = torch.load(final_of(run_dir), weights_only=True)
    assert all(torch.equal(value, saved["model"][name]) for name, value in found.model.state_dict().items())
    saved["evaluation"] = {name: tensor + 1 for name, tensor in saved["model"].items()}
    torch.save(saved, tmp_path / "averaged.pt")
    averaged = restore(tmp_path / "averaged.pt", "cpu").model.state_dict()
    assert all(torch.equal(averaged[name], tensor + 1) for name, tensor in saved["model"].items())
    saved["config"]["arch"] = "mamba"
    torch.save(saved, tmp_path / "mamba.pt")
    with pytest.raises(RecordError, match=r"(?s)is damaged.*unknown architecture 'mamba'"):
        restore(tmp_path / "mamba.pt", "cpu")


def test_a_missing_gpu_is_refused(monkeypatch):
    # The machine of the test may have a GPU.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("").type == "cpu"
    with pytest.raises(LaunchError, match=r"(?s)DEVICE=cuda is not available.*pass DEVICE=cpu"):
        choose_device("cuda")
