"""Write the numbers of a matrix as results.json and all_results.json, for other programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from kmatrix.records.attempts import Attempt, End
from kmatrix.records.decode import SCHEMA, as_json
from kmatrix.records.files import write_bytes
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.report.formats.encode import indented, packed
from kmatrix.report.gpu.numbers import DeviceNumbers, GpuNumbers, PeriodNumbers, Statistics
from kmatrix.report.metrics import Evaluations
from kmatrix.report.numbers import (
    CostDifference,
    GroupNumbers,
    MatrixNumbers,
    OptimizerSettings,
    Ranking,
    RunNumbers,
    Scaling,
)
from kmatrix.report.pair_text import no_more_text
from kmatrix.report.sentences.rankings import no_result_text
from kmatrix.report.sentences.values import VerdictText
from kmatrix.report.target import Effort, TargetGroup, TargetNumbers, reached, target_numbers
from kmatrix.report.verdict_text import verdict_texts
from kmatrix.stats import Interval
from kmatrix.status.fold import FINISHED, rule_of
from kmatrix.status.stragglers import RankNumbers
from kmatrix.verdict.family import Pair as PairVerdict
from kmatrix.verdict.target import TargetTest

QUANTITIES = ("memory_used", "utilization", "power", "temperature", "sm_clock")  # fields of DeviceNumbers

PLAIN = (  # fields of RunNumbers with the same key in results.json
    *("name", "run_id", "status", "reason", "optimizer", "model", "device", "device_name", "world_size", "seed"),
    *("attempt", "data_sha256", "steps", "max_iters", "global_batch", "block_size", "eval_samples", "planned_tokens"),
    *("warmup_share", "initial_val_loss", "final_val_loss", "last_val_step", "best_val_loss", "best_val_step"),
    *("tokenizer", "bits_per_byte", "hellaswag_accuracy", "hellaswag_accuracy_norm"),
    *("core_metric", "core_standard_error"),
    *("final_train_loss", "perplexity", "tokens", "tokens_per_second", "mfu", "step_ms", "seconds"),
    *("wall_s", "gpu_hours", "dollars"),
    *("peak_memory_mib", "params", "ended", "evidence", "log"),
    *("pruning", "target_sparsity", "sparsity"),
)


def write_results(matrix: MatrixDir, numbers: MatrixNumbers) -> None:
    """Write results.json: all numbers of the report, with the runs they come from."""
    # A matrix may have thousands of runs with curves of hundreds of points: not all of them are objects at a time.
    write_bytes(matrix.results, indented({"schema": SCHEMA, **results(numbers, packed)}))


def write_all_results(matrix: MatrixDir, numbers: MatrixNumbers) -> None:
    """Write all_results.json: the array of the original project, one object per run, with additional keys."""
    write_bytes(matrix.all_results, indented([original(run) for run in numbers.runs]))


def results(numbers: MatrixNumbers, pack: Callable[[dict[str, Any]], object] | None = None) -> dict[str, Any]:
    """Return the content of results.json. pack: turns the object of a run into a value that takes less memory."""
    target = target_numbers(numbers)
    target = target if target is not None and target.is_set else None
    runs = (_run(run, None if target is None else target.value) for run in numbers.runs)
    texts = verdict_texts(numbers)
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
        "cuts": [as_json(cells) for cells in numbers.excluded],
        "counts": {str(status): numbers.count(status) for status in Status},
        "runs": [run if pack is None else pack(run) for run in runs],
        "groups": [_group(group) for group in numbers.groups],
        # Without a ranking there is a text, too.
        "rankings": [_ranking(ranking, text) for ranking, text in zip(numbers.rankings, texts, strict=False)],
        "target": None if target is None else _target(target),
        "verdict": [text.sentence for text in texts],
        "reserve": sorted(numbers.reserve),
        "settings": [_settings(one) for one in numbers.settings],
        "scaling": [_scaling(scaling) for scaling in numbers.scalings],
        "warnings": list(numbers.warnings),
    }


def original(run: RunNumbers) -> dict[str, Any]:
    """Return the numbers of a run by their names in the original project.

    Unknown values are None. An unfinished run has no final loss.
    """
    gpu = run.gpu
    numbers = {
        "final_val_loss": run.final_val_loss if run.counts else None,
        "best_val_loss": run.best_val_loss,
        "final_perplexity": run.perplexity if run.counts else None,
        "total_time": run.seconds,
        "model_params": run.params,
        "tokens": run.tokens,
        "tokens_per_second": run.tokens_per_second,
        "mfu": run.mfu,
        "joules": gpu.joules if gpu else None,
        "joules_per_token": gpu.main.joules_per_token if gpu else None,
        "joules_per_token_run": gpu.joules_per_token if gpu else None,
        "gpu_memory_mean": gpu.main.total_mean if gpu else None,
        "gpu_memory_mean_run": gpu.total_mean if gpu else None,
        "gpu_memory_max": gpu.run_max if gpu else None,
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
        "reused_from": run.reused_from or None,
        "wall_s": run.wall_s,
        "gpu_hours": run.gpu_hours,
        "dollars": run.dollars,
    }
    failure = {"error": run.reason or "no reason recorded"} if run.status is Status.FAILED else {}
    return {**numbers, **identity, **failure}


def _settings(one: OptimizerSettings) -> dict[str, Any]:
    """Return one optimizer's settings: values and origin."""
    each = {setting.name: {"values": list(setting.values), "origin": setting.origin} for setting in one.settings}
    return {"optimizer": one.optimizer, "runs": list(one.runs), "settings": each}


