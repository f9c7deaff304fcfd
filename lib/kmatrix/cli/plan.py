"""The command that says what a matrix will need, and whether it can be: memory, time, energy, money, disk."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kmatrix.cli.arguments import Arguments
from kmatrix.cli.data import with_known_vocabulary
from kmatrix.cli.planning import Plan, make_plan
from kmatrix.cli.session import below_root
from kmatrix.config import RunConfig, with_data
from kmatrix.errors import ConfigError
from kmatrix.launch.prepare import epochs, prepared, run_tokens
from kmatrix.plan import warnings
from kmatrix.plan.devices import GIB, KNOWN, Device, by_name, detected
from kmatrix.plan.memory import Memory, memory
from kmatrix.plan.outlook import (
    BAND,
    OVERHEAD,
    Chance,
    Target,
    at_mfu,
    at_rate,
    chance,
    deeper,
    disk,
    fit,
    kilowatt_hours,
    largest_batch,
    largest_depth,
    money,
    other_counts,
    peak_of,
)
from kmatrix.plan.ready import READY, to_fetch

TARGETS = {"TOKENS_PER_SECOND": "tokens_per_second", "SECONDS_PER_STEP": "seconds_per_step", "HOURS": "hours"}
BAND_TEXT = f"{BAND[0]:.0%} to {BAND[1]:.0%}".replace("%", " %")


def plan(arguments: Arguments) -> int:
    """Print what each run of the matrix needs; runs that need the same are told of once."""
    target = _target(arguments)
    asked = by_name(arguments.get("GPU")) if arguments.get("GPU") else None
    if asked and not {"DEVICE", "GPT2_DEVICE", "CONFIG_GPT2_DEVICE"} & set(arguments.assignments):
        arguments = dataclasses.replace(arguments, assignments={**arguments.assignments, "DEVICE": "cuda"})
    made = make_plan(arguments)
    data_dir = below_root(made.config.data_dir)
    told: dict[tuple[str, ...], list[str]] = {}
    said: dict[str, None] = {}
    for run in made.matrix.runs:
        config = _with_known_data(made.run_config(run), data_dir)
        devices = _devices(made, config, asked)
        told.setdefault(tuple(_lines(config, devices, target, data_dir)), []).append(run.name)
        said.update(dict.fromkeys(warnings(config.fields)))
    for lines, names in told.items():
        print("\n".join([*names, *lines]) + "\n")
    for note in (*made.matrix.notes, *made.notes):
        print(f"note: {note}")
    for text in said:
        print(f"warning: {text}")
    return 0


def _with_known_data(config: RunConfig, data_dir: Path) -> RunConfig:
    """Return a run with the vocabulary of its data, and with epochs as steps, where the data are prepared."""
    known = prepared(data_dir, config.fields) if config.steps is None else None
    if known:
        return with_data(config, known.train_tokens, known.vocab_size)
    return with_known_vocabulary(config, data_dir)


def _target(arguments: Arguments) -> Target:
    found: dict[str, float] = {}
    for name, field in TARGETS.items():
        if text := arguments.get(name):
            found[field] = _positive(name, text)
    return Target(**found)


def _positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={text} is no number above 0", fix=f"pass {name}=4.5, or leave it out")
    return value


def _devices(made: Plan, config: RunConfig, asked: Device | None) -> Sequence[Device]:
    """Return what a run is planned for: what is asked for, what is here, or every known GPU where none is here."""
    if config.device == "cpu":
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return (Device(name="this machine", memory=ram / config.ranks, watts=None),)
    if asked:
        return (asked,)
    here = {gpu.name: detected(gpu.name, gpu.memory_total) for gpu in made.gpus}
    return tuple(here.values()) or KNOWN


def _lines(config: RunConfig, devices: Sequence[Device], target: Target, data_dir: Path) -> Iterator[str]:
    shape, fields = config.shape, config.fields
    needed = memory(shape, fields)
    flops = shape.flops_per_token
    yield _line(
        "model",
        f"{shape.n_layer} layers, {shape.n_head} heads, width {shape.n_embd}, vocabulary {shape.vocab_size:,}: "
        f"{shape.params:,} parameters, {_scaled(flops)}FLOP a token",
    )
    yield _line("length", _length(config))
    yield _line("data", _data(config, data_dir))
    yield _line("memory", _memory(needed))
    if len(devices) > 1:
        yield from (_line(device.name, _short(config, device, needed, target)) for device in devices)
    else:
        yield from _on(config, devices[0], needed, target)
    if kept := disk(shape, fields, config.steps):
        files = f"{kept.files} checkpoint{'' if kept.files == 1 else 's'} of {_bytes(kept.each)}"
        yield _line(
            "disk", f"{files} at the most: {_bytes(kept.files * kept.each)}" if kept.files else "no checkpoints"
        )


def _line(label: str, text: str) -> str:
    return f"  {label:11}{text}"


def _length(config: RunConfig) -> str:
    fields = config.fields
    step = (
        f"{config.tokens_per_step:,} tokens ({fields['batch_size']} sequences x {fields['gradient_accumulation']} "
        f"accumulated x {config.ranks} rank{'s' if config.ranks > 1 else ''} x {config.shape.block_size} tokens)"
    )
    if config.tokens is None or config.steps is None:
        return f"{fields['max_epochs']:g} epochs of the data, in steps of {step}"
    share = config.tokens / config.shape.params
    return (
        f"{config.steps:,} steps of {step}: {config.tokens:,} tokens, {share:.3g} a parameter "
        f"(20 a parameter: {config.tokens // 20:,} parameters)"
    )


def _data(config: RunConfig, data_dir: Path) -> str:
    known = prepared(data_dir, config.fields)
    if known is None:
        return f"{config.fields['dataset']}: not prepared, {_unprepared(config)} (make prepare-data)"
    if config.tokens is None:
        return f"{config.fields['dataset']}: {known.train_tokens:,} tokens"
    read = epochs(config.fields, known)
    return (
        ", ".join(f"{name}: {count:.2f} epochs" for name, count in read.items()) + f" of {known.train_tokens:,} tokens"
    )


def _unprepared(config: RunConfig) -> str:
    """Say what will be fetched, where that is known beforehand."""
    fields = config.fields
    ready = READY.get(fields["dataset"]) if fields["tokenizer"] == "gpt2" else None
    if ready is None:
        return "so how often it is read is not known"
    fetch = to_fetch(ready, int(fields["data_tokens"] or 0) or run_tokens(fields), int(fields["block_size"]))
    text = f"{fetch.shards} of {ready.shards} training shards to fetch, {fetch.bytes / 1e9:.1f} GB with validation's"
    everything = ready.tokens if fetch.shards == ready.shards else None
    return text + (f", all read {run_tokens(fields) / everything:.2f} times" if everything else "")


def _memory(needed: Memory) -> str:
    parts = {
        "weights": needed.weights,
        "gradients": needed.gradients,
        "optimizer": needed.states,
        "16-bit copies": needed.copies,
        "activations": needed.activations,
        "way back of a block": needed.block,
        "logits": needed.logits,
    }
    listed = ", ".join(
        f"{name} {'not known' if size is None else _gib(size)}" for name, size in parts.items() if size != 0
    )
    peak = "not known: the optimizer's states are not" if needed.total is None else f"{_gib(needed.total)} on each rank"
    return f"peak {peak} ({listed})"


def _on(config: RunConfig, device: Device, needed: Memory, target: Target) -> Iterator[str]:
    """Yield what is to be said of a run on one kind of device."""
    if device.memory is not None and needed.total is not None:
        room = f"{_gib(needed.total)} of {_gib(device.memory)}, of which {_gib(OVERHEAD)} is the libraries'"
        yield _line("fit", f"{fit(needed.total, device)} on {device.name}: {room}")
        yield _line("largest", _largest(config, device))
    yield _line("time", _time(config, device))
    if (rate := target.rate(config.tokens_per_step, config.tokens)) is not None:
        yield _line("target", _reached(config, device, rate))
    yield from _costs(config, device, _seconds(config, device, target))
    if config.device != "cpu":
        yield _line("GPUs", _other_counts(config, device))


def _costs(config: RunConfig, device: Device, seconds: Sequence[float]) -> Iterator[str]:
    """Yield energy and money, as far as they are known."""
    hungry = [kilowatt_hours(second, device, config.ranks) for second in seconds]
    used = [_three(hours) for hours in hungry if hours is not None]
    if used:
        yield _line("energy", f"{' to '.join(used)} kWh at {device.watts:g} W a GPU, the most it may draw")
    costs = [money(second, config.fields) for second in seconds]
    paid = [f"${cost:,.2f}" for cost in costs if cost is not None]
    if paid:
        yield _line("money", f"{' to '.join(paid)} at ${config.fields['gpu_hour_price']:g} a GPU and hour")


def _largest(config: RunConfig, device: Device) -> str:
    shape, fields = config.shape, config.fields
    batch = largest_batch(shape, fields, device)
    depth = largest_depth(fields, device, deeper(shape, fields))
    layers = f"{depth} layers" + ("" if fields["model"] == "depth" else f" of width {shape.n_embd}")
    return (
        f"micro-batch {batch} with this model; {layers} at a micro-batch of {fields['batch_size']}"
        if batch
        else f"not one sequence fits; {layers} would at a micro-batch of {fields['batch_size']}"
    )


def _seconds(config: RunConfig, device: Device, target: Target) -> list[float]:
    """Return the seconds of a run: at a target that can be, else at both ends of the band, the shortest first."""
    rate = target.rate(config.tokens_per_step, config.tokens)
    if rate is not None and config.tokens is not None:
        reached = at_rate(rate, shape=config.shape, fields=config.fields, tokens=config.tokens, device=device)
        if chance(reached.mfu) is not Chance.IMPOSSIBLE:
            return [config.tokens / rate]
    band = [_at(config, device, share) for share in reversed(BAND)]
    return [seconds for seconds in band if seconds is not None]


def _at(config: RunConfig, device: Device, share: float, ranks: int | None = None) -> float | None:
    fields = {**config.fields, "num_gpus": ranks or config.ranks}
    speed = at_mfu(share, shape=config.shape, fields=fields, tokens=config.tokens, device=device)
    return speed.seconds if speed else None


def _band(config: RunConfig, device: Device, ranks: int | None = None) -> str:
    """Return the time of a run at both ends of the band, as text; empty where it is not known."""
    ends = [_at(config, device, share, ranks) for share in reversed(BAND)]
    return " to ".join(_duration(end) for end in ends if end is not None)


def _time(config: RunConfig, device: Device) -> str:
    if peak_of(device, config.fields) is None:
        return f"not known: {device.name} has no known peak in {config.fields['dtype']} (PEAK_TFLOPS=)"
    if config.tokens is None:
        return "not known before the data are"
    return f"{_band(config, device)} at an MFU of {BAND_TEXT}, evaluations not counted"


def _reached(config: RunConfig, device: Device, rate: float) -> str:
    speed = at_rate(rate, shape=config.shape, fields=config.fields, tokens=config.tokens, device=device)
    words = [f"{rate:,.0f} tok/s"]
    if speed.seconds is not None:
        words.append(_duration(speed.seconds))
    if speed.mfu is None:
        return ", ".join(words)
    return ", ".join([*words, f"MFU {speed.mfu:.1%}".replace("%", " %")]) + f": {chance(speed.mfu)}"


def _short(config: RunConfig, device: Device, needed: Memory, target: Target) -> str:
    """Return one kind of device in one line, where there are many."""
    words = [str(fit(needed.total, device))]
    fits = largest_batch(config.shape, config.fields, device)
    if fits is not None:
        words.append(f"largest micro-batch {fits}")
    rate = target.rate(config.tokens_per_step, config.tokens)
    if rate is not None:
        words.append(_reached(config, device, rate))
    else:
        words += [band] if (band := _band(config, device)) else []
    return ", ".join(words)


def _other_counts(config: RunConfig, device: Device) -> str:
    """Return what changes with the number of GPUs while the global batch stays."""
    told = []
    for ranks, accumulation in other_counts(config.fields, config.global_batch).items():
        name = f"{ranks} GPU{'s' if ranks > 1 else ''}"
        if accumulation is None:
            told.append(
                f"{name}: {config.global_batch} sequences are no multiple of {config.fields['batch_size']} x {ranks}"
            )
            continue
        band = _band(config, device, ranks)
        told.append(f"{name}: accumulation {accumulation}" + (f", {band}" if band else ""))
    return "; ".join(told) + f" (PARALLEL_BATCH_SIZE={config.global_batch} keeps steps and batch)"


def _three(number: float) -> str:
    """A number with three digits, or all of those before the point."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


def _gib(size: float) -> str:
    """Bytes as memory is counted; below a GiB in MiB."""
    if size < GIB:
        return f"{size / 2**20:.3g} MiB"
    return f"{size / GIB:.1f} GiB" if size < 100 * GIB else f"{size / GIB:.0f} GiB"


def _bytes(size: float) -> str:
    """Bytes as disks are counted."""
    for unit, length in (("MB", 1e6), ("GB", 1e9)):
        if size < 999.5 * length:
            return f"{size / length:.3g} {unit}"
    return f"{size / 1e12:,.3g} TB"


def _duration(seconds: float) -> str:
    for unit, length, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 100)):
        if seconds < most * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86400:,.1f} d"


def _scaled(number: float) -> str:
    for letter in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.3g} {letter}"
        number /= 1000
    return f"{number:.3g} P"
