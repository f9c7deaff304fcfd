"""Make matrix and run directories as the runner and the trainer write them, without torch."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kmatrix.experiment import create
from kmatrix.records import attempts, files
from kmatrix.records import matrix as plans
from kmatrix.records.attempts import Attempt, End, Exit
from kmatrix.records.control import Request, Requests
from kmatrix.records.decode import as_json
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.status.alerts import Alert

CREATED = 1_795_152_180.0  # 2026-11-20 05:23:00 UTC
DATA = "1a2b3c4d5e6f" + "0" * 52
START_LOSS = 10.9
write_json = partial(files.write_json, durable=False)  # thousands of files, which need not outlive a power failure


@dataclass(frozen=True, kw_only=True)
class FakeRun:
    """The properties of one run. final_loss: validation loss at its end; tokens_per_s: of the whole run.

    stop_at: last step of a run that does not finish.  axes: in addition to optimizer and gpus.
    result: whether the trainer wrote result.json.
    """

    optimizer: str = "adamw"
    gpus: int = 1
    seed: int = 1337
    final_loss: float = 3.28
    status: str = "finished"
    reason: str | None = None
    kind: str | None = None
    stop_at: int | None = None
    ended_by: str | None = None
    steps: int = 100
    eval_interval: int = 10
    log_interval: int = 5
    axes: Mapping[str, str] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    tokens_per_s: float = 4000.0
    mfu: float | None = None
    data_sha256: str = DATA
    attempt: int = 1
    result: bool = True
    log_tail: tuple[str, ...] = ()
    asked: tuple[str, ...] | None = None
    reused_from: str = ""
    symbols: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 60.0  # of its attempt
    code: str = ""  # SHA-256 of the sources that it ran

    @property
    def all_axes(self) -> dict[str, str]:
        return {"optimizer": self.optimizer, "gpus": str(self.gpus), **self.axes}

    @property
    def name(self) -> str:
        more = "".join(f"_{label}{value}" for label, value in self.axes.items())
        more = re.sub(r"[^ -.0-~]", "_", more)  # what the name of a run cannot have
        return f"gpt2_{self.optimizer}{more}_{self.gpus}{'gpu' if self.device == 'cuda' else 'cpu'}"

    @property
    def run_id(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()[:10]


def runs_with_seeds(count: int, losses: Sequence[float], **fields: Any) -> list[FakeRun]:
    """Return one run per final loss that differ only in seed."""
    return [
        FakeRun(
            seed=seed, final_loss=loss, axes={"seed": str(seed), **fields.get("axes", {})}, **_without(fields, "axes")
        )
        for seed, loss in zip(range(1, count + 1), losses, strict=True)
    ]


def make_matrix(
    root: Path,
    runs: Sequence[FakeRun],
    *,
    name: str = "test_matrix_results_20261120_052300",
    planned: Sequence[FakeRun] = (),
    cuts: Sequence[tuple[int, str]] = (),
    verdict: Mapping[str, Any] | None = None,
    engine: str = "local",
) -> MatrixDir:
    """Write a matrix. planned: runs that nobody has taken yet.  verdict: the rules in matrix.json."""
    matrix = MatrixDir(root / name)
    all_runs = [*runs, *planned]
    labels = dict.fromkeys(label for run in all_runs for label in run.all_axes)
    records = [run_json(run) for run in all_runs]
    common = create.common_of(records)
    write_json(
        matrix.matrix_json,
        {
            "name": name,
            "engine": engine,
            "created": CREATED,
            "command": "make test-matrix MAX_ITERS=100",
            "axes": [
                {
                    "label": label,
                    "symbol": f"GPT2_{label.upper()}",
                    "values": list(dict.fromkeys(run.all_axes[label] for run in all_runs if label in run.all_axes)),
                }
                for label in labels
            ],
            "overrides": ["MAX_ITERS=100"],
            "common": common,
            "runs": [create.planned(common, record) for record in records],
            "cuts": [{"count": count, "reason": reason} for count, reason in cuts],
            "provenance": provenance(all_runs),
            **({} if verdict is None else {"verdict": dict(verdict)}),
        },
    )
    started = CREATED
    for run in runs:  # one after the other, so that they do not share the machine
        make_run(matrix, run, started=started)
        started += 0 if run.status in ("skipped", "planned") else run.seconds
    if skipped := {run.name: Request(skip=run.reason or "too few GPUs") for run in runs if run.status == "skipped"}:
        write_json(matrix.path / "control" / "requests.json", as_json(Requests(runs=skipped)))
    return matrix


def replan(matrix: MatrixDir, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change what was planned. change: returns the new values of run.json of a run, from the old ones."""
    plan = json.loads(matrix.matrix_json.read_text(encoding="utf-8"))
    records = [change(plans.whole(plan["common"], run)) for run in plan["runs"]]
    plan["common"] = create.common_of(records)
    plan["runs"] = [create.planned(plan["common"], record) for record in records]
    write_json(matrix.matrix_json, plan)
    for record in records:
        if (folder := matrix.run(record["name"])).run_json.exists():
            write_json(folder.run_json, {**record, "matrix": matrix.name})


