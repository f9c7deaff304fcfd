"""The commands before a run: dry run, plan (memory, time, energy, cost, disk space), data preparation."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.config import RunConfig
from kmatrix.depth_rule import RULES, describe, describe_batch
from kmatrix.errors import LaunchError, reason_of
from kmatrix.experiment.cluster.data import refuse_large_data
from kmatrix.experiment.inputs.benchmarks import fetch_benchmarks
from kmatrix.experiment.inputs.data import data_lines, epochs, prebuilt_of, prepare_data, prepared, run_tokens, to_fetch
from kmatrix.experiment.plan import (
    Plan,
    RunKind,
    budget_warnings,
    gpu_fix,
    make_plan,
    no_gpus,
    refuse_risks,
    risks_on,
)
from kmatrix.matrix.expand import Run
from kmatrix.plan.cpu import CpuSpeed, cpu_speed
from kmatrix.plan.feasibility import (
    KNOWN,
    OVERHEAD,
    GpuModel,
    by_name,
    detected,
    disk,
    fit,
    gpu_cost,
    kilowatt_hours,
    largest_batch,
    mfu_band,
    peak_of,
    rate_at,
    this_machine,
    within_budget,
)
from kmatrix.plan.memory import MemoryNeed, memory, warnings
from kmatrix.plan.risk import Risk
from kmatrix.records.matrix import LOCAL, SLURM
from kmatrix.records.paths import ROOT
from kmatrix.rules import budget_s
from kmatrix.text import (
    UNKNOWN,
    columns,
    count,
    disk_size,
    duration,
    flop_count,
    make_command,
    memory_size,
    money,
    plural,
    shown,
    table,
)

SHOWN = 20  # warnings of the dry run about runs that are impossible on this machine
TITLES = ("", "params", "steps", "tokens", "memory", "fit", "micro-batch", "time", "cost", "disk")
WORDS = (0, 5)  # of the titles: columns of words


def dry_run(arguments: Arguments) -> int:
    """Print the axes, one line per run, and one line per reason for which cells are excluded."""
    made = _plan(arguments)
    print(_axes_line(made))
    if made.verdict.seeds_auto:
        print(_seeds_line(made))
    needs = {kind: _needs(kind) for kind in made.kinds}
    for planned in made.runs:
        print(_run_line(planned.run, needs[planned.kind]))
    marked = [planned for planned in made.runs if planned.kind.lacks]
    if made.equal:
        print(f"equal {made.equal}")
    for cells in made.matrix.excluded:
        print(f"excluded {cells.count}: {cells.reason}")
    for note in (*made.notes, *made.data_notes):
        print(f"note: {note}")
    for text in dict.fromkeys((*made.warnings, *made.data_warnings)):
        print(f"warning: {text}")
    if marked:
        one = min(marked, key=lambda planned: planned.kind.config.ranks)
        print(
            f"warning: {len(marked)} of {plural(len(made.runs), 'run')} cannot run on this machine: "
            f"{one.name} {one.kind.lacks}: {gpu_fix(made, one.kind)}"
        )
    # A dry run is often made on another machine than the run: estimates for this one are warnings.
    accepted = refuse_risks(made, estimates=False)
    for text in accepted[:SHOWN]:
        print(f"warning: {text}")
    if len(accepted) > SHOWN:
        print(f"warning: and {plural(len(accepted) - SHOWN, 'more run')}")
    return 0


def _plan(arguments: Arguments) -> Plan:
    """Return the plan of .config and the command line."""
    return make_plan(
        arguments.config,
        arguments.assignments,
        kconfig=arguments.kconfig,
        gpus=arguments.get("GPUS"),
        options=arguments.takes,
    )


def _axes_line(plan: Plan) -> str:
    axes = " x ".join(f"{axis.label}({len(axis.points)})" for axis in plan.matrix.axes) or "(none)"
    excluded = sum(cells.count for cells in plan.matrix.excluded)
    cells, runs = plural(plan.matrix.cells, "cell"), plural(len(plan.matrix.runs), "run")
    return f"axes {axes} = {cells}: {runs} ({plural(plan.matrix.duplicates, 'duplicate')}, {excluded} excluded)"


def _seeds_line(plan: Plan) -> str:
    """Return `2 configurations x 3 to 10 seeds: 6 to 20 runs`."""
    least, most = plan.verdict.seeds_min, len(plan.verdict.seeds)
    configurations = len(plan.matrix.runs) // most
    span = f"{least} to {most}" if least < most else str(most)
    runs = f"{configurations * least} to {len(plan.matrix.runs)}" if least < most else str(len(plan.matrix.runs))
    return f"{plural(configurations, 'configuration')} x {span} seeds: {runs} runs"


def _run_line(run: Run, needs: str) -> str:
    axes = [f"{label}={text}" for label, text in run.axes]
    axes += [f"{point.axis.removeprefix('GPT2_').lower()}={point.text}" for point in run.points if not point.swept]
    return f"run {run.run_id} {run.name}  {' '.join(axes)}  {needs}"


def _needs(kind: RunKind) -> str:
    """Return the devices, length, size and memory of the runs of a kind."""
    config, known = kind.config, kind.forecast
    devices = plural(config.ranks, "cpu" if config.device == "cpu" else "gpu")
    return (
        f"{devices}, global batch {plural(config.global_batch, 'sequence')}, {_run_length(config)}, "
        f"{count(known.params)} parameters"
        f", {flop_count(known.flops)}, memory over {memory_size(known.state_mib * 2**20)}"
        f"{f' [skipped here: {kind.lacks}]' if kind.lacks else ''}{' [impossible here]' if kind.risks else ''}"
    )


def _run_length(config: RunConfig) -> str:
    """Return the length of a run, with the limit that decides it if that is not MAX_ITERS."""
    by = "" if config.bound == "max_iters" else f" in {config.steps} steps ({config.bound.upper()})"
    length = f"{count(config.tokens)} tokens{by}"
    time = config.train.max_time, config.train.max_cost
    most = [f"at most {text}" for text in (time[0] and duration(time[0]), time[1] and f"${time[1]:g}") if text]
    return ", ".join([length, *most])


def prepare(arguments: Arguments) -> int:
    """Download and tokenize the data of every run of the matrix, and its benchmarks; print the paths of the data."""
    made = _plan(arguments)
    fields = [config.train for config in made.configs.values()]
    data_dir = made.data_dir
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"cannot make DATA_DIR={data_dir}", why=reason_of(error), hint="choose a writable directory"
        ) from None
    fetch_benchmarks(fields, data_dir, ROOT)
    if made.config.engine == SLURM:
        refuse_large_data(data_dir, fields)
    data = prepare_data(Path(sys.executable), ROOT, data_dir, fields)
    for found in data.values():
        print(
            f"{found.train_tokens:,} training and {found.val_tokens:,} validation tokens in {shown(Path(found.path))}"
        )
    for line in data_lines(fields, data):
        print(line)
    return 0


def plan(arguments: Arguments) -> int:
    """Print the forecast of each run of the matrix. Runs with the same forecast are grouped.

    Raises LaunchError after the forecasts if a run is impossible on the devices that it is planned for.
    """
    asked = by_name(arguments.get("GPU")) if arguments.get("GPU") else None
    # GPU= asks for a forecast on that model, also if .config selects the CPU.
    if asked and not {"DEVICE", "GPT2_DEVICE", "CONFIG_GPT2_DEVICE"} & set(arguments.assignments):
        arguments = dataclasses.replace(arguments, assignments={**arguments.assignments, "DEVICE": "cuda"})
    made = _plan(arguments)
    data_dir = made.data_dir
    # Group by the text itself: runs that differ only in a seed or a rate need the same.
    grouped: dict[tuple[str, ...], list[str]] = {}
    # Equal in all runs.
    unasked = made.nodes.warning if made.nodes else ""
    warned = dict.fromkeys([unasked] if unasked else [])
    found: dict[RunKind, tuple[Risk, ...]] = {}
    for planned in made.runs:
        config = planned.config
        devices = _devices(made, config, asked)
        cpu = _cpu(made, config)
        grouped.setdefault(tuple(_forecast_lines(config, devices, data_dir, cpu)), []).append(planned.name)
        warned.update(dict.fromkeys(warnings(config.train)))
        # Earlier runs tell the time of those that are planned for this machine.
        here = None if asked or made.nodes else made.earlier
        warned.update(dict.fromkeys(budget_warnings(config, devices, cpu, here)))
        if planned.kind not in found:
            found[planned.kind] = risks_on(config, devices, made.earlier, made.nodes)
    for lines, names in grouped.items():
        print("\n".join([*names, *lines]) + "\n")
    for note in made.notes:
        print(f"note: {note}")
    for text in warned:
        print(f"warning: {text}")
    # GPU= plans for another machine; a machine without GPUs lists all known models.
    if asked is None and made.gpus and all(kind.lacks for kind in made.kinds):
        raise no_gpus(made)
    for text in refuse_risks(made, found):
        print(f"warning: {text}")
    if made.config.engine != LOCAL and not unasked:
        from kmatrix.cli.running.cluster import show_jobs

        show_jobs(made)
    return 0


def _cpu(made: Plan, config: RunConfig) -> CpuSpeed | None:
    """Return the expected speed of a run on the CPU, None for other runs."""
    if config.device != "cpu":
        return None
    if made.nodes:
        return cpu_speed(config.train, there=made.nodes.cores(config))
    return made.earlier.cpu_speed(config.shape, config.train)


def _devices(made: Plan, config: RunConfig, asked: GpuModel | None) -> Sequence[GpuModel]:
    """Return the devices of a forecast: GPU=, else the GPUs of this machine, else all known models."""
    if asked and config.device != "cpu":
        return (asked,)
    if made.nodes:
        return made.nodes.devices(config) or KNOWN
    if config.device == "cpu":
        return (this_machine(config.ranks),)
    # One per model: equal GPUs need the same forecast only once.
    here = {gpu.name: detected(gpu.name, gpu.memory_total) for gpu in made.gpus}
    return tuple(here.values()) or KNOWN


def _forecast_lines(
    config: RunConfig, devices: Sequence[GpuModel], data_dir: Path, cpu: CpuSpeed | None
) -> Iterator[str]:
    """Yield a table with a row per device, and details. cpu: the expected speed of a run on the CPU."""
    shape, train = config.shape, config.train
    rows = [_row(config, device, cpu) for device in devices]
    yield from (f"  {line}" for line in table(columns(TITLES, words=WORDS), rows))
    yield _line(
        "model",
        f"{shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}, vocabulary {shape.vocab_size:,}; "
        f"{flop_count(shape.flops_per_token)} per token",
    )
    yield _line("length", _length(config))
    yield from (_line("rule" if i == 0 else "", text) for i, text in enumerate(_rules(config)))
    yield _line("data", _data(config, data_dir))
    if cpu is None:
        yield _line("memory", _memory(memory(shape, train)))
    yield _line("time", _time(config, devices, cpu))
    if len(devices) == 1 and (used := _energy(config, devices[0])):
        yield _line("energy", used)
    if (price := train.machine_hour_price if cpu else train.gpu_hour_price) is not None:
        yield _line("cost", f"at ${price:g} per {'machine' if cpu else 'GPU'} hour")
    kept = disk(shape, train, config.steps)
    files = f"{plural(kept.files, 'checkpoint')} of {disk_size(kept.each)}"
    yield _line("disk", f"at most {files}" if kept.files else "no checkpoints")


def _row(config: RunConfig, device: GpuModel, cpu: CpuSpeed | None) -> list[str]:
    """Return the row of a run on a device, by TITLES."""
    shape, train = config.shape, config.train
    needed, seconds = memory(shape, train), _seconds(config, device, cpu)
    costs = [money(cost) for second in seconds if (cost := gpu_cost(second, train)) is not None]
    kept = disk(shape, train, config.steps)
    if cpu is None:
        size = memory_size(needed.total, device.memory)
        fits = str(fit(needed, device))
        largest = largest_batch(shape, train, device)
    else:  # what the process takes beside its states is not planned
        size = f"over {memory_size(needed.least)}"
        fits, largest = None, None
    cells = [
        device.name,
        f"{shape.params:,}",
        f"{config.steps:,}",
        count(config.tokens),
        size,
        fits,
        None if largest is None else str(largest),
        " to ".join(duration(second) for second in seconds),
        " to ".join(costs),
        disk_size(kept.bytes),
    ]
    return [cell or UNKNOWN for cell in cells]


def _line(label: str, text: str) -> str:
    return f"  {label:11}{text}"


def _rules(config: RunConfig) -> list[str]:
    """Return the sizes, batch, rates and decay that follow from nanochat's rules, each with its formula."""
    shape, train = config.shape, config.train
    found: list[str] = []
    if not shape.is_nanochat and train.optimizer not in RULES:
        return found
    if train.model == "depth" and train.aspect_ratio and train.head_dim:
        rounded = f"{train.aspect_ratio} x {shape.n_layer} layers, up to a multiple of {train.head_dim}"
        found.append(f"width {shape.n_embd} = {rounded}; {shape.n_head} heads of {shape.head_dim}")
    found.append(describe_batch(shape, config.tokens_per_step))
    if config.bound == "tokens_per_param" and train.tokens_per_param:
        counted, of = shape.budget_params, "parameters"
        if counted != shape.params:
            of = "scaling parameters (matrices in blocks, output layer)"
        per_step = f"{config.tokens_per_step:,} tokens"
        found.append(f"{config.steps:,} steps = {train.tokens_per_param:g} tokens x {counted:,} {of} / {per_step}")
    return [*found, *describe(train)]


