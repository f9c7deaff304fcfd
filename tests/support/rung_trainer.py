"""A trainer with scripted losses at each evaluation, in place of torchrun's ranks, that waits at a rung.

curves.json next to the matrices has them: learning rate -> {step: loss, "nan" (it diverges) or "fails" (it crashes each
time)}; between two scripted steps, the loss of the earlier one. Its checkpoint is one number, the step, written after
each step. trained.jsonl next to it gets a line per attempt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

START_LOSS = 11.0


def option(name: str) -> int | None:
    """Return the number that follows an option of the command line, None without it."""
    return int(sys.argv[sys.argv.index(name) + 1]) if name in sys.argv else None


def train() -> int:
    """Train the run of the command line, and return the exit code."""
    folder, attempt = Path(sys.argv[sys.argv.index("--attempt") - 1]), option("--attempt") or 1
    script = json.loads((folder.parents[1] / "curves.json").read_text())
    plan = json.loads((folder / "run.json").read_text())
    fields, checkpoint = plan["train"], folder / "scripted_step"
    curve = {int(step): loss for step, loss in script["curves"][f"{fields['learning_rate']:g}"].items()}
    step = int(checkpoint.read_text()) if "--resume" in sys.argv and checkpoint.exists() else 0
    until = option("--until") or fields["max_iters"]
    with (folder.parents[1] / "trained.jsonl").open("a") as trained:
        line = {"matrix": folder.parent.name, "run": folder.name, "attempt": attempt, "from": step, "until": until}
        trained.write(json.dumps(line) + "\n")

    def loss() -> float:
        return float(curve[max(at for at in curve if at <= max(step, min(curve)) and isinstance(curve[at], float))])

    def end(status: str, **known: object) -> None:
        values = {"run_id": plan["run_id"], "attempt": attempt, "status": status, "step": step, "seconds": 0.1}
        write(folder / "result.json", json.dumps({**values, "initial_val_loss": START_LOSS, **known}))

    def stop(*_: object) -> None:
        end("stopped", kind="signal", reason=f"stopped at step {step}")
        os._exit(1)

    def log(**values: object) -> None:
        line = {"schema": 1, "step": step, "time": time.time(), "attempt": attempt, **values}
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(line) + "\n")

    signal.signal(signal.SIGTERM, stop)
    write(folder / "run_used.json", json.dumps({"train": fields, "adjusted": []}))
    log(**({"resumed": True} if step else {"val/loss": START_LOSS}))
    while step < until:
        time.sleep(script.get("seconds", 0.0))
        step += 1
        if curve.get(step) == "fails":
            return 3
        if curve.get(step) == "nan":
            end("failed", kind="nan", reason=f"loss is nan at step {step}")
            return 1
        if step % fields["eval_interval"] == 0:
            log(**{"val/loss": loss()})
        write(checkpoint, str(step))
    if step < fields["max_iters"]:
        end("stopped", kind="rung", reason=f"waits at step {step} for the other configurations")
    else:
        end("finished", final_val_loss=loss(), best_val_loss=loss(), best_val_step=step, tokens=1000)
    return 0


def write(path: Path, text: str) -> None:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)


if __name__ == "__main__":
    sys.exit(train())
