"""A trainer with the files of the real one: steps, checkpoints, exact resume, SIGTERM on several ranks, failures."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("run", type=Path)
parser.add_argument("--attempt", type=int)
parser.add_argument("--resume", default="none")
parser.add_argument("--micro-batch", type=int)
args = parser.parse_args()
run: Path = args.run
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
record = json.loads((run / "run.json").read_text(encoding="utf-8"))
train = record["train"]
stops: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: (stops.append(number), (run / f"asked.{rank}").touch()))
meeting, checkpoints = run / f".meet{args.attempt}", run / "checkpoints"


def replace(path: Path, value: object) -> None:
    new = path.with_name(f".{path.name}.{rank}")
    new.write_text(json.dumps(value), encoding="utf-8")
    new.replace(path)


def agree(step: int) -> bool:
    """Wait for the other ranks; return whether one of them has to stop."""
    replace(meeting / str(rank), [step, bool(stops)])
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            found = [json.loads((meeting / str(other)).read_text(encoding="utf-8")) for other in range(world)]
        except (FileNotFoundError, ValueError):
            found = []
        if found and all(at >= step for at, _ in found):
            return any(is_asked for at, is_asked in found if at == step)
        time.sleep(0.002)
    sys.exit(1)


def end(status: str, code: int, **more: object) -> None:
    if rank == 0:
        about = {"run_id": record["run_id"], "attempt": args.attempt, "status": status, "step": step}
        replace(run / "result.json", {**about, "final_val_loss": float(value), **more})
    os._exit(code)


meeting.mkdir(exist_ok=True)
checkpoints.mkdir(exist_ok=True)
step, value = 0, 1
saved = sorted(checkpoints.glob("step_*.json"), key=lambda path: int(path.stem[5:]))
if args.resume != "none" and saved:
    step, value = json.loads(saved[-1].read_text(encoding="utf-8"))
if (args.micro_batch or train["batch_size"]) > train.get("fits", 8):
    end("failed", 1, kind="oom", reason="CUDA out of memory")
while step < train["max_iters"]:
    if agree(step):
        if rank == 0:
            replace(checkpoints / f"step_{step}.json", [step, value])
        end("stopped", 130)
    step, value = step + 1, value * 31 % 1000003
    if rank == 0:
        with (run / "metrics.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps({"step": step, "value": value}) + "\n")
        if step % 5 == 0:
            replace(checkpoints / f"step_{step}.json", [step, value])
    if train.get("diverges") == step:
        end("failed", 1, kind="nan", reason="loss is nan")
    while (run / f"hold.{step}").exists():
        time.sleep(0.005)
agree(step + 1)
end("finished", 0)
