"""The table of processes, and the lines about the machine, the runs and the selected GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

from kmatrix.gputop.terminal.glyphs import cell, number
from kmatrix.gputop.view import DeviceRow, HostState, ProcessRow, RunLine
from kmatrix.text import UNKNOWN, count, duration, memory_size

MIB = 2**20  # bytes
LEAST = 3  # lines: a heading, titles and a process


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessColumn:
    """One column of the table of processes. width: columns of the terminal."""

    title: str
    width: int
    text: Callable[[ProcessRow], str]
    right: bool = True
    optional: bool = False  # dropped first on a narrow terminal


COLUMNS = (
    ProcessColumn(title="GPU", width=3, text=lambda row: str(row.gpu_index), right=False),
    ProcessColumn(title="PID", width=7, text=lambda row: str(row.pid)),
    ProcessColumn(title="user", width=10, text=lambda row: row.user or UNKNOWN, right=False),
    ProcessColumn(title="T", width=1, text=lambda row: row.kind, optional=True),
    ProcessColumn(title="GPU mem", width=9, text=lambda row: _memory(row.memory_mib)),
    ProcessColumn(title="%SM", width=4, text=lambda row: number(row.sm)),
    ProcessColumn(title="%BW", width=4, text=lambda row: number(row.bandwidth), optional=True),
    ProcessColumn(title="%CPU", width=5, text=lambda row: number(row.cpu)),
    ProcessColumn(title="host mem", width=9, text=lambda row: _memory(row.host_mib)),
    ProcessColumn(title="time", width=8, text=lambda row: _running(row.seconds)),
)
COMMAND_WIDTH = 16  # columns: least width of the command


def process_table(processes: Sequence[ProcessRow], width: int, room: int) -> list[Text]:
    """Return a heading and the processes by GPU and pid, at most `room` lines; none if there is no room for one."""
    if room < LEAST:
        return []
    lines = [cell("1 process" if len(processes) == 1 else f"{len(processes)} processes", width, "bold")]
    if not processes:
        return lines
    columns = _fitting(width)
    rest = max(0, width - sum(column.width + 1 for column in columns))
    titles = [cell(column.title, column.width, "dim", right=column.right) for column in columns]
    lines.append(Text(" ").join([*titles, cell("command", rest, "dim")]))
    room -= len(lines)
    fits = room if len(processes) <= room else max(1, room - 1)
    for row in sorted(processes, key=lambda one: (one.gpu_index, one.pid))[:fits]:
        cells = [cell(column.text(row), column.width, right=column.right) for column in columns]
        lines.append(Text(" ").join([*cells, cell(_command(row), rest, "" if row.visible else "dim")]))
    if len(processes) > room > fits:
        lines.append(cell(f"and {len(processes) - fits} more: --once lists all", width, "dim"))
    return lines


def host_line(host: HostState) -> str:
    """Return the line about the machine."""
    used = None if host.memory_used is None else host.memory_used * MIB
    load = "" if host.load is None else "  load " + " ".join(f"{one:.2f}" for one in host.load)
    return f"host  CPU {host.cpu:.0f}%  mem {memory_size(used, host.memory_total * MIB)}{load}"


def run_line(run: RunLine) -> str:
    """Return the line about the progress of a run."""
    parts = [f"run {run.name}"]
    if run.step is not None:
        total = f"/{run.max_iters:,} ({100 * run.step / run.max_iters:.0f}%)" if run.max_iters else ""
        parts.append(f"step {run.step:,}{total}")
    if run.loss is not None:
        parts.append(f"loss {run.loss:.4f}")
    if run.tokens_per_second is not None:
        parts.append(f"{count(run.tokens_per_second)} tokens/s")
    if run.mfu is not None:
        parts.append(f"MFU {run.mfu:.1f}%")
    if run.left_s is not None:
        parts.append(f"{duration(run.left_s)} left")
    if run.kwh is not None:
        parts.append(f"{run.kwh:.3f} kWh")
    return "  ".join(parts)


def detail_lines(row: DeviceRow) -> list[str]:
    """Return what is known about the selected GPU besides the columns of the table, as parts of a line."""
    extra = dict(row.sample.extra)

    def known(name: str) -> str:
        return number(extra.get(name))

    def part(text: str, *names: str) -> list[str]:
        return [text] if any(name in extra for name in names) else []

    return [
        *part(f"fan {known('fan')}%", "fan"),
        *part(f"HBM {known('memory_temperature')} C", "memory_temperature"),
        *part(
            f"SM {known('sm_active')}%  tensor {known('tensor_active')}%  DRAM {known('dram_active')}%",
            *("sm_active", "tensor_active", "dram_active"),
        ),
        *part(f"PCIe {known('pcie_tx')} sent {known('pcie_rx')} received MiB/s", "pcie_tx", "pcie_rx"),
        *part(f"NVLink {known('nvlink_tx')} sent {known('nvlink_rx')} received MiB/s", "nvlink_tx", "nvlink_rx"),
        *part(f"ECC {known('ecc_uncorrected')}", "ecc_uncorrected"),
        *part(f"XID {known('xid')}" if extra.get("xid") else "no XID error", "xid"),
        *(["throttled by " + ", ".join(row.throttle)] if row.throttle else []),
    ]


def _fitting(width: int) -> Sequence[ProcessColumn]:
    """Return the columns that leave room for the command."""
    found = list(COLUMNS)
    while found and sum(column.width + 1 for column in found) + COMMAND_WIDTH > width:
        spare = next((column for column in found if column.optional), found[-1])
        found.remove(spare)
    return found


def _command(row: ProcessRow) -> str:
    if row.run:
        return f"run {row.run}" + ("" if row.rank is None else f"  rank {row.rank}")
    return row.command or "not visible from here"


def _running(seconds: float | None) -> str:
    """Return how long a process has been running, in whole seconds below an hour."""
    if seconds is None:
        return UNKNOWN
    return f"{int(seconds)}s" if seconds < 60 else duration(int(seconds))


def _memory(mib: float | None) -> str:
    return UNKNOWN if mib is None else memory_size(mib * MIB)
