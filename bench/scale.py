"""Measure how kmatrix behaves at scale, and print each figure next to its goal.

    python bench/scale.py [FIGURE ...] [--smallest] [--cells 100000] [--runs 2000] [--jobs 1000] [--queued 10000]
                          [--letters 80000] [--samples 1000] [--seconds 5] [--rounds 5] [--peer PATH]

Each figure is measured in its own process. CPU seconds are those of all its processes, so other load on the machine
changes them little. --smallest measures everything
at a size that takes seconds, to see that it works: its figures say nothing about the goals.
With --peer, a checkout of the original project, its report scripts read the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "lib"), str(ROOT), str(ROOT / "tests" / "support")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the measurements."""

    cells: int  # of the matrix of the dry run
    runs: int  # of the matrix of status, summary and continue
    jobs: int  # of the schedule; four times as many are compared with it
    queued: int  # runs of a matrix on a cluster, of which four run and the others wait
    letters: int  # without a break, for the training of a tokenizer
    samples: int  # per run and GPU, of the reports
    seconds: float  # of a recording
    rounds: int  # of the recorder and of the reports, whose medians count
    peer: str  # checkout of the original project, "" for none


SMALLEST = Sizes(cells=80, runs=6, jobs=50, queued=6, letters=2_000, samples=50, seconds=0.5, rounds=1, peer="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One measured figure."""

    value: float | None  # None: not measured
    note: str  # the size, or why it was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure with its goal."""

    title: str
    goal: float  # the value must not be above it
    unit: str
    measure: Callable[[Sizes], Found]


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per figure. Returns 1 if a goal was missed at full size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("figures", nargs="*", help=f"of {', '.join(FIGURES)}; all by default")
    parser.add_argument("--smallest", action="store_true", help="the smallest sizes: seconds instead of minutes")
    parser.add_argument("--cells", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=2_000)
    parser.add_argument("--jobs", type=int, default=1_000)
    parser.add_argument("--queued", type=int, default=10_000)
    parser.add_argument("--letters", type=int, default=80_000)
    parser.add_argument("--samples", type=int, default=1_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", default="", help="a checkout of the original project")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    sizes = Sizes(**{name: getattr(args, name) for name in Sizes.__slots__})
    sizes = SMALLEST if args.smallest else sizes
    if args.worker:
        print(json.dumps(asdict(FIGURES[args.worker].measure(sizes))))
        return 0
    for name in args.figures:
        if name not in FIGURES:
            parser.error(f"unknown figure {name}: expected {', '.join(FIGURES)}")
    print(f"Python {platform.python_version()}, {os.cpu_count()} x {_cpu_name()}, load {os.getloadavg()[0]:.1f}")
    print(f"{'figure':70}{'measured':>12}{'goal':>12}", flush=True)
    missed = 0
    for name in args.figures or FIGURES:
        missed += not _print(FIGURES[name], in_a_process(name, sizes), smallest=args.smallest)
    return 1 if missed and not args.smallest else 0


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _print(figure: Figure, found: Found, *, smallest: bool) -> bool:
    """Print a figure; return whether its goal is met, or it was not measured."""
    text = "-" if found.value is None else f"{found.value:.3g} {figure.unit}"
    met = found.value is None or found.value <= figure.goal
    mark = "" if smallest or found.value is None else "  met" if met else "  MISSED"
    print(f"{f'{figure.title} ({found.note})':70}{text:>12}{f'{figure.goal:g} {figure.unit}':>12}{mark}", flush=True)
    return met


def in_a_process(name: str, sizes: Sizes) -> Found:
    """Measure a figure in its own process, whose memory and imports are those of no other figure."""
    words = [word for field, value in asdict(sizes).items() for word in (f"--{field}", str(value))]
    command = [sys.executable, __file__, "--worker", name, *words]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} exited with status {done.returncode}:\n{done.stderr[-2000:]}")
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "lib"), str(ROOT)])}


