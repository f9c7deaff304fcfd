"""Simulated GPUs: NVIDIA's client library runs on them and reads the values of the scenario.

Each query runs in its own process, because the loader looks for the library once per process.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kmatrix.simulate.library as stubs
from kmatrix.errors import ConfigError, KmatrixError, LaunchError
from kmatrix.simulate.library import SCENARIOS, build, environment
from kmatrix.simulate.scenario import ERRORS, QUANTITIES, SETTINGS, parse
from pages import ROOT
from skips import require_program

pytestmark = pytest.mark.process

EVERYWHERE = {"PYTHONPATH": os.pathsep.join([str(ROOT / "lib"), str(ROOT)])}
INIT = """
import json, time
import pynvml as n
n.nvmlInit()
def handle(index):
    return None if code("nvmlDeviceGetHandleByIndex", index) else n.nvmlDeviceGetHandleByIndex(index)
def code(name, *arguments):
    try:
        getattr(n, name)(*arguments)
    except n.NVMLError as error:
        return error.value
    return 0
def fields(gpu, *ids):
    return [(v.nvmlReturn, v.value.ullVal, v.timestamp) for v in n.nvmlDeviceGetFieldValues(gpu, list(ids))]
def answer(value):
    print(json.dumps(value))
gpus = [handle(i) for i in range(n.nvmlDeviceGetCount())]
"""
AVERAGE, INSTANT, ENERGY = 185, 186, 83  # fields of nvmlDeviceGetFieldValues


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_program("gcc")
    return build(tmp_path_factory.mktemp("simulated"))


@pytest.fixture
def query(library: Path, tmp_path: Path) -> Callable[..., Any]:
    """Run Python code in a process that sees the GPUs of a scenario; return the printed JSON."""

    def run(scenario: str, script: str, *, gpus: int | None = None, epoch: float | None = None) -> Any:
        path = tmp_path / "test.scn"
        path.write_text(scenario)
        environ = os.environ | EVERYWHERE | environment(library, path, gpus, epoch)
        command = [sys.executable, "-c", INIT + script]
        completed = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert completed.returncode == 0, completed.stderr
        return json.loads(completed.stdout)

    return run


def refusal(tmp_path: Path, scenario: str, gpus: int | None = None) -> str:
    path = tmp_path / "x.scn"
    path.write_text(scenario)
    with pytest.raises(ConfigError) as raised:
        parse(path, gpus)
    return str(raised.value).replace(f"{tmp_path}/", "")


# ---- values read by the client library


def test_pynvml_reads_every_value_of_the_scenario(query):
    scenario = """
        freeze 10
        gpus 2
        0 1 util 71
        0 1 memutil 33
        0 1 mem 9000
        0 1 memtotal 81920
        0 1 limit 700
        0 1 temp 77
        0 1 smclk 1290
        0 1 fan 55
        0 1 pcie_tx 1234
        0 1 pcie_rx 4321
        0 1 ecc_u 1
        0 1 throttle power_cap+thermal
    """
    values = query(
        scenario,
        """
