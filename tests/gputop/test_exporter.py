"""The exporter: its metrics, who may read them, the queries of the dashboard, and its service."""

from __future__ import annotations

import configparser
import json
import re
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gputop_values import ROOT, T0, gpu_sample
from kmatrix.gpu.formats.samples import GpuSample, Snapshot
from kmatrix.gpu.nvml.facts import DeviceFacts
from kmatrix.gputop.exporter.command import PORT, _parser, application
from kmatrix.gputop.exporter.metrics import DCGM, LABELS, OWN, RUNS, GpuCollector
from kmatrix.gputop.view import RunLine, ScreenSample
from scripts.environment import VENV

UNIT = ROOT / "docs" / "systemd" / "kmatrix-gpu-exporter.service"
DASHBOARD = ROOT / "docs" / "grafana" / "kmatrix-gpus.json"
# Units of names of our own, by their last word.
# NVIDIA/dcgm-exporter, etc/default-counters.csv.
SELECTED = re.compile(r"\b((?:DCGM|kmatrix)_\w+)(?:\{(.*?)\})?")  # metric and conditions in a query
EXTRA = {
    **{"memory_temperature": 71.0, "fan": 30.0, "xid": 79, "xids": 3, "ecc_uncorrected": 2},
    **{"nvlink_tx": 100.0, "nvlink_rx": 50.0, "pcie_tx": 2.0, "pcie_rx": 1.0},
    **{"sm_active": 90.0, "tensor_active": 55.0, "dram_active": 48.0},
}
RUN = RunLine(name="a", step=5, max_iters=9, loss=3.5, tokens_per_second=1e5, mfu=40.0, left_s=60.0, kwh=0.5)


def sample(time=T0, *, gpus=None, **changes):
    gpus = gpus or (gpu_sample(0, extra=tuple(EXTRA.items()), energy_j=12.5), gpu_sample(1))
    known = {"throttle": {0: ("power cap",), 1: ()}, "ranks": {0: 3}, "runs": {0: "a"}, "progress": (RUN,)}
    return ScreenSample(snapshot=Snapshot(time=time, samples=gpus), driver_version="580.1", **known | changes)


def text_of(*samples):
    collector = GpuCollector(lambda: {0: DeviceFacts(bus_id="00000000:01:00.0")})
    for one in samples:
        collector.ingest(one)
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def parsed(text):
    """Return metric name -> labels and value of each sample, and check that no series is there twice."""
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found.setdefault(one.name, []).append((one.labels, one.value))
    for name, pairs in found.items():
        series = [tuple(sorted(labels.items())) for labels, _ in pairs]
        assert len(set(series)) == len(series), name
    return found


def value(found, name, gpu="0", **labels):
    (one,) = [v for known, v in found[name] if known["gpu"] == gpu and labels.items() <= known.items()]
    return one


