"""Reports of runs over several nodes list every device with its host."""

from __future__ import annotations

import pytest

from gpu_factory import FakeGpus, record
from kmatrix.records.files import read_json, write_json
from kmatrix.report.analyse import analyse
from kmatrix.report.gpu.measure import gpu_of
from kmatrix.report.write import summary
from records_factory import FakeRun, edit_attempt, make_matrix


@pytest.fixture
def matrix(tmp_path):
    """Return a matrix of a run that trained on 4 nodes with 2 ranks each."""
    found = make_matrix(tmp_path, [FakeRun(gpus=8, train={"num_nodes": 4})])
    (run,) = found.runs()
    hosts = [f"n{node}" for node in (1, 1, 2, 2, 3, 3, 4, 4)]
    write_json(run.result, read_json(run.result) | {"devices": ["AMD EPYC 7R32"] * 8, "hosts": hosts})
    edit_attempt(run, host="n1", nodes=4)
    for node in range(1, 4):
        write_json(run.path / "nodes" / f"{node}.json", {"host": f"n{node + 1}", "attempt": 1})
    return found


def folder_of(run, node):
    return run.later_nodes()[node] if node else run


def test_results_have_the_host_and_the_device_of_each_rank(matrix):
    (run,) = analyse(matrix).runs
    assert run.hosts == tuple(f"n{rank // 2 + 1}" for rank in range(8))
    assert run.devices == ("AMD EPYC 7R32",) * 8


def test_recordings_of_all_nodes_are_one_with_hosts_and_their_sums(matrix):
    (run,) = matrix.runs()
    for node in range(4):
        record(folder_of(run, node), FakeGpus())
    (found,) = analyse(matrix).runs
    one = gpu_of(folder_of(run, 3))
    assert [device.host for device in found.gpu.gpus] == [f"n{node + 1}" for node in range(4) for _ in one.gpus]
    assert found.gpu.whole.joules == pytest.approx(4 * one.whole.joules)
    assert found.gpu.whole.memory_used_mean == pytest.approx(4 * one.whole.memory_used_mean)
    assert found.gpu.memory_used_max is None  # its nodes have clocks of their own
    assert "GPU 0 on n4" in [device.label for device in found.gpu.gpus]


def test_a_node_without_a_recording_makes_sums_unknown_and_is_named(matrix):
    (run,) = matrix.runs()
    for node in (0, 2, 3):
        record(folder_of(run, node), FakeGpus())
    (found,) = analyse(matrix).runs
    assert (found.gpu.whole.joules, found.gpu.whole.memory_used_mean) == (None, None)
    assert "nothing recorded on n2" in found.gpu.notes


def test_a_matrix_names_the_hosts_that_trained_and_where_each_attempt_began(matrix):
    (run,) = matrix.runs()
    edit_attempt(run, 1, host="n8", end={"kind": "node lost", "reason": "n9 is lost"})
    edit_attempt(run, 2, host="n1", end={"kind": "finished", "reason": ""})

    lines = summary(analyse(matrix)).splitlines()

    machine = next(line for line in lines if line.startswith("Machine"))
    assert machine == "Machine   n1, n2, n3, n4, AMD EPYC 7R32"
    assert f"{run.name}  1: node lost on n8, n9 is lost; 2: finished on n1" in lines