def clean(value: Any) -> Any:
    """Return a value with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    return value


def _run(run: RunNumbers, target: float | None) -> dict[str, Any]:
    facts = {name: getattr(run, name) for name in PLAIN}
    found = None if target is None else reached(run, target)
    return {
        **facts,
        "reason": run.reason or None,
        "kind": run.kind or None,
        "code": run.code or None,
        "diverged": run.diverged,
        "log_tail": list(run.log_tail),
        "reached": None if found is None else asdict(found),
        "axes": dict(run.axes),
        "ended_by": run.ended_by,
        "adjusted": list(run.adjusted),
        "devices": [asdict(device) for device in run.devices],
        "reused_from": run.reused_from or None,
        "attempts": [_attempt(attempt, run.how_ended(attempt)) for attempt in run.attempts],
        "gpu": gpu_object(run.gpu) if run.gpu else None,
        "alerts": [alert.to_json() for alert in run.alerts],
        "val": _columns(run.val),
        "links": dict(run.links),
    }


def _attempt(attempt: Attempt, end: End | None) -> dict[str, Any]:
    """Return an attempt of a run. end: None while it trains."""
    status = Status.RUNNING if end is None else Status.FINISHED if end.kind == FINISHED else rule_of(end.kind).status
    return {
        "attempt": attempt.number,
        "status": str(status),
        "kind": end.kind if end and status is not Status.FINISHED else None,
        "reason": (end.reason if end else "") or None,
        "exit_code": next((one.code for one in end.exits if one.code), 0) if end and end.exits else None,
        "resume": attempt.resume,
        "micro_batch": attempt.micro_batch,
        "started": attempt.started,
        "seconds": end.seconds if end else attempt.seconds,
        "gpus": list(attempt.gpus),
        "host": attempt.host,
        "code": attempt.code or None,
    }


def _columns(val: Evaluations) -> dict[str, list[float | None]]:
    """Return the evaluations as columns of equal length."""
    return {
        "step": list(val.step),
        "tokens": list(val.tokens),
        "seconds": list(val.seconds),
        "loss": list(val.loss),
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


def _ranking(ranking: Ranking, text: VerdictText) -> dict[str, Any]:
    family, replay = ranking.verdict, ranking.replay
    rules = family.rules
    return {
        "measure": ranking.metric,
        "data_sha256": ranking.data_sha256 or None,
        "order": [group.name for group in ranking.groups],
        "evidence": text.sentence,
        "comparisons": [{"leader": pair.a, "other": pair.b, **_pair(pair)} for pair in family.against_reference],
        "no_result": [_without_result(group) for group in ranking.without_result],
        "notes": list(ranking.notes),
        "state": str(text.state),
        "preliminary": text.is_preliminary,
        "lines": [
            {"label": str(line.label), "text": line.text, "command": line.command or None} for line in text.lines
        ],
        "family": "all pairs" if rules.baseline is None else "baseline",
        "family_size": family.size,
        "reference": family.reference,
        "confidence": rules.confidence,
        "min_difference": rules.min_difference,
        "pairs": [{"a": pair.a, "b": pair.b, **_pair(pair)} for pair in family.pairs],
        "diverged": {name: number for name, number in family.diverged.items() if number},
        "costs": [_cost(cost) for cost in ranking.costs],
        "seeds_auto": None
        if replay is None
        else {
            "rounds": list(replay.rounds),
            "wanted": len(replay.wanted),
            "unused": replay.unused,
            "seeds_min": rules.seeds_min,
            "seeds_max": len(rules.seeds),
        },
    }


def _without_result(group: GroupNumbers) -> dict[str, Any]:
    """Return a configuration of which no run has a loss, and why."""
    return {
        "name": group.name,
        "reason": no_result_text(group),
        "runs": len(group.runs),
        "diverged": len(group.diverged),
    }


def _target(target: TargetNumbers) -> dict[str, Any]:
    return {"loss": target.value, "configurations": [_target_group(group, group.test) for group in target.groups]}


def _target_group(group: TargetGroup, test: TargetTest | None) -> dict[str, Any]:
    step = group.reached("step")
    return {
        "name": group.name,
        "mean": test.mean if test else None,
        "seeds": test.seeds if test else 0,
        "p": test.p if test else None,
        "p_holm": test.p_holm if test else None,
        "below": test.is_below if test else False,
        "reason": test.reason if test else "",
        "runs": step.runs,
        "reached": step.reached,
        "pending": group.pending,
        "median": {field.name: group.reached(field.name).median for field in fields(Effort)},
    }


def _pair(pair: PairVerdict) -> dict[str, Any]:
    return {
        "outcome": str(pair.outcome),
        "difference": pair.difference,
        "interval": _interval(pair.interval),
        "p": pair.p,
        "p_holm": pair.p_holm,
        "method": str(pair.method) or None,
        "seeds": list(pair.seeds),
        "reason": pair.reason or no_more_text(pair),
        "deviation": pair.deviation,
        "detectable": pair.detectable,
        "margin": pair.margin,
        "more_seeds": pair.more_seeds,
        "diverged": list(pair.diverged),
        "no_more": None if pair.no_more is None else str(pair.no_more),
    }


def _cost(cost: CostDifference) -> dict[str, Any]:
    return {
        "quantity": str(cost.quantity),
        "a": cost.a,
        "b": cost.b,
        "mean_a": cost.mean_a,
        "mean_b": cost.mean_b,
        "ratio": cost.ratio,
        "p": cost.p,
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


def gpu_object(gpu: GpuNumbers) -> dict[str, Any]:
    """Return the numbers of a run's devices, with the keys of gpu_summary.json; `training` without its phases."""
    whole = gpu.whole
    return {
        "evidence": gpu.evidence or None,
        "device_type": gpu.device_type or None,
        "simulated": gpu.simulated,
        "final": gpu.final,
        "samples": gpu.samples,
        "seconds": gpu.seconds,
        "hz_reached": gpu.hz,
        "energy_source": gpu.energy_source,
        "gpus": [_device(device) for device in gpu.devices],
        "totals": {
            "memory_used_mean": gpu.total_mean,
            "memory_used_max": gpu.run_max,
            "mean_power": whole.mean_power,
            "joules": gpu.joules,
            "joules_per_token": gpu.joules_per_token,
            "tokens_per_joule": whole.tokens_per_joule,
            "mfu": gpu.mfu,
            **asdict(gpu.cost),
        },
        "factors": asdict(gpu.factors),
        "phases": _phases(gpu),
        "balance": _balance(whole),
        "training": _training(gpu.training) if gpu.training else None,
        "ranks": _ranks(gpu.ranks) if gpu.ranks else None,
        "notes": list(gpu.notes),
    }


