"""What a recorder knows now, for Prometheus: the text format 0.0.4 on a port of this machine alone.

The standard library's HTTP server is 6 MiB of imports, a quarter of what a recorder may take; one request needs a
socket and ten lines.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kmatrix.gpu.source import AT, WIDTH, Device, Extra, Slow

HOST = "127.0.0.1"
MOST_REQUEST, PATIENCE_S = 8192, 2.0  # bytes, seconds that a client may take for its request
MIB, MHZ = 2**20, 1e6
FAST = (  # column, name, help, what makes the unit of it
    ("utilization", "utilization_ratio", "Share of the last sample period in which something ran.", 0.01),
    ("memory_used", "memory_used_bytes", "Memory in use.", MIB),
    ("power", "power_watts", "Power, the average that the driver gives.", 1.0),
    ("power_instant", "power_instant_watts", "Power at this moment.", 1.0),
    ("temperature", "temperature_celsius", "Temperature.", 1.0),
    ("sm_clock", "sm_clock_hertz", "Clock of the multiprocessors.", MHZ),
)
EXTRA = (
    ("fan", "fan_ratio", "Speed of the fan.", 0.01),
    ("pcie_tx", "pcie_transmit_bytes_per_second", "PCIe traffic from the device.", MIB),
    ("pcie_rx", "pcie_receive_bytes_per_second", "PCIe traffic to the device.", MIB),
    ("sm_active", "sm_active_ratio", "Share of the time in which multiprocessors were at work.", 0.01),
    ("sm_occupancy", "sm_occupancy_ratio", "Warps on the multiprocessors, of those possible.", 0.01),
    ("tensor_active", "tensor_active_ratio", "Share of the time in which tensor cores were at work.", 0.01),
    ("dram_active", "dram_active_ratio", "Memory bandwidth in use.", 0.01),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One device now. values: its columns.  joules, throttled_s, ecc: since the recording began."""

    device: Device
    values: Sequence[float]
    slow: Slow
    extra: Extra
    lost: bool
    joules: float | None
    throttled_s: Mapping[str, float]
    ecc: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric: its name, kind (gauge or counter), help, and its samples: labels and value."""

    name: str
    kind: str
    help: str
    samples: Sequence[tuple[Mapping[str, str], float]]


def families(run: str, run_id: str | None, readings: Sequence[Reading], *, samples: int, late: int) -> Iterator[Family]:
    """Yield everything that is known; what is not known has no sample. run: the name of the run."""
    labels = [{"gpu": str(one.device.gpu_index), "uuid": one.device.uuid, "run": run} for one in readings]

    def gauge(name: str, text: str, values: Sequence[float | None], kind: str = "gauge") -> Family:
        known = [(label, value) for label, value in zip(labels, values, strict=True) if value is not None]
        return Family(name=f"kmatrix_gpu_{name}", kind=kind, help=text, samples=known)

    yield Family(
        name="kmatrix_gpu_info",
        kind="gauge",
        help="Always 1; says what the device is.",
        samples=[({**label, **_about(one.device, run_id)}, 1.0) for label, one in zip(labels, readings, strict=True)],
    )
    for column, name, text, unit in FAST:
        yield gauge(name, text, [_scaled(one.values[AT[column]], unit) for one in readings])
    yield gauge("memory_total_bytes", "Whole memory.", [_scaled(one.device.memory_total, MIB) for one in readings])
    yield gauge("power_limit_watts", "Power limit in force.", [one.slow.power_limit for one in readings])
    for field, name, text, unit in EXTRA:
        yield gauge(name, text, [_scaled(getattr(one.extra, field), unit) for one in readings])
    yield gauge("lost", "1 while the device answers nothing.", [float(one.lost) for one in readings])
    energy = "Energy since the recording began."
    yield gauge("energy_joules_total", energy, [one.joules for one in readings], "counter")
    yield Family(
        name="kmatrix_gpu_throttled_seconds_total",
        kind="counter",
        help="Seconds in which the clocks were held down, by reason.",
        samples=[
            ({**label, "reason": reason}, seconds)
            for label, one in zip(labels, readings, strict=True)
            for reason, seconds in sorted(one.throttled_s.items())
        ],
    )
    yield Family(
        name="kmatrix_gpu_ecc_errors_total",
        kind="counter",
        help="Errors of memory since the recording began, by kind.",
        samples=[
            ({**label, "kind": kind}, float(count))
            for label, one in zip(labels, readings, strict=True)
            for kind, count in sorted(one.ecc.items())
        ],
    )
    for name, text, value in (
        ("kmatrix_recorder_samples_total", "Samples taken.", samples),
        ("kmatrix_recorder_late_ticks_total", "Samples left out because they came too late.", late),
    ):
        yield Family(name=name, kind="counter", help=text, samples=[({"run": run}, float(value))])


def text_of(known: Iterator[Family]) -> str:
    """Return the text format of metrics; one without a sample is left out."""
    lines = []
    for family in known:
        if family.samples:
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
            lines += [f"{family.name}{{{_labels(labels)}}} {value!r}" for labels, value in family.samples]
    return "\n".join([*lines, ""])


class Server:
    """Answers GET /metrics. Raises OSError where the port cannot be had."""

    def __init__(self, port: int, text: Callable[[], str]) -> None:
        self._text = text
        self._socket = socket.create_server((HOST, port), backlog=8)
        self._thread = threading.Thread(target=self._serve, daemon=True)  # it ends with the process
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            try:
                with client:
                    client.settimeout(PATIENCE_S)
                    client.sendall(self._answer(_request(client)))
            except OSError:
                continue  # a client that went away, or was too slow

    def _answer(self, request: bytes) -> bytes:
        """Return the answer to a request's head."""
        method, _, rest = request.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
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


def reading_of(values: Sequence[float], at: int) -> list[float]:
    """Return the columns of the device at a place among the values of all."""
    return list(values[at * WIDTH : (at + 1) * WIDTH])


def _request(client: socket.socket) -> bytes:
    """Return the head of a request."""
    data = b""
    while b"\r\n\r\n" not in data and len(data) < MOST_REQUEST:
        more = client.recv(MOST_REQUEST)
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
