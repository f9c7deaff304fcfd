"""A trainer with scripted losses in place of torchrun's ranks, as a program: `python -m torch.distributed.run ...`.

losses.json next to the matrices has them: configuration -> the outcome of each seed from the first on. An outcome is a
loss, "nan" (it diverges), "fail" (it crashes in its first attempt) or "fails" (in each). starts.jsonl next to it gets a
line per attempt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

START_LOSS = 11.0


def train() -> int:
    """Train the run of the command line, and return the exit code."""
    place = sys.argv.index("--attempt")
    folder, attempt = Path(sys.argv[place - 1]), int(sys.argv[place + 1])
    results = folder.parents[1]
    plan = json.loads((folder / "run.json").read_text())
    script = json.loads((results / "losses.json").read_text())
    fields = plan["train"]
    with (results / "starts.jsonl").open("a") as starts:
        line = {"matrix": folder.parent.name, "run": folder.name, "attempt": attempt, "time": time.time()}
        starts.write(json.dumps(line) + "\n")
    outcome = script["losses"][fields["optimizer"]][fields["seed"] - script["first"]]

    def end(status: str, **known: object) -> None:
        values = {"run_id": plan["run_id"], "attempt": attempt, "status": status, "step": 10, "seconds": 0.1}
        write(folder / "result.json", {**values, "initial_val_loss": START_LOSS, **known})

    def stop(*_: object) -> None:
        end("stopped", kind="signal", reason="stopped at step 10")
        os._exit(1)

    signal.signal(signal.SIGTERM, stop)
    write(folder / "run_used.json", {"train": fields, "adjusted": []})
    with (folder / "metrics.jsonl").open("a") as metrics:
        values = {"step": 10, "time": time.time(), "attempt": attempt, "train/loss": 3.0}
        metrics.write(json.dumps({"schema": 1, **values}) + "\n")
    time.sleep(script.get("seconds", 0.0))
    if outcome == "fails" or (outcome == "fail" and attempt == 1):
        return 3
    if outcome == "nan":
        end("failed", kind="nan", reason="loss is nan at step 10")
        return 1
    loss = 3.3 if outcome == "fail" else outcome
    end("finished", final_val_loss=loss, final_train_loss=loss, best_val_loss=loss, best_val_step=10, tokens=1000)
    return 0


def write(path: Path, value: object) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(value))
    part.replace(path)


if __name__ == "__main__":
    sys.exit(train())
