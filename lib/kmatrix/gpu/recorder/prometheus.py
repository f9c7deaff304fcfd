"""Prometheus metrics of a recorder, in the text format 0.0.4, on a port of the loopback interface.

http.server would add 6 MiB of imports, a quarter of the recorder's memory budget; one request needs a socket and ten
lines. Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kmatrix.gpu.devices import COLUMN_INDEX, WIDTH, Device, DeviceLimits, ExtraMetrics
from kmatrix.hosts import LOOPBACK, REFUSED, is_accepted, refusal

HOST = "127.0.0.1"  # run names and the use of GPUs are not for everyone on the network
MAX_REQUEST, REQUEST_S = 8192, 2.0  # bytes and s that a request may take
RETRY_S = 0.1  # between two tries to accept a client after a failure
MIB, MHZ = 2**20, 1e6


FAST = (  # column, metric name, help, factor to its unit
    ("utilization", "utilization_ratio", "Fraction of the last sample period with a running kernel.", 0.01),
    ("memory_used", "memory_used_bytes", "Memory in use.", MIB),
    ("power", "power_watts", "Power, average of the driver.", 1.0),
    ("power_instant", "power_instant_watts", "Instantaneous power.", 1.0),
    ("temperature", "temperature_celsius", "Temperature.", 1.0),
    ("sm_clock", "sm_clock_hertz", "SM clock.", MHZ),
)


EXTRA = (
    ("fan", "fan_ratio", "Fan speed.", 0.01),
    ("pcie_tx", "pcie_transmit_bytes_per_second", "PCIe traffic from the device.", MIB),
    ("pcie_rx", "pcie_receive_bytes_per_second", "PCIe traffic to the device.", MIB),
    ("sm_active", "sm_active_ratio", "Fraction of time with active SMs.", 0.01),
    ("sm_occupancy", "sm_occupancy_ratio", "Resident warps relative to the maximum.", 0.01),
    ("tensor_active", "tensor_active_ratio", "Fraction of time with active tensor cores.", 0.01),
    ("dram_active", "dram_active_ratio", "Fraction of the memory bandwidth in use.", 0.01),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """The current values of one device."""

    device: Device
    values: Sequence[float]  # COLUMNS, NaN: unknown
    limits: DeviceLimits
    extra: ExtraMetrics
    lost: bool
    joules: float | None  # J since the recording began
    throttled_s: Mapping[str, float]  # reason -> s since the recording began
    ecc: Mapping[str, int]  # kind -> memory errors since the recording began


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    """One metric with its samples."""

    name: str
    kind: str  # gauge or counter
    help: str
    samples: Sequence[tuple[Mapping[str, str], float]]  # labels, value


def families(
    run: str, run_id: str | None, gauges: Sequence[Gauges], *, samples: int, late: int
) -> Iterator[MetricFamily]:
    """Yield all metrics. Unknown values have no sample. `run`: the name of the run."""
    labels = [{"gpu": str(one.device.gpu_index), "uuid": one.device.uuid, "run": run} for one in gauges]

    def gauge(name: str, text: str, values: Sequence[float | None], kind: str = "gauge") -> MetricFamily:
        known = [(label, value) for label, value in zip(labels, values, strict=True) if value is not None]
        return MetricFamily(name=f"kmatrix_gpu_{name}", kind=kind, help=text, samples=known)

    # Text belongs into the labels of an info metric, which queries join with the others.
    yield MetricFamily(
        name="kmatrix_gpu_info",
        kind="gauge",
        help="Always 1; the labels describe the device.",
        samples=[({**label, **_about(one.device, run_id)}, 1.0) for label, one in zip(labels, gauges, strict=True)],
    )
    # Gauges: the newest values.
    for column, name, text, unit in FAST:
        yield gauge(name, text, [_scaled(one.values[COLUMN_INDEX[column]], unit) for one in gauges])
    yield gauge("memory_total_bytes", "Total memory.", [_scaled(one.device.memory_total, MIB) for one in gauges])
    yield gauge("power_limit_watts", "Enforced power limit.", [one.limits.power_limit for one in gauges])
    for field, name, text, unit in EXTRA:
        yield gauge(name, text, [_scaled(getattr(one.extra, field), unit) for one in gauges])
    yield gauge("lost", "1 while the device does not respond.", [float(one.lost) for one in gauges])
    # Counters: totals since the recording began. Their rate is exact over any interval, unlike that of a gauge.
    energy = "Energy since the recording began."
    yield gauge("energy_joules_total", energy, [one.joules for one in gauges], "counter")
    yield MetricFamily(
        name="kmatrix_gpu_throttled_seconds_total",
        kind="counter",
        help="Throttled time, by reason.",
        samples=[
            ({**label, "reason": reason}, seconds)
            for label, one in zip(labels, gauges, strict=True)
            for reason, seconds in sorted(one.throttled_s.items())
        ],
    )
    yield MetricFamily(
        name="kmatrix_gpu_ecc_errors_total",
        kind="counter",
        help="Memory errors since the recording began, by kind.",
        samples=[
            ({**label, "kind": kind}, float(count))
            for label, one in zip(labels, gauges, strict=True)
            for kind, count in sorted(one.ecc.items())
        ],
    )
    # The recorder itself.
    for name, text, value in (
        ("kmatrix_recorder_samples_total", "Samples taken.", samples),
        ("kmatrix_recorder_late_ticks_total", "Ticks skipped because they were late.", late),
    ):
        yield MetricFamily(name=name, kind="counter", help=text, samples=[({"run": run}, float(value))])


def text_of(known: Iterator[MetricFamily]) -> str:
    """Return metrics in the text format. A metric without samples is omitted."""
    lines = []
    for family in known:
        if family.samples:
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{family.name}{{{_labels(labels)}}} {value!r}" for labels, value in family.samples]
    return "\n".join([*lines, ""])


class MetricsServer:
    """Answers GET /metrics. Raises OSError if the port cannot be used."""

    def __init__(self, port: int, text: Callable[[], str]) -> None:
        self._text = text
        self._socket = socket.create_server((HOST, port), backlog=8)
        self._thread = threading.Thread(target=self._serve, daemon=True)  # exits with the process
        self._thread.start()

    def _serve(self) -> None:
        while True:
            # One client at a time, in one thread: a scrape takes less than a millisecond.
            try:
                client, _ = self._socket.accept()
            except OSError:  # the client is gone already, or no descriptors are left: both pass
                if self._socket.fileno() < 0:
                    return  # closed
                time.sleep(RETRY_S)  # without descriptors, accept fails at once again
                continue
            try:
                with client:
                    answer = self._answer(_request(client))
                    client.settimeout(REQUEST_S)
                    client.sendall(answer)
            except OSError:
                continue  # the client disconnected or timed out

    def _answer(self, request: bytes) -> bytes:
        """Return the response to the head of a request."""
        line, *headers = request.decode("latin-1").split("\r\n")
        method, _, rest = line.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        hosts = [
            value.strip() for name, _, value in (header.partition(":") for header in headers) if name.lower() == "host"
        ]
        if len(hosts) != 1 or not is_accepted(hosts[0], LOOPBACK):
            status, body = f"{REFUSED} Misdirected Request", refusal(", ".join(hosts)).encode("latin-1")
        elif method not in ("GET", "HEAD"):
            status, body = "405 Method Not Allowed", b"only GET\n"
        elif path != "/metrics":
            status, body = "404 Not Found", b"see /metrics\n"
        else:
            status, body = "200 OK", self._text().encode()
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (b"" if method == "HEAD" else body)


def device_values(values: Sequence[float], at: int) -> list[float]:
    """Return the columns of one device from the flat list of all values."""
    return list(values[at * WIDTH : (at + 1) * WIDTH])


def _request(client: socket.socket) -> bytes:
    """Read a request up to the end of its head."""
    data, deadline = b"", time.monotonic() + REQUEST_S  # of the whole request: a slow client would block all others
    while b"\r\n\r\n" not in data and len(data) < MAX_REQUEST:
        client.settimeout(max(0.001, deadline - time.monotonic()))
        more = client.recv(MAX_REQUEST)
        if not more:
            break
        data += more
    return data


def _about(device: Device, run_id: str | None) -> dict[str, str]:
    rank = "" if device.rank is None else str(device.rank)
    return {"name": device.gpu_name, "rank": rank, "run_id": run_id or ""}


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None or math.isnan(value) else value * unit


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
