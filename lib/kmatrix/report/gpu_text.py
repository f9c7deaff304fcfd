"""The numbers of devices -> text: the sections of the summary, and the consolidated report of the original project."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from kmatrix.report.energy import cost_parts
from kmatrix.report.gpu_values import CPU, SIMULATED, Balance, DeviceNumbers, GpuNumbers, RunGpus, Spread
from kmatrix.report.layout import UNKNOWN, WIDTH, duration, section, table, wrap
from kmatrix.stats import cv_text, mean

MAX_DEVICES = 16  # of a run that the summary lists; of more, the lowest and the highest in memory
MIB = "memory is in MiB, the same that nvidia-smi and the original project write as MB"
QUANTITIES = (("memory", "memory_used"), ("utilization", "utilization"), ("power", "power"))


def gpu_sections(runs: Sequence[RunGpus]) -> list[tuple[str, list[str]]]:
    """Return the summary's sections on GPUs and on the ranks of runs on the CPU, a title and lines each."""
    recorded = [run for run in runs if run.gpu]
    on_cpu = [run for run in recorded if run.gpu and run.gpu.device_type == CPU]
    on_gpu = [run for run in recorded if run not in on_cpu]
    sections = []
    if on_gpu:
        blank = [run for run in runs if run.gpu is None]
        sections.append(("GPUs", [*_section(on_gpu, "GPU"), *_not_recorded(blank)]))
    if on_cpu:
        blank = [] if on_gpu else [run for run in runs if run.gpu is None]
        sections.append(("CPU ranks", [*_section(on_cpu, "rank"), *_not_recorded(blank)]))
    return sections


def consolidated(name: str, runs: Sequence[RunGpus]) -> str:
    """Return the report on all runs of a matrix: totals by optimizer, then every device of every run."""
    blocks = [
        section("Consolidated GPU Summary", [f"Matrix  {name}", f"Runs    {_counted(runs)}", MIB]),
        section("By optimizer", _by_optimizer(runs)),
        *(_breakdown(run, run.gpu) for run in runs if run.gpu and run.gpu.devices),
    ]
    if rest := [run for run in runs if run.gpu is None or not run.gpu.devices]:
        blocks.append(section("Without numbers", [line for run in rest for line in _without(run)]))
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n"


def balance_text(balance: Balance | None, why: str = "n/a") -> str:
    """Return "CV = 0.2% (Excellent)"."""
    return why if balance is None else f"CV = {cv_text(balance.cv)} ({balance.quality})"


def joules_text(joules: float | None) -> str:
    """Return an energy with its unit."""
    if joules is None:
        return UNKNOWN
    return f"{joules:,.0f} J" if joules >= 100 else f"{joules:.3g} J"


def clock(time: float) -> str:
    """Return Unix seconds as a date and a time."""
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"


def energy_line(gpu: GpuNumbers) -> str:
    """Return joules, joules a token, mean power and where they come from."""
    power = "" if gpu.mean_power is None else f", mean {gpu.mean_power:.1f} W"
    if gpu.joules is None:
        return f"not known{power}"
    per_token = UNKNOWN if gpu.joules_per_token is None else f"{gpu.joules_per_token:.3g}"
    back = "" if gpu.tokens_per_joule is None else f" ({gpu.tokens_per_joule:.3g} tokens/J)"
    source = f" ({SOURCES.get(gpu.energy_source, gpu.energy_source)})" if gpu.energy_source else ""
    return f"{joules_text(gpu.joules)} = {gpu.cost.kwh:.3g} kWh, {per_token} J/token{back}{power}{source}"


def cost_lines(gpu: GpuNumbers) -> Iterator[str]:
    """Say what the energy and the hours cost, and where the energy went."""
    if parts := list(cost_parts(gpu.cost, gpu.factors)):
        yield f"Cost: {', '.join(parts)}"
    kinds = list(dict.fromkeys(phase.name for phase in gpu.phases))
    if kinds and gpu.seconds:
        yield f"Time: {', '.join(_phase_text(gpu, kind) for kind in kinds)} of {duration(gpu.seconds)} recorded"


