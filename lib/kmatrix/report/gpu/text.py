"""Format the numbers of devices as text: sections of the summary, and the consolidated GPU report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kmatrix.gpu.balance import Balance, cv_text
from kmatrix.report.gpu.numbers import (
    CPU,
    SIMULATED,
    DeviceNumbers,
    GpuNumbers,
    PeriodNumbers,
    RunGpus,
    Statistics,
    cost_parts,
    is_incomplete,
)
from kmatrix.stats import complete_sum, mean
from kmatrix.text import UNKNOWN, WIDTH, columns, duration, money, plural, section, table, time_of_day, wrap

MAX_DEVICES = 16  # listed per run; of more devices, those with the least and the most memory
UNITS_NOTE = "memory in MiB, which nvidia-smi and the original project write as MB"
QUANTITIES = (("memory", "memory_used"), ("utilization", "utilization"), ("power", "power"))

SOURCES = {  # of GpuNumbers.energy_source
    "counter": "energy counter, board only",
    "power": "integrated power, board only",
}


def gpu_sections(runs: Sequence[RunGpus]) -> list[tuple[str, list[str]]]:
    """Return the summary's sections about GPUs and CPU ranks: title, lines."""
    recorded = [run for run in runs if run.gpu]
    on_cpu = [run for run in recorded if run.gpu and run.gpu.device_type == CPU]
    on_gpu = [run for run in recorded if run not in on_cpu]
    missing = _not_recorded([run for run in runs if run.gpu is None])
    sections = []
    if on_gpu:
        sections.append(("GPUs", [*_section(on_gpu, "GPU"), *missing]))
    if on_cpu:
        sections.append(("CPU ranks", [*_section(on_cpu, "rank"), *([] if on_gpu else missing)]))
    return sections


def consolidated(name: str, runs: Sequence[RunGpus]) -> str:
    """Return the report on all devices of a matrix: averages per optimizer, then every device of every run."""
    blocks = [
        section("Consolidated GPU Summary", [f"Matrix  {name}", f"Runs    {_counts(runs)}", UNITS_NOTE]),
        section("By optimizer", _by_optimizer(runs)),
        *(_breakdown(run, run.gpu) for run in runs if run.gpu and run.gpu.devices),
    ]
    if rest := [run for run in runs if run.gpu is None or not run.gpu.devices]:
        blocks.append(section("Without recording", [line for run in rest for line in _without_devices(run)]))
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n"


def balance_text(balance: Balance | None, unknown: str = "n/a") -> str:
    """Return "CV = 0.2% (Excellent)"."""
    return unknown if balance is None else f"CV = {cv_text(balance.cv)} ({balance.quality})"


def problems(gpu: GpuNumbers, device: DeviceNumbers) -> Iterator[str]:
    """Yield what impaired one device: loss, XID errors, throttling, memory errors, other processes."""
    label = gpu.label(device)
    if device.lost_at is not None:
        # Its energy is unknown if the driver lost it, and ends there if only its queries failed.
        numbers = "its numbers" if device.joules is None else "its numbers, including energy,"
        yield f"{label} was lost at {time_of_day(device.lost_at, utc=True)}: {numbers} end there"
    for xid in device.xids:
        yield f"{label}: {xid.text}"
    if device.throttled_s:
        yield f"{label} was throttled: {', '.join(f'{why} {duration(s)}' for why, s in device.throttled_s)}"
    if device.ecc_uncorrected:
        yield f"{label} had {device.ecc_uncorrected} uncorrected memory errors: do not trust its results"
    if device.foreign:
        yield f"{label} was shared with {', '.join(device.foreign)}"


def joules_text(joules: float | None) -> str:
    """Return an energy with its unit."""
    if joules is None:
        return UNKNOWN
    return f"{joules:,.0f} J" if joules >= 100 else f"{joules:.3g} J"