def edit_attempt(folder: RunDir, number: int = 1, **changes: Any) -> None:
    """Change an attempt of a run, or add one like another. A change of its end is in `end`."""
    path = attempts.path_of(folder.path, number)
    other = path if path.exists() else next(attempts.folder(folder.path).iterdir())
    known = json.loads(other.read_text(encoding="utf-8"))
    end = {"end": {**known.get("end", {}), **changes["end"]}} if changes.get("end") else {}
    write_json(
        path,
        {name: value for name, value in {**known, "number": number, **changes, **end}.items() if value is not None},
    )


def write_alerts(folder: RunDir, *alerts: Alert) -> None:
    """Write the alerts of a run as its program does."""
    for alert in alerts:
        files.append_jsonl(folder.alerts, as_json(alert))


def run_json(run: FakeRun) -> dict[str, Any]:
    """Return the planned values of a run."""
    record = {"run_id": run.run_id, "name": run.name, "axes": run.all_axes, "symbols": dict(run.symbols)}
    record |= {} if run.asked is None else {"asked": list(run.asked)}
    record |= {"reused_from": run.reused_from} if run.reused_from else {}
    return {**record, "train": train_fields(run), "timeout_s": 0, "provenance": provenance([run])}


def make_run(matrix: MatrixDir, run: FakeRun, *, started: float = CREATED) -> RunDir:
    """Write the folder of one run: the files that its program and the trainer have written up to its status."""
    folder = matrix.run(run.name)
    if run.status in ("skipped", "planned"):
        return folder
    folder.path.mkdir(parents=True)
    write_json(folder.run_json, {**run_json(run), "matrix": matrix.name})
    code = {"finished": 0, "failed": 1, "stopped": 130}.get(run.status, 0)
    kind = run.kind or {"failed": "error"}.get(run.status, run.status)
    exits = tuple(Exit(rank=rank, code=code, host="node-1") for rank in range(run.gpus))
    end = End(
        kind=kind, reason=run.reason or "", seconds=run.seconds, at=started + run.seconds, exits=exits,
        log_tail=run.log_tail if run.status == "failed" else (),
    )  # fmt: skip
    # A run that trains does so on another host: its file has just been written.
    attempt = Attempt(
        number=run.attempt, host="node-1", boot="boot-1", pid=4243, started=started, code=run.code, seconds=run.seconds,
        end=None if run.status == "running" else end,
    )  # fmt: skip
    write_json(attempts.path_of(folder.path, run.attempt), as_json(attempt))
    folder.output_log.write_text("\n".join(run.log_tail) + "\n", encoding="utf-8")
    lines = metrics(run)
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    if run.result and run.status != "running":
        write_json(folder.result, result(run, lines))
    return folder


