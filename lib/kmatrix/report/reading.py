"""The files of one run -> its numbers; tolerant of a run that was cut short."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kmatrix.alerts import alerts_of
from kmatrix.errors import RecordError, SchemaError
from kmatrix.records import MatrixDir, RunDir, RunRecord, Status, merged_metrics, read_json, read_run
from kmatrix.report.settings import fields_of
from kmatrix.report.values import GPUS_AXIS, SEED_AXIS, Point, RunNumbers

TEXTS = ("stdlib", "shakespeare", "folder")  # datasets that are made of the same text for every tokenizer
OF_TEXT = ("GPT2_DATA_PATH", "GPT2_TEXT_COLUMN", "GPT2_VAL_PERCENT")
LOG_TAIL = 20  # lines of a failed run's log that are kept


def readable(path: Path) -> dict[str, Any]:
    """Return a JSON object, empty where the file is missing or damaged. A newer schema is refused."""
    try:
        return read_json(path)
    except SchemaError:
        raise
    except RecordError:
        return {}


def run_dirs(matrix: MatrixDir, planned: Sequence[Mapping[str, Any]]) -> list[RunDir]:
    """Return the folder of every run that is planned, in order, then of every other that is there."""
    names = [str(run["name"]) for run in planned]
    there = sorted(path.parent.name for path in matrix.path.glob("*/run.json"))
    return [matrix.run(name) for name in dict.fromkeys(names + there)]


def read_numbers(run_dir: RunDir, planned: Mapping[str, Any]) -> RunNumbers:
    """Read one run. `planned` is its line in matrix.json: all there is of a run that has not begun."""
    record = _record(run_dir, planned)
    train: Mapping[str, Any] = record.run.get("train") or {}
    axes = {str(label): str(value) for label, value in (record.run.get("axes") or {}).items()}
    result = _current_result(record)
    val, curve = _points(record.metrics, "val/loss"), _points(record.metrics, "train/loss")
    facts = {**_measured(record.metrics, val, curve), **{k: v for k, v in result.items() if v is not None}}
    max_iters = _whole(train, "max_iters")
    return RunNumbers(
        name=run_dir.name,
        run_id=str(record.run.get("run_id") or ""),
        axes=axes,
        status=record.status,
        reason=record.reason,
        optimizer=str(train.get("optimizer") or axes.get("optimizer") or ""),
        model=str(train.get("model") or axes.get("model") or ""),
        device={"cuda": "gpu", "cpu": "cpu"}.get(str(facts.get("device") or train.get("device")).split(":")[0], ""),
        device_name=str(facts["device_name"]) if facts.get("device_name") else None,
        world_size=_whole(facts, "world_size") or _whole(train, "num_gpus") or _text_int(axes.get(GPUS_AXIS)),
        seed=seed if (seed := _whole(train, "seed")) is not None else _text_int(axes.get(SEED_AXIS)),
        attempt=_whole(facts, "attempt"),
        data_sha256=str(train["data_sha256"]) if train.get("data_sha256") else None,
        tokenizer=str(train.get("tokenizer") or ""),
        text=_text(train, record.run.get("symbols") or {}),
        steps=_whole(facts, "step"),
        max_iters=max_iters,
        global_batch=_whole(train, "global_batch"),
        block_size=_whole(train, "block_size"),
        eval_samples=_whole(train, "eval_samples"),
        planned_tokens=_product(max_iters, _whole(train, "global_batch"), _whole(train, "block_size")),
        warmup_share=_share(_whole(train, "warmup_steps"), max_iters),
        initial_val_loss=finite(facts, "initial_val_loss"),
        final_val_loss=finite(result if record.status is Status.FINISHED else facts, "final_val_loss"),
        last_val_step=val[-1].step if val else None,
        best_val_loss=finite(facts, "best_val_loss"),
        best_val_step=_whole(facts, "best_val_step"),
        bytes_per_token=finite(facts, "bytes_per_token"),
        hellaswag_accuracy=finite(facts, "hellaswag_accuracy"),
        hellaswag_accuracy_norm=finite(facts, "hellaswag_accuracy_norm"),
        final_train_loss=finite(facts, "final_train_loss"),
        tokens=_whole(facts, "tokens"),
        tokens_per_second=finite(facts, "tokens_per_second"),
        mfu=finite(facts, "mfu"),
        step_ms=finite(facts, "step_ms"),
        seconds=finite(facts, "seconds"),
        peak_memory_mib=finite(facts, "peak_memory_mib"),
        params=_whole(facts, "params"),
        ended=finite(facts, "ended"),
        ended_by=str(facts["ended_by"]) if facts.get("ended_by") else None,
        evidence=_evidence(record, result),
        log=f"{run_dir.name}/{run_dir.output_log.name}" if run_dir.output_log.exists() else "",
        log_tail=_log_tail(run_dir) if record.status is Status.FAILED else (),
        adjusted=_adjusted(run_dir),
        pruning=str(train.get("pruning") or "none"),
        target_sparsity=finite(train, "target_sparsity") if train.get("pruning") not in (None, "none") else None,
        sparsity=finite(facts, "sparsity"),
        settings=fields_of(train),
        asked=_asked(record.run),
        attempts=tuple(entry for entry in readable(run_dir.status).get("attempts") or [] if isinstance(entry, dict)),
        reused_from=str(record.run.get("reused_from") or ""),
        alerts=alerts_of(readable(run_dir.status)),
        val=val,
        train=curve,
    )


def _record(run_dir: RunDir, planned: Mapping[str, Any]) -> RunRecord:
    """Read the record of a run; what is damaged is said in its reason, and the rest still counts."""
    if not run_dir.run_json.exists():
        reason = "run.json is missing" if run_dir.path.exists() else ""
        return RunRecord(dir=run_dir, run=planned, status=Status.PLANNED, reason=reason, result=None)
    try:
        return read_run(run_dir)
    except SchemaError:
        raise
    except (RecordError, KeyError, ValueError) as error:
        damage = error.what if isinstance(error, RecordError) else f"its records are not kmatrix's: {error}"
        return RunRecord(
            dir=run_dir,
            run=readable(run_dir.run_json) or planned,
            status=Status.FAILED,
            reason=damage.replace(f"{run_dir.path}/", ""),
            result=None,
            metrics=tuple(merged_metrics(run_dir.metrics)),
        )


def _current_result(record: RunRecord) -> Mapping[str, Any]:
    """Return result.json, unless the run runs again or a later attempt wrote metrics after it."""
    if record.result is None or record.status in (Status.PLANNED, Status.RUNNING):
        return {}
    newest = max((int(line.get("attempt", 1)) for line in record.metrics), default=0)
    return record.result if int(record.result.get("attempt", 1)) >= newest else {}


def _evidence(record: RunRecord, result: Mapping[str, Any]) -> str:
    if result:
        return f"{record.dir.name}/{record.dir.result.name}"
    return f"{record.dir.name}/{record.dir.metrics.name}" if record.metrics else ""


def _measured(lines: Sequence[Mapping[str, Any]], val: Sequence[Point], train: Sequence[Point]) -> dict[str, Any]:
    """Return what metrics.jsonl alone says, under the names of result.json.

    Speeds are medians; the first line is left out where there are more, for it holds the warming up.
    """
    if not lines:
        return {}
    best = min(val, key=lambda point: point.loss, default=None)
    points = sorted((*val, *train), key=lambda point: point.step)
    return {
        "attempt": lines[-1].get("attempt"),
        "step": lines[-1]["step"],
        "tokens": lines[-1].get("tokens"),
        "seconds": points[-1].seconds if points else None,
        "initial_val_loss": val[0].loss if val and val[0].step == 0 else None,
        "final_val_loss": val[-1].loss if val else None,
        "best_val_loss": best.loss if best else None,
        "best_val_step": best.step if best else None,
        "bytes_per_token": _bytes_per_token(lines),
        "hellaswag_accuracy": _newest(lines, "hellaswag/accuracy"),
        "hellaswag_accuracy_norm": _newest(lines, "hellaswag/accuracy_norm"),
        "final_train_loss": train[-1].loss if train else None,
        "sparsity": next((line["sparsity"] for line in reversed(lines) if "sparsity" in line), None),
        "tokens_per_second": _median(lines, "throughput/tokens_per_s"),
        "mfu": _median(lines, "throughput/mfu"),
        "step_ms": _median(lines, "throughput/step_ms"),
    }


def _points(lines: Sequence[Mapping[str, Any]], key: str) -> tuple[Point, ...]:
    """Return the finite losses. A clock that a later attempt sets back to 0 goes on from where it was."""
    points = []
    offset = last = 0.0
    for line in lines:
        elapsed = finite(line, "elapsed_s")
        if elapsed is not None:
            offset += last if elapsed < last else 0.0
            last = elapsed
        loss = finite(line, key)
        if loss is not None:
            seconds = None if elapsed is None else offset + elapsed
            points.append(Point(int(line["step"]), finite(line, "tokens"), seconds, loss))
    return tuple(points)


def _median(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [value for line in lines if (value := finite(line, key)) is not None]
    return statistics.median(values[1:] or values) if values else None


def _log_tail(run_dir: RunDir) -> tuple[str, ...]:
    """Return the end of a failed run's log: as the runner kept it, else from the log itself."""
    lines = readable(run_dir.status).get("log_tail") or []
    if not lines and run_dir.output_log.exists():
        with run_dir.output_log.open("rb") as file:
            file.seek(max(0, run_dir.output_log.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    return tuple(str(line) for line in lines[-LOG_TAIL:])


def _asked(run: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the trainer's fields whose symbols were asked for, None where run.json does not say."""
    names = run.get("asked")
    if not isinstance(names, list):
        return None
    return frozenset(str(name).removeprefix("GPT2_").lower() for name in names)


def _adjusted(run_dir: RunDir) -> tuple[str, ...]:
    """Return what the trainer changed, as sentences."""
    changes = readable(run_dir.run_used).get("adjusted") or []
    return tuple(f"{c.get('field')} {c.get('from')} -> {c.get('to')}: {c.get('why')}" for c in changes)


def _text(train: Mapping[str, Any], symbols: Mapping[str, Any]) -> str:
    """Return a name for the text that a run reads, the same for every tokenizer; "" where tokens are all there is."""
    if train.get("dataset") not in TEXTS:
        return ""
    return " ".join([str(train["dataset"]), *(f"{name}={symbols[name]}" for name in OF_TEXT if symbols.get(name))])


def _bytes_per_token(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return bytes a token from an evaluation's loss and bits per byte."""
    for line in lines:
        loss, bits = finite(line, "val/loss"), finite(line, "val/bits_per_byte")
        if loss and bits:
            return loss / math.log(2) / bits
    return None


def _newest(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    return next((value for line in reversed(lines) if (value := finite(line, key)) is not None), None)


def finite(values: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number, or None."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _whole(values: Mapping[str, Any], key: str) -> int | None:
    number = finite(values, key)
    return None if number is None else int(number)


def _text_int(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _product(*factors: int | None) -> int | None:
    known = [factor for factor in factors if factor is not None]
    return math.prod(known) if len(known) == len(factors) else None


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole
