"""The process table: order, users, selection, and signals that need an answer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
from rich.cells import cell_len
from rich.text import Text

from gputop_values import T0, gpu_sample, rendered, view
from kmatrix.gpu.devices import DeviceProcess, ProcessShare
from kmatrix.gputop.host import ProcessTable, host_state
from kmatrix.gputop.loop import visible_gpus
from kmatrix.gputop.processes import SORTS, ProcessActions
from kmatrix.gputop.snapshot import snapshot_entry
from kmatrix.gputop.terminal.glyphs import ASCII
from kmatrix.gputop.terminal.pages import COLUMNS, KEYS, REPLAY, page_end
from kmatrix.gputop.terminal.process_table import host_line, process_table, run_line
from kmatrix.gputop.terminal.screen import plain, render
from kmatrix.gputop.view import Confirmation, HostState, ProcessList, ProcessRow, RunLine, ScreenSample
from kmatrix.status.alerts import Alert, AlertKind, Severity
from waiting import wait_until

ROWS = (
    ProcessRow(gpu_index=1, pid=30, user="bob", memory_mib=500, sm=10, cpu=90, seconds=70, command="train b"),
    ProcessRow(gpu_index=0, pid=20, user="ann", memory_mib=900, sm=None, cpu=10, seconds=4000, command="train a"),
    ProcessRow(gpu_index=0, pid=10, user=None, memory_mib=None, sm=80, visible=False),
)


def actions(*keys, rows=ROWS):
    found = ProcessActions()
    found.update(rows)
    for key in keys:
        found.press(key)
    return found


def pids(found):
    return [row.pid for row in found.shown()]


def test_processes_are_in_the_order_of_their_gpus_at_first():
    assert pids(actions()) == [10, 20, 30]


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("PID", [10, 20, 30]),
        ("GPU mem", [20, 30, 10]),
        ("%SM", [10, 30, 20]),
        ("user", [20, 30, 10]),
        ("command", [20, 30, 10]),
    ],
)
def test_the_key_s_sorts_by_each_column_with_unknown_values_last(sort, expected):
    found = actions(*["s"] * list(SORTS).index(sort))
    assert found.list().sort == sort
    assert pids(found) == expected


def test_the_order_can_be_reversed_and_unknown_values_stay_last():
    found = actions(*["s"] * list(SORTS).index("GPU mem"), "r")
    assert pids(found) == [30, 20, 10]
    assert found.list().sort == "GPU mem, reversed"


def test_the_key_u_shows_one_user_after_the_other_and_then_all():
    found = actions()
    seen = []
    for _ in range(3):
        found.press("u")
        seen.append((found.user, pids(found)))
    assert seen == [("ann", [20]), ("bob", [30]), (None, [10, 20, 30])]


def test_the_selection_stays_on_its_process_while_others_come_and_go():
    found = actions("tab", "down")
    assert found.selected == (0, 20)
    found.update((ProcessRow(gpu_index=0, pid=5), *ROWS))
    assert found.selected == (0, 20)
    found.update(ROWS[:1])
    assert found.selected == (1, 30)
    found.update(())
    assert (found.selected, found.focused) == (None, False)


def test_keys_that_are_not_of_the_processes_are_left_to_others():
    found = actions()
    assert not found.press("up")
    assert not found.press("m")
    assert found.press("tab")
    assert found.press("up")


# -- signals


@pytest.fixture
def worker():
    process = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=-1)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def chosen(pid, *keys, user="me"):
    return actions("tab", *keys, rows=(ProcessRow(gpu_index=0, pid=pid, user=user, command="sleep 600"),))


@pytest.mark.parametrize(("key", "number"), [("T", signal.SIGTERM), ("K", signal.SIGKILL), ("I", signal.SIGINT)])
def test_a_signal_is_sent_after_the_answer_y(worker, key, number):
    found = chosen(worker.pid, key)
    assert str(found.question) == f"send {number.name} to process {worker.pid} of me (sleep 600)? y/n"
    found.press("y")
    assert found.message == f"sent {number.name} to process {worker.pid}"
    assert found.question is None
    expected = {signal.SIGINT: (-signal.SIGINT, 1)}.get(number, (-number,))  # Python ends at SIGINT with a traceback
    assert worker.wait(60) in expected


@pytest.mark.parametrize("answer", ["n", "q", "enter", "escape", "T"])
def test_any_other_answer_sends_nothing(worker, answer):
    found = chosen(worker.pid, "T", answer)
    assert found.message == "no signal was sent"
    assert worker.poll() is None


def test_a_process_that_ended_before_the_answer_gets_no_signal(worker):
    """Its number may belong to another process by then."""
    found = chosen(worker.pid, "T")
    worker.kill()
    worker.wait()
    found.press("y")
    assert found.message == f"process {worker.pid} has ended already"


def test_another_container_or_no_selection_is_reported_instead_of_a_question():
    found = actions("tab", "T")
    assert found.question is None
    assert found.message.startswith("process 10 is not visible from here")
    assert actions("T").message == "no process is selected: Tab moves to the processes"


def test_a_process_of_another_user_is_not_permitted(worker, monkeypatch):
    def refuse(_pid, _number):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    found = chosen(worker.pid, "T", "y", user="root")
    assert found.message == f"process {worker.pid} belongs to root: not permitted"


# -- what the system knows


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


def test_an_ended_process_is_looked_up_again(worker):
    table = ProcessTable()
    found = [DeviceProcess(pid=worker.pid, memory_mib=300.0)]
    assert table.rows(0, found, {})[0].visible
    worker.kill()
    worker.wait()
    assert not table.rows(0, found, {})[0].visible
    table.forget([])
    assert not table._known


def test_a_busy_process_has_its_share_of_a_core():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        table, found = ProcessTable(), [DeviceProcess(pid=busy.pid, memory_mib=1.0)]
        table.rows(0, found, {})
        wait_until(lambda: (table.rows(0, found, {})[0].cpu or 0) > 1, "the process used the processor")
    finally:
        busy.kill()
        busy.wait()


def test_the_host_has_processors_memory_and_load():
    host = host_state()
    assert 0 <= host.cpu <= 100
    assert 0 < host.memory_used < host.memory_total
    assert len(host.load) == 3


# -- on the screen


def shown(*rows, **changes):
    return ProcessList(**{"rows": rows, "total": len(rows), "sort": "GPU", **changes})


def texts(*arguments):
    return [line.plain.rstrip() if isinstance(line, Text) else line for line in process_table(*arguments)]


def test_the_table_has_a_line_per_process():
    lines = texts(shown(*ROWS), 110, 10)
    assert lines[0] == "3 processes, sorted by GPU"
    assert lines[2].split() == ["1", "30", "bob", "C", "500", "MiB", "10", "-", "90", "-", "1m10s", "train", "b"]
    assert lines[4].endswith("not visible from here")


def test_a_rank_of_a_run_is_named_by_its_run():
    row = ProcessRow(gpu_index=0, pid=4, command="python -m gpt2.train x", run="gpt2_adamw", rank=3)
    assert texts(shown(row), 110, 10)[2].endswith("run gpt2_adamw  rank 3")


def test_many_processes_scroll_around_the_selected_one():
    rows = tuple(ProcessRow(gpu_index=0, pid=pid, command=f"p{pid}") for pid in range(100))
    lines = texts(shown(*rows, selected=(0, 50)), 110, 12)
    assert len(lines) == 12
    assert any(line.endswith("p50") for line in lines)
    assert lines[-1] == "processes 47-55 of 100: Tab, then up/down scrolls"


@pytest.mark.parametrize("room", range(3, 9))
def test_a_table_of_any_height_has_the_selected_process(room):
    rows = tuple(ProcessRow(gpu_index=0, pid=pid, command=f"p{pid}") for pid in range(6))
    lines = texts(shown(*rows, selected=(0, 4)), 110, room)
    assert len(lines) == room
    assert any(line.endswith("p4") for line in lines)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_the_table_fits_any_width(width):
    assert all(len(line) <= width for line in texts(shown(*ROWS), width, 10))


def test_the_heading_names_the_user_of_a_filter():
    assert texts(shown(ROWS[0], user="bob", total=3), 100, 9)[0] == "1 process of bob, 3 in total, sorted by GPU"


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


# -- CUDA_VISIBLE_DEVICES and JSON

GPUS = (gpu_sample(0), gpu_sample(1), gpu_sample(2))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0,2", {0, 2}),
        ("GPU-0001", {1}),
        ("GPU-000", set()),  # it matches several
        ("1,-1,2", {1}),
        ("1,9,2", {1}),
        ("", set()),
        ("MIG-GPU-0002/1/0", {2}),
        ("MIG-abc", {1}),
    ],
)
def test_visible_gpus_are_named_as_cuda_names_them(text, expected):
    sliced = gpu_sample(1, slices=("MIG-abcdef",))
    assert visible_gpus(text, (GPUS[0], sliced, GPUS[2])) == expected


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
    assert (first["bus_id"], first["persistence_mode"], first["mig_mode"]) == ("00000000:01:00.0", True, None)
    assert (
        first["processes"][0] | {"pid": 20, "user": "ann", "gpu_memory": 900, "seconds": 4000} == first["processes"][0]
    )
    assert (second["throttle"], second["rank"], second["processes"]) == (None, None, [])
    assert entry["runs"][0]["step"] == 5
    assert entry["driver"] == "580.1"


ALERT = Alert(
    kind=AlertKind.TEMPERATURE, severity=Severity.CRITICAL, since=T0, about="GPU 3", value=88.0, threshold=87.0
)


def test_the_help_and_all_alerts_cover_the_screen():
    assert "sort the processes" in rendered(view(gpu_sample(0), page="help"), 100, 40)
    assert rendered(view(gpu_sample(0), page="alerts"), 100, 40) == "0 alerts\n\nAny key closes this page.\n"


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


def test_a_page_beyond_its_end_shows_its_last_lines():
    """Such as after the terminal was enlarged."""
    beyond = view(gpu_sample(0), page="help", page_at=500)
    assert rendered(beyond, 80, 24).splitlines()[-2].split()[0] == "new"
    assert rendered(beyond, 80, 1) == "enlarge the terminal; any key closes this page\n"


def test_a_question_replaces_the_line_of_keys_even_on_a_small_screen():
    question = Confirmation(action="send SIGTERM to process 1", about="sleep 600")
    for height in (1, 6, 24):
        assert rendered(view(gpu_sample(0), question=question), 80, height).splitlines()[-1].startswith("send")


@pytest.mark.parametrize(
    "about", ["sleep 600", "/home/ann/" * 20 + "train.py --width 768", "\u4e2d\u6587" * 60, "gpt2" * 90]
)
def test_a_question_has_its_process_and_its_answers_at_every_width(about):
    """A long command is shortened, not what it asks for."""
    question = Confirmation(action="send SIGKILL to process 22279 of root", about=about)
    for width in range(5, 200):
        line = rendered(view(gpu_sample(0), question=question), width, 24).splitlines()[-1]
        assert line.endswith("? y/n")
        assert cell_len(line) <= width
        if width >= 42:
            assert line.startswith("send SIGKILL to process 22279 of root")
    assert line.startswith("send SIGKILL to process 22279 of root (")


def test_a_shortened_command_keeps_both_ends_and_is_marked():
    question = Confirmation(action="send SIGKILL to process 22279 of root", about="/usr/bin/python " * 9 + "fake.py")
    screen = view(gpu_sample(0), question=question)
    assert re.search(r"root \(/usr/bin.*….*fake.py\)\? y/n$", plain(render(screen, width=80, height=24)).rstrip())
    assert re.search(r"root \(/usr/bin.*~.*fake.py\)", plain(render(screen, width=80, height=24, glyphs=ASCII)))
