"""Distances of GPUs from a simulated driver through the real client library, and the placement of runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import kmatrix.simulate.library as simulate
from kmatrix.gpu.nvml.detect import _distance
from once import session_folder
from recordings import ROOT
from skips import require_program

pytestmark = pytest.mark.process

QUERY = """
import itertools, json
from kmatrix.gpu.nvml.detect import UNKNOWN_DISTANCE, detect, distances
from kmatrix.engines.packing import place
uuids = [gpu.uuid for gpu in detect().gpus]
known = distances(uuids)
far = lambda *pair: known.get(frozenset(pair), UNKNOWN_DISTANCE)
where = [[uuids.index(uuid) for uuid in place(width, uuids, uuids, far)] for width in (1, 2, 4) if width <= len(uuids)]
print(json.dumps([[known.get(frozenset(pair)) for pair in itertools.combinations(uuids, 2)], where]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    require_program("gcc")
    return simulate.build(session_folder(tmp_path_factory))


@pytest.fixture
def topology_of(library, tmp_path):
    """Return the distances of all pairs of a machine, and the first placement of runs of 1, 2 and 4 GPUs."""

    def ask(*lines):
        path = tmp_path / "test.scn"
        path.write_text("\n".join(lines) + "\n")
        environment = {**os.environ, **simulate.environment(library, path), "PYTHONPATH": str(ROOT / "lib")}
        return json.loads(subprocess.check_output([sys.executable, "-c", QUERY], env=environment, text=True))

    return ask


def test_nvlink_is_nearest_then_a_pcie_switch_then_a_numa_node(topology_of):
    pairs, _ = topology_of("gpus 4", "nvlink 0,2", "switch 0-1", "numa 0-2 3")
    assert pairs == [2, 0, 6, 5, 6, 6]  # 0-1 0-2 0-3 1-2 1-3 2-3


def test_runs_are_placed_on_bridged_gpus_of_one_node(topology_of):
    _, placements = topology_of("gpus 8", "nvlink 0,2 1,3 4,6 5,7", "numa 0-3 4-7")
    assert placements == [[0], [0, 2], [0, 1, 2, 3]]
    _, placements = topology_of("gpus 8", "numa 0,2,4,6 1,3,5,7")
    assert placements[1:] == [[0, 2], [0, 2, 4, 6]]


def test_gpus_on_one_nvswitch_are_all_bridged():
    assert _distance(None, ("a", "b"), {}, {"a": frozenset({""}), "b": frozenset({""})}) == 0
