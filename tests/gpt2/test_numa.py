"""A rank is bound to the processors of its GPU's NUMA node, within those that it may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from factories import environment
from gpt2 import numa
from gpt2.dist import World
from gpt2.machine import machine_of
from gpt2.numa import Binding, bind, binding, cpus_of, listed, pci_address

GPU = torch.device("cuda", 0)
NEAR, FAR = "0000:3b:00.0", "0001:ca:00.0"
ALL = frozenset(range(16))


@pytest.fixture
def sysfs(tmp_path):
    """Return a tree of two nodes with eight processors each, and a GPU on each; node 2 has memory alone."""
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15", "")):
        write(tmp_path / f"devices/system/node/node{node}/cpulist", cpus)
    for address, node, cpus in ((NEAR, 0, "0-3,8-11"), (FAR, 1, "4-7,12-15")):
        write(tmp_path / f"bus/pci/devices/{address}/numa_node", node)
        write(tmp_path / f"bus/pci/devices/{address}/local_cpulist", cpus)
    return tmp_path


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n", encoding="ascii")


def test_all_ranks_of_a_node_get_the_processors_of_their_gpus_node(sysfs):
    assert binding(NEAR, ALL, sysfs) == (Binding(node=0, cpus="0-3,8-11"), {0, 1, 2, 3, 8, 9, 10, 11})
    assert binding(FAR, ALL, sysfs) == (Binding(node=1, cpus="4-7,12-15"), {4, 5, 6, 7, 12, 13, 14, 15})


def test_processors_that_a_scheduler_has_chosen_are_kept(sysfs):
    assert binding(NEAR, frozenset({2, 3, 4, 5}), sysfs) == (Binding(node=0, cpus="2-3"), {2, 3})


def test_a_rank_without_a_processor_of_the_node_is_not_bound(sysfs):
    found, cpus = binding(NEAR, frozenset({4, 5}), sysfs)

    assert (found.node, found.why, cpus) == (0, "no processor of node 0 may be used", frozenset())


def test_one_node_with_processors_needs_no_binding(sysfs):
    write(sysfs / "devices/system/node/node1/cpulist", "")

    assert binding(NEAR, ALL, sysfs) == (Binding(why="this machine has one NUMA node"), frozenset())


@pytest.mark.parametrize(("content", "why"), [("-1", "does not know"), ("nonsense", "has no NUMA node")])
def test_a_gpu_of_an_unknown_node_is_not_bound(sysfs, content, why):
    write(sysfs / f"bus/pci/devices/{NEAR}/numa_node", content)

    found, cpus = binding(NEAR, ALL, sysfs)

    assert why in found.why
    assert not cpus


def test_a_gpu_that_the_system_does_not_list_is_not_bound(sysfs):
    found, cpus = binding("0000:ff:00.0", ALL, sysfs)

    assert "has no NUMA node" in found.why
    assert not cpus


def test_the_address_is_written_as_in_sysfs():
    assert pci_address(SimpleNamespace(pci_domain_id=1, pci_bus_id=202, pci_device_id=0)) == FAR
    assert pci_address(SimpleNamespace()) is None


@pytest.mark.parametrize("text", ["0", "0-3", "0-3,8", "1,3,5-7", ""])
def test_a_list_of_processors_is_read_and_written_as_the_kernel_does(tmp_path, text):
    write(tmp_path / "cpulist", text)

    assert listed(cpus_of(tmp_path / "cpulist")) == text


def test_a_rank_on_the_cpu_is_not_bound():
    assert bind(torch.device("cpu"), wanted=True) is None


def test_without_the_symbol_nothing_is_bound():
    assert bind(GPU, wanted=False) == Binding(why="GPT2_NUMA_BINDING=n")


@pytest.fixture
def one_of_two(sysfs, monkeypatch):
    """Return a tree whose GPU is next to the first processor that this process may use, and restore the threads."""
    before = os.sched_getaffinity(0)
    first = min(before)
    write(sysfs / f"bus/pci/devices/{NEAR}/local_cpulist", first)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=59, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(numa, "_UNBOUND", set())
    yield sysfs, first
    for thread in threads():
        os.sched_setaffinity(thread, before)


def threads():
    """Return the numbers of the threads of this process."""
    return [int(thread.name) for thread in Path("/proc/self/task").iterdir()]


def test_all_threads_of_the_process_are_bound_and_its_children_inherit_it(one_of_two):
    sysfs, first = one_of_two

    found = bind(GPU, wanted=True, sysfs=sysfs)

    assert found == Binding(node=0, cpus=str(first))
    assert all(os.sched_getaffinity(thread) == {first} for thread in threads())


def test_a_child_that_serves_all_ranks_gets_the_processors_from_before(one_of_two):
    sysfs, _ = one_of_two
    before = os.sched_getaffinity(0)
    bind(GPU, wanted=True, sysfs=sysfs)
    program = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, env=environment()) as child:
        numa.release(child.pid)

        assert os.sched_getaffinity(child.pid) == before


def test_run_used_json_gets_the_binding_of_each_rank(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H100", uuid="12")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: properties.name)
    world = World(rank=0, local_rank=0, size=1, device=GPU, numa=Binding(node=1, cpus="4-7"))

    assert machine_of(world)["numa"] == {"node": 1, "cpus": "4-7", "why": ""}


def test_a_system_that_refuses_is_named(one_of_two, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    found = bind(GPU, wanted=True, sysfs=one_of_two[0])
    monkeypatch.undo()

    assert found == Binding(node=0, why="the system refuses: Operation not permitted")