def _kmatrix(*words: str) -> tuple[float, float]:
    """Run a command; return its CPU seconds and the peak memory of its largest process in MiB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "kmatrix", *words]
    subprocess.run(command, cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, after.ru_maxrss / 1024


def _dry_run(sizes: Sizes) -> tuple[float, float, str]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / ".config"
        config.write_text("CONFIG_GPT2_DEVICE_CPU=y\nCONFIG_GPT2_NUM_GPUS=1\nCONFIG_GPT2_MODEL_TINY=y\n", "utf-8")
        seeds = ",".join(map(str, range(max(1, sizes.cells // 40))))
        axes = ["OPTIMIZER=sgd,adam,adamw,muon,adafactor", "SCHEDULE=cosine,linear,constant,wsd", "DTYPE=fp32,bf16"]
        seconds, mib = _kmatrix("test-matrix-dry-run", f"KCONFIG_CONFIG={config}", *axes, f"SEED={seeds}")
    return seconds, mib, f"{sizes.cells:,} cells"


def dry_run_time(sizes: Sizes) -> Found:
    """Return the CPU seconds of a dry run, with legality and ids."""
    seconds, _, note = _dry_run(sizes)
    return Found(value=seconds, note=note)


def dry_run_memory(sizes: Sizes) -> Found:
    """Return the peak memory of a dry run in MiB."""
    _, mib, note = _dry_run(sizes)
    return Found(value=mib, note=note)


def _matrix(folder: str, sizes: Sizes, **fields: object) -> Path:
    """Write a matrix of finished runs, of 40 groups or fewer, and return its directory."""
    from records_factory import make_matrix, runs_with_seeds

    losses = [3.2 + 0.001 * number for number in range(sizes.runs)]
    return make_matrix(Path(folder), runs_with_seeds(sizes.runs, losses, **fields)).path


def summary(sizes: Sizes) -> Found:
    """Return the CPU seconds of `make summary`."""
    with tempfile.TemporaryDirectory() as folder:
        seconds, _ = _kmatrix("summary", f"TARGET={_matrix(folder, sizes)}")
    return Found(value=seconds, note=f"{sizes.runs:,} runs")


def redraw(sizes: Sizes) -> Found:
    """Return the CPU milliseconds of one redraw of the live status, after the first."""
    with tempfile.TemporaryDirectory() as folder:
        return _redraw(_matrix(folder, sizes), f"{sizes.runs:,} runs")


def _redraw(path: Path, note: str) -> Found:
    from kmatrix.cli.status import screen
    from kmatrix.records.paths import MatrixDir
    from kmatrix.status.view.overview import Overview

    overview = Overview(MatrixDir(path))
    times = []
    for _ in range(4):
        since = time.process_time()
        screen(overview.poll(), width=120, height=50)
        times.append(1e3 * (time.process_time() - since))
    return Found(value=statistics.median(times[1:]), note=note)


def _queued(command: str, sizes: Sizes) -> tuple[float, float, str]:
    """Run a command on a matrix of a cluster, whose scheduler has just answered."""
    from kmatrix.records.jobs.paths import JobsDir
    from large_matrix import make_queued_matrix

    with tempfile.TemporaryDirectory() as folder:
        matrix = make_queued_matrix(Path(folder), sizes.queued)
        JobsDir(matrix).poll.touch()  # no question to a scheduler is part of the figure
        seconds, mib = _kmatrix(command, f"TARGET={matrix.path}")
    return seconds, mib, f"{sizes.queued:,} runs on a cluster"


def submitted(sizes: Sizes) -> Found:
    """Return the CPU seconds of `make test-matrix` on a cluster, with the creation of all runs.

    Slurm is an imitation of its programs, whose CPU time counts, too; no run trains.
    """
    from factories import make_data
    from fake_slurm import FakeSlurm

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_data(folder / "data")
        os.environ["PATH"] = FakeSlurm(folder / "slurm").path
        (folder / ".config").touch()
        words = ["ENGINE=slurm", "DEVICE=cpu", "MODEL=tiny", "NUM_GPUS=1", "DATASET=shards", "BLOCK_SIZE=32"]
        words += [f"DATA_PATH={folder}/data", f"RESULTS_DIR={folder}/results", f"KCONFIG_CONFIG={folder}/.config"]
        words += ["EVAL_SAMPLES=10", "SLURM_TIME=1h", f"SEED={','.join(map(str, range(1, sizes.queued + 1)))}"]
        seconds, _ = _kmatrix("test-matrix", *words)
    return Found(value=seconds, note=f"{sizes.queued:,} runs, an imitation of Slurm")


def queued_status(sizes: Sizes) -> Found:
    """Return the CPU seconds of `make status` of a matrix on a cluster, most of whose jobs wait."""
    seconds, _, note = _queued("status", sizes)
    return Found(value=seconds, note=note)


def queued_memory(sizes: Sizes) -> Found:
    """Return the peak memory of the same in MiB."""
    _, mib, note = _queued("status", sizes)
    return Found(value=mib, note=note)


def queued_estimate(sizes: Sizes) -> Found:
    """Return the CPU seconds of `make estimate` of the same matrix."""
    seconds, _, note = _queued("estimate", sizes)
    return Found(value=seconds, note=note)


def queued_redraw(sizes: Sizes) -> Found:
    """Return the CPU milliseconds of one redraw of the live status of a matrix on a cluster, after the first."""
    from large_matrix import make_queued_matrix

    with tempfile.TemporaryDirectory() as folder:
        return _redraw(make_queued_matrix(Path(folder), sizes.runs).path, f"{sizes.runs:,} runs on a cluster")


def continue_nothing(sizes: Sizes) -> Found:
    """Return the CPU seconds of `make continue` on a matrix whose runs have all finished."""
    with tempfile.TemporaryDirectory() as folder:
        matrix = _matrix(folder, sizes)
        _kmatrix("continue", f"TARGET={matrix}")  # writes the status and the report of the matrix, as a runner does
        seconds, _ = _kmatrix("continue", f"TARGET={matrix}")
    return Found(value=seconds, note=f"{sizes.runs:,} runs")


def packing(sizes: Sizes) -> Found:
    """Return how many times as long the schedule of four times as many runs takes: 4 is linear, 16 quadratic."""
    from kmatrix.packing import Limits, PackedJob, ends

    times = []
    for count in (sizes.jobs, 4 * sizes.jobs):
        jobs = [PackedJob(name=f"run{n}", width=1 + n % 2, seconds=60.0 + n % 17) for n in range(count)]
        since = time.process_time()
        ends(jobs, [], 8, Limits())
        times.append(max(time.process_time() - since, 1e-6))
    return Found(value=times[1] / times[0], note=f"{sizes.jobs:,} and {4 * sizes.jobs:,} runs")


def recorder(sizes: Sizes) -> Found:
    """Return the CPU of a recorder at 100 Hz on 8 simulated GPUs above an empty loop, in percent of one core.

    Medians of several rounds.
    """
    from recorder import Bench

    from kmatrix.simulate import library

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        scenario = folder / "bench.scn"
        scenario.write_text("loop 10\n0 * power 228\n5 * power 180\n", encoding="utf-8")
        known = library.environment(library.build(folder), scenario, 8, time.time())
        environment = {**_environment(), "TERM": "xterm", **known}
        bench = Bench(folder=folder, environment=environment, seconds=sizes.seconds)
        # In turn, so that other load on the machine changes both.
        rounds = [(bench.empty(100.0).cpu, bench.recorder(100.0).cpu) for _ in range(sizes.rounds)]
        empty, recording = (statistics.median(column) for column in zip(*rounds, strict=True))
    return Found(value=recording - empty, note=f"{recording:.2f} - {empty:.2f} %, {sizes.rounds} x {sizes.seconds:g} s")


def reports(sizes: Sizes) -> Found:
    """Return the CPU time of our two report scripts relative to those of the original, on its own files."""
    if not sizes.peer:
        return Found(value=None, note="needs --peer=<checkout>")
    from reports import SCRIPTS, make_foreign, measure

    peer = Path(sizes.peer).resolve()
    with tempfile.TemporaryDirectory() as folder:
        foreign = make_foreign(Path(folder) / "foreign", sizes.samples)
        ratios = []
        for kind, script in SCRIPTS.items():
            theirs = [sys.executable, str(peer / "scripts" / script), *([str(foreign)] * (kind == "graphs"))]
            ours = [sys.executable, str(ROOT / "scripts" / script), str(foreign)]
            rounds = [[measure(command, foreign) for command in (ours, theirs)] for _ in range(sizes.rounds)]
            for failed in {cost.failed for pair in rounds for cost in pair if cost.failed}:
                sys.exit(f"{script}: {failed}")
            seconds = [statistics.median(cost.cpu for cost in column) for column in zip(*rounds, strict=True)]
            ratios.append(seconds[0] / seconds[1])
    names = ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in zip(SCRIPTS, ratios, strict=True))
    return Found(value=max(ratios), note=f"{sizes.samples:,} samples, {names}")


def tokenizer(sizes: Sizes) -> Found:
    """Return the CPU seconds of training a tokenizer on one long line without a break."""
    from gpt2.data.tokenizer import BpeTokenizer

    text = "".join(chr(97 + n * n % 26) for n in range(sizes.letters))
    since = time.process_time()
    BpeTokenizer.trained([text, "and a short line"], 512)
    return Found(value=time.process_time() - since, note=f"{sizes.letters:,} letters")


def attention(sizes: Sizes) -> Found:
    """Return the time of the attention that this CPU uses in fp32 relative to the faster of the two."""
    import torch
    from torch.nn import functional

    from gpt2.model.attention import causal_mask, plain_attention
    from gpt2.model.gpt2 import GPT
    from gpt2.model.precision import attention_path, configure_precision
    from kmatrix.shapes import ModelShape

    tokens = 64 if sizes.cells == SMALLEST.cells else 512
    configure_precision("cpu", "fp32", tf32=True)
    amx = GPT(ModelShape(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=8)).amx
    q, k, v = torch.randn(3, 4, 6, tokens, 64, requires_grad=True).unbind(0)
    mask = causal_mask(tokens)
    paths: dict[str, Callable[[], torch.Tensor]] = {
        "sdpa": lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        "matmul": lambda: plain_attention(q, k, v, mask, 0.0),
    }
    times = {}
    for name, attend in paths.items():
        took = []
        for _ in range(7):
            since = time.perf_counter()
            torch.autograd.grad(attend().sum(), (q, k, v))
            took.append(time.perf_counter() - since)
        times[name] = min(took)
    used = attention_path("cpu", "fp32", tokens, flash=True, amx=amx)
    return Found(value=times[used] / min(times.values()), note=f"{used}, {tokens} tokens")


FIGURES = {
    "dry-run": Figure(title="dry run: CPU", goal=10, unit="s", measure=dry_run_time),
    "dry-run-memory": Figure(title="dry run: memory", goal=500, unit="MiB", measure=dry_run_memory),
    "summary": Figure(title="summary", goal=5, unit="s", measure=summary),
    "redraw": Figure(title="live redraw", goal=100, unit="ms", measure=redraw),
    "submitted": Figure(title="test-matrix on a cluster: CPU", goal=60, unit="s", measure=submitted),
    "queued": Figure(title="status, jobs waiting: CPU", goal=5, unit="s", measure=queued_status),
    "queued-memory": Figure(title="status, jobs waiting: memory", goal=300, unit="MiB", measure=queued_memory),
    "queued-estimate": Figure(title="estimate, jobs waiting: CPU", goal=5, unit="s", measure=queued_estimate),
    "queued-redraw": Figure(title="live redraw, jobs waiting", goal=100, unit="ms", measure=queued_redraw),
    "continue": Figure(title="continue, nothing to do", goal=3, unit="s", measure=continue_nothing),
    "packing": Figure(title="packing.ends, growth for 4 x runs", goal=6, unit="x", measure=packing),
    "recorder": Figure(title="recorder at 100 Hz x 8", goal=1.5, unit="%", measure=recorder),
    "reports": Figure(title="small reports, CPU of the original", goal=1, unit="x", measure=reports),
    "tokenizer": Figure(title="bpe without breaks", goal=2, unit="s", measure=tokenizer),
    "attention": Figure(title="fp32 attention, time of the faster", goal=1.1, unit="x", measure=attention),
}


if __name__ == "__main__":
    sys.exit(main())
