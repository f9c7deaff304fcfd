"""The list of processes, the pages and the JSON of gputop."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from rich.text import Text

from gputop_values import T0, gpu_sample, rendered, view
from kmatrix.gpu.devices import DeviceProcess, ProcessShare
from kmatrix.gputop.host import ProcessTable
from kmatrix.gputop.snapshot import snapshot_entry
from kmatrix.gputop.terminal.pages import COLUMNS, KEYS, REPLAY, page_end
from kmatrix.gputop.terminal.process_table import host_line, process_table, run_line
from kmatrix.gputop.terminal.screen import render
from kmatrix.gputop.view import HostState, ProcessRow, RunLine, ScreenSample
from kmatrix.status.alerts import Alert, AlertKind, Severity

ROWS = (
    ProcessRow(gpu_index=1, pid=30, user="bob", memory_mib=500, sm=10, cpu=90, seconds=70, command="train b"),
    ProcessRow(gpu_index=0, pid=20, user="ann", memory_mib=900, sm=None, cpu=10, seconds=4000, command="train a"),
    ProcessRow(gpu_index=0, pid=10, user=None, memory_mib=None, sm=80, visible=False),
)


@pytest.fixture
def worker():
    process = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=-1)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


# -- what the system knows


@pytest.mark.process
def test_a_row_has_what_driver_and_system_know(worker):
    table = ProcessTable()
    found = [DeviceProcess(pid=worker.pid, memory_mib=300.0), DeviceProcess(pid=2**22 + 7, memory_mib=None, kind="G")]
    shares = {worker.pid: ProcessShare(sm=40, memory=20)}
    own, other = table.rows(3, found, shares)
    assert (own.gpu_index, own.sm, own.bandwidth, own.memory_mib) == (3, 40, 20, 300)
    assert own.command.startswith(sys.executable)
    assert own.user
    assert own.host_mib > 1
    assert 0 < own.host_percent < 100
    assert 0 <= own.seconds < 600
    assert own.visible
    assert (other.visible, other.command, other.kind) == (False, "", "G")


@pytest.mark.process
def test_an_ended_process_is_looked_up_again(worker):
    table = ProcessTable()
    found = [DeviceProcess(pid=worker.pid, memory_mib=300.0)]
    assert table.rows(0, found, {})[0].visible
    worker.kill()
    worker.wait()
    assert not table.rows(0, found, {})[0].visible
    table.forget([])
    assert not table._known


# -- on the screen


def texts(*arguments):
    return [line.plain.rstrip() if isinstance(line, Text) else line for line in process_table(*arguments)]


def test_the_table_has_a_line_per_process():
    lines = texts(ROWS, 110, 10)
    assert lines[0] == "3 processes"
    assert [line.split()[1] for line in lines[2:]] == ["10", "20", "30"], "by GPU and pid"
    assert lines[2].endswith("not visible from here")
    assert lines[4].split() == ["1", "30", "bob", "C", "500", "MiB", "10", "-", "90", "-", "1m10s", "train", "b"]
    assert texts(ROWS, 110, 4)[2:] == [lines[2], "and 2 more: --once lists all"]


def test_the_table_fits_any_width():
    for width in (20, 40, 60, 80, 200):
        assert all(len(line) <= width for line in texts(ROWS, width, 10))


def test_the_lines_about_host_and_run_leave_out_what_is_unknown():
    host = HostState(cpu=12.4, memory_used=1024.0, memory_total=4096.0, load=(0.5, 1.25, 3.0))
    assert host_line(host) == "host  CPU 12%  mem 1.0 of 4.0 GiB  load 0.50 1.25 3.00"
    run = RunLine(name="a", step=50, max_iters=200, loss=3.25, tokens_per_second=4e5, mfu=38.5, left_s=90, kwh=0.5)
    assert run_line(run) == ("run a  step 50/200 (25%)  loss 3.2500  400k tokens/s  MFU 38.5%  1m30s left  0.500 kWh")
    assert run_line(RunLine(name="a")) == "run a"


def test_colours_follow_the_limits_of_the_alerts():
    """A full GPU below the limit is used well: it is not red."""

    def styles(**values):
        line = next(line for line in render(view(gpu_sample(0, **values)), width=120) if line.plain.startswith("0 "))
        return {str(span.style) for span in line.spans}

    assert not {"red", "yellow"} & styles(memory_used=24000.0, power=300.0, temperature=70.0)
    assert "red" in styles(memory_used=24400.0)
    assert "yellow" in styles(temperature=84.0)
    assert "red" in styles(temperature=87.0)


# -- JSON

GPUS = (gpu_sample(0), gpu_sample(1), gpu_sample(2))


def test_json_has_processes_throttling_ranks_and_runs():
    from kmatrix.gpu.formats.samples import Snapshot
    from kmatrix.gpu.nvml.facts import DeviceFacts

    sample = ScreenSample(
        snapshot=Snapshot(time=T0, samples=GPUS[:2]),
        throttle={0: ("power cap",)},
        ranks={0: 3},
        runs={0: "a"},
        processes=(ROWS[1],),
        progress=(RunLine(name="a", step=5),),
        driver_version="580.1",
    )
    entry = snapshot_entry(sample, {0: DeviceFacts(bus_id="00000000:01:00.0", persistence=True)})
    first, second = entry["multi_gpu_data"]
    assert (first["throttle"], first["rank"], first["run"]) == (["power cap"], 3, "a")
    assert (first["bus_id"], first["persistence_mode"]) == ("00000000:01:00.0", True)
    assert (
        first["processes"][0] | {"pid": 20, "user": "ann", "gpu_memory": 900, "seconds": 4000} == first["processes"][0]
    )
    assert (second["throttle"], second["rank"], second["processes"]) == (None, None, [])
    assert entry["runs"][0]["step"] == 5
    assert entry["driver"] == "580.1"


ALERT = Alert(
    kind=AlertKind.TEMPERATURE, severity=Severity.CRITICAL, since=T0, about="GPU 3", value=88.0, threshold=87.0
)


PAGES = [
    {"page": "help"},
    {"page": "help", "mode": "replay"},
    {"page": "alerts", "alerts": (ALERT,) * 30},
]


@pytest.mark.parametrize(("width", "height"), [(200, 60), (120, 30), (80, 24), (40, 10), (30, 5)])
@pytest.mark.parametrize("fields", PAGES, ids=["live", "replay", "alerts"])
def test_a_page_can_be_read_to_its_end_at_every_size(fields, width, height):
    """It scrolls, and its last line always has the keys that scroll and close it."""
    whole = rendered(view(gpu_sample(0), **fields), width, 1000).splitlines()[:-2]
    end = page_end(view(gpu_sample(0), **fields), width, height)
    seen = []
    for at in (*range(0, end, height - 1), end):
        *lines, last = rendered(view(gpu_sample(0), page_at=at, **fields), width, height).splitlines()
        assert "scrolls" in last if end else last == "Any key closes this page."
        assert "close" in last or width < 34
        seen += lines[(len(seen) - at) :] if at < len(seen) else lines
    assert [line for line in seen if line] == whole
    text = re.sub(r"\s+", " ", " ".join(whole))
    if fields["page"] == "help":
        keys = (*KEYS, *REPLAY) if "mode" in fields else KEYS
        assert all(f"{name} {what}" in text for name, what in (*keys, *COLUMNS))