def energy_line(gpu: GpuNumbers) -> str:
    """Return energy (J) of the run, then energy per token (J/token) and mean power (W) of its training and in all."""
    source = f" ({SOURCES.get(gpu.energy_source, gpu.energy_source)})" if gpu.energy_source else ""
    joules = "unknown" if gpu.joules is None else f"{joules_text(gpu.joules)} = {gpu.cost.kwh:.3g} kWh"
    if gpu.training is None:
        return f"{joules}{_intensity(gpu.whole)}{source}"
    periods = (("training", _intensity(gpu.training)), ("whole run", _intensity(gpu.whole)))
    return f"{joules}{source}" + "".join(f"; {name}{text}" for name, text in periods if text)


def _intensity(period: PeriodNumbers) -> str:
    """Return energy per token and mean power, each after a comma; nothing for what is unknown."""
    power = "" if period.mean_power is None else f", mean {period.mean_power:.1f} W"
    if period.joules_per_token is None:
        return power if period.joules is None else f", {UNKNOWN} J/token{power}"
    inverse = "" if period.tokens_per_joule is None else f" ({period.tokens_per_joule:.3g} tokens/J)"
    return f", {period.joules_per_token:.3g} J/token{inverse}{power}"


def cost_lines(gpu: GpuNumbers) -> Iterator[str]:
    """Yield the cost, and the time and energy of each phase."""
    parts = list(cost_parts(gpu.cost, gpu.factors))
    if gpu.gpu_hours is None and gpu.dollars is not None:
        parts.append(f"machine {money(gpu.dollars)} at ${gpu.factors.machine_hour_price or 0:g} per hour")
    if gpu.reused and gpu.dollars is not None:
        parts = ["nothing in this matrix (reused)"]
    if parts:
        yield f"Cost: {', '.join(parts)}"
    phases = list(dict.fromkeys(phase.name for phase in gpu.phases))
    if phases and gpu.seconds:
        unknown = gpu.training is not None and gpu.training.seconds is None
        rest = "; phases of an earlier attempt are unknown" if unknown and gpu.has_earlier else ""
        yield f"Time: {', '.join(_phase(gpu, name) for name in phases)} of {duration(gpu.seconds)} recorded{rest}"


def _phase(gpu: GpuNumbers, name: str) -> str:
    joules = gpu.phase_joules(name)
    return f"{name} {duration(gpu.phase_seconds(name))}" + ("" if joules is None else f" ({joules_text(joules)})")


def busy_lines(gpu: GpuNumbers) -> Iterator[str]:
    """Yield utilization next to MFU: a GPU can be busy all the time and still slow."""
    if gpu.mfu is None or gpu.utilization is None or gpu.device_type == CPU:
        return
    tensor = gpu.extra("tensor_active")
    cores = "" if tensor is None else f", tensor cores active {tensor:.1f}% of the time"
    yield f"Utilization {gpu.utilization:.1f}% (time with a kernel running), MFU {100 * gpu.mfu:.1f}% of peak{cores}"


def rank_lines(gpu: GpuNumbers) -> Iterator[str]:
    """Yield the compute time of each rank, and the time lost waiting for the slowest."""
    ranks = gpu.ranks
    if ranks is None:
        return
    times = ranks.compute_ms
    if len(times) <= MAX_DEVICES:
        listed = "  ".join(f"rank {rank} {value:.1f}" for rank, value in times)
    else:
        low, high = (pick(times, key=lambda item: item[1]) for pick in (min, max))
        listed = f"rank {low[0]} {low[1]:.1f} (min)  rank {high[0]} {high[1]:.1f} (max of {len(times)})"
    yield f"Compute time, ms/step: {listed}"
    yield (
        f"Load-balance efficiency {100 * ranks.efficiency:.1f}% (mean / max), "
        f"straggler time share {100 * ranks.waiting:.1f}% of {ranks.step_ms:.1f} ms/step"
    )
    yield f"Most often slowest: rank {ranks.slowest}, in {100 * ranks.slowest_share:.0f}% of {ranks.steps:,} steps"
    if gpu.hides_straggler:
        yield (
            f"! memory is balanced, but {100 * ranks.waiting:.1f}% of the time is spent waiting for the slowest rank: "
            f"the CV does not show rank {ranks.slowest}"
        )


