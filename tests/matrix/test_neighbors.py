"""Expansion computes a cell from its neighbor: the result must be that of a cell computed from scratch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kmatrix.config import RULES, read_run
from kmatrix.experiment.inputs.data import key
from kmatrix.experiment.plan import ALIKE, make_plan
from kmatrix.kconfig.tree import Assignment, Tree, open_tree
from kmatrix.matrix import expand as expansion
from kmatrix.matrix.axes import overrides, plan_axes, single
from kmatrix.matrix.expand import RunIdentity, assign_run, expand
from kmatrix.plan.cpu import cpu_speed
from kmatrix.plan.feasibility import KNOWN
from kmatrix.plan.memory import forecast, warnings
from kmatrix.plan.risk import risks
from programs import ROOT

SEEDS = 50  # random matrices
# Axes that enable, forbid or change other symbols, and values that are out of range in some cells.
POOL = {
    "OPTIMIZER": ["sgd", "adamw", "muon", "adamwprune"],
    "PRUNING": ["none", "magnitude", "movement"],
    "SCHEDULE": ["cosine", "constant", "wsd"],
    "DEVICE": ["cpu", "cuda"],
    "DTYPE": ["fp32", "bf16"],
    "NUM_GPUS": ["1", "2", "3"],
    "DDP_BACKEND": ["gloo", "nccl"],
    "SEED": ["1", "2", "3"],
    "BATCH_SIZE": ["4", "12"],
    "LEARNING_RATE": ["1e-3", "2e-3", "5e-5"],
    "SGD_MOMENTUM": ["0", "0.9"],
    "SGD_NESTEROV": ["y", "n"],
    "MODEL": ["tiny", "custom", "depth"],
    "N_EMBD": ["96", "130"],
    "MAX_ITERS": ["0", "5"],
    "MIN_LR": ["1e-4", "1e-2"],
}
LINES = (
    ("GPT2_MUON_NS_STEPS", "3"),
    ("PARALLEL_BATCH_SIZE", "24"),
    ("GPT2_SGD_MOMENTUM", "0.5"),
    ("GPT2_CHECKPOINT_INTERVAL", "7"),
    ("GPT2_PRUNING_MAGNITUDE", "y"),
    ("GPT2_TARGET_SPARSITY", "0.9"),
)
COUPLED = "OPTIMIZER=muon => LR=0.05,0.02; OPTIMIZER=sgd SEED=2 => WEIGHT_DECAY=0 LR=1; DTYPE=bf16 => DROPOUT=0.1"
EXCLUDE = "OPTIMIZER=muon BATCH_SIZE=12: too large; SEED=2 DTYPE=bf16: not needed"


def drawn(tree, seed):
    """Return the lines and axes of a random matrix."""
    draw = random.Random(seed)
    names = draw.sample(sorted(POOL), draw.randint(3, 6))
    texts = {name: ",".join(draw.sample(POOL[name], draw.randint(1, min(3, len(POOL[name]))))) for name in names}
    asked = overrides(tree, texts)
    lines = [Assignment(name, value, f"file:{i}") for i, (name, value) in enumerate(LINES) if draw.random() < 0.2]
    if draw.random() < 0.8:
        rules = [("MATRIX", "y"), ("MATRIX_COUPLED", COUPLED), ("MATRIX_EXCLUDE", EXCLUDE)]
        lines += [Assignment(name, value, "file:99") for name, value in rules]
    axis = {tree.axis_of(tree.kconf.syms[item.name]) for item in lines} & asked.keys()
    lines = [item for item in lines if tree.axis_of(tree.kconf.syms[item.name]) not in axis]
    base = [*lines, *single(asked)]
    # Lines without effect would end the expansion with an error: all are noted instead.
    axes = replace(plan_axes(tree, base, asked), overridden=frozenset({"MATRIX"}))
    axes = replace(axes, axes=tuple(replace(each, from_command_line=False) for each in axes.axes))
    return [replace(item, where="file:1") for item in base], axes


def enter_from_scratch(cells, points):
    """Apply a cell to a tree without values, and report that everything may have changed."""
    cells.tree.reset()
    cells.present = {point.axis: point.assignment for point in points}
    for axis, assignment in {**cells.fixed, **cells.present}.items():
        cells._set(axis, assignment)
    return frozenset(cells.all_axes)


class FromScratch(expansion._Cells):
    """The slow way: no cell uses anything of the cell before."""

    enter = enter_from_scratch

    @property
    def all_axes(self):
        return {*self.tree.names()}


@pytest.fixture(scope="module")
def tree():
    return Tree.parse(srctree=ROOT)


def test_a_matrix_is_that_of_cells_that_are_evaluated_from_scratch(monkeypatch, tree):
    refused = 0
    for seed in range(SEEDS):
        base, axes = drawn(tree, seed)
        outcomes = []
        for cells in (expansion._Cells, FromScratch):
            monkeypatch.setattr(expansion, "_Cells", cells)
            try:
                outcomes.append(expand(tree, base, axes, RULES))
            except expansion.ConfigError as error:
                outcomes.append(str(error))
        fast, slow = outcomes
        assert fast == slow, seed
        refused += isinstance(fast, str)
        for run in [] if isinstance(fast, str) else fast.runs:
            plain = [item for item in base if not item.name.startswith("MATRIX")]
            assign_run(tree, plain, run)
            assert fast.values(tree, run) == tree.effective()
            assert RunIdentity(tree, set()).of_cell() == run.run_id
    assert refused < SEEDS / 2


def test_select_and_imply_make_symbols_dependent(tmp_path):
    """A definition does not name the symbols that select it."""
    (tmp_path / "Kconfig").write_text(
        'config A\n\tint "a"\n\tdefault 0\n'
        'config ON\n\tbool "on"\n\tselect CHOSEN if A = 1\n\timply MAYBE\n'
        "config CHOSEN\n\tbool\n"
        'config MAYBE\n\tbool "maybe"\n'
        'config ALONE\n\tbool "alone"\n',
        encoding="utf-8",
    )
    edges = Tree.parse(str(tmp_path / "Kconfig"), srctree=tmp_path).edges()

    assert edges.reached_from(["ON"]) >= {"ON", "CHOSEN", "MAYBE"}
    assert edges.reached_from(["A"]) >= {"A", "CHOSEN"}
    assert "ALONE" not in edges.reached_from(["A", "ON"])


def test_runs_that_differ_by_a_selected_symbol_are_different_runs(tmp_path):
    (tmp_path / "Kconfig").write_text(
        f'source "{ROOT}/Kconfig"\n'
        'config EXTRA\n\tbool "extra"\n\tselect SELECTED\n'
        'config SELECTED\n\tbool "selected"\n'
        'config DEEPER\n\tint "deeper"\n\tdefault 5 if SELECTED\n\tdefault 1\n',
        encoding="utf-8",
    )
    tree = Tree.parse(str(tmp_path / "Kconfig"), srctree=ROOT)
    asked = overrides(tree, {"EXTRA": "n,y"})
    matrix = expand(tree, [], plan_axes(tree, [], asked), ())

    assert {"SELECTED", "DEEPER"} <= set(matrix.varying)
    assert [matrix.values(tree, run).typed["DEEPER"] for run in matrix.runs] == [1, 5]


class Recorder:
    """Stands for a TrainConfig, and records the names of the fields that are read."""

    def __init__(self, train):
        object.__setattr__(self, "train", train)
        object.__setattr__(self, "read", set())

    def __getattr__(self, name):
        self.read.add(name)
        member = getattr(type(self.train), name, None)
        return member.fget(self) if isinstance(member, property) else getattr(self.train, name)


def test_no_forecast_or_warning_reads_a_field_that_runs_of_one_kind_do_not_share():
    symbols = open_tree().effective()
    train = read_run({**symbols.typed, "GPT2_DEVICE": "cpu", "GPT2_NUM_GPUS": 1}).train
    recorder = Recorder(train)

    forecast(recorder.shape, recorder, tokens=1)
    warnings(recorder)
    risks(recorder.shape, recorder, 10, KNOWN[0], cpu_speed(recorder))
    key(recorder)

    assert "optimizer" in recorder.read
    assert not recorder.read & ALIKE


def test_runs_that_differ_in_seed_and_rate_share_their_forecast(tmp_path):
    config = tmp_path / ".config"
    config.write_text("CONFIG_GPT2_DEVICE_CPU=y\nCONFIG_GPT2_NUM_GPUS=1\n", encoding="utf-8")
    plan = make_plan(config, {"SEED": "1,2", "LEARNING_RATE": "1e-3,2e-3", "BATCH_SIZE": "2,3"})

    assert (len(plan.runs), len(plan.kinds)) == (8, 2)
    trains = [run.config.train for run in plan.runs]
    assert {(each.seed, each.learning_rate, each.batch_size) for each in trains} == {
        (seed, rate, batch) for seed in (1, 2) for rate in (1e-3, 2e-3) for batch in (2, 3)
    }
