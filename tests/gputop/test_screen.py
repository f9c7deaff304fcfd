"""The screen of gputop: what it draws from which values, and the meaning of keys."""

import math
import os
import pty
import re
import termios
from dataclasses import fields
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from gputop_values import T0, gpu_sample, line_of, rendered, view
from kmatrix.gpu.devices import ExtraMetrics
from kmatrix.gpu.formats.samples import GpuSample, Snapshot, aggregate
from kmatrix.gputop.terminal.glyphs import ASCII, UNICODE
from kmatrix.gputop.terminal.keyboard import NAMES, Keyboard, decode
from kmatrix.gputop.terminal.screen import render
from kmatrix.gputop.view import (
    UNITS,
    DeviceRow,
    History,
    HostState,
    Metric,
    ProcessRow,
    RunLine,
    View,
)
from kmatrix.status.alerts import Alert, AlertKind, Severity

# ---- drawing: a pure function -----------------------------------------------------------------------------------

floats = st.none() | st.floats(0, 1e6) | st.sampled_from([0.0, math.inf, -1.0, 1e300])
names = st.text(max_size=40)
samples = st.builds(
    GpuSample,
    gpu_index=st.integers(0, 300),
    gpu_name=st.sampled_from(["NVIDIA A10G", "NVIDIA A10G (simulated)", "\u4e2d\u6587 GPU", "a\x1b[31mb\n\t", ""]),
    uuid=st.text(max_size=5),
    **dict.fromkeys(("utilization", "memory_used", "memory_total", "power", "power_limit"), floats),
    **dict.fromkeys(("power_instant", "temperature", "sm_clock", "energy_j"), floats),
    extra=st.dictionaries(
        st.sampled_from([one.name for one in fields(ExtraMetrics)]), st.floats(0, 1e12), max_size=13
    ).map(lambda known: tuple(known.items())),
)
rows = st.builds(
    DeviceRow,
    sample=samples,
    rank=st.none() | st.integers(0, 999),
    run=st.text(max_size=30),
    throttle=st.none() | st.lists(st.sampled_from(["power cap", "heat (hardware)", "new\nkind", ""])).map(tuple),
    age=st.none() | st.floats(0, 1e9),
    history=st.dictionaries(st.sampled_from(list(Metric)), st.lists(floats, max_size=70).map(tuple)),
)
views = st.builds(
    View,
    rows=st.lists(rows, max_size=6).flatmap(
        lambda some: st.sampled_from([0, 1, 11]).map(lambda n: tuple(some * n)[:64])
    ),
    mode=st.sampled_from(["live", "attached", "replay", "paused"]),
    clock=st.text(max_size=30),
    title=st.text(max_size=50),
    notices=st.lists(st.text(max_size=90), max_size=3).map(tuple),
    alerts=st.lists(
        st.builds(
            Alert,
            kind=st.sampled_from(AlertKind),
            severity=st.sampled_from(Severity),
            since=st.floats(0, 1e9),
            about=st.text(max_size=20),
            value=floats,
            threshold=floats,
            reason=st.text(max_size=40),
        ),
        max_size=6,
    ).map(tuple),
    metric=st.sampled_from(Metric),
    selected=st.none() | st.integers(0, 300),
    large=st.booleans(),
    charts=st.booleans(),
    page=st.sampled_from(["", "help", "alerts"]),
    progress=st.lists(st.builds(RunLine, name=names, step=st.none() | st.integers(0, 9), loss=floats), max_size=5).map(
        tuple
    ),
    host=st.none()
    | st.builds(HostState, cpu=st.floats(0, 100), memory_used=floats, memory_total=st.just(9e4), load=st.none()),
    processes=st.none()
    | st.lists(
        st.builds(
            ProcessRow,
            gpu_index=st.integers(0, 300),
            pid=st.integers(1, 2**22),
            user=st.none() | names,
            command=names,
            memory_mib=floats,
            sm=floats,
            cpu=floats,
            run=names,
            visible=st.booleans(),
        ),
        max_size=6,
    ).map(tuple),
)