def _section(runs: Sequence[RunGpus], unit: str) -> list[str]:
    """Return a table of devices, then the numbers that each run has only as a whole."""
    memory = "RSS" if unit == "rank" else "memory"
    titles = ["run", unit, f"{memory} MiB", "sd", "peak", "total", "util %", "W", "°C", "J"]
    rows = [row for run in runs if run.gpu and run.gpu.evidence for row in _rows(run, run.gpu)]
    lines = table(columns(titles, (0, 1)), rows, WIDTH, rule=True) if rows else ["memory and power were not recorded"]
    if rows:
        owner = "host" if unit == "rank" else "GPU"
        periods = {"training" if run.gpu.training else "recording" for run in runs if run.gpu and run.gpu.evidence}
        period = f"the {periods.pop()}" if len(periods) == 1 else "the training, or the recording if marked"
        lines.append(f"{memory}, sd, util %, W, °C: means over {period}")
        lines.append(f"peak, J: whole run; total: memory of the {owner}")
    if rows and unit == "rank":
        lines.append("RSS: resident memory of a rank; util %: 100 is one busy CPU core")
    for run in runs:
        if run.gpu:
            lines += _run_lines(run, run.gpu)
    return lines


def _rows(run: RunGpus, gpu: GpuNumbers) -> Iterator[list[str]]:
    listed = _listed_devices(gpu)
    for place, device in enumerate(listed):
        yield [_name(run) if place == 0 else "", _number_of(gpu, device), *_cells(device, _whole(gpu, device))]
    if not listed:
        yield [_name(run), *[UNKNOWN] * 9]
    if len(gpu.devices) > 1:
        # Ranks share the memory of their host.
        hosts = {device.host: device.memory_total for device in gpu.devices}
        sizes = hosts.values() if gpu.device_type == CPU else [device.memory_total for device in gpu.devices]
        size = complete_sum(list(sizes))
        total = UNKNOWN if size is None else f"{size:.0f}"
        numbers = [_decimal(gpu.main.total_mean), "", _decimal(gpu.total_max), total]
        joules = UNKNOWN if gpu.joules is None else f"{gpu.joules:,.0f}"
        yield ["", "all", *numbers, _decimal(gpu.utilization), _decimal(gpu.mean_power), "", joules]


def _whole(gpu: GpuNumbers, device: DeviceNumbers) -> DeviceNumbers:
    """Return the numbers of a device over the whole recording."""
    key = (device.host, device.gpu_index, device.uuid)
    return next(one for one in gpu.devices if (one.host, one.gpu_index, one.uuid) == key)


def _listed_devices(gpu: GpuNumbers) -> list[DeviceNumbers]:
    """Return all devices, or if there are too many, those with the least and the most memory."""
    if len(gpu.devices) <= MAX_DEVICES:
        return list(gpu.main.devices)
    known = [device for device in gpu.main.devices if device.memory_used]
    if not known:
        return []
    return [pick(known, key=lambda device: device.memory_used.mean if device.memory_used else 0) for pick in (min, max)]


def _cells(device: DeviceNumbers, whole: DeviceNumbers) -> list[str]:
    """Return means of a device over the main period; peak and energy are of the whole recording."""
    memory = device.memory_used
    return [
        _mean(memory),
        _decimal(memory.deviation if memory else None),
        _decimal(memory.maximum if memory else None),
        UNKNOWN if device.memory_total is None else f"{device.memory_total:.0f}",
        _mean(device.utilization),
        UNKNOWN if is_incomplete(device) else _mean(device.power),
        _mean(device.temperature),
        UNKNOWN if whole.joules is None else f"{whole.joules:,.0f}",
    ]