def _phases(gpu: GpuNumbers) -> dict[str, Any]:
    """Return the total time (s) and energy (J) of each phase."""
    names = dict.fromkeys(phase.name for phase in gpu.phases)
    return {name: {"seconds": gpu.phase_seconds(name), "joules": gpu.phase_joules(name)} for name in names}


def _balance(period: PeriodNumbers) -> dict[str, Any]:
    return {
        name: asdict(balance) if (balance := period.balance(quantity)) else None
        for name, quantity in (("memory", "memory_used"), ("utilization", "utilization"), ("power", "power"))
    }


def _training(period: PeriodNumbers) -> dict[str, Any]:
    """Return the numbers of a recording without set-up, evaluations, checkpoints and ending."""
    return {
        "seconds": period.seconds,
        "memory_used_mean": period.total_mean,
        "mean_power": period.mean_power,
        "utilization": period.utilization,
        "joules": period.joules,
        "joules_per_token": period.joules_per_token,
        "tokens_per_joule": period.tokens_per_joule,
        "balance": _balance(period),
        "gpus": [
            {
                "gpu_index": device.gpu_index,
                "uuid": device.uuid or None,
                "rank": device.rank,
                **({"host": device.host} if device.host else {}),
                **{
                    name: None
                    if (one := getattr(device, name)) is None
                    else {"mean": one.mean, "deviation": one.deviation}
                    for name in QUANTITIES
                },
            }
            for device in period.devices
        ],
    }


def _device(device: DeviceNumbers) -> dict[str, Any]:
    return {
        "gpu_index": device.gpu_index,
        "gpu_name": device.gpu_name,
        "uuid": device.uuid or None,
        "rank": device.rank,
        **({"host": device.host} if device.host else {}),
        "samples": device.samples,
        "lost_at": device.lost_at,
        "lost_s": device.lost_s,
        "memory_total": device.memory_total,
        **{name: _statistics(getattr(device, name)) for name in QUANTITIES},
        "joules": device.joules,
        "throttled_s": dict(device.throttled_s),
        "foreign": list(device.foreign),
        "ecc_uncorrected": device.ecc_uncorrected,
        "xids": [{"code": x.code, "count": x.count, "first": x.first, "last": x.last} for x in device.xids],
        **device.extras,
    }


def _statistics(one: Statistics | None) -> dict[str, float | None] | None:
    if one is None:
        return None
    return {"mean": one.mean, "deviation": one.deviation, "min": one.minimum, "max": one.maximum}


def _ranks(ranks: RankNumbers) -> dict[str, Any]:
    return {
        "compute_ms": {str(rank): value for rank, value in ranks.compute_ms},
        "step_ms": ranks.step_ms,
        "steps": ranks.steps,
        "load_balance_efficiency": ranks.efficiency,
        "straggler_time_share": ranks.waiting,
        "slowest_rank": ranks.slowest,
        "slowest_share": ranks.slowest_share,
    }