def test_every_known_value_is_in_the_units_of_dcgm():
    found = parsed(text_of(sample()))
    assert value(found, "DCGM_FI_DEV_GPU_UTIL") == 95
    assert value(found, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION") == 12_500
    assert value(found, "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL") == pytest.approx(150 * 1.048576)
    assert value(found, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE") == pytest.approx(0.55)
    assert value(found, "DCGM_FI_PROF_PCIE_TX_BYTES") == 2 * 2**20
    assert value(found, "DCGM_FI_DEV_XID_ERRORS") == 79
    assert value(found, "kmatrix_gpu_xid_errors_total") == 3
    assert {name for name in found if name.startswith("DCGM")} == {metric.name for metric in DCGM}
    assert {metric.name for metric in OWN} <= found.keys()
    assert {name for name, _, _ in RUNS} <= found.keys()


def test_the_labels_are_those_of_dcgm_with_run_and_rank():
    labels, _ = parsed(text_of(sample()))["DCGM_FI_DEV_POWER_USAGE"][0]
    assert set(labels) == set(LABELS)
    assert labels["Hostname"] == socket.gethostname()
    assert (labels["gpu"], labels["device"], labels["pci_bus_id"]) == ("0", "nvidia0", "00000000:01:00.0")
    assert (labels["run"], labels["rank"], labels["DCGM_FI_DRIVER_VERSION"]) == ("a", "3", "580.1")


def test_an_unknown_value_has_no_sample():
    found = parsed(text_of(sample()))
    assert len(found["DCGM_FI_DEV_MEMORY_TEMP"]) == 1
    lost = replace(gpu_sample(0), **dict.fromkeys(("utilization", "memory_used", "power", "temperature", "sm_clock")))
    found = parsed(text_of(sample(gpus=(lost,))))
    assert "DCGM_FI_DEV_GPU_UTIL" not in found
    assert value(found, "kmatrix_gpu_lost") == 1


def test_a_lost_gpu_keeps_its_labels_its_newest_error_and_its_counters():
    lost = GpuSample(gpu_index=0, gpu_name="NVIDIA A10G", uuid="GPU-0000", extra=(("xid", 79), ("xids", 3)))
    found = parsed(text_of(sample(T0), sample(T0 + 2, gpus=(lost,), throttle={}, progress=())))
    assert {name for name in found if not name.startswith("kmatrix_exporter")} == {
        *("kmatrix_gpu_lost", "kmatrix_gpu_info", "DCGM_FI_DEV_XID_ERRORS"),
        *("kmatrix_gpu_throttled_seconds_total", "kmatrix_gpu_xid_errors_total"),
    }
    assert value(found, "kmatrix_gpu_lost") == 1


def test_throttled_time_adds_up_while_a_reason_is_active():
    samples = [sample(T0), sample(T0 + 2), sample(T0 + 3, throttle={0: ()}), sample(T0 + 4)]
    found = parsed(text_of(*samples))
    assert value(found, "kmatrix_gpu_throttled_seconds_total", reason="power cap") == 3
    assert value(found, "kmatrix_gpu_throttled_seconds_total", reason="power brake") == 0
    changing = [sample(T0 + second, throttle={0: ("power cap",) if second % 2 else ()}) for second in range(11)]
    assert value(parsed(text_of(*changing)), "kmatrix_gpu_throttled_seconds_total", reason="power cap") == 5


def test_throttled_time_is_that_of_a_clock_that_nobody_sets():
    samples = [sample(T0), sample(T0 + 3602), sample(T0 + 3)]
    monotonic = [
        replace(one, snapshot=replace(one.snapshot, monotonic=at)) for one, at in zip(samples, (7, 9, 10), strict=True)
    ]
    assert value(parsed(text_of(*monotonic)), "kmatrix_gpu_throttled_seconds_total", reason="power cap") == 3


def test_counters_never_fall_when_the_clock_is_set_back_or_the_driver_is_reloaded():
    reloaded = gpu_sample(0, extra=(("xids", 0),))
    found = parsed(text_of(sample(T0), sample(T0 + 2), sample(T0 - 100), sample(T0 - 99, gpus=(reloaded,))))
    assert value(found, "kmatrix_gpu_throttled_seconds_total", reason="power cap") == 3
    assert value(found, "kmatrix_gpu_xid_errors_total") == 3


@pytest.mark.parametrize("name", ["ordinary", 'with "quotes"\nand lines', "ünïcode"])
def test_the_name_of_a_run_cannot_break_the_text(name):
    found = parsed(text_of(sample(runs={0: name}, progress=(replace(RUN, name=name),))))
    assert found["DCGM_FI_DEV_POWER_USAGE"][0][0]["run"] == name
    assert found["kmatrix_run_step"][0][0]["run"] == name


# -- requests


def ask(path="/metrics", method="GET", host="localhost:9835"):
    collector = GpuCollector(dict)
    collector.ingest(sample())
    started = []
    environ = {"PATH_INFO": path, "REQUEST_METHOD": method, "HTTP_HOST": host, "QUERY_STRING": ""}
    body = b"".join(application(collector)(environ, lambda status, headers: started.append((status, dict(headers)))))
    return started[0][0][:3], body.decode(), started[0][1]


def test_get_and_head_of_metrics_are_answered_and_nothing_else():
    status, body, headers = ask()
    assert (status, "DCGM_FI_DEV_GPU_UTIL" in body) == ("200", True)
    assert headers["Content-Type"].startswith("text/plain; version=")
    assert ask(method="HEAD")[:2] == ("200", "")
    assert ask("/")[0] == "404"
    assert ask(method="POST")[0] == "405"


@pytest.mark.parametrize("host", ["evil.example", "", "127.0.0.1.evil.example"])
def test_a_request_that_names_another_host_is_refused(host):
    status, body, _ = ask(host=host)
    assert status == "421"
    assert "DCGM" not in body


# -- the dashboard


def test_every_metric_and_label_of_the_dashboard_is_exported():
    found = parsed(text_of(sample()))
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [*(one["definition"] for one in board["templating"]["list"] if one["type"] == "query")]
    for query in asked:
        selected = SELECTED.findall(query)
        assert selected, query
        for name, conditions in selected:
            assert name in found, f"{name} of {query}"
            labels = set(found[name][0][0])
            assert set(re.findall(r"(\w+)=~", conditions)) <= labels, query
        for group in re.findall(r"\bon \(([\w, ]+)\)", query):
            assert all(set(group.split(", ")) <= set(found[name][0][0]) for name, _ in selected), query
        for group in re.findall(r"\bby \(([\w, ]+)\)", query):
            assert set(group.split(", ")) <= set(found[selected[0][0]][0][0]), query


# -- the service


def service():
    """Return the unit for systemd, with the paths of this checkout."""
    found = configparser.ConfigParser(interpolation=None)
    found.optionxform = str  # names are case-sensitive
    found.read_string(UNIT.read_text().replace("/opt/kmatrix", str(ROOT)))
    return found


@pytest.mark.process
def test_the_service_starts_a_command_that_exists():
    python, *words = service()["Service"]["ExecStart"].split()
    name, _, path = service()["Service"]["Environment"].partition("=")
    assert python == str(VENV / "bin" / "python")
    assert _parser().parse_args(words[2:]).port == PORT
    done = subprocess.run(
        [sys.executable, *words, "--help"], cwd="/", env={name: path}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "--port" in done.stdout) == (0, True), done.stderr