def _phase_text(gpu: GpuNumbers, kind: str) -> str:
    joules = gpu.phase_joules(kind)
    return f"{kind} {duration(gpu.phase_seconds(kind))}" + ("" if joules is None else f" ({joules_text(joules)})")


def busy_lines(gpu: GpuNumbers) -> Iterator[str]:
    """Put MFU beside utilization: a GPU can be busy all the time and slow."""
    if gpu.mfu is None or gpu.utilization is None or gpu.device_type == CPU:
        return
    tensor = gpu.extra("tensor_active")
    cores = "" if tensor is None else f", tensor cores {tensor:.1f}% of the time"
    yield (
        f"Utilization {gpu.utilization:.1f}% of the time something ran, "
        f"MFU {100 * gpu.mfu:.1f}% of the peak was used{cores}"
    )


SOURCES = {
    "counter": "by the energy counter; the board alone",
    "power": "by the area under the power; the board alone",
    "rapl": "by RAPL: the whole processor",
}


def rank_lines(gpu: GpuNumbers) -> Iterator[str]:
    """Say how long each rank computed, and what waiting for the slowest cost."""
    ranks = gpu.ranks
    if ranks is None:
        return
    times = ranks.compute_ms
    if len(times) <= MAX_DEVICES:
        listed = "  ".join(f"rank {rank} {value:.1f}" for rank, value in times)
    else:
        low, high = (pick(times, key=lambda item: item[1]) for pick in (min, max))
        listed = f"rank {low[0]} {low[1]:.1f} (lowest)  rank {high[0]} {high[1]:.1f} (highest of {len(times)})"
    yield f"Compute time a step, ms: {listed}"
    yield (
        f"Load-balance efficiency {100 * ranks.efficiency:.1f}% (mean / max), "
        f"straggler time share {100 * ranks.waiting:.1f}% of {ranks.step_ms:.1f} ms a step"
    )
    yield f"Most often slowest: rank {ranks.slowest}, in {100 * ranks.slowest_share:.0f}% of {ranks.steps:,} steps"
    if gpu.hides_a_straggler:
        yield (
            f"! memory is balanced, and yet {100 * ranks.waiting:.1f}% of the time goes into waiting for the slowest "
            f"rank: the CV cannot see rank {ranks.slowest}"
        )


def _section(runs: Sequence[RunGpus], word: str) -> list[str]:
    """Return a table of devices, and below it what can be said of each run only as a whole."""
    titles = ["run", word, "RSS" if word == "rank" else "memory", "± sd", "peak", "of", "util %", "W", "°C", "joules"]
    rows = [row for run in runs if run.gpu and run.gpu.evidence for row in _rows(run, run.gpu)]
    lines = table(titles, rows, left=(0, 1)) if rows else ["memory and power were not recorded"]
    if rows:
        lines.append(
            "MiB: mean over the recording, its deviation, the highest; util %, W and °C are means; - is unknown"
        )
    if rows and word == "rank":
        lines.append("RSS: resident memory of a rank, of that of its host; util %: 100 is one processor at work")
    for run in runs:
        if run.gpu:
            lines += _beside(run, run.gpu)
    return lines


def _rows(run: RunGpus, gpu: GpuNumbers) -> Iterator[list[str]]:
    shown = _shown(gpu)
    for place, device in enumerate(shown):
        yield [_marked(run) if place == 0 else "", _short_label(gpu, device), *_cells(device)]
    if not shown:
        yield [_marked(run), *[UNKNOWN] * 9]
    if len(gpu.devices) > 1:
        sizes = [device.memory_total for device in gpu.devices]
        size = sizes[0] if gpu.device_type == CPU else _sum(sizes)  # ranks share the memory of their host
        numbers = [_number(gpu.total_mean), "", _number(gpu.total_high), UNKNOWN if size is None else f"{size:.0f}"]
        known = [device.utilization.mean for device in gpu.devices if device.utilization]
        joules = UNKNOWN if gpu.joules is None else f"{gpu.joules:,.0f}"
        yield ["", "all", *numbers, _number(mean(known) if known else None), _number(gpu.mean_power), "", joules]


