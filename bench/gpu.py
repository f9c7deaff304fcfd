"""Measure on a GPU, in parts of at most 8 minutes: the first hour on a new machine.

    make bench PART=first            # products, memory and attention: a minute
    make bench PART=speed            # the models; also ladder, profile, ranks, and peer PEER=../nanoGPT
    make bench PART=report           # the tables in Markdown
    make bench PART=first ON=cpu     # tiny shapes, to see that the program works

Each measurement is a line of results.jsonl as soon as it is finished; the same command continues with the next one.
docs/gpu-day.md has the order, the goals, and the meaning of each figure.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import gpu_kernels
import gpu_parts
import gpu_report
import torch
from gpu_results import Item, Results, Values, headline, machine, scale_of
from gpu_runs import ROOT

from kmatrix.errors import is_full, reason_of
from kmatrix.records.lock import try_lock

PARTS = ("first", "speed", "ladder", "peer", "profile", "ranks", "report")
LIMIT_S = 480.0  # of a call


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="", help=f"one of {', '.join(PARTS)} (default: first)")
    parser.add_argument("--on", default="", help="cpu: tiny shapes on the CPU, which shows nothing about speed")
    parser.add_argument("--peer", default="", help="a checkout of karpathy/nanoGPT, for the part peer")
    parser.add_argument("--folder", type=Path, help="of the results (default: artifacts/bench)")
    parser.add_argument("--minutes", type=float, default=LIMIT_S / 60, help="time after which this call ends")
    args = parser.parse_args(argv)
    part, device = args.part or "first", args.on or "cuda"
    if problem := problem_of(part, device, args.peer):
        print("{}\n  hint: {}".format(*problem), file=sys.stderr)
        return 2
    results = results_of(device, args)
    if part == "report":
        print("\n".join(gpu_report.report(results)))
        return 0
    if (lock := try_lock(results.path.with_name(".lock"))) is None:
        print(f"error: another call is measuring into {results.path.parent}", file=sys.stderr)
        print("  hint: wait until it ends, or end it: two at a time slow each other down", file=sys.stderr)
        return 2
    os.set_inheritable(lock, True)  # trainers that outlive this process keep it
    try:
        return measure(part, results, args.peer)
    except KeyboardInterrupt:
        print(f"{results.path}: interrupted; the same command continues", file=sys.stderr)
        return 130
    except OSError as error:
        if not is_full(error):
            raise
        print(f"error: cannot write {error.filename or results.path}: {reason_of(error)}", file=sys.stderr)
        print("  hint: make space; the same command continues", file=sys.stderr)
        return 1
    finally:
        os.close(lock)


def measure(part: str, results: Results, checkout: str) -> int:
    """Make the measurements of a part, and return the exit status."""
    print("\n".join(headline(results.about)), flush=True)
    left = results.run(part, items_of(part, results, checkout), show_of(part))
    print(f"{results.path}" + (f": {left} left; the same command continues" if left else ": complete"))
    return 0


def problem_of(part: str, device: str, checkout: str) -> tuple[str, str] | None:
    """Return why a part cannot run here, with a hint; None if it can."""
    if part not in PARTS:
        return f"error: unknown part {part}", f"PART is one of {', '.join(PARTS)}"
    if device not in ("cpu", "cuda"):
        return f"error: unknown device {device}", "ON=cpu runs tiny shapes on the CPU; leave it out on a GPU"
    if device == "cuda" and part != "report" and not torch.cuda.is_available():
        return "error: PyTorch finds no GPU", "run this on a machine with a GPU; ON=cpu checks the program without one"
    if device == "cuda" and part == "ranks" and torch.cuda.device_count() == 1:
        return "error: the part ranks needs at least 2 GPUs, and there is 1", "run it on a machine with several GPUs"
    if (checkout or part == "peer") and not (checkout and (Path(checkout) / "train.py").is_file()):
        what = f"{checkout} has no train.py" if checkout else "the part peer compares with nanoGPT"
        return f"error: {what}", "pass PEER=<checkout of karpathy/nanoGPT>"
    return None


def results_of(device: str, args: argparse.Namespace) -> Results:
    """Return the results of the device of this call; without a GPU, a report is of the results of any GPU."""
    folder = args.folder or ROOT / "artifacts" / ("bench-cpu" if device == "cpu" else "bench")
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.jsonl"
    if device == "cuda" and not torch.cuda.is_available():
        return Results(path=path, scale=gpu_report.elsewhere(path))
    scale, limit_s = scale_of(device), 60 * args.minutes
    about = machine(scale)
    return Results(path=path, scale=scale, end=time.monotonic() + limit_s, limit_s=limit_s, about=about)


def items_of(part: str, results: Results, checkout: str) -> Iterable[Item]:
    """Return the measurements of a part."""
    if part == "first":
        return gpu_kernels.first(results.scale)
    if part == "peer":
        return gpu_parts.peer(results, Path(checkout).absolute())
    return {
        "speed": gpu_parts.speed,
        "ladder": gpu_parts.ladder,
        "profile": gpu_parts.profile,
        "ranks": gpu_parts.ranks,
    }[part](results)


def show_of(part: str) -> Callable[[str, Values], str]:
    """Return the function that shows a measurement of a part on the terminal."""
    return gpu_kernels.show if part == "first" else gpu_parts.show


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl+C: no trainer may go on during the next call
        signal.signal(ending, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as other programs, it ends with the `head` that reads a report
    sys.exit(main())
