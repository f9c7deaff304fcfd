"""Print the tables of `make bench PART=` in Markdown. What was not measured has no row."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_kernels
import gpu_parts
from gpu_results import Results, Scale, Values, headline

from kmatrix.records.files import read_jsonl

STORED = Path(__file__).with_name("gpu-results.jsonl")  # what docs/gpu-day.md shows
PERCENT = 100.0
PEER_GOAL = 1.25
GOALS = (  # what, run of the part `speed`, MFU in percent
    ("MFU of 124M in bf16", "124m bf16 stream, graphs, x4", 50.0),
    ("MFU of 124M with FP8", "124m bf16 stream, graphs, x4, FP8", 57.0),
    ("MFU of 774M in bf16", "774m bf16 stream, graphs, x4", 50.0),
    ("MFU of 774M with FP8", "774m bf16 stream, graphs, x4, FP8", 60.0),
)
Row = list[str]


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def report(results: Results) -> list[str]:
    """Return the lines of the whole report."""
    lines = {part: results.lines(part) for part in ("first", "speed", "ladder", "peer", "profile", "ranks")}
    newest = [line for found in lines.values() for line in found.values()]
    about = max(newest, key=lambda line: line["time"])["machine"] if newest else None
    out = ["Nothing was measured."] if about is None else headline(about)
    if results.scale.tiny:
        out += ["**A check with tiny shapes on the CPU: no figure here is a measurement of a GPU.**"]
    tables: Sequence[tuple[str, Sequence[str], Iterable[Row]]] = (
        ("Goals", ("what", "measured", "goal"), goals(lines)),
        ("Products of 124M at micro-batch 32", ("product", "bf16 TFLOP/s", "peak", "FP8 TFLOP/s"), products(results)),
        ("Memory and attention", ("what", "measured"), others(results)),
        (
            "Speed",
            ("run", "micro-batch", "tokens/s", "MFU", "GiB", "products alone", "recompilations"),
            speed(results),
        ),
        ("Ladder", ("run", "tokens/s", "gain", "GiB", "loss"), ladder(results)),
        ("Peer", ("model", "round", "nanoGPT tokens/s", "kmatrix", "kmatrix, bf16 stream, graphs"), peer(results)),
        ("Profile", ("run", "part", "share"), profile(results)),
        ("Ranks", ("run", "tokens/s", "of one rank x ranks", "states MiB"), ranks(results)),
    )
    for title, head, rows in tables:
        if cells := list(rows):
            out += ["", f"### {title}", "", *markdown(head, cells)]
    return out


def elsewhere(path: Path) -> Scale:
    """Return the GPU of the newest results, for a report on a machine without one; an H100 without results."""
    names = [line["machine"]["device"] for line in read_jsonl(path) if line.get("machine", {}).get("device") != "CPU"]
    return Scale(device="cuda", tiny=False, name=names[-1] if names else "NVIDIA H100 80GB HBM3", gpus=1)


def products(results: Results) -> list[Row]:
    """Return a row per product: TFLOP/s in bf16 and its share of the peak, and in FP8."""
    lines = results.lines("first")
    shape, batch = gpu_kernels.shape_of(results.scale)
    rows = []
    for layer, (outputs, inputs) in gpu_kernels.layers_of(shape).items():
        for way in gpu_kernels.WAYS:
            name, sizes = f"{layer}, {way}", (batch * shape.block_size, outputs, inputs)
            m, n, k = gpu_kernels.mnk(way, sizes)
            if not (found := lines.get(name)):
                continue
            small = lines.get(f"{name}, FP8", {})
            in_fp8 = "stays in bf16" if layer == "head" else _number(small.get("tflops"), ".0f") or _why(small)
            share = _percent(found.get("share")) or "n/a"
            rows.append(
                [f"{name} ({m} x {n} x {k})", _number(found.get("tflops"), ".0f") or _why(found), share, in_fp8]
            )
    return rows


def others(results: Results) -> list[Row]:
    """Return the rows of the copy and of the kernels of attention."""
    lines = results.lines("first")
    rows = [["copy, GB/s", f"{lines['copy']['gbps']:.0f}"]] if "copy" in lines else []
    for kernel in ("auto", *gpu_kernels.KERNELS):
        if found := lines.get(f"attention {kernel}"):
            speeds = [found.get(f"{way}_tflops") for way in ("forward", "backward")]
            text = " and ".join(f"{tera:.0f}" for tera in speeds if tera is not None) or _why(found)
            rows.append([f"attention {kernel}, TFLOP/s forward and backward", text])
    return rows


def speed(results: Results) -> list[Row]:
    """Return a row per model."""
    lines, rows = results.lines("speed"), []
    for case in gpu_parts.speed_cases():
        if not (found := lines.get(case.name)):
            continue
        alone = lines.get(f"products of {case.name}", {}).get("seconds")
        share = found.get("step_ms") and alone and 1e3 * alone * found["accumulation"] / found["step_ms"]
        batch = found.get("micro_batch") or case.setting.symbols["BATCH_SIZE"]
        rows.append(
            [
                *(case.name, str(batch), _number(found.get("tokens_per_second"), ",.0f") or _why(found)),
                *(_percent(found.get("mfu")) or "n/a", _gib(found)),
                *(_percent(share) or "n/a", _number(found.get("recompilations"), "d") or "n/a"),
            ]
        )
    return rows


def input_share(lines: Mapping[str, Values]) -> float | None:
    """Return the share of a step that the input pipeline takes if nothing of it overlaps, 0 to 1."""
    alone = lines.get("input pipeline, 124m", {})
    step = lines.get("evaluation and checkpoints, 124m", {})
    if "seconds" not in alone or "step_ms" not in step:
        return None
    return 1e3 * alone["seconds"] / step["step_ms"]


def between_share(lines: Mapping[str, Values]) -> float | None:
    """Return the share of evaluations and checkpoints, 0 to 1, if each comes once per default evaluation interval.

    The first evaluation includes compilation and is left out.
    """
    found = lines.get("evaluation and checkpoints, 124m", {})
    phases: dict[str, list[float]] = found.get("phases_s") or {}
    if "step_ms" not in found or not phases.get("evaluation"):
        return None
    spent = statistics.median(phases["evaluation"][1:] or phases["evaluation"])
    spent += statistics.median(phases.get("checkpoint") or [0.0])
    training = gpu_parts.EVAL_INTERVAL * found["step_ms"] / 1e3
    return spent / (spent + training)


def goals(lines: Mapping[str, Mapping[str, Values]]) -> list[Row]:
    """Return a row per goal."""
    ran, missing = lines["speed"], "not measured"
    ratios = [ratio for model in gpu_parts.PEER_BATCH for ratio in _ratios(lines["peer"], model)]
    waits = lines["profile"].get("124m as it is", {}).get("waits")
    again = max((line.get("recompilations") or 0 for line in ran.values() if "recompilations" in line), default=None)
    return [
        *(
            [what, _percent(ran.get(name, {}).get("mfu")) or missing, f"at least {goal:.0f} %"]
            for what, name, goal in GOALS
        ),
        [
            "speed relative to nanoGPT, best setting",
            f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else missing,
            f"at least {PEER_GOAL}",
        ],
        ["input pipeline, share of a step", _percent(input_share(ran)) or missing, "under 1 %"],
        ["waits for the GPU per step", _number(waits, ".1f") or missing, "only for the step before"],
        ["evaluations and checkpoints, share of the time", _percent(between_share(ran)) or missing, "under 2 %"],
        ["recompilations", _number(again, "d") or missing, "none"],
    ]


def ladder(results: Results) -> list[Row]:
    """Return a row per change: its gain in speed relative to the model as it is."""
    lines, rows = results.lines("ladder"), []
    for case in gpu_parts.ladder_cases():
        if not (found := lines.get(case.name)):
            continue
        first = lines.get(f"{case.name.split()[0]} as it is", {}).get("tokens_per_second")
        rate = found.get("tokens_per_second")
        gain = f"{PERCENT * (rate / first - 1):+.1f} %" if rate and first else "n/a"
        loss = _number(found.get("loss"), ".3f") or "n/a"
        rows.append([case.name, _number(rate, ",.0f") or _why(found), gain, _gib(found), loss])
    return rows


def _ratios(lines: Mapping[str, Values], model: str) -> list[float]:
    """Return the speed of the best setting relative to nanoGPT in each round."""
    found = []
    for turn in range(1, gpu_parts.ROUNDS + 1):
        theirs, *ours = (lines.get(name, {}).get("tokens_per_second") for name in gpu_parts.peer_names(model, turn))
        best = max((rate for rate in ours if rate), default=None)
        if theirs and best:
            found.append(best / theirs)
    return found


def peer(results: Results) -> list[Row]:
    """Return a row per round: tokens/s, and relative to nanoGPT."""
    lines, rows = results.lines("peer"), []
    for model in gpu_parts.PEER_BATCH:
        for turn in range(1, gpu_parts.ROUNDS + 1):
            found = [lines.get(name, {}) for name in gpu_parts.peer_names(model, turn)]
            if not any(found):
                continue
            first = found[0].get("tokens_per_second")
            cells = [_number(first, ",.0f") or _why(found[0])]
            for line in found[1:]:
                rate = line.get("tokens_per_second")
                ratio = f" ({rate / first:.2f}x)" if rate and first else ""
                cells.append(f"{rate:,.0f}{ratio}" if rate else _why(line))
            rows.append([model, str(turn), *cells])
    return rows


def profile(results: Results) -> list[Row]:
    """Return a row per run and part of a step."""
    lines = results.lines("profile")
    return [
        [name, kind, _percent(share) or "n/a"]
        for name in gpu_parts.profile_settings()
        for kind, share in (lines.get(name, {}).get("shares") or {}).items()
    ]


def ranks(results: Results) -> list[Row]:
    """Return a row per run on several ranks."""
    lines = results.lines("ranks")
    alone = lines.get("one rank", {}).get("tokens_per_second")
    rows = []
    for name, found in lines.items():
        rate, states = found.get("tokens_per_second"), found.get("optimizer_state_mib")
        share = _percent(rate / alone / found["ranks"]) if rate and alone else None
        text = ", ".join(f"{size:.0f}" for size in states) if states else "n/a"
        rows.append([name, _number(rate, ",.0f") or _why(found), share or "n/a", text])
    return rows


def _number(value: Any, form: str) -> str | None:
    return None if value is None else f"{value:{form}}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{PERCENT * share:.1f} %"


def _gib(found: Values) -> str:
    return f"{found['peak_mib'] / 1024:.1f}" if found.get("peak_mib") else "n/a"


def _why(found: Values) -> str:
    return f"not possible: {found['failed']}".replace("|", "/") if "failed" in found else "not measured"