def _length(config: RunConfig) -> str:
    train = config.train
    step = (
        f"{config.tokens_per_step:,} tokens ({plural(train.batch_size, 'sequence')} x {train.gradient_accumulation} "
        f"accumulated x {plural(config.ranks, 'rank')} x {config.shape.block_size} tokens)"
    )
    share = config.tokens / config.shape.params
    ratio = f"{share:,.0f}" if share >= 1000 else f"{share:.3g}"
    return f"steps of {step}; {config.tokens:,} tokens, {ratio} per parameter"


def _data(config: RunConfig, data_dir: Path) -> str:
    if config.train.data_streaming:
        return f"{config.train.dataset}: prepared while the run reads it, so the number of epochs is unknown"
    known = prepared(data_dir, config.train)
    if known is None:
        return f"{config.train.dataset}: not prepared, {_unprepared(config)} ({make_command('prepare-data')})"
    read = epochs(config.train, known)
    return (
        ", ".join(f"{name}: {times:.2f} epochs" for name, times in read.items()) + f" of {known.train_tokens:,} tokens"
    )


def _unprepared(config: RunConfig) -> str:
    """Return the download of data that are not prepared, if it is known."""
    train = config.train
    tokens = train.data_tokens or run_tokens(train)
    prebuilt = prebuilt_of(train, tokens)
    if prebuilt is None:
        return "so the number of epochs is unknown"
    fetch = to_fetch(prebuilt, tokens, train.block_size)
    size = disk_size(fetch.bytes)
    text = f"{fetch.shards} of {prebuilt.shards} training shards to download, {size} with the validation shard"
    # The number of tokens is published for all shards together only.
    everything = prebuilt.tokens if fetch.shards == prebuilt.shards else None
    return text + (f", {run_tokens(train) / everything:.2f} epochs" if everything else "")


