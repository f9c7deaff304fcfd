"""Memory of other processes on a GPU, read from a simulated driver through the real client library."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import kmatrix.simulate.library as simulate
from once import session_folder
from recordings import ROOT
from skips import require_program

pytestmark = pytest.mark.process

QUERY = """
import json, sys
from kmatrix.gpu.nvml.detect import detect, occupied
uuids = [gpu.uuid for gpu in detect().gpus] + sys.argv[2:]
print(json.dumps([uuids, occupied(uuids, int(sys.argv[1]))]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    require_program("gcc")
    return simulate.build(session_folder(tmp_path_factory))


@pytest.fixture
def query(library, tmp_path):
    def run_query(*lines, limit_mib=1024, extra_uuids=()):
        path = tmp_path / "test.scn"
        path.write_text("\n".join(lines) + "\n")
        environment = {**os.environ, **simulate.environment(library, path), "PYTHONPATH": str(ROOT / "lib")}
        command = [sys.executable, "-c", QUERY, str(limit_mib), *extra_uuids]
        uuids, found = json.loads(subprocess.check_output(command, env=environment, text=True))
        return [found.get(uuid, "") for uuid in uuids]

    return run_query


def test_a_gpu_with_memory_of_other_processes_is_reported_with_the_programs(query):
    found = query("gpus 3", "0 * mem 300", "0 1 mem 17408", f"0 1 process {os.getpid()} 17000")
    assert (found[0], found[2]) == ("", "")
    assert found[1].startswith("17.0 GiB used by ")
    assert found[1].endswith(f"(pid {os.getpid()})")


def test_in_a_container_the_memory_counts_though_no_process_is_visible(query):
    assert query("gpus 1", "0 0 mem 2048") == ["2.0 GiB used by processes that are not visible here"]


def test_many_programs_are_counted_and_the_first_are_named(query):
    (text,) = query(
        "gpus 1", "0 0 mem 9000", *(f"0 0 process {pid} 1000" for pid in (999999901, 999999902, 999999903, 999999904))
    )
    assert text.endswith("a process (pid 999999903) and 1 more")


def test_an_unresponsive_gpu_is_not_used(query):
    assert query("gpus 1", extra_uuids=["GPU-gone"])[1].startswith("no response: ")
