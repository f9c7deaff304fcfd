"""The commands before a run: dry run, plan (memory, time, energy, cost, disk space), data preparation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kmatrix.cli.commands import Arguments
from kmatrix.config import RunConfig
from kmatrix.depth_rule import RULES, describe, describe_batch
from kmatrix.errors import LaunchError, reason_of
from kmatrix.experiment.inputs.benchmarks import fetch_benchmarks, missing_benchmarks
from kmatrix.experiment.inputs.data import (
    SHARD_TOKENS,
    data_lines,
    epochs,
    forecast_data,
    prepare_data,
    prepared,
    refuse_downloads,
    to_download,
)
from kmatrix.experiment.machine import RunKind
from kmatrix.experiment.plan import Plan, make_plan, no_gpus, refuse_risks
from kmatrix.matrix.expand import Run
from kmatrix.plan.cpu import CpuSpeed
from kmatrix.plan.feasibility import (
    OVERHEAD,
    GpuModel,
    by_name,
    disk,
    fit,
    gpu_cost,
    kilowatt_hours,
    largest_batch,
    mfu_band,
    rates,
    within_budget,
)
from kmatrix.plan.memory import MemoryNeed, memory
from kmatrix.records.matrix import LOCAL, SLURM
from kmatrix.rules import budget_s
from kmatrix.text import (
    UNKNOWN,
    columns,
    count,
    disk_size,
    duration,
    make_command,
    memory_size,
    money,
    plural,
    shown,
    table,
)

TITLES = ("", "params", "steps", "tokens", "memory", "fit", "micro-batch", "time", "energy", "cost", "disk")
WORDS = (0, 5)  # of the titles: columns of words


def dry_run(arguments: Arguments) -> int:
    """Print the axes, one line per run, and one line per reason for which cells are excluded."""
    made = plan_of(arguments)
    print(_axes_line(made))
    if made.verdict.seeds_auto:
        print(_seeds_line(made))
    for run in made.runs:
        print(_run_line(run))
    if made.equal:
        print(f"equal {made.equal}")
    for cells in made.matrix.excluded:
        print(f"excluded {cells.count}: {cells.reason}")
    for note in made.notes:
        print(f"note: {note}")
    return 0


def plan(arguments: Arguments) -> int:
    """Print a forecast for each kind of run of the matrix.

    Raises LaunchError after the forecasts if a run is impossible on the devices that it is planned for.
    """
    asked = by_name(arguments.get("GPU")) if arguments.get("GPU") else None
    # GPU= asks for a forecast on that model, also if .config selects the CPU.
    if asked and not {"DEVICE", "GPT2_DEVICE"} & set(arguments.assignments):
        arguments = arguments._replace(assignments={**arguments.assignments, "DEVICE": "cuda"})
    made = plan_of(arguments, device=asked)
    for kind, names in made.kinds.items():
        print("\n".join([*names, *_forecast(made, kind)]) + "\n")
    trains = [kind.config.train for kind in made.kinds]
    notes, warnings = forecast_data(made.data_dir, trains)
    missing_benchmarks(trains, made.data_dir)
    for note in (*made.notes, *notes):
        print(f"note: {note}")
    for text in (*made.warnings, *warnings):
        print(f"warning: {text}")
    # A machine without GPUs lists all known models.
    if made.machine.gpus and len(made.skipped) == len(made.configs):
        raise no_gpus(made)
    for text in refuse_risks(made):
        print(f"warning: {text}")
    if made.config.engine != LOCAL and not (made.machine.nodes and made.machine.nodes.why_not):
        from kmatrix.cli.cluster import show_jobs

        show_jobs(made)
    return 0


def prepare(arguments: Arguments) -> int:
    """Download and tokenize the data of every run of the matrix, and its benchmarks; print the paths of the data."""
    made = plan_of(arguments)
    fields = [config.train for config in made.configs.values()]
    try:
        made.data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot make DATA_DIR={made.data_dir}"
        raise LaunchError(what, why=reason_of(error), hint="choose a writable directory") from None
    fetch_benchmarks(fields, made.data_dir)
    if made.config.engine == SLURM:
        refuse_downloads(made.data_dir, fields)
    data = prepare_data(made.data_dir, fields)
    for found in data.values():
        print(
            f"{found.train_tokens:,} training and {found.val_tokens:,} validation tokens in {shown(Path(found.path))}"
        )
    for line in data_lines(fields, data):
        print(line)
    return 0


def plan_of(arguments: Arguments, *, one: bool = False, device: GpuModel | None = None) -> Plan:
    """Return the plan of .config and the command line. one, device: as for `make_plan`."""
    return make_plan(
        arguments.config,
        arguments.assignments,
        gpus=arguments.get("GPUS"),
        one=one,
        options=arguments.takes,
        device=device,
    )


def _axes_line(made: Plan) -> str:
    axes = " x ".join(f"{axis.label}({len(axis.points)})" for axis in made.matrix.axes) or "(none)"
    excluded = sum(cells.count for cells in made.matrix.excluded)
    cells, runs = plural(made.matrix.cells, "cell"), plural(len(made.runs), "run")
    return f"axes {axes} = {cells}: {runs} ({plural(made.matrix.duplicates, 'duplicate')}, {excluded} excluded)"


def _seeds_line(made: Plan) -> str:
    """Return `2 configurations x 3 to 10 seeds: 6 to 20 runs`."""
    least, most, runs = made.verdict.seeds_min, len(made.verdict.seeds), len(made.runs)
    configurations = runs // most
    span = f"{least} to {most} seeds: {configurations * least} to {runs}" if least < most else f"{most} seeds: {runs}"
    return f"{plural(configurations, 'configuration')} x {span} runs"


def _run_line(run: Run) -> str:
    """Return the id and the name of a run, its values, and its length."""
    config, train = run.config, run.config.train
    axes = [f"{label}={text}" for label, text in run.axes]
    axes += [f"{point.axis.removeprefix('GPT2_').lower()}={point.text}" for point in run.points if not point.swept]
    # The limit that decides the length, if that is not MAX_ITERS.
    by = "" if config.bound == "max_iters" else f" ({config.bound.upper()})"
    most = [train.max_time and duration(train.max_time), train.max_cost and f"${train.max_cost:g}"]
    parts = [
        plural(train.num_gpus, "cpu" if train.device == "cpu" else "gpu"),
        f"global batch {plural(train.global_batch, 'sequence')}",
        f"{plural(train.max_iters, 'step')}{by}",
        f"{count(config.tokens)} tokens",
        *(f"at most {text}" for text in most if text),
    ]
    return f"run {run.run_id} {run.name}  {' '.join(axes)}  {', '.join(parts)}"


def _forecast(made: Plan, kind: RunKind) -> Iterator[str]:
    """Yield a table with a row per device, and details."""
    config, shape, train = kind.config, kind.config.train.shape, kind.config.train
    cpu = made.machine.cpu_speed(config)
    rows = [_row(config, device, cpu) for device in kind.devices]
    yield from (f"  {line}" for line in table(columns(TITLES, words=WORDS), rows))
    details = [
        (
            "model",
            f"{shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}, vocabulary "
            f"{shape.vocab_size:,}; {count(shape.flops_per_token)} FLOP per token",
        ),
        ("length", _length(config)),
        *(("rule", text) for text in _rules(config)),
        ("data", _data(made, config)),
        ("memory", _memory(memory(train)) if cpu is None else "weights, gradients and optimizer states only"),
        ("time", _time(kind, cpu)),
    ]
    files, size = disk(train)
    details += [("disk", f"at most {plural(files, 'checkpoint')} of {disk_size(size)}")] if files else []
    yield from (f"  {label:11}{text}" for label, text in details)


def _row(config: RunConfig, device: GpuModel, cpu: CpuSpeed | None) -> list[str]:
    """Return the row of a run on a device, by TITLES."""
    shape, train = config.train.shape, config.train
    needed, expected = memory(train), rates(train, device, cpu)
    files, size = disk(train)
    # Both ends may be the budget.
    ends = [within_budget(config.tokens / rate, train) for rate in reversed(expected or ())]
    seconds = list(dict.fromkeys(ends))
    energy = [used for second in seconds if (used := kilowatt_hours(second, device, config.train.num_gpus)) is not None]
    costs = [money(cost) for second in seconds if (cost := gpu_cost(second, train)) is not None]
    largest = None if cpu else largest_batch(train, device)
    cells = [
        device.name,
        f"{shape.params:,}",
        f"{config.train.max_iters:,}",
        count(config.tokens),
        # What the process on a CPU takes beside its states is not planned.
        f"over {memory_size(needed.least)}" if cpu else memory_size(needed.total, device.memory),
        "" if cpu else str(fit(needed, device)),
        "" if largest is None else str(largest),
        " to ".join(duration(second) for second in seconds),
        f"{' to '.join(count(used) for used in energy)} kWh" if energy else "",
        " to ".join(costs),
        disk_size(files * size),
    ]
    return [cell or UNKNOWN for cell in cells]


def _rules(config: RunConfig) -> list[str]:
    """Return the sizes, batch, rates and decay that follow from nanochat's rules, each with its formula."""
    shape, train = config.train.shape, config.train
    found: list[str] = []
    if not shape.is_nanochat and train.optimizer not in RULES:
        return found
    if train.model == "depth" and train.aspect_ratio and train.head_dim:
        rounded = f"{train.aspect_ratio} x {shape.n_layer} layers, up to a multiple of {train.head_dim}"
        found.append(f"width {shape.n_embd} = {rounded}; {shape.n_head} heads of {shape.head_dim}")
    found.append(describe_batch(shape, config.train.tokens_per_step))
    if config.bound == "tokens_per_param" and train.tokens_per_param:
        counted, of = shape.budget_params, "parameters"
        if counted != shape.params:
            of = "scaling parameters (matrices in blocks, output layer)"
        per_step = f"{train.tokens_per_step:,} tokens"
        found.append(f"{train.max_iters:,} steps = {train.tokens_per_param:g} tokens x {counted:,} {of} / {per_step}")
    return [*found, *describe(train)]


