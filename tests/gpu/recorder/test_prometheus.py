"""The metrics that a recorder exports, parsed with the parser of Prometheus."""

import contextlib
import socket
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kmatrix.gpu.devices import COLUMN_INDEX, UNKNOWN, WIDTH, Device, DeviceLimits, ExtraMetrics
from kmatrix.gpu.recorder.prometheus import Gauges, MetricsServer, families, text_of
from kmatrix.records.files import read_json
from recordings import sample_count, stop_recorder
from waiting import wait_until

SCENARIO = (
    "0 * util 97\n0 * power 200\n0 * mem 10000..20000\n0 * fan 40\n0 1 throttle thermal\n0 0 temp !not_supported\n"
)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def scrape(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as response:
        return response.headers["Content-Type"], response.read().decode()


def parse(text):
    """Return sample name -> list of (labels, value), and check the properties of all our metrics."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("kmatrix_")
        assert family.documentation.endswith(".")
        assert family.type in ("gauge", "counter")
        for sample in family.samples:
            assert family.type != "counter" or sample.name.endswith("_total")
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def check_responds(port):
    with contextlib.suppress(OSError):
        return "kmatrix_gpu_fan_ratio" in scrape(port)[1]
    return False


def test_a_scrape_returns_every_metric_in_base_units_during_a_recording(start_recorder, run_dir):
    port = free_port()
    process = start_recorder("--hz", 20, "--prometheus", port, lines=SCENARIO, gpus=2)
    wait_until(lambda: check_responds(port) and sample_count(run_dir) > 45, "it responds")
    kind, text = scrape(port)
    assert kind.startswith("text/plain; version=0.0.4")
    found = parse(text)
    labels, _ = found["kmatrix_gpu_power_watts"][1]
    assert labels == {"gpu": "1", "uuid": "GPU-00000000-0000-4000-8000-000000000001", "run": "gpt2_adamw_4gpu"}
    values = {name: [value for _, value in pairs] for name, pairs in found.items()}
    assert values["kmatrix_gpu_utilization_ratio"] == pytest.approx([0.97, 0.97])
    assert values["kmatrix_gpu_memory_used_bytes"] == [10000 * 2**20, 20000 * 2**20]
    assert values["kmatrix_gpu_fan_ratio"] == pytest.approx([0.4, 0.4])
    assert values["kmatrix_gpu_sm_clock_hertz"] == [1.71e9, 1.71e9]
    assert values["kmatrix_gpu_lost"] == [0, 0]
    assert [label["gpu"] for label, _ in found["kmatrix_gpu_temperature_celsius"]] == ["1"], (
        "unknown is absent, never 0"
    )
    assert found["kmatrix_gpu_throttled_seconds_total"][0][0]["reason"] == "heat (software)"
    assert "(simulated)" in found["kmatrix_gpu_info"][0][0]["name"]
    assert found["kmatrix_gpu_info"][0][0]["run_id"] == "0123456789"
    later = parse(scrape(port)[1])
    assert later["kmatrix_gpu_energy_joules_total"][0][1] >= found["kmatrix_gpu_energy_joules_total"][0][1] > 0
    wait_until(lambda: sample_count(run_dir) > 60, "it records")
    rss = next(
        line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("VmRSS")
    )
    assert int(rss.split()[1]) < 25 * 1024
    stop_recorder(process)
    totals = read_json(run_dir.gpu_summary)["gpus"][0]
    assert totals["joules"] >= later["kmatrix_gpu_energy_joules_total"][0][1]


@pytest.mark.parametrize(
    ("request_line", "status"),
    [("GET /nothing HTTP/1.1\r\nHost: localhost", 404), ("POST /metrics HTTP/1.1\r\nHost: 127.0.0.1:9400", 405)],
)
def test_other_requests_are_refused_and_hanging_clients_do_not_stop_the_recorder(
    start_recorder, run_dir, request_line, status
):
    port = free_port()
    process = start_recorder("--hz", 20, "--prometheus", port, gpus=1)
    wait_until(lambda: check_responds(port), "it responds")
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"{request_line}\r\n\r\n".encode())
        assert client.recv(100).decode().split()[1] == str(status)
    with socket.create_connection(("127.0.0.1", port)):
        pass  # sends nothing and disconnects
    with socket.create_connection(("127.0.0.1", port)):  # sends nothing and stays connected
        wait_until(lambda: check_responds(port), "the next request is served")
    stop_recorder(process)


def test_a_port_in_use_is_reported_in_one_line_and_the_recording_continues(start_recorder, run_dir):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        process = start_recorder("--hz", 20, "--prometheus", port, gpus=1)
        wait_until(lambda: sample_count(run_dir) > 5, "5 samples")
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert errors.startswith(f"kmatrix recorder: no metrics for Prometheus: cannot use port {port} of 127.0.0.1: ")
    assert len(errors.splitlines()) == 1
    assert any("no metrics for Prometheus" in text for text in read_json(run_dir.gpu_summary)["warnings"])


def test_only_loopback_is_served(start_recorder, run_dir):
    port = free_port()
    process = start_recorder("--hz", 20, "--prometheus", port, gpus=1)
    wait_until(lambda: check_responds(port), "it responds")
    listening = [line.split() for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]]
    assert [line[1] for line in listening if line[3] == "0A" and line[1].endswith(f":{port:04X}")] == [
        f"0100007F:{port:04X}"
    ]
    stop_recorder(process)


def test_special_characters_in_names_are_escaped():
    device = Device(gpu_index=0, gpu_name='A "GPU"\\ of\nlines', uuid="GPU-0")
    values = [UNKNOWN] * WIDTH
    values[COLUMN_INDEX["power"]] = 1e-9
    gauges = Gauges(
        device=device,
        values=values,
        limits=DeviceLimits(),
        extra=ExtraMetrics(),
        lost=True,
        joules=None,
        throttled_s={},
        ecc={},
    )
    found = parse(text_of(families('run "x"', None, [gauges], samples=3, late=1)))
    assert found["kmatrix_gpu_info"][0][0]["name"] == 'A "GPU"\\ of\nlines'
    assert found["kmatrix_gpu_power_watts"] == [({"gpu": "0", "uuid": "GPU-0", "run": 'run "x"'}, 1e-9)]
    assert found["kmatrix_gpu_lost"][0][1] == 1
    assert "kmatrix_gpu_energy_joules_total" not in found
    assert found["kmatrix_recorder_samples_total"] == [({"run": 'run "x"'}, 3)]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        *((f"Host: {name}", 200) for name in ("localhost", "127.0.0.1:9400", "[::1]:9400", "LOCALHOST.")),
        *((f"Host: {name}", 421) for name in ("example.org", "127.0.0.1.example.org", "", "\xff")),
        ("Accept: */*", 421),
        ("Host: localhost\r\nHost: example.org", 421),
    ],
)
def test_a_web_site_cannot_read_the_metrics_under_a_name_of_its_own(head, status):
    port = free_port()
    MetricsServer(port, lambda: "kmatrix_up 1\n")
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"GET /metrics HTTP/1.1\r\n{head}\r\n\r\n".encode("latin-1"))
        answer = client.makefile("rb").read()
    assert int(answer.split()[1]) == status
    assert (b"kmatrix_up" in answer) == (status == 200)


def test_a_failed_accept_does_not_end_the_server(monkeypatch):
    accept, failures = socket.socket.accept, iter([OSError(24, "Too many open files"), ConnectionAbortedError()])

    def failing(self):
        if (error := next(failures, None)) is not None:
            raise error
        return accept(self)

    monkeypatch.setattr("socket.socket.accept", failing)
    port = free_port()
    MetricsServer(port, lambda: "kmatrix_up 1\n")
    assert scrape(port)[1] == "kmatrix_up 1\n"