def _run_lines(run: RunGpus, gpu: GpuNumbers) -> Iterator[str]:
    """Yield balance, energy, cost, problems and notes of one run."""
    yield ""
    yield _name(run)
    if len(gpu.devices) > MAX_DEVICES:
        yield f"    {len(gpu.devices)} {gpu.unit}s: the table lists the lowest and the highest, results.json all"
    for line in [*_facts(gpu), *(f"! {note}" for note in gpu.notes)]:
        yield from _indented(line)


def _facts(gpu: GpuNumbers) -> Iterator[str]:
    if gpu.devices:
        memory, utilization, power = (gpu.balance(quantity) for _, quantity in QUANTITIES)
        period = " (training)" if gpu.training else ""
        yield (
            f"Balance{period}: {balance_text(memory, _why_no_balance(gpu))}; utilization: {balance_text(utilization)}; "
            f"power: {balance_text(power)}"
        )
        if gpu.training:
            yield (
                f"{_recorded_period(gpu).capitalize()}: {memory_name(gpu)} {_decimal(gpu.total_mean)} MiB; "
                f"balance: {balance_text(gpu.whole.balance('memory_used'), _why_no_balance(gpu))}"
            )
        yield f"Energy: {energy_line(gpu)}"
        yield from cost_lines(gpu)
        yield from busy_lines(gpu)
    for device in gpu.devices:
        yield from (f"! {problem}" for problem in problems(gpu, device))
    yield from rank_lines(gpu)


def _recorded_period(gpu: GpuNumbers) -> str:
    """Return the period of the memory over the whole recording: attempts on other devices have their own."""
    return "last attempt" if gpu.has_earlier else "whole run"


def _breakdown(run: RunGpus, gpu: GpuNumbers) -> list[str]:
    """Return every device of one run, in the format of the original project."""
    optimizer = (run.optimizer or run.name).upper()
    names = ", ".join(dict.fromkeys(device.gpu_name for device in gpu.devices if device.gpu_name))
    count = len(gpu.devices)
    devices = f"{count} x {names}" if names and gpu.device_type != CPU else plural(count, gpu.unit)
    length = "" if gpu.seconds is None else f" in {duration(gpu.seconds)}"
    lines = wrap(f"{_name(run)}: {devices}, {gpu.samples:,} samples{length}")
    lines.append(f"{optimizer} Training - Per-{gpu.unit[0].upper()}{gpu.unit[1:]} Breakdown:")
    for device in gpu.main.devices:
        lines.append(f"    {gpu.label(device)}: {_mean_and_deviation(device.memory_used)}")
    whole = "" if gpu.training is None else f"  (training; {_recorded_period(gpu)}: {_megabytes(gpu.total_mean)})"
    lines.append(f"    Total:  {_megabytes(gpu.main.total_mean)}{whole}")
    lines.append(f"    Balance: {balance_text(gpu.balance('memory_used'), _why_no_balance(gpu))}")
    for name, quantity in QUANTITIES[1:]:
        lines.append(f"    Balance of {name}: {balance_text(gpu.balance(quantity))}")
    lines.append(f"    Energy: {energy_line(gpu)}")
    lines += [part for line in [*cost_lines(gpu), *busy_lines(gpu)] for part in _indented(line)]
    impaired = [f"! {problem}" for device in gpu.devices for problem in problems(gpu, device)]
    for line in [*rank_lines(gpu), *impaired, *(f"! {note}" for note in gpu.notes)]:
        lines += _indented(line)
    lines.append(f"    Source: {gpu.evidence}")
    return lines


def _without_devices(run: RunGpus) -> Iterator[str]:
    """Yield why a run has no numbers of devices, and the timings of its ranks."""
    yield from wrap(f"{_name(run)}: {'; '.join(run.gpu.notes) if run.gpu and run.gpu.notes else 'no recording'}")
    for line in rank_lines(run.gpu) if run.gpu else ():
        yield from _indented(line)


