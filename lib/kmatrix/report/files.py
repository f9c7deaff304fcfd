"""The numbers of a matrix -> results.json and all_results.json, for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kmatrix.records import MatrixDir, Status, write_json, write_json_array
from kmatrix.records.tracking import read_track
from kmatrix.report.gpu_files import gpu_object
from kmatrix.report.values import GroupNumbers, MatrixNumbers, OptimizerSettings, Point, Ranking, RunNumbers, Scaling
from kmatrix.stats import Interval

PLAIN = (  # fields of RunNumbers that are written as they are
    *("name", "run_id", "status", "reason", "optimizer", "model", "device", "device_name", "world_size", "seed"),
    *("attempt", "data_sha256", "steps", "max_iters", "global_batch", "block_size", "eval_samples", "planned_tokens"),
    *("warmup_share", "initial_val_loss", "final_val_loss", "last_val_step", "best_val_loss", "best_val_step"),
    *("tokenizer", "bytes_per_token", "bits_per_byte", "hellaswag_accuracy", "hellaswag_accuracy_norm"),
    *("final_train_loss", "perplexity", "tokens", "tokens_per_second", "mfu", "step_ms", "seconds"),
    *("peak_memory_mib", "params", "ended", "evidence", "log"),
    *("pruning", "target_sparsity", "sparsity"),
)


def write_results(matrix: MatrixDir, numbers: MatrixNumbers) -> None:
    """Write results.json: everything that the report says, with the runs behind each figure."""
    value = clean(results(numbers))
    for run in value["runs"]:
        run["links"] = {sent.tracker: sent.link for sent in read_track(matrix.run(run["name"])) if sent.link}
    write_json(matrix.results, value)


def write_all_results(matrix: MatrixDir, numbers: MatrixNumbers) -> None:
    """Write all_results.json: the original's array, one object a run, with our keys beside."""
    write_json_array(matrix.all_results, [clean(original(matrix, run)) for run in numbers.runs])


def results(numbers: MatrixNumbers) -> dict[str, Any]:
    """Return what results.json holds."""
    return {
        "name": numbers.name,
        "status": numbers.status,
        "created": numbers.created,
        "ended": numbers.ended,
        "command": numbers.command,
        "overrides": list(numbers.overrides),
        "equal": numbers.equal,
        "provenance": dict(numbers.provenance),
        "axes": {label: list(values) for label, values in numbers.axes.items()},
        "cuts": [{"count": count, "reason": reason} for count, reason in numbers.cuts],
        "counts": {str(status): numbers.count(status) for status in Status},
        "runs": [_run(run) for run in numbers.runs],
        "groups": [_group(group) for group in numbers.groups],
        "rankings": [_ranking(ranking) for ranking in numbers.rankings],
        "settings": [_settings(one) for one in numbers.settings],
        "scaling": [_scaling(scaling) for scaling in numbers.scalings],
        "warnings": list(numbers.warnings),
    }


def original(matrix: MatrixDir, run: RunNumbers) -> dict[str, Any]:
    """Return training_metrics.json of a run with what the matrix knows of it.

    What is measured nowhere is null. The loss of a run that did not finish is never a final one.
    """
    gpu = run.gpu
    ours = {
        "final_val_loss": run.final_val_loss if run.counts else None,
        "best_val_loss": run.best_val_loss,
        "final_perplexity": run.perplexity if run.counts else None,
        "total_time": run.seconds,
        "model_params": run.params,
        "tokens": run.tokens,
        "tokens_per_second": run.tokens_per_second,
        "mfu": run.mfu,
        "joules": gpu.joules if gpu else None,
        "joules_per_token": gpu.joules_per_token if gpu else None,
        "gpu_memory_mean": gpu.total_mean if gpu else None,
        "gpu_memory_max": gpu.total_high if gpu else None,
        "sparsity": run.sparsity,
        "gpu_simulated": gpu.simulated if gpu else None,
        "world_size": run.world_size,
        "global_batch": run.global_batch,
        "seed": run.seed,
    }
    identity = {
        "test_id": run.name,
        "run_id": run.run_id,
        "model": run.model,
        "optimizer": run.optimizer,
        "pruning": run.pruning,
        "target_sparsity": run.target_sparsity,
        "elapsed_time": run.seconds,
        "success": run.status is Status.FINISHED,
        "status": str(run.status),
        "reason": run.reason or None,
        "axes": dict(run.axes),
    }
    failure = {"error": run.reason or "no reason recorded"} if run.status is Status.FAILED else {}
    own = _loose_object(matrix.run(run.name).training_metrics)
    known = {key: value for key, value in own.items() if value is not None or key not in ours}
    return {**ours, **known, **identity, **failure}


