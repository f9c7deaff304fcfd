"""The nodes that runs of a cluster are planned for."""

from __future__ import annotations

import pytest

from kmatrix.engines.slurm import Slurm
from kmatrix.errors import LaunchError
from kmatrix.experiment.cluster.nodes import MIB, cluster_nodes

SINFO = [
    "main*|1-00:00:00|1-infinite|9|64|900000|(null)",
    "main*|1-00:00:00|1-infinite|2|48|500000|gpu:a100:4(S:0-1)",
    "main*|1-00:00:00|1-infinite|1|32|250000|gpu:a100:4(S:0-1)",
]


def test_runs_are_planned_for_the_smallest_node_with_most_gpus(monkeypatch):
    monkeypatch.setattr(Slurm, "_ask", lambda *_: SINFO)
    nodes = cluster_nodes("slurm", {"GPT2_NUM_GPUS": "0"})
    assert (nodes.gpus, nodes.cpus, nodes.memory, nodes.model.name) == (4, 32, 250_000 * MIB, "A100")
    asked = cluster_nodes("slurm", {"GPUS_PER_NODE": "2", "SLURM_MEMORY": "100G"})
    assert (asked.gpus, asked.memory) == (2, 100 * 1024 * MIB)


def test_a_cluster_that_hides_its_nodes_is_planned_for_as_configured(monkeypatch):
    monkeypatch.setattr(Slurm, "_ask", lambda *_: [])
    nodes = cluster_nodes("slurm", {"GPUS_PER_NODE": "8"})
    assert (nodes.gpus, nodes.cpus, nodes.memory, nodes.warning) == (8, None, None, "")


def test_without_an_answer_a_plan_warns_and_needs_the_gpus_of_a_node(monkeypatch):
    def silent(*_):
        raise LaunchError("Slurm does not answer")

    monkeypatch.setattr(Slurm, "_ask", silent)
    assert "Slurm does not answer: planned for" in cluster_nodes("slurm", {"GPUS_PER_NODE": "8"}).warning
    with pytest.raises(LaunchError, match="pass GPUS_PER_NODE="):
        cluster_nodes("slurm", {"GPT2_NUM_GPUS": "0"})