def _memory(needed: MemoryNeed) -> str:
    parts = {
        "weights": needed.weights,
        "gradients": needed.gradients,
        "optimizer": needed.states,
        "16-bit copies": needed.copies,
        "activations": needed.activations,
        "backward of a block": needed.block,
        "logits": needed.logits,
    }
    listed = ", ".join(f"{name} {memory_size(size)}" for name, size in parts.items() if size != 0)
    return f"per rank: {listed}; and {memory_size(OVERHEAD)} for libraries"


def _seconds(config: RunConfig, device: GpuModel, cpu: CpuSpeed | None) -> list[float]:
    """Return the time (s) of a run at both ends of its expected speed and within its budget, the shortest first.

    Both ends may be the budget. Empty if the speed is unknown.
    """
    ends: list[float | None]
    if cpu is not None:
        work = config.tokens * config.shape.flops_per_token / cpu.cores
        ends = [work / cpu.fast, work / cpu.slow]
    else:
        band = mfu_band(config.shape, config.train, device)
        rates = [rate_at(share, config.shape, config.train, device) for share in reversed(band)]
        ends = [config.tokens / rate if rate else None for rate in rates]
    return list(dict.fromkeys(within_budget(end, config.train) for end in ends if end is not None))


def _time(config: RunConfig, devices: Sequence[GpuModel], cpu: CpuSpeed | None) -> str:
    """Return what the times in the table assume."""
    budget = budget_s(config.train)
    ended = f"; at most {duration(budget)}, its budget" if budget is not None else ""
    if cpu is not None:
        return f"{cpu.text}; without evaluations{ended}"
    if len(devices) == 1 and peak_of(devices[0], config.train) is None:
        return f"unknown: the peak of {devices[0].name} in {config.train.dtype} is not known (PEAK_TFLOPS=){ended}"
    bands = [mfu_band(config.shape, config.train, device) for device in devices]
    low, high = min(low for low, _ in bands), max(high for _, high in bands)
    band = f"{low:.0%} to {high:.0%}".replace("%", " %")
    return f"at an MFU of {band} ({'compiled' if config.train.compile else 'COMPILE=n'}), without evaluations{ended}"


def _energy(config: RunConfig, device: GpuModel) -> str:
    """Return the energy of a run at the maximum power of its GPUs, "" if it is unknown."""
    used = [kilowatt_hours(second, device, config.ranks) for second in _seconds(config, device, None)]
    known = [count(hours) for hours in used if hours is not None]
    return f"{' to '.join(known)} kWh at {device.watts:g} W per GPU, its maximum power" if known else ""
