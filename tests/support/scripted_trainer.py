"""A trainer whose ends are scripted, in place of gpt2/train.py of a clone.

script.json next to the matrices has them: {"first": seed, "ends": {optimizer: [the end of each seed from then on]}}.
An end is a loss, "nan" (it diverges), "fail" (it crashes in its first attempt), "fails" (in each), or "oom" (there is
memory for micro-batches of one sequence only).
starts.jsonl next to it gets a line per attempt. While a file `hold` is there, attempts from that number on wait in the
middle of their steps, until it is gone, has a larger number, or they are asked to stop: a test can act meanwhile.
A further attempt goes on from the middle.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

START_LOSS, STEPS, MIDDLE, POLL_S = 11.0, 10, 5, 0.02


def option(name: str) -> int | None:
    """Return the number that follows an option of the command line, None without it."""
    return int(sys.argv[sys.argv.index(name) + 1]) if name in sys.argv else None


def train() -> int:
    """Train the run of the command line, and return the exit code."""
    folder, attempt = Path(sys.argv[sys.argv.index("--attempt") - 1]), option("--attempt") or 1
    results = folder.parents[1]
    plan, script = json.loads((folder / "run.json").read_text()), json.loads((results / "script.json").read_text())
    fields = plan["train"]
    batch = option("--micro-batch") or fields["batch_size"]
    outcome = script["ends"][fields["optimizer"]][fields["seed"] - script["first"]]

    def end(status: str, step: int, **known: object) -> None:
        values = {"run_id": plan["run_id"], "attempt": attempt, "status": status, "step": step, "seconds": 0.1}
        values |= {"used": used, "adjusted": adjusted, "initial_val_loss": START_LOSS}
        write(folder / "result.json", {**values, **known})

    def stop(*_: object) -> None:
        end("stopped", MIDDLE, kind="signal", reason=f"stopped at step {MIDDLE}")
        os._exit(1)

    used = {**fields, "batch_size": batch, "gradient_accumulation": fields["global_batch"] // batch}
    changed = [name for name in ("batch_size", "gradient_accumulation") if used[name] != fields[name]]
    adjusted = [{"field": name, "from": fields[name], "to": used[name], "why": "memory"} for name in changed]
    signal.signal(signal.SIGTERM, stop)
    number = note_start(results, {"matrix": folder.parent.name, "run": folder.name, "attempt": attempt})
    if outcome == "oom" and batch > 1:
        end("failed", 0, kind="oom", reason=f"out of memory with {batch} sequences")
        return 1
    start = MIDDLE if attempt > 1 and (folder / "metrics.jsonl").exists() else 0
    if start:
        log(folder, step=start, time=time.time(), attempt=attempt, resumed=True)
    for step in range(start, STEPS):
        while step == MIDDLE and is_held(results, number):
            time.sleep(POLL_S)
        log(folder, step=step, time=time.time(), attempt=attempt, **{"train/loss": START_LOSS - step})
        print(f"Iter {step} | loss {START_LOSS - step}", flush=True)
    if outcome == "fails" or (outcome == "fail" and attempt == 1):
        raise RuntimeError("the cable was pulled")
    if outcome == "nan":
        end("failed", STEPS, kind="nan", reason=f"loss is nan at step {STEPS}")
        return 1
    loss = outcome if isinstance(outcome, float) else 3.3
    log(folder, step=STEPS, time=time.time(), attempt=attempt, **{"val/loss": loss})
    known = {"final_val_loss": loss, "final_train_loss": loss, "best_val_loss": loss, "best_val_step": STEPS}
    end("finished", STEPS, **known, tokens=1000)
    return 0


def note_start(results: Path, line: dict[str, object]) -> int:
    """Add a line to starts.jsonl, and return its number, from 1."""
    with (results / "starts.jsonl").open("a") as starts:
        starts.write(json.dumps(line) + "\n")
    return len((results / "starts.jsonl").read_text().splitlines())


def is_held(results: Path, number: int) -> bool:
    try:
        return number >= int((results / "hold").read_text() or 1)
    except FileNotFoundError:
        return False


def log(folder: Path, **values: object) -> None:
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"schema": 1, **values}) + "\n")


def write(path: Path, value: object) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value))
    part.replace(path)


if __name__ == "__main__":
    sys.exit(train())
