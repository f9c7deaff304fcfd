"""The nodes of a run: part of its identity and an axis, resolved and checked before anything is made."""

from __future__ import annotations

from subprocess import CompletedProcess

import pytest

from kmatrix.cli import run as running
from kmatrix.experiment.cluster import resolve
from kmatrix.experiment.cluster.nodes import Nodes
from kmatrix.packing import fewest_nodes
from programs import Program

DRY = "test-matrix-dry-run"
CLUSTER = ("ENGINE=slurm", "DEVICE=cpu")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return the program next to a cluster whose scheduler reports nothing about its nodes."""
    monkeypatch.setattr(resolve, "cluster_nodes", lambda engine, texts: Nodes(name="n1"))
    found = Program(tmp_path)
    found.check("defconfig-gpt2-cpu-quick", "OPTIMIZER=adamw")
    return found


def test_the_id_depends_on_the_nodes_and_not_on_the_engine(program):
    one, two = (program.check(DRY, *CLUSTER, "NUM_GPUS=2", f"NUM_NODES={nodes}").ids for nodes in (1, 2))

    assert one != two
    assert one == program.check(DRY, "DEVICE=cpu", "NUM_GPUS=2").ids  # one node is the default


def test_nodes_are_named_only_if_they_vary_or_are_several(program):
    assert program.check(DRY, *CLUSTER, "NUM_GPUS=2").names == ["gpt2_adamw_2cpu"]
    assert program.check(DRY, *CLUSTER, "NUM_GPUS=2", "NUM_NODES=2").names == ["gpt2_adamw_2nodes_2cpu"]
    assert program.check(DRY, *CLUSTER, "NUM_GPUS=2", "NUM_NODES=1,2").names == [
        "gpt2_adamw_1node_2cpu",
        "gpt2_adamw_2nodes_2cpu",
    ]


def test_cells_whose_ranks_cannot_be_divided_or_do_not_fit_are_excluded_with_the_fix(program):
    result = program.check(
        DRY, *CLUSTER, "NUM_GPUS=3,4,8", "NUM_NODES=1,2", "GPUS_PER_NODE=4", "BATCH_SIZE=1", "GLOBAL_BATCH=24"
    )

    assert "excluded 1: NUM_GPUS=3 is not a multiple of NUM_NODES=2: pass NUM_GPUS=2" in result.out
    assert (
        "excluded 1: NUM_GPUS=8 does not fit on 1 node with GPUS_PER_NODE=4: pass NUM_NODES=2, or NUM_GPUS=4"
        in result.out
    )
    assert len(result.runs) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("NUM_GPUS=9", "NUM_NODES=1", "GPUS_PER_NODE=4"), "pass NUM_NODES=3, or NUM_GPUS=4"),
        (("NUM_GPUS=9", "NUM_NODES=2"), "NUM_GPUS=9 is not a multiple of NUM_NODES=2: pass NUM_GPUS=8"),
        (("NUM_GPUS=0", "NUM_NODES=2"), "NUM_GPUS=1 is not a multiple of NUM_NODES=2: pass NUM_GPUS=2"),
        (("NUM_GPUS=4", "NUM_NODES=0"), "NUM_NODES=0 needs GPUS_PER_NODE"),
        (("NUM_GPUS=4", "NUM_NODES=0,2", "GPUS_PER_NODE=4"), "NUM_NODES=0 cannot be resolved here"),
    ],
)
def test_impossible_nodes_are_refused_before_anything_is_made(program, tmp_path, arguments, message):
    before = sorted(tmp_path.iterdir())

    error = program.refused("test-matrix", *CLUSTER, "BATCH_SIZE=1", "GLOBAL_BATCH=36", *arguments)

    assert message in error
    assert sorted(tmp_path.iterdir()) == before


def test_zero_nodes_are_as_few_as_fit_for_each_number_of_gpus(program):
    arguments = (*CLUSTER, "NUM_NODES=0", "BATCH_SIZE=1", "GLOBAL_BATCH=72", "GPUS_PER_NODE=4")

    assert program.check(DRY, *arguments, "NUM_GPUS=8").names == ["gpt2_adamw_2nodes_8cpu"]
    assert program.check(DRY, *arguments, "NUM_GPUS=4,8,9").names == [
        "gpt2_adamw_1node_4cpu",
        "gpt2_adamw_2nodes_8cpu",
        "gpt2_adamw_3nodes_9cpu",
    ]
    written = [text.replace("NUM_NODES=0", "NUM_NODES=2") for text in arguments]
    assert program.check(DRY, "NUM_NODES=0", "NUM_GPUS=2", "DEVICE=cpu").names == ["gpt2_adamw_2cpu"]
    assert program.check(DRY, *arguments, "NUM_GPUS=8").ids == program.check(DRY, *written, "NUM_GPUS=8").ids


def test_the_fewest_nodes_divide_the_ranks():
    assert [fewest_nodes(ranks, 4) for ranks in (1, 4, 6, 7, 8, 9)] == [1, 1, 2, 7, 2, 3]


def test_this_machine_refuses_several_nodes_with_the_way_out(program, tmp_path):
    before = sorted(tmp_path.iterdir())

    error = program.refused("test-matrix", "DEVICE=cpu", "NUM_GPUS=2", "NUM_NODES=2")

    assert "a run needs 2 nodes, ENGINE=local has 1" in error
    assert "HOSTS=a,b" in error
    assert "ENGINE=slurm or kubernetes" in error
    assert sorted(tmp_path.iterdir()) == before


def test_a_host_that_ssh_does_not_reach_is_refused_before_anything_is_made(program, tmp_path, monkeypatch):
    before = sorted(tmp_path.iterdir())
    answers = {"b": (0, "", ""), "c": (255, "", "ssh: Could not resolve hostname c\r\n")}
    monkeypatch.setattr(running.subprocess, "run", lambda words, **_: CompletedProcess(words, *answers[words[-2]]))

    error = program.refused("test-matrix", "DEVICE=cpu", "NUM_GPUS=3", "NUM_NODES=3", "GLOBAL_BATCH=18", "HOSTS=a,b,c")

    assert "ssh does not reach c of HOSTS=\n  why: ssh: Could not resolve hostname c\n" in error
    assert sorted(tmp_path.iterdir()) == before