def _settings(one: OptimizerSettings) -> dict[str, Any]:
    """Return one optimizer's settings: values, and whether they are defaults, were asked for or swept."""
    each = {setting.name: {"values": list(setting.values), "origin": setting.origin} for setting in one.settings}
    return {"optimizer": one.optimizer, "runs": list(one.runs), "settings": each}


def clean(value: Any) -> Any:
    """Return a value with null for every float that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def _loose_object(path: Path) -> dict[str, Any]:
    """Return the object in a file of the original's format, less its schema; empty where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {key: item for key, item in value.items() if key != "schema"} if isinstance(value, dict) else {}


def _run(run: RunNumbers) -> dict[str, Any]:
    facts = {name: getattr(run, name) for name in PLAIN}
    return {
        **facts,
        "reason": run.reason or None,
        "axes": dict(run.axes),
        "ended_by": run.ended_by,
        "adjusted": list(run.adjusted),
        "reused_from": run.reused_from or None,
        "attempts": [dict(attempt) for attempt in run.attempts],
        "gpu": gpu_object(run.gpu) if run.gpu else None,
        "alerts": [alert.to_json() for alert in run.alerts],
        "val": _columns(run.val),
    }


def _columns(points: tuple[Point, ...]) -> dict[str, list[float | None]]:
    """Return a curve as columns of equal length."""
    return {
        "step": [point.step for point in points],
        "tokens": [point.tokens for point in points],
        "seconds": [point.seconds for point in points],
        "loss": [point.loss for point in points],
    }


def _group(group: GroupNumbers) -> dict[str, Any]:
    return {
        "name": group.name,
        "axes": dict(group.axes),
        "data_sha256": group.data_sha256,
        "runs": [run.name for run in group.runs],
        "counted": {run.name: run.final_val_loss for run in group.counted},
        "seeds": sorted(group.losses),
        "mean_final_val_loss": group.mean,
        "deviation": group.deviation,
        "interval": _interval(group.interval),
    }


def _ranking(ranking: Ranking) -> dict[str, Any]:
    comparisons = [
        {
            "leader": comparison.leader,
            "other": comparison.other,
            "word": str(comparison.word),
            "difference": comparison.verdict.difference,
            "interval": _interval(comparison.verdict.interval),
            "p": comparison.verdict.p,
            "p_holm": comparison.p_holm,
            "method": comparison.verdict.method or None,
            "seeds": list(comparison.verdict.seeds),
            "reason": comparison.verdict.reason,
        }
        for comparison in ranking.comparisons
    ]
    return {
        "measure": ranking.measure,
        "data_sha256": ranking.data_sha256 or None,
        "order": [group.name for group in ranking.groups],
        "evidence": ranking.evidence,
        "comparisons": comparisons,
        "notes": list(ranking.notes),
    }


def _interval(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else {"low": interval.low, "high": interval.high, "level": interval.level}


def _scaling(scaling: Scaling) -> dict[str, Any]:
    rows = [
        {
            "world_size": row.world_size,
            "tokens_per_second": row.tokens_per_second,
            "speedup": row.speedup,
            "efficiency": row.efficiency,
            "global_batch": row.global_batch,
            "runs": list(row.runs),
        }
        for row in scaling.rows
    ]
    return {"configuration": scaling.name, "device": scaling.device, "rows": rows}