g, f = gpus[1], lambda name, *more: getattr(n, "nvmlDeviceGet" + name)(gpus[1], *more)
u, m, m2 = f("UtilizationRates"), f("MemoryInfo"), n.nvmlDeviceGetMemoryInfo(g, n.nvmlMemory_v2)
answer({
    "util": (u.gpu, u.memory), "memory": [v // 2**20 for v in (m.used, m.total, m.free)],
    "memory2": [v // 2**20 for v in (m2.used, m2.total, m2.free)],
    "limit": f("EnforcedPowerLimit"), "temp": (f("Temperature", 0), f("TemperatureV", 0)),
    "sm": f("ClockInfo", 1), "fan": f("FanSpeed"),
    "pcie": (f("PcieThroughput", 0), f("PcieThroughput", 1)),
    "ecc": f("TotalEccErrors", 1, 0),
    "throttle": (f("CurrentClocksEventReasons"), f("CurrentClocksThrottleReasons")),
})
""",
    )
    assert values == {
        "util": [71, 33],
        "memory": [9000, 81920, 72920],
        "memory2": [9000, 81920, 72920],
        "limit": 700000,
        "temp": [77, 77],
        "sm": 1290,
        "fan": 55,
        "pcie": [1234, 4321],
        "ecc": 1,
        "throttle": [0x24, 0x24],
    }


def test_gpus_are_distinguished_and_found_by_index_and_uuid(query):
    values = query(
        "gpus 3\n",
        """
uuids, buses = [[f(g) for g in gpus] for f in (n.nvmlDeviceGetUUID, lambda g: n.nvmlDeviceGetPciInfo(g).busId)]
found = [n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(u)) for u in uuids]
answer([len(set(uuids)), len(set(buses)), found, code("nvmlDeviceGetHandleByIndex", 3)])
""",
    )
    assert values == [3, 3, [0, 1, 2], 2]


def test_every_name_ends_in_simulated(query):
    for line in ("", f"name {'n' * 51}"):
        assert query(line, "answer([n.nvmlDeviceGetName(g) for g in gpus])")[0].endswith(" (simulated)")


def test_a_newer_function_is_not_supported_rather_than_missing(library):
    loaded = ctypes.CDLL(str(library))
    missing = [name for name in stubs.symbols() if not hasattr(loaded, name)]
    assert missing == []
    assert loaded.nvmlDeviceGetNvLinkErrorCounter() == stubs.NOT_SUPPORTED


def test_without_a_scenario_the_library_is_a_machine_without_a_driver(library):
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).nvmlInit_v2())"
    completed = subprocess.run([sys.executable, "-c", code], env={}, capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == str(ERRORS["no_driver"])


# ---- power, energy and time


def energy_of(steps: list[tuple[float, float]], until: float) -> float:
    """Return watts x seconds from 0 to `until`, step by step. Without a line the GPU draws 150 W."""
    edges = [(0.0, 150.0), *sorted(steps)]
    ends = [*(start for start, _ in edges[1:]), until]
    return sum(watts * max(0.0, min(end, until) - start) for (start, watts), end in zip(edges, ends, strict=True))


STEPS = st.lists(
    st.tuples(st.integers(1, 300).map(lambda tenths: tenths / 10), st.integers(0, 700).map(float)),
    max_size=6,
    unique_by=lambda step: step[0],
)


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gpus=st.lists(STEPS, min_size=4, max_size=4), until=st.integers(0, 400).map(lambda tenths: tenths / 10))
def test_the_energy_counter_is_the_exact_integral_of_the_scripted_power(query, gpus, until):
    lines = [f"{second} {gpu} power {watts}" for gpu, steps in enumerate(gpus) for second, watts in steps]
    values = query(
        "\n".join([f"freeze {until}", "gpus 4", *lines]), f"answer([fields(g, {ENERGY})[0][1] for g in gpus])"
    )
    assert values == pytest.approx([energy_of(steps, until) * 1000 for steps in gpus], abs=1)


def test_a_range_is_spread_evenly_over_the_gpus_of_a_line(query):
    read = "answer([n.nvmlDeviceGetUtilizationRates(g).gpu for g in gpus])"
    assert query("freeze 0\ngpus 5\n0 * util 90..50\n", read) == [90, 80, 70, 60, 50]
    assert query("freeze 0\ngpus 5\n0 * util 99\n0 4,0,2 util 10..20\n", read) == [15, 99, 20, 99, 10]
    assert query("freeze 0\ngpus 1\n0 * util 90..50\n", read) == [90]


def test_a_loop_repeats_the_power_and_the_counter_continues(query):
    scenario = "freeze 25\nloop 10\n0 0 power 100\n4 0 power 300\n"
    energy, power = query(scenario, f"answer([fields(gpus[0], {ENERGY})[0][1], n.nvmlDeviceGetPowerUsage(gpus[0])])")
    assert energy == 1000 * (2 * (4 * 100 + 6 * 300) + 4 * 100 + 1 * 300)
    assert power == 300_000  # the mean of seconds 4 to 5 of the third pass


def test_average_and_instant_power_are_means_over_a_long_and_a_short_window(query):
    scenario = "freeze 10\nwindow_ms 1000\ninstant_ms 25\n0 0 power 100\n9.5 0 power 700\n9.99 0 power 300\n"
    values = query(
        scenario,
        f"answer([n.nvmlDeviceGetPowerUsage(gpus[0])] + [v for _, v, _ in fields(gpus[0], {AVERAGE}, {INSTANT})])",
    )
    average = (0.5 * 100 + 0.49 * 700 + 0.01 * 300) * 1000
    assert values == [average, average, (0.015 * 700 + 0.010 * 300) / 0.025 * 1000]


# ---- failing GPUs


def test_a_gpu_lost_before_the_start_has_no_handle_but_is_counted(library, tmp_path):
    path = tmp_path / "lost.scn"
    path.write_text("gpus 3\n0 1 all !lost\n")
    code = "from kmatrix.gpu.nvml.detect import detect; d = detect(); print([g.index for g in d.gpus], d.notes)"
    environ = os.environ | EVERYWHERE | environment(library, path)
    completed = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "[0, 2] ('GPU 1 is ignored: GPU is lost',)"


def test_a_single_value_can_fail_and_recover(query):
    scenario = "freeze {}\n0 0 fan !not_supported\n5 0 temp !timeout\n6 0 temp ok\n0 * instant !3\n0 0 temp 71\n"
    script = f"""
answer([code("nvmlDeviceGetFanSpeed", gpus[0]), code("nvmlDeviceGetTemperature", gpus[0], 0),
        [c for c, _, _ in fields(gpus[0], {INSTANT}, {AVERAGE}, {ENERGY})]])
"""
    assert query(scenario.format(5), script) == [3, 10, [3, 0, 0]]
    assert query(scenario.format(6), "answer(n.nvmlDeviceGetTemperature(gpus[0], 0))") == 71


def test_processes_appear_and_exit_with_their_memory(query):
    scenario = "freeze {}\n1 0 process 41 8000\n1 0 process 42 300.5\n2 0 process 41 9000\n3 0 process 42 0\n"
    read = "answer(sorted((p.pid, p.usedGpuMemory / 2**20) for p in n.nvmlDeviceGetComputeRunningProcesses(gpus[0])))"
    results = [query(scenario.format(second), read) for second in (0, 1, 2, 3)]
    assert results == [[], [[41, 8000], [42, 300.5]], [[41, 9000], [42, 300.5]], [[41, 9000]]]


def test_a_truncated_table_is_refused_and_never_played_partially(library):
    environ = environment(library, None, 2)
    table = Path(environ["KMATRIX_SIMULATE"])
    content = table.read_text()
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).nvmlInit_v2())"
    for damaged in (
        content[: len(content) // 2],
        content.replace("end\n", ""),
        content.replace("gpus 2", "gpus 999"),
        "",
    ):
        truncated = table.with_name("cut.table")
        truncated.write_text(damaged)
        variables = environ | {"KMATRIX_SIMULATE": str(truncated)}
        completed = subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
        )
        assert completed.stdout.strip() == str(ERRORS["unknown"])
        assert "the table is damaged" in completed.stderr


def test_the_lost_gpu_demo_loses_one_gpu_and_restores_it_with_a_new_counter(query):
    scenario = "freeze {}\n" + (SCENARIOS / "lost.scn").read_text()
    read = f"answer([g and fields(g, {ENERGY})[0][1] for g in gpus])"
    assert query(scenario.format(19), read) == [19 * 228_000] * 4
    assert query(scenario.format(30), read) == [30 * 228_000, 30 * 228_000, None, 30 * 228_000]
    assert query(scenario.format(63), read) == [63 * 228_000, 63 * 228_000, 3 * 22_000, 63 * 228_000]


# ---- parsing a scenario

INVALID_SCENARIOS = [
    ("gpus 4\n5 0 utl 3\n", "x.scn:2: '5 0 utl 3'", "unknown field utl"),
    ("5 0 util 101\n", "x.scn:1:", "101 is not a number from 0 to 100"),
    ("\n# calm\n5 0 util much\n", "x.scn:3:", "much is not a number"),
    ("5 0 util nan\n", "x.scn:1:", "nan is not a number from"),
    ("5 0 util\n", "x.scn:1:", "an event has at least four words"),
    ("5 0 util 3 4\n", "x.scn:1:", "util takes one value"),
    ("5 0 process 12\n", "x.scn:1:", "process takes two values"),
    ("5 0 process 0 12\n", "x.scn:1:", "0 is not an integer from 1"),
    ("-1 0 util 3\n", "x.scn:1:", "-1 is not a number from 0"),
    ("5 x util 3\n", "x.scn:1:", "x is not a number"),
    ("5 0 all 3\n", "x.scn:1:", "all does not take a value"),
    ("5 0 instant 3\n", "x.scn:1:", "instant does not take a value"),
    ("5 0 temp !hot\n", "x.scn:1:", "unknown driver error !hot"),
    ("5 0 util 3..\n", "x.scn:1:", " is not a number"),
    ("5 0 util 3..200\n", "x.scn:1:", "200 is not a number from 0 to 100"),
    ("5 0 all !lost..ok\n", "x.scn:1:", "is not a range of values"),
    ("5 0 throttle heat\n", "x.scn:1:", "unknown reason heat"),
    ("gpus 2\n5 2 util 3\n", "x.scn:2:", "GPU 2 does not exist, the scenario has 2 GPUs"),
    ("gpus 65\n", "x.scn:1:", "65 is not an integer from 0 to 64"),
    ("gpus 2.5\n", "x.scn:1:", "2.5 is not an integer"),
    ("loop 60\n61 0 util 3\n", "x.scn:2:", "second 61 is never reached"),
    ("loop 0\n", "x.scn:1:", "0 is not a number from 0.001"),
    ("loop 60\nloop 30\n", "x.scn:2:", "loop is already set in line 1"),
    ("period_ms util 100\nperiod_ms util 50\n", "x.scn:2:", "period_ms util is already set in line 1"),
    ("period_ms utl 100\n", "x.scn:1:", "unknown field utl"),
    ("colour blue\n", "x.scn:1: 'colour blue'", "unknown setting colour"),
    ("name\n", "x.scn:1:", "name must have 1 to 51 ASCII characters"),
    (f"name {'n' * 52}\n", "x.scn:1:", "name must have 1 to 51 ASCII characters"),
    ("speed\n", "x.scn:1:", "speed takes one value"),
    ("init 9\n", "x.scn:1:", "unknown driver error 9"),
    ("0 0 mem 30000\n", "x.scn:1:", "30000 MiB in use exceed 23028 MiB in total at second 0"),
    ("0 0 mem 20000\n5 0 memtotal 16384\n", "x.scn:2:", "20000 MiB in use exceed 16384 MiB in total at second 5"),
]


def test_an_invalid_scenario_is_refused_with_file_line_and_cause(tmp_path):
    for scenario, location, cause in INVALID_SCENARIOS:
        message = refusal(tmp_path, scenario)
        assert message.startswith(location)
        assert cause in message
        assert "\n  hint: " in message
    assert "number of simulated GPUs: 65" in refusal(tmp_path, "", gpus=65)


WORDS = ["0", "1", "5", "*", "0,1", "1e400", "-3", "0x4", "!lost", "!", "!0", "ok", "process", "#", "", "٣", "inf"]
LINES = st.lists(
    st.sampled_from([*WORDS, *QUANTITIES, *SETTINGS, "gpus", "name"]) | st.text(max_size=4), min_size=1, max_size=6
)


@given(st.lists(LINES, max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_scenario_is_either_played_or_refused(tmp_path, lines):
    path = tmp_path / "any.scn"
    path.write_text("\n".join(" ".join(words) for words in lines), encoding="utf-8")
    try:
        table = parse(path).table()
    except KmatrixError:
        return
    assert table.endswith("\nend\n")


# ---- building and running


def test_without_a_compiler_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError) as raised:
        build(tmp_path)
    assert (
        str(raised.value)
        == "simulated GPUs need a C compiler\n  why: neither gcc nor cc was found\n  hint: install gcc"
    )


def program(library: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | EVERYWHERE
    command = [sys.executable, "-m", "kmatrix.simulate", "--library", str(library.parent.parent), *arguments]
    return subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_program_runs_a_command_with_simulated_gpus_and_returns_its_status(library):
    code = "import sys; from kmatrix.gpu.nvml.detect import detect; sys.exit(40 + len(detect().gpus))"
    assert program(library, "--gpus", "3", "--", sys.executable, "-c", code).returncode == 43
    assert program(library, "--scenario", "straggler", "--", sys.executable, "-c", code).returncode == 44


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gpus", "2"], "error: no command to run with simulated GPUs"),
        (["--", "no-such-program"], "error: cannot start no-such-program"),
        (["--scenario", "none.scn", "--", "true"], "error: cannot read the scenario none.scn"),
        (["--gpus", "99", "--", "true"], "error: invalid number of simulated GPUs: 99"),
    ],
)
def test_the_program_refuses_invalid_arguments_with_a_message(library, arguments, message):
    completed = program(library, *arguments)
    assert completed.returncode == 2
    assert completed.stderr.startswith(message)
    assert "Traceback" not in completed.stderr
