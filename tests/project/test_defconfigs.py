"""Every line of every defconfig and fragment takes effect in some run, and the flagship has its documented values."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kmatrix.kconfig.assignments import read_assignments
from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.expand import visit
from kmatrix.plan.feasibility import OVERHEAD, by_name
from kmatrix.plan.memory import memory
from kmatrix.plan.risk import ERROR
from kmatrix.text import GIB
from programs import ROOT, Program, give_gpus

DEFCONFIGS = sorted(path.name for path in (ROOT / "defconfigs").iterdir() if path.is_file())
MACHINE = re.compile(r"-(a10g|a100|h100)(?:x(\d))?\b")
FRAGMENTS = sorted(path.stem for path in (ROOT / "defconfigs" / "fragments").iterdir())


@pytest.fixture
def program(tmp_path, monkeypatch):
    give_gpus(monkeypatch, 8)
    return Program(tmp_path)


def test_every_line_axis_and_value_of_a_defconfig_takes_effect_in_some_run(program):
    for name in DEFCONFIGS:
        out = program.check(f"defconfig-{name}").out
        tree = Tree.parse(srctree=ROOT)
        lines = [
            item for item in read_assignments(tree, ROOT / "defconfigs" / name) if not item.name.startswith("MATRIX")
        ]
        plan = program.plan()
        for _ in visit(plan.tree, plan.base, plan.matrix.runs):
            lines = [item for item in lines if plan.tree.kconf.syms[item.name].str_value != item.value]

        assert lines == [], name
        assert "has no effect" not in out
        assert plan.matrix.notes == plan.matrix.excluded == ()
        used = {(point.axis, point.text) for run in plan.matrix.runs for point in run.points}
        assert used >= {(axis.name, point.text) for axis in plan.matrix.axes for point in axis.points}
        assert len(plan.matrix.runs) == plan.matrix.cells
        assert bool(plan.matrix.axes) == (plan.matrix.cells >= 2)  # without axes it is a single run, of nanochat


def test_a_defconfig_fits_on_the_gpus_in_its_name(program):
    for name in (name for name in DEFCONFIGS if MACHINE.search(name)):
        program.check(f"defconfig-{name}")
        model, count = MACHINE.search(name).groups()

        out = program.check("plan", f"GPU={model.upper()}").out

        assert re.search(rf"^  {model.upper()} .* fits ", out, re.M)
        assert "does not fit" not in out
        assert "tight" not in out
        assert f"_{count or 1}gpu" in out


def test_the_micro_batches_of_nanochat_are_the_largest_powers_of_two_that_leave_room_for_the_error_of_the_plan(program):
    peaks = {}
    for name in (name for name in DEFCONFIGS if name.startswith("nanochat")):
        program.check(f"defconfig-{name}")
        (config,) = program.plan().configs.values()
        room = by_name(MACHINE.search(name)[1].upper()).memory - OVERHEAD
        peaks[name], twice = (_peak(config, config.train.batch_size * factor) for factor in (1, 2))
        assert peaks[name] * (1 + ERROR) <= room < twice * (1 + ERROR)
        assert config.train.batch_size.bit_count() == 1

    order = ("nanochat-d24-h100x8", "nanochat2025-d20-h100x8", "nanochat-d12-a10gx4")
    printed = [f"{peaks.pop(name) / GIB:.0f}" for name in order]
    text = (ROOT / "docs" / "nanochat.md").read_text(encoding="utf-8")
    assert "Memory by `make plan`: {}, {} and {} GiB per GPU.".format(*printed) in text
    assert not peaks


def _peak(config, batch):
    """Return the planned bytes of a rank with another micro-batch and the same global batch."""
    accumulation = config.train.global_batch // (batch * config.train.num_gpus)
    changed = replace(config.train, batch_size=batch, gradient_accumulation=accumulation)
    return memory(changed).total


def test_every_line_of_a_fragment_takes_effect_in_every_run(program):
    tree = Tree.parse(srctree=ROOT)
    for number, fragment in enumerate(FRAGMENTS):
        name = DEFCONFIGS[number % len(DEFCONFIGS)]
        program.check(f"defconfig-{name}+{fragment}")
        lines = read_assignments(tree, ROOT / "defconfigs" / "fragments" / f"{fragment}.config")
        plan = program.plan()
        for _ in visit(plan.tree, plan.base, plan.matrix.runs):
            for item in lines:
                assert plan.tree.kconf.syms[item.name].str_value == item.value, (name, fragment)


INTENDED = {
    "num_gpus": 4,
    "model": "124m",
    "dataset": "finewebedu",
    "tokenizer": "gpt2",
    "batch_size": 12,
    "gradient_accumulation": 8,
    "block_size": 1024,
    "global_batch": 384,
    "max_iters": 50000,
    "learning_rate": 6e-4,
    "min_lr": 6e-5,
    "warmup_steps": 2000,
    "schedule": "cosine",
    "eval_interval": 500,
    "eval_samples": 200,
    "dtype": "bf16",
    "checkpoint_interval": 1000,
    "ddp_backend": "nccl",
    "use_ddp": True,
    "device": "cuda",
    "compile": True,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "vocab_size": 50257,
}


def test_the_flagship_has_its_documented_values_on_any_machine(program, monkeypatch):
    for gpus in (0, 4):
        give_gpus(monkeypatch, gpus)
        program.check("defconfig-gpt2-finewebedu-a10gx4")
        adamw, muon = (config.train.to_json() for config in program.plan().configs.values())

        assert {name: adamw[name] for name in INTENDED} == INTENDED
        assert (muon["optimizer"], muon["learning_rate"], muon["min_lr"]) == ("muon", 0.02, 0.002)
        different = {name for name in adamw if adamw[name] != muon[name]}
        assert different == {
            *("optimizer", "learning_rate", "min_lr", "weight_decay"),
            *("muon_momentum", "muon_nesterov", "muon_ns_steps", "muon_split_qkv", "muon_adjust_lr_fn"),
            "muon_adamw_lr",
        }
        result = program.check("test-matrix-dry-run", "MAX_ITERS=20", "OPTIMIZER=sgd,adamw", "NUM_GPUS=1")
        assert result.names == ["gpt2_sgd_1gpu", "gpt2_adamw_1gpu"]
