"""The recorder on each node of a run records the ranks of its own node."""

from __future__ import annotations

import math

import psutil
import pytest

from kmatrix.gpu.devices import COLUMN_INDEX, UNKNOWN, WIDTH, Device
from kmatrix.gpu.host import HostSource, RankProcess, ranks_on_host
from kmatrix.gpu.recorder.__main__ import numbered


def environment(rank, local_rank, count, size):
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    return dict(zip(names, map(str, (rank, local_rank, count, size)), strict=True))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (environment(5, 1, 2, 8), range(4, 6)),  # node 2 of 4
        (environment(1, 1, 2, 2), range(2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, range(2)),
        ({}, None),
    ],
)
def test_the_ranks_of_a_host_follow_from_the_environment_of_one_of_them(found, expected):
    assert ranks_on_host(found) == expected


def test_a_recorder_has_the_ranks_of_its_own_node_with_their_numbers_in_the_run(tmp_path):
    found = RankProcess(5, psutil.Process(), ranks_on_host(environment(5, 1, 2, 8)))
    source = HostSource(1, tmp_path, [found])

    values = [UNKNOWN] * (2 * WIDTH)
    source.read(values)

    assert [(device.gpu_index, device.rank) for device in source.devices] == [(4, 4), (5, 5)]
    memory = values[COLUMN_INDEX["memory_used"] :: WIDTH]
    assert math.isnan(memory[0])  # rank 4 has not started
    assert memory[1] > 0


def test_ranks_without_a_readable_environment_count_from_0(tmp_path):
    source = HostSource(1, tmp_path, [RankProcess(1, psutil.Process(), None)])
    assert [device.rank for device in source.devices] == [0, 1]


def test_gpus_of_a_node_have_the_ranks_of_the_run():
    devices = [Device(gpu_index=at, gpu_name="NVIDIA A10G", uuid=f"u{at}", rank=at) for at in (0, 1)]
    assert [(device.gpu_index, device.rank) for device in numbered(devices, 6)] == [(0, 6), (1, 7)]
    without = Device(gpu_index=0, gpu_name="NVIDIA A10G", uuid="u")  # all GPUs of a machine are recorded
    assert numbered([without], 6) == (without,)