def _shown(gpu: GpuNumbers) -> list[DeviceNumbers]:
    """Return the devices to list: all, or of many the one with least and the one with most memory."""
    if len(gpu.devices) <= MAX_DEVICES:
        return list(gpu.devices)
    known = [device for device in gpu.devices if device.memory_used]
    if not known:
        return []
    return [pick(known, key=lambda device: device.memory_used.mean if device.memory_used else 0) for pick in (min, max)]


def _cells(device: DeviceNumbers) -> list[str]:
    memory = device.memory_used
    return [
        _mean(memory),
        _number(memory.deviation if memory else None),
        _number(memory.high if memory else None),
        UNKNOWN if device.memory_total is None else f"{device.memory_total:.0f}",
        _mean(device.utilization),
        _mean(device.power),
        _mean(device.temperature),
        UNKNOWN if device.joules is None else f"{device.joules:,.0f}",
    ]


def _beside(run: RunGpus, gpu: GpuNumbers) -> Iterator[str]:
    """Say of one run how even it was, what it cost, and what a reader must know."""
    yield ""
    yield f"{_marked(run)}"
    if len(gpu.devices) > MAX_DEVICES:
        yield f"    {len(gpu.devices)} {gpu.word}s: the lowest and the highest are listed; results.json has all"
    for line in [*_facts(gpu), *(f"! {note}" for note in gpu.notes)]:
        yield from _indented(line)


def _facts(gpu: GpuNumbers) -> Iterator[str]:
    if gpu.devices:
        memory, utilization, power = (gpu.balance(quantity) for _, quantity in QUANTITIES)
        yield (
            f"Balance: {balance_text(memory, _why_none(gpu))}; utilization: {balance_text(utilization)}; "
            f"power: {balance_text(power)}"
        )
        yield f"Energy: {energy_line(gpu)}"
        yield from cost_lines(gpu)
        yield from busy_lines(gpu)
    for device in gpu.devices:
        yield from _troubles(gpu, device)
    yield from rank_lines(gpu)


def _troubles(gpu: GpuNumbers, device: DeviceNumbers) -> Iterator[str]:
    """Say what happened to one device."""
    label = gpu.label(device)
    if device.lost_at is not None:
        yield f"! {label} was lost at {clock(device.lost_at)}: its numbers, and its joules, end there"
    if device.throttled_s:
        yield f"! {label} was throttled: {', '.join(f'{why} {duration(s)}' for why, s in device.throttled_s)}"
    if device.ecc_uncorrected:
        yield f"! {label} had {device.ecc_uncorrected} errors of its memory that were not corrected: do not trust it"
    if device.foreign:
        yield f"! {label} was shared with {', '.join(device.foreign)}"


def _breakdown(run: RunGpus, gpu: GpuNumbers) -> list[str]:
    """Return one run in the original project's words."""
    optimizer = (run.optimizer or run.name).upper()
    names = ", ".join(dict.fromkeys(device.gpu_name for device in gpu.devices if device.gpu_name))
    count = len(gpu.devices)
    what = f"{count} x {names}" if names and gpu.device_type != CPU else f"{count} {gpu.word}{'s' if count > 1 else ''}"
    lasted = "" if gpu.seconds is None else f" in {duration(gpu.seconds)}"
    lines = wrap(f"{_marked(run)}: {what}, {gpu.samples:,} samples{lasted}")
    lines.append(f"{optimizer} Training - Per-{gpu.word[0].upper()}{gpu.word[1:]} Breakdown:")
    for device in gpu.devices:
        lines.append(f"    {gpu.label(device)}: {_mean_and_deviation(device.memory_used)}")
    lines.append(f"    Total:  {UNKNOWN if gpu.total_mean is None else f'{gpu.total_mean:.1f} MB'}")
    lines.append(f"    Balance: {balance_text(gpu.balance('memory_used'), _why_none(gpu))}")
    for name, quantity in QUANTITIES[1:]:
        lines.append(f"    Balance of {name}: {balance_text(gpu.balance(quantity))}")
    lines.append(f"    Energy: {energy_line(gpu)}")
    lines += [part for line in [*cost_lines(gpu), *busy_lines(gpu)] for part in _indented(line)]
    troubles = [text for device in gpu.devices for text in _troubles(gpu, device)]
    for line in [*rank_lines(gpu), *troubles, *(f"! {note}" for note in gpu.notes)]:
        lines += _indented(line)
    lines.append(f"    From: {gpu.evidence}")
    return lines