def _length(config: RunConfig) -> str:
    train = config.train
    step = (
        f"{train.tokens_per_step:,} tokens ({plural(train.batch_size, 'sequence')} x {train.gradient_accumulation} "
        f"accumulated x {plural(train.num_gpus, 'rank')} x {train.block_size} tokens)"
    )
    share = config.tokens / config.train.shape.params
    ratio = f"{share:,.0f}" if share >= 1000 else f"{share:.3g}"
    return f"steps of {step}; {config.tokens:,} tokens, {ratio} per parameter"


def _data(made: Plan, config: RunConfig) -> str:
    """Return how often a run reads its data, or what is to be downloaded first."""
    train = config.train
    if train.data_streaming:
        return f"{train.dataset}: prepared while the run reads it, so the number of epochs is unknown"
    if known := prepared(made.data_dir, train):
        read = ", ".join(f"{name}: {times:.2f} epochs" for name, (times, _) in epochs([(train, known)]).items())
        return f"{read} of {known.train_tokens:,} tokens"
    fetch = "so the number of epochs is unknown"
    if found := to_download(train):
        size = disk_size((found[0] + 1) * SHARD_TOKENS * 2)
        fetch = f"{found[0]} of {found[1]} training shards to download, {size} with the validation shard"
    return f"{train.dataset}: not prepared, {fetch} ({make_command('prepare-data')})"


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


def _time(kind: RunKind, cpu: CpuSpeed | None) -> str:
    """Return what the times in the table assume."""
    train, devices = kind.config.train, kind.devices
    budget = budget_s(train)
    ended = f"; at most {duration(budget)}, its budget" if budget is not None else ""
    if cpu is not None:
        return f"{cpu.text}; without evaluations{ended}"
    if len(devices) == 1 and rates(train, devices[0], None) is None:
        return f"unknown: the peak of {devices[0].name} in {train.dtype} is not known (PEAK_TFLOPS=){ended}"
    bands = [mfu_band(train, device) for device in devices]
    low, high = min(low for low, _ in bands), max(high for _, high in bands)
    band = f"{low:.0%} to {high:.0%}".replace("%", " %")
    return f"at an MFU of {band} ({'compiled' if train.compile else 'COMPILE=n'}), without evaluations{ended}"
