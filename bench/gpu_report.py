"""Print the tables of `make bench-gpu` in Markdown: measurements, and predictions for those that are missing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_kernels
import gpu_parts
from gpu_results import Results, Scale, Values, headline
from roofline import BANDS, DEVICES, Prediction, markdown

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
PARTS_OF_STEP = {  # kind of a profile: parts of a prediction
    "products": ("blocks' products", "head's products"),
    "attention": ("attention",),
    "loss": ("loss",),
    "elementwise": ("elementwise", "casts", "quantization"),
    "optimizer": ("optimizer",),
    "gaps": ("gaps",),
}
Row = list[str]


def unmeasured(low: float, high: float, form: str = ".1f", unit: str = " %") -> str:
    return f"not measured, predicted {low:{form}} to {high:{form}}{unit}"


def report(results: Results) -> list[str]:
    """Return the lines of the whole report."""
    scale = results.scale
    lines = {part: results.lines(part) for part in ("first", "speed", "ladder", "peer", "profile", "ranks")}
    newest = [line for found in lines.values() for line in found.values()]
    about = max(newest, key=lambda line: line["time"])["machine"] if newest else None
    out = ["Nothing was measured: all figures are predictions."] if about is None else headline(about)
    if scale.tiny:
        out += ["**A check with tiny shapes on the CPU: no figure here is a measurement of a GPU.**"]
    out += [f"Predictions are for an {scale.predicted_as} by bench/roofline.py, low to high."]
    tables: Sequence[tuple[str, Sequence[str], Iterable[Row]]] = (
        ("Goals", ("what", "measured", "goal", "by prediction"), goals(lines)),
        ("Products of 124M at micro-batch 32", ("product", "bf16 TFLOP/s", "peak", "FP8 TFLOP/s"), products(results)),
        ("Memory and attention", ("what", "measured", "assumed, low to high"), others(results)),
        ("MFU of 124M at micro-batch 32, predicted", ("rates", "low", "mid", "high"), predictions(results)),
        (
            "Speed",
            ("run", "micro-batch", "tokens/s", "MFU", "predicted MFU", "GiB", "products alone", "recompilations"),
            speed(results),
        ),
        ("Ladder", ("run", "tokens/s", "gain", "predicted gain", "GiB", "loss"), ladder(results)),
        ("Peer", ("model", "round", "nanoGPT tokens/s", "kmatrix", "kmatrix, bf16 stream, graphs"), peer(results)),
        ("Profile", ("run", "part", "share", "predicted, mid"), profile(results)),
        ("Ranks", ("run", "tokens/s", "of one rank x ranks", "states MiB"), ranks(results)),
    )
    for title, head, rows in tables:
        out += ["", f"### {title}", "", *markdown(head, rows)]
    return out


def elsewhere(path: Path) -> Scale:
    """Return the GPU of the newest results, for a report on a machine without one; an H100 without results."""
    names = [line["machine"]["device"] for line in read_jsonl(path) if line.get("machine", {}).get("device") != "CPU"]
    return Scale(device="cuda", tiny=False, name=names[-1] if names else "NVIDIA H100 80GB HBM3", gpus=1)


def products(results: Results) -> list[Row]:
    """Return a row per product: TFLOP/s in bf16 and its share of the peak, and in FP8."""
    lines, scale = results.lines("first"), results.scale
    shape, batch = gpu_kernels.shape_of(scale)
    gpu, rows = DEVICES[scale.predicted_as], []
    for layer, (outputs, inputs) in gpu_kernels.layers_of(shape).items():
        for way in gpu_kernels.WAYS:
            name, sizes = f"{layer}, {way}", (batch * shape.block_size, outputs, inputs)
            m, n, k = gpu_kernels.mnk(way, sizes)
            found, small = lines.get(name, {}), lines.get(f"{name}, FP8", {})
            band = [
                2e-12 * m * n * k / gpu_kernels.product_seconds(m, n, k, gpu, rates)
                for rates in BANDS[scale.predicted_as]
            ]
            measured = _number(found.get("tflops"), ".0f") or unmeasured(band[0], band[-1], ".0f", "")
            in_fp8 = "stays in bf16" if layer == "head" else _number(small.get("tflops"), ".0f") or _why(small)
            share = _percent(found.get("share")) or _band([1e12 * tera / gpu.peak for tera in band])
            rows.append([f"{name} ({m} x {n} x {k})", measured, share, in_fp8])
    return rows


def others(results: Results) -> list[Row]:
    """Return the rows of the copy and of the kernels of attention."""
    lines, scale = results.lines("first"), results.scale
    gpu, band = DEVICES[scale.predicted_as], BANDS[scale.predicted_as]
    low, high = (gpu.bandwidth * rates.bandwidth / 1e9 for rates in (band[0], band[-1]))
    copied = lines.get("copy", {}).get("gbps")
    share = f" ({PERCENT * copied * 1e9 / gpu.bandwidth:.0f} % of the data sheet)" if copied and not scale.tiny else ""
    rows = [["copy, GB/s", f"{copied:.0f}{share}" if copied else "not measured", f"{low:.0f} to {high:.0f}"]]
    assumed = " and ".join(
        f"{getattr(band[0], way) / 1e12:.0f} to {getattr(band[-1], way) / 1e12:.0f}" for way in ("forward", "backward")
    )
    for kernel in ("auto", *gpu_kernels.KERNELS):
        found = lines.get(f"attention {kernel}", {})
        speeds = [found.get(f"{way}_tflops") for way in ("forward", "backward")]
        text = " and ".join(f"{tera:.0f}" for tera in speeds if tera is not None) or _why(found)
        rows.append([f"attention {kernel}, TFLOP/s forward and backward", text, assumed if kernel == "auto" else ""])
    return rows


def predictions(results: Results) -> list[Row]:
    """Return the band with assumed rates, and with those that were measured."""
    lines, scale = results.lines("first"), results.scale
    shape, batch = gpu_kernels.shape_of(scale)
    rates = BANDS[scale.predicted_as]
    work = gpu_kernels.work_at(shape, batch)
    assumed = [gpu_kernels.predict(work, shape, batch, DEVICES[scale.predicted_as], rate) for rate in rates]
    found = gpu_kernels.recomputed(lines, scale) if lines else None
    return [
        ["assumed", *_mfus(assumed)],
        ["measured", *(_mfus(found) if found else ["not measured"] * 3)],
    ]


def speed(results: Results) -> list[Row]:
    """Return a row per model, and one each for the input pipeline and for evaluation and checkpoints."""
    lines, rows = results.lines("speed"), []
    for case in gpu_parts.speed_cases():
        found = lines.get(case.name, {})
        alone = lines.get(f"products of {case.name}", {}).get("seconds")
        share = found.get("step_ms") and alone and 1e3 * alone * found["accumulation"] / found["step_ms"]
        band = case.predicted.on(results.scale.predicted_as) if case.predicted else []
        predicted = _band([p.mfu for p in band]) if band else "no prediction"
        batch = found.get("micro_batch") or case.setting.symbols["BATCH_SIZE"]
        rows.append(
            [
                *(case.name, str(batch), _number(found.get("tokens_per_second"), ",.0f") or _why(found)),
                *(_percent(found.get("mfu")) or "n/a", predicted, _gib(found)),
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
    rows, ran = [], lines["speed"]
    cases = {case.name: case for case in gpu_parts.speed_cases()}
    for what, name, goal in GOALS:
        predicted = cases[name].predicted
        assert predicted
        used = ran.get(name, {}).get("mfu")
        band = [p.mfu for p in predicted.on("H100")]
        text = _percent(used) or unmeasured(PERCENT * band[0], PERCENT * band[-1])
        inside = "within the band" if goal <= PERCENT * band[-1] else "above the band"
        rows.append([what, text, f"at least {goal:.0f} %", inside])
    ratios = [ratio for model in gpu_parts.PEER_BATCH for ratio in _ratios(lines["peer"], model)]
    peers = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "not measured, no prediction"
    rows.append(["speed relative to nanoGPT, best setting", peers, f"at least {PEER_GOAL}", "unknown"])
    rows.append(
        ["input pipeline, share of a step", _percent(input_share(ran)) or "not measured", "under 1 %", "unknown"]
    )
    waits = lines["profile"].get("124m as it is", {}).get("waits")
    rows.append(
        [
            "waits for the GPU per step",
            _number(waits, ".1f") or "not measured",
            "only for the step before",
            "met on the double",
        ]
    )
    shares = _percent(between_share(ran)) or "not measured"
    rows.append(["evaluations and checkpoints, share of the time", shares, "under 2 %", "unknown"])
    again = max((line.get("recompilations") or 0 for line in ran.values() if "recompilations" in line), default=None)
    rows.append(["recompilations", _number(again, "d") or "not measured", "none", "met on the double"])
    return rows


def ladder(results: Results) -> list[Row]:
    """Return a row per change: its gain in speed relative to the model as it is, measured and predicted."""
    lines, rows, gpu = results.lines("ladder"), [], results.scale.predicted_as
    cases = gpu_parts.ladder_cases()
    base = {case.name.split()[0]: case for case in cases if case.name.endswith("as it is")}
    for case in cases:
        found, start = lines.get(case.name, {}), base[case.name.split()[0]]
        first = lines.get(start.name, {}).get("tokens_per_second")
        rate = found.get("tokens_per_second")
        gain = f"{PERCENT * (rate / first - 1):+.1f} %" if rate and first else "n/a"
        predicted = "no prediction"
        if case.predicted and start.predicted:
            ratios = [
                new.tokens_per_second / old.tokens_per_second
                for new, old in zip(case.predicted.on(gpu), start.predicted.on(gpu), strict=True)
            ]
            predicted = f"{PERCENT * (min(ratios) - 1):+.1f} to {PERCENT * (max(ratios) - 1):+.1f} %"
        loss = _number(found.get("loss"), ".3f") or "n/a"
        rows.append([case.name, _number(rate, ",.0f") or _why(found), gain, predicted, _gib(found), loss])
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
    lines, rows = results.lines("profile"), []
    for name, (_, predicted) in gpu_parts.profile_settings().items():
        found: dict[str, float] = lines.get(name, {}).get("shares") or {}
        middle = predicted.on(results.scale.predicted_as)[1]
        kinds = [*PARTS_OF_STEP, *(kind for kind in found if kind not in PARTS_OF_STEP)]
        for kind in kinds:
            share = sum(middle.parts[part] for part in PARTS_OF_STEP.get(kind, ())) / middle.seconds
            measured = _percent(found.get(kind)) or ("0.0 %" if found else "not measured")
            rows.append([name, kind, measured, f"{PERCENT * share:.1f} %" if kind in PARTS_OF_STEP else "none"])
    return rows


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
    return rows or [["all", "not measured, no prediction", "n/a", "n/a"]]


def _mfus(found: Sequence[Prediction]) -> Row:
    return [f"{PERCENT * prediction.mfu:.1f}" for prediction in found]


def _number(value: Any, form: str) -> str | None:
    return None if value is None else f"{value:{form}}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{PERCENT * share:.1f} %"


def _band(shares: Sequence[float]) -> str:
    return f"{PERCENT * shares[0]:.1f} to {PERCENT * shares[-1]:.1f} %"


def _gib(found: Values) -> str:
    return f"{found['peak_mib'] / 1024:.1f}" if found.get("peak_mib") else "n/a"


def _why(found: Values) -> str:
    return f"not possible: {found['failed']}".replace("|", "/") if "failed" in found else "not measured"