def _by_optimizer(runs: Sequence[RunGpus]) -> list[str]:
    """Return a row per optimizer and number of devices: averages over its recorded runs."""
    # Simulated and real devices are never averaged, nor are runs on different numbers of devices.
    groups: dict[tuple[str, str], list[tuple[RunGpus, GpuNumbers]]] = {}
    for run in runs:
        if run.gpu and run.gpu.devices:
            mark = f" {SIMULATED}" if run.gpu.simulated else ""
            devices = f"{plural(len(run.gpu.devices), run.gpu.unit)}{mark}"
            groups.setdefault((run.optimizer or "unknown", devices), []).append((run, run.gpu))
    rows = []
    for (optimizer, devices), members in groups.items():
        gpus = [gpu for _, gpu in members]
        unfinished = sum(run.status in ("failed", "stopped", "skipped") for run, _ in members)
        used = [device.utilization.mean for gpu in gpus for device in gpu.main.devices if device.utilization]
        peaks = [gpu.total_max for gpu in gpus if gpu.total_max is not None]
        rows.append(
            [
                *(optimizer, devices, str(len(members)), str(unfinished) if unfinished else ""),
                _average([gpu.main.total_mean for gpu in gpus]),
                _average([max(peaks)] if peaks else []),
                _average(used),
                _average([gpu.mean_power for gpu in gpus]),
                _average([gpu.joules for gpu in gpus], "{:,.0f}"),
                _average([gpu.main.joules_per_token for gpu in gpus], "{:.3g}"),
            ]
        )
    titles = ["optimizer", "devices", "runs", "unfinished", "memory", "peak", "util %", "W", "J/run", "J/token"]
    note = (
        "mean over runs (peak: maximum); peak and J: whole run, others: training, if known; "
        "memory, peak and W: sum over the devices of a run"
    )
    return [*table(columns(titles, (0, 1)), rows, WIDTH, rule=True), *wrap(note)]


def _mean_and_deviation(statistics: Statistics | None) -> str:
    if statistics is None:
        return UNKNOWN
    deviation = "" if statistics.deviation is None else f" (±{statistics.deviation:.1f})"
    return f"{statistics.mean:.1f} MB{deviation}"


def _megabytes(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f} MB"


def _name(run: RunGpus) -> str:
    """Return the name of a run, marked if it is simulated or did not finish."""
    simulated = f" {SIMULATED}" if run.gpu and run.gpu.simulated else ""
    return f"{run.name}{simulated}" + ("" if run.status in ("", "finished") else f" ({run.status})")


def _not_recorded(runs: Sequence[RunGpus]) -> list[str]:
    return ["", *wrap(f"not recorded: {', '.join(_name(run) for run in runs)}")] if runs else []


def _counts(runs: Sequence[RunGpus]) -> str:
    recorded = sum(run.gpu is not None and bool(run.gpu.devices) for run in runs)
    failed = sum(run.status == "failed" for run in runs)
    return f"{len(runs)}, {recorded} recorded" + (f", {failed} failed" if failed else "")


def memory_name(gpu: GpuNumbers) -> str:
    return "RSS" if gpu.device_type == CPU else "memory"


def _why_no_balance(gpu: GpuNumbers) -> str:
    if not gpu.consistent:
        return "n/a (impossible values)"
    return f"n/a (one {gpu.unit})" if len(gpu.devices) < 2 else "n/a (unknown for a device)"


def _number_of(gpu: GpuNumbers, device: DeviceNumbers) -> str:
    """Return the number of a device; over several nodes with its host, and of a GPU with its rank in the run."""
    number = gpu.label(device).split(maxsplit=1)[1]
    rank = device.host and gpu.device_type != CPU and device.rank is not None
    return f"{number}, rank {device.rank}" if rank else number


def _indented(line: str) -> list[str]:
    return [f"    {part}" for part in wrap(line, width=WIDTH - 4)]


def _mean(statistics: Statistics | None) -> str:
    return _decimal(statistics.mean if statistics else None)


def _decimal(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"


def _average(values: Sequence[float | None], form: str = "{:,.1f}") -> str:
    """Return the mean of the known values."""
    known = [value for value in values if value is not None]
    return form.format(mean(known)) if known else UNKNOWN
