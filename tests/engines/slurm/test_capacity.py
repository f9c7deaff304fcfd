"""What a cluster has, as scontrol of a real Slurm described it."""

from __future__ import annotations

import pytest

from kmatrix.engines.base import NodeKind
from kmatrix.engines.slurm.capacity import capacity, capacity_of, gpus_of, seconds_of
from kmatrix.engines.slurm.commands import fields
from slurm_answers import answer, recorded

NODES = [fields(line) for line in recorded("node").splitlines() if line]
PARTITIONS = [fields(line) for line in recorded("partition").splitlines() if line]


def test_partitions_have_their_nodes_and_limits(monkeypatch):
    answer(monkeypatch)

    found = capacity()

    assert [(one.name, one.is_default, one.seconds, one.preempts) for one in found.partitions] == [
        ("main", True, 172800.0, True),
        ("urgent", False, 3600.0, False),
        ("short", False, 300.0, False),
    ]
    main = found.partition("")
    assert main is not None
    assert main.kinds == (
        NodeKind(count=2, cpus=16, memory_mib=4000, gpus=4, gpu_type="a10g"),
        NodeKind(count=1, cpus=16, memory_mib=4000, gpus=2, gpu_type="a10g"),
    )
    assert (main.nodes, main.gpus_per_node) == (3, 4)
    assert (found.kill_s, found.most_tasks, found.has_accounting) == (30.0, 1000, False)


def test_only_nodes_with_the_wanted_type_of_gpu_count(monkeypatch):
    answer(monkeypatch)

    main = capacity("h100").partition("main")

    assert main is not None
    assert main.kinds == ()


@pytest.mark.parametrize("state", ["DOWN*", "IDLE+DRAIN", "DOWN+NOT_RESPONDING", "MIXED+MAINT"])
def test_a_node_that_takes_no_jobs_is_counted_as_down(state):
    nodes = [{**node, "State": state} if node["NodeName"] == "n1" else node for node in NODES]

    main = capacity_of({}, PARTITIONS, nodes).partition("main")

    assert main is not None
    assert (main.kinds[0].count, main.kinds[0].down) == (2, 1)


@pytest.mark.parametrize("state", ["IDLE", "MIXED+PLANNED", "ALLOCATED", "IDLE+CLOUD+POWERED_DOWN"])
def test_a_node_that_works_or_can_be_started_is_not_down(state):
    main = capacity_of({}, PARTITIONS, [{**NODES[0], "State": state}]).partition("main")

    assert main is not None
    assert main.kinds[0].down == 0


def test_a_node_of_the_future_does_not_count():
    main = capacity_of({}, PARTITIONS, [{**NODES[0], "State": "FUTURE"}]).partition("main")

    assert main is not None
    assert main.kinds == ()


def test_an_unlimited_partition_has_no_limit():
    about = {"PartitionName": "p", "DefaultTime": "NONE", "MaxTime": "UNLIMITED", "MaxNodes": "4", "State": "DRAIN"}
    (found,) = capacity_of({}, [about], []).partitions
    assert (found.seconds, found.default_s, found.most_nodes, found.is_up) == (None, None, 4, False)

    (found,) = capacity_of({}, [{**about, "DefaultTime": "00:30:00"}], []).partitions
    assert (found.seconds, found.default_s) == (None, 1800.0)


def test_accounting_is_known_from_its_plugin():
    assert capacity_of({"AccountingStorageType": "accounting_storage/slurmdbd"}, [], []).has_accounting


@pytest.mark.parametrize(("size", "most"), [("1001", 1000), ("1", 1), ("0", 1), ("", None)])
def test_an_array_has_one_task_less_than_its_limit_and_at_least_one(size, most):
    assert capacity_of({"MaxArraySize": size}, [], []).most_tasks == most


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("gpu:a10g:4", {"a10g": 4}),
        ("gpu:8(S:0-1)", {"": 8}),
        ("gpu:a100:4(S:0,1),gpu:v100:2,nvme:1", {"a100": 4, "v100": 2}),
        ("gpu:1g.10gb:7", {"1g.10gb": 7}),
        ("gpu", {"": 1}),
        ("(null)", {}),
    ],
)
def test_gpus_are_read_from_gres(gres, gpus):
    assert gpus_of(gres) == gpus


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-12", 129600), ("1-12:30", 131400), ("01:02:03", 3723), ("10", 600), ("5:30", 330), ("NONE", None), ("", None)],
)
def test_times_of_slurm_are_read(text, seconds):
    assert seconds_of(text) == seconds