def _without(run: RunGpus) -> Iterator[str]:
    """Say why there are no numbers of a run, and what its ranks wrote themselves."""
    yield from wrap(f"{_marked(run)}: {'; '.join(run.gpu.notes) if run.gpu and run.gpu.notes else 'no recording'}")
    for line in rank_lines(run.gpu) if run.gpu else ():
        yield from _indented(line)


def _by_optimizer(runs: Sequence[RunGpus]) -> list[str]:
    """Return a line for each optimizer on each number and kind of devices, over the runs that have numbers."""
    groups: dict[tuple[str, str], list[tuple[RunGpus, GpuNumbers]]] = {}
    for run in runs:
        if run.gpu and run.gpu.devices:
            mark = f" {SIMULATED}" if run.gpu.simulated else ""
            where = f"{len(run.gpu.devices)} {run.gpu.word}{'s' if len(run.gpu.devices) > 1 else ''}{mark}"
            groups.setdefault((run.optimizer or "unknown", where), []).append((run, run.gpu))
    rows = []
    for (optimizer, where), members in groups.items():
        gpus = [gpu for _, gpu in members]
        lost = sum(run.status in ("failed", "stopped", "skipped") for run, _ in members)
        used = [device.utilization.mean for gpu in gpus for device in gpu.devices if device.utilization]
        highest = [gpu.total_high for gpu in gpus if gpu.total_high is not None]
        rows.append(
            [
                *(optimizer, where, str(len(members)), str(lost) if lost else ""),
                _average([gpu.total_mean for gpu in gpus]),
                _average([max(highest)] if highest else []),
                _average(used),
                _average([gpu.mean_power for gpu in gpus]),
                _average([gpu.joules for gpu in gpus], "{:,.0f}"),
                _average([gpu.joules_per_token for gpu in gpus], "{:.3g}"),
            ]
        )
    titles = ["optimizer", "on", "runs", "lost", "memory", "peak", "util %", "W", "J/run", "J/token"]
    note = (
        "means over the runs, peak: the highest; memory, peak and W: all devices of a run together; lost: not finished"
    )
    return [*table(titles, rows, left=(0, 1)), *wrap(note)]


def _mean_and_deviation(spread: Spread | None) -> str:
    if spread is None:
        return UNKNOWN
    deviation = "" if spread.deviation is None else f" (±{spread.deviation:.1f})"
    return f"{spread.mean:.1f} MB{deviation}"


def _marked(run: RunGpus) -> str:
    """Return the name of a run, with what a reader must know of it."""
    simulated = f" {SIMULATED}" if run.gpu and run.gpu.simulated else ""
    return f"{run.name}{simulated}" + ("" if run.status in ("", "finished") else f" ({run.status})")


def _not_recorded(runs: Sequence[RunGpus]) -> list[str]:
    return ["", *wrap(f"not recorded: {', '.join(_marked(run) for run in runs)}")] if runs else []


def _counted(runs: Sequence[RunGpus]) -> str:
    recorded = sum(run.gpu is not None and bool(run.gpu.devices) for run in runs)
    lost = [run.name for run in runs if run.status == "failed"]
    return f"{len(runs)}, {recorded} with numbers" + (f", {len(lost)} failed" if lost else "")


def _why_none(gpu: GpuNumbers) -> str:
    return f"n/a (one {gpu.word})" if len(gpu.devices) < 2 else "n/a (not known of every device)"


def _short_label(gpu: GpuNumbers, device: DeviceNumbers) -> str:
    return gpu.label(device).split()[1]


def _indented(line: str) -> list[str]:
    return [f"    {part}" for part in wrap(line, width=WIDTH - 4)]


def _mean(spread: Spread | None) -> str:
    return _number(spread.mean if spread else None)


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"


def _average(values: Sequence[float | None], form: str = "{:,.1f}") -> str:
    """Return the mean of the known values."""
    known = [value for value in values if value is not None]
    return form.format(mean(known)) if known else UNKNOWN


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None
