"""Reports of runs over several nodes list every device with its host."""

from __future__ import annotations

import pytest

from cluster_factory import make_engine
from gpu_factory import FakeGpus, record
from kmatrix.records.files import read_json, read_or_empty, write_json
from kmatrix.records.jobs.paths import NodeDir
from kmatrix.report.analysis import analyse
from kmatrix.report.gpu.read_gpu import TrainingTotals, read_gpu
from kmatrix.report.summary import render_summary
from kmatrix.report.write import write_summary
from records_factory import CREATED, FakeRun, make_matrix


@pytest.fixture
def matrix(tmp_path):
    """Return a matrix of a run that trained on 4 nodes with 2 ranks each."""
    found = make_matrix(tmp_path, [FakeRun(gpus=8)])
    (run,) = found.runs()
    record = read_json(run.run_json)
    write_json(run.run_json, {**record, "train": {**record["train"], "num_gpus": 8, "num_nodes": 4}})
    hosts = [f"n{node}" for node in (1, 1, 2, 2, 3, 3, 4, 4)]
    used = {"devices": ["AMD EPYC 7R32"] * 8, "hosts": hosts, "attempt": 1}
    write_json(run.run_used, {**read_or_empty(run.run_used), **used})
    for node in range(4):
        folder = NodeDir(run, node)
        write_json(folder.node_json, {"node": node, "host": f"n{node + 1}", "attempt": 1})
    return found


def test_the_report_lists_every_device_with_its_host(matrix):
    numbers = analyse(matrix)
    write_summary(numbers)

    (run,) = read_json(matrix.results)["runs"]
    assert [(device["rank"], device["node"], device["host"]) for device in run["devices"]] == [
        (rank, rank // 2, f"n{rank // 2 + 1}") for rank in range(8)
    ]
    _, _, table = render_summary(numbers).partition("Nodes\n")
    rows = [line.split() for line in table.splitlines()[3:11]]
    assert [(row[1], row[2], row[3]) for row in rows] == [
        (str(rank // 2), f"n{rank // 2 + 1}", str(rank)) for rank in range(8)
    ]
    assert all(row[-1] == "7R32" for row in rows)


def test_runs_on_one_node_have_no_table_of_nodes(tmp_path):
    assert "Nodes\n" not in render_summary(analyse(make_matrix(tmp_path, [FakeRun(gpus=2)])))


def test_recordings_of_all_nodes_are_one_with_hosts_and_their_sums(matrix):
    (run,) = matrix.runs()
    for node in range(4):
        record(NodeDir(run, node).recording, FakeGpus())

    gpu = next(numbers.gpu for numbers in analyse(matrix).runs)
    one = read_gpu(NodeDir(run, 3).recording, TrainingTotals(device="gpu"))

    assert [device.host for device in gpu.devices] == [f"n{node + 1}" for node in range(4) for _ in one.devices]
    assert gpu.joules == pytest.approx(4 * one.joules)
    assert gpu.total_mean == pytest.approx(4 * one.total_mean)
    assert gpu.total_max is None  # its nodes have clocks of their own
    assert "GPU 0 on n4" in [gpu.label(device) for device in gpu.devices]
    write_summary(analyse(matrix))
    (entry,) = read_json(matrix.results)["runs"]
    assert {device["host"] for device in entry["gpu"]["gpus"]} == {"n1", "n2", "n3", "n4"}


def test_a_node_without_a_recording_makes_sums_unknown_and_is_named(matrix):
    (run,) = matrix.runs()
    for node in (0, 2, 3):
        record(NodeDir(run, node).recording, FakeGpus())

    gpu = next(numbers.gpu for numbers in analyse(matrix).runs)

    assert (gpu.joules, gpu.total_mean) == (None, None)
    assert "nothing recorded on n2" in gpu.notes


def test_a_matrix_of_a_cluster_names_the_hosts_that_trained_and_their_times_by_their_own_clocks(matrix):
    make_engine(matrix)
    (run,) = matrix.runs()
    status = read_json(run.status)
    last = {"attempt": 1, "status": "finished", "started": CREATED, "ended": CREATED + 60, "seconds": 60.0}
    write_json(run.status, {**status, "attempts": [last | {"hosts": ["n1", "n2", "n3", "n4"]}]})
    for node in range(4):  # the clock of n2 is an hour ahead
        file = NodeDir(run, node).node_json
        write_json(file, {**read_json(file), "started": CREATED + 10 + (3600 if node == 1 else 0)})

    numbers = analyse(matrix)

    assert numbers.runs[0].on_hosts["n1"] == [(CREATED, CREATED + 60)]
    assert numbers.runs[0].on_hosts["n2"] == [(CREATED + 3610, CREATED + 3660)]
    machine = next(line for line in render_summary(numbers).splitlines() if line.startswith("Machine"))
    assert machine.startswith("Machine   n1, n2, n3, n4 (submitted from ")
    assert "cores" not in machine


def test_attempts_say_where_they_ran_and_count_on_their_hosts(matrix):
    make_engine(matrix)
    (run,) = matrix.runs()
    lost = {"attempt": 1, "status": "stopped", "started": CREATED, "ended": CREATED + 5, "reason": "node n9 is lost"}
    last = {"attempt": 2, "status": "finished", "started": CREATED + 20, "ended": CREATED + 60}
    write_json(
        run.status,
        {**read_json(run.status), "attempts": [{**lost, "hosts": ["n8", "n9"]}, {**last, "hosts": ["n1", "n2"]}]},
    )

    numbers = analyse(matrix)

    assert numbers.runs[0].on_hosts["n8"] == [(CREATED, CREATED + 5)]
    assert numbers.runs[0].on_hosts["n1"] == [(CREATED + 20, CREATED + 60)]
    text = render_summary(numbers)
    assert "1: stopped on n8,n9, node n9 is lost" in text
    assert "2: finished on n1,n2" in text