@settings(max_examples=50, deadline=None)
@given(views, st.integers(0, 200), st.none() | st.integers(0, 70), st.sampled_from([UNICODE, ASCII]))
def test_no_line_is_wider_and_no_screen_taller_than_the_terminal(screen_view, width, height, glyphs):
    lines = render(screen_view, width=width, height=height, glyphs=glyphs)
    assert all(cell_len(line.plain) <= width for line in lines)
    assert height is None or len(lines) <= height
    assert not any(not character.isprintable() for line in lines for character in line.plain)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.data(), st.integers(20, 200), st.integers(6, 60), st.booleans())
def test_the_selected_gpu_is_always_visible(count, data, width, height, large):
    chosen = data.draw(st.integers(0, count - 1))
    text = rendered(view(*(gpu_sample(i) for i in range(count)), selected=chosen, large=large), width, height)
    assert re.search(rf"^{chosen}\s|GPU {chosen}\b", text, re.MULTILINE)


def process_rows(count):
    return tuple(ProcessRow(gpu_index=0, pid=pid, command=f"p{pid}") for pid in range(count))


def test_the_columns_have_titles_also_if_not_all_gpus_fit():
    for count, processes, (width, height) in product((1, 64), (0, 3), ((200, 60), (80, 24), (40, 8))):
        screen = view(*(gpu_sample(i) for i in range(count)), selected=0, processes=process_rows(processes))
        text = rendered(screen, width, height)
        assert re.search(r"^GPU .*util", text, re.MULTILINE)
        whole = all(re.search(rf"^{i}\s", text, re.MULTILINE) for i in range(count))
        assert ("up/down scrolls" in text) == (not whole)


def test_charts_below_the_table_are_shown_however_many_gpus_and_processes_there_are():
    for count, processes, (width, height) in product((4, 64), (0, 60), ((200, 60), (80, 24))):
        screen = view(*map(gpu_sample, range(count)), selected=1, charts=True, processes=process_rows(processes))
        text = rendered(screen, width, height)
        assert "GPU 1 utilization 95 %" in text
        assert line_of(text, 1)
        assert " p0\n" in text or not processes


def test_the_line_of_a_gpu_has_all_its_values():
    text = line_of(rendered(view(gpu_sample(3), ranks={3: 7}, throttle={3: ("heat (hardware)", "power cap")}), 160), 3)
    assert re.search(r"^3 +7 .*95%.*12\.5/24\.0.*150/300 +60C +1710 +TP", text)


def test_unknown_values_are_dashes_and_never_zero():
    unknown = dict.fromkeys(("utilization", "memory_used", "memory_total", "power", "power_limit", "temperature"))
    text = rendered(view(gpu_sample(1, **unknown, sm_clock=None), gpu_sample(2)), 160)
    assert "lost" in line_of(text, 1)
    assert not re.search(r"\d", line_of(text, 1)[1:])
    assert "1 lost" in text
    assert "power 150 W" in text  # the total of the live GPUs


def test_totals_equal_those_of_the_multi_gpu_file():
    ones = [gpu_sample(0), gpu_sample(1, utilization=70.0, memory_used=9000.0), gpu_sample(2, power=None)]
    totals = aggregate(ones)
    assert f"util {totals['average_utilization']:.0f}%" in rendered(view(*ones))
    used, total = totals["total_memory_used"] / 1024, totals["total_memory_total"] / 1024
    assert f"mem {used:.1f} of {total:.1f} GiB" in rendered(view(*ones))
    assert f"power {totals['total_power']:.0f} W" in rendered(view(*ones))


@pytest.mark.parametrize(
    ("second", "expected"),
    [(100.0, "CV 0.0% Excellent"), (120.0, "CV 9.1% Good"), (130.0, "CV 13.0% Fair"), (200.0, "CV 33.3% Poor")],
)
def test_balance_is_shown_with_its_class(second, expected):
    assert f"memory {expected}" in rendered(
        view(gpu_sample(0, memory_used=100.0), gpu_sample(1, memory_used=second)), 160
    )