def train_fields(run: FakeRun) -> dict[str, Any]:
    """Return the fields of the trainer's configuration, at least all that a report may read."""
    return {
        "model": "tiny",
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 128,
        "vocab_size": 257,
        "block_size": 128,
        "dataset": "stdlib",
        "tokenizer": "byte",
        "optimizer": run.optimizer,
        "learning_rate": 6e-4,
        "min_lr": 6e-5,
        "schedule": "cosine",
        "warmup_steps": 10,
        "max_iters": run.steps,
        "eval_interval": run.eval_interval,
        "eval_samples": 200,
        "log_interval": run.log_interval,
        "seed": run.seed,
        "batch_size": 8,
        "gradient_accumulation": 1,
        "num_gpus": run.gpus,
        "global_batch": 8 * run.gpus,
        "device": run.device,
        "dtype": "fp32",
        "data_path": "/data/stdlib",
        "data_sha256": run.data_sha256,
        **run.train,
    }


def metrics(run: FakeRun) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl up to the last step of the run."""
    last = run.steps if run.stop_at is None else run.stop_at
    step_tokens = train_fields(run)["global_batch"] * train_fields(run)["block_size"]
    lines = []
    for step in range(last + 1):
        elapsed = step * step_tokens / run.tokens_per_s
        head = {"schema": 1, "step": step, "time": CREATED + elapsed, "elapsed_s": elapsed}
        head |= {"tokens": step * step_tokens, "attempt": run.attempt}
        if step % run.eval_interval == 0 or step == run.steps:
            loss = loss_at(run, step)
            lines.append({**head, "val/loss": loss})
        if step % run.log_interval == 0 and step < run.steps:
            # Deterministic noise, different per seed, so that curves of seeds can be distinguished.
            wobble = 0.03 * math.sin(7.3 * step + run.seed)
            speed = {"throughput/tokens_per_s": run.tokens_per_s, "throughput/mfu": run.mfu}
            speed["throughput/step_ms"] = 1000 * step_tokens / run.tokens_per_s
            lines.append(
                {**head, "train/loss": loss_at(run, step) + wobble, "train/lr": 6e-4, "grad/norm": 0.85, **speed}
            )
    return lines


def loss_at(run: FakeRun, step: int) -> float:
    """Return a loss that falls from START_LOSS and is exactly final_loss at the last step."""
    if step == run.steps:
        return run.final_loss
    fade = (math.exp(-6 * step / run.steps) - math.exp(-6)) / (1 - math.exp(-6))
    return run.final_loss + (START_LOSS - run.final_loss) * fade


def result(run: FakeRun, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return result.json as the trainer writes it last."""
    val = [(line["step"], line["val/loss"]) for line in lines if "val/loss" in line]
    train = [line["train/loss"] for line in lines if "train/loss" in line]
    best_step, best = min(val, key=lambda item: item[1])
    return {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "status": run.status,
        "kind": run.kind,
        "reason": run.reason,
        "ended_by": run.ended_by,
        "step": lines[-1]["step"],
        "tokens": lines[-1]["tokens"],
        "initial_val_loss": val[0][1],
        "final_val_loss": None if run.kind == "nan" else val[-1][1],
        "best_val_loss": best,
        "best_val_step": best_step,
        "final_train_loss": train[-1],
        "tokens_per_second": run.tokens_per_s,
        "mfu": run.mfu,
        "step_ms": lines[-1].get("throughput/step_ms", 250.0),
        "seconds": lines[-1]["elapsed_s"],
        "peak_memory_mib": 812.5,
        "world_size": run.gpus,
        "device": run.device,
        "device_name": "NVIDIA A10G" if run.device == "cuda" else "AMD EPYC 7R32",
        "params": 842_496,
        "ended": CREATED + 60,
    }


def provenance(runs: Sequence[FakeRun]) -> dict[str, Any]:
    """Return the provenance of the runs: machine, versions and commit."""
    gpus = max((run.gpus for run in runs if run.device == "cuda"), default=0)
    return {
        "created": CREATED,
        "command": "make test-matrix MAX_ITERS=100",
        "host": "node-1",
        "git_commit": "8ea3763f00c0ffee",
        "git_dirty": True,
        "python": "3.11.7",
        "versions": {"torch": "2.13.0", "numpy": "2.3.1"},
        "gpus": [{"index": i, "name": "NVIDIA A10G", "uuid": f"GPU-{i}"} for i in range(gpus)],
        "cpu": "AMD EPYC 7R32",
        "cores": 2,
    }


def _without(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}