@pytest.mark.parametrize("width", [16, 20, 80, 200])
def test_simulated_gpus_are_marked_at_every_width(width):
    simulated = view(gpu_sample(0), gpu_sample(1, name="NVIDIA A10G (simulated)"))
    assert "SIMULATED" in rendered(simulated, width, 24)
    assert "SIMULATED" not in rendered(view(gpu_sample(0)), width, 24)


def test_a_name_with_escape_codes_cannot_move_the_cursor():
    text = rendered(view(gpu_sample(0, name="evil\x1b[2J\r\n"), gpu_sample(1)), 160)
    assert "\x1b" not in text
    assert "\r" not in text


def test_one_metric_is_enlarged_with_its_value_and_unit():
    for metric in Metric:
        text = rendered(view(gpu_sample(0), gpu_sample(1), metric=metric, large=True), 100, 30)
        assert f"GPU 0 {metric} " in text
        assert f" {UNITS[metric]} of " in text
        assert "mem GiB" not in text  # the chart replaces the table


# ---- the last minute ---------------------------------------------------------------------------------------------


def test_one_second_of_history_is_the_mean_of_its_samples_oldest_first():
    history = History()
    for second, value in ((0.0, 10.0), (0.5, 20.0), (2.0, 50.0)):
        history.add(Snapshot(time=T0 + second, samples=(gpu_sample(0, utilization=value),)))
    assert history.series(0, Metric.UTILIZATION, T0 + 2)[-4:] == (None, 15.0, None, 50.0)
    assert len(history.series(0, Metric.UTILIZATION, T0 + 2)) == 120
    assert set(history.series(0, Metric.UTILIZATION, T0 + 200)) == {None}
    assert set(history.series(9, Metric.UTILIZATION, T0)) == {None}


def test_the_age_is_that_of_the_last_changed_value():
    history = History()
    for second, power in ((0, 150.0), (1, 151.0), (2, 151.0), (3, 151.0)):
        history.add(Snapshot(time=T0 + second, samples=(gpu_sample(0, power=power),)))
    assert history.age(0, T0 + 3) == 2.0
    assert history.age(1, T0 + 3) is None


def test_a_clock_that_is_set_back_restarts_the_history():
    history = History()
    history.add(Snapshot(time=T0, samples=(gpu_sample(0),)))
    history.add(Snapshot(time=T0 - 3600, samples=(gpu_sample(0, utilization=1.0),)))
    assert history.series(0, Metric.UTILIZATION, T0 - 3600)[-1] == 1.0
    assert history.age(0, T0 - 3600) == 0.0
    history.add(Snapshot(time=T0 - 3630, samples=(gpu_sample(0),)))
    assert history.series(0, Metric.UTILIZATION, T0 - 3600)[-1] is None  # not measured with this clock yet


# ---- keys --------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([*NAMES, "q", "m", "1", "\x1b[15~"])), st.data())
def test_keys_are_decoded_however_the_terminal_splits_them(typed, data):
    text = "".join(typed)
    split = data.draw(st.integers(0, len(text)))
    first, rest = decode(text[:split])
    second, left = decode(rest + text[split:])
    assert (first + second, left) == (decode(text)[0], "")
    assert first + second == [NAMES.get(key, key) for key in typed if key != "\x1b[15~"]


def test_the_keyboard_restores_the_terminal_settings():
    parent, child = pty.openpty()
    before = termios.tcgetattr(child)
    with Keyboard(child) as keyboard:
        assert not termios.tcgetattr(child)[3] & (termios.ICANON | termios.ECHO)
        os.write(parent, b"q\x1b[A")
        assert keyboard.read(1.0) == ["q", "up"]
    assert termios.tcgetattr(child) == before
    os.close(parent)
    os.close(child)


def test_ranks_that_have_ended_are_not_lost():
    ranks = [
        GpuSample(gpu_index=i, gpu_name=f"CPU rank {i}", uuid=f"cpu-rank-{i}", memory_total=1000.0) for i in (0, 1)
    ]
    text = rendered(view(*ranks, throttle={0: (), 1: ()}))
    assert "2 not running" in text
    assert "lost" not in text
    assert "1 lost" in rendered(view(*ranks, throttle={0: ()}))  # the recorder saw rank 1 exit before the other
