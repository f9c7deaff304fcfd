"""Read the runs of a matrix from their files: what the trainer measured, its curves, its recordings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from kmatrix.errors import RecordError, add_damage, take_damage
from kmatrix.packing import usable_cores
from kmatrix.records.decode import replaced
from kmatrix.records.matrix import run_files
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunFile, RunNumbers, RunResult, Status
from kmatrix.records.tracking import read_track
from kmatrix.report.gpu.measure import gpu_of
from kmatrix.report.gpu.recordings import recordings_of
from kmatrix.report.metrics import Metrics
from kmatrix.report.metrics import read as read_metrics
from kmatrix.report.results import Run
from kmatrix.status.alerts import Severity, read_alerts
from kmatrix.status.cost import spent_of
from kmatrix.status.fold import Files, State, end_of, loss_of
from kmatrix.status.look import Look
from kmatrix.status.wanted import GPUS_AXIS, SEED_AXIS, all_axes

S = TypeVar("S")
T = TypeVar("T")
LOG_TAIL = 20  # lines kept of a failed run's log
DEVICES = {"cuda": "gpu", "cpu": "cpu"}
PLANNED = ("data_sha256", "max_iters", "global_batch", "block_size", "eval_samples")  # fields of a run; 0, "": unknown
LARGE = 100e6  # bytes of logs and recordings from which several processes read them


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is known of a run before its logs are read."""

    folder: RunDir
    run: RunFile  # as planned
    axes: Mapping[str, str]
    files: Files
    state: State


def read_runs(seen: Look) -> tuple[Run, ...]:
    """Return the runs of a matrix in its order. Raises RecordError if matrix.json is missing or damaged."""
    sources = [
        Source(
            folder=RunDir(seen.path / name),
            run=run,
            axes=all_axes(run.axes, run.symbols, seen.plan.axis_entries),
            files=seen.files[name],
            state=seen.states[name],
        )
        for name, run in run_files(seen.path).items()
    ]
    return tuple(of_each(read_run, sources, sum(_bytes(source.folder) for source in sources)))


def of_each(call: Callable[[S], T], items: Sequence[S], size: float = 0) -> list[T]:
    """Return what a function makes of each item, in several processes if these are forked, or read many bytes."""
    is_single = len([*Path("/proc/self/task").glob("*")]) == 1  # a fork would lose threads, also those of libraries
    if min(len(items), usable_cores()) < 2 or (size < LARGE and not is_single):
        return list(map(call, items))
    # One more than cores: items differ in size.
    workers, context = min(len(items), usable_cores() + 1), get_context("fork" if is_single else "spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        found = list(pool.map(partial(_elsewhere, call), items))
    for _, damage in found:
        add_damage(damage)
    return [one for one, _ in found]


def _elsewhere(call: Callable[[S], T], item: S) -> tuple[T, dict[Path, str]]:
    return call(item), take_damage()


def read_run(source: Source) -> Run:
    """Return a run. A log or a recording that cannot be read is its `error`: the other numbers stay."""
    folder, run, files, state = source.folder, source.run, source.files, source.state
    train, last = run.train, state.attempts[-1] if state.attempts else None
    running = last if state.status is Status.RUNNING else None
    end = last.end if last else None
    spent: dict[str, Any] = asdict(spent_of(state, files.train))
    if run.reused_from:
        spent["dollars"] = None  # it was paid for in another matrix
    planned: dict[str, Any] = {name: getattr(train, name) or None for name in PLANNED}
    used = _result(files, state) or RunResult()
    device = DEVICES.get((used.device or train.device).split(":")[0], "")  # it may have an index: cuda:0
    metrics, gpu, error = Metrics(), None, None
    # Without an attempt, its files are those of a result that is being archived.
    if state.attempts or files.damage:
        try:
            nodes = recordings_of(folder)
            metrics = read_metrics(folder, nodes[0].samples if len(nodes) == 1 else None)
            totals = {name: _known(used, metrics, name) for name in ("tokens", "seconds")}
            gpu = gpu_of(folder, nodes, **totals, running=state.status is Status.RUNNING)
        except (RecordError, OSError) as damage:
            error = str(damage).replace(f"{folder.path}/", "")
    loss = loss_of(files, state)
    # The log completes the numbers: it is all that an unfinished run has.
    numbers = {name: _known(used, metrics, name) for name in RunNumbers.__struct_fields__}
    numbers |= {"run_id": run.run_id, "reason": state.reason or None}
    numbers["kind"] = state.kind if state.status in (Status.FAILED, Status.STOPPED) else None
    # The best evidence first: what ran, what was planned, the name of the axis.
    numbers["world_size"] = numbers["world_size"] or train.num_gpus or _integer(source.axes.get(GPUS_AXIS))
    if state.status is Status.FINISHED:  # it is ranked by its own result alone
        numbers |= {name: getattr(used, name) for name in ("final_val_loss", "final_bits_per_byte")}
    return Run(
        **numbers,
        name=folder.name,
        status=state.status,
        error=error,
        axes=dict(source.axes),
        counts=state.status is Status.FINISHED and loss is not None and math.isfinite(loss),
        diverged=loss is not None and not math.isfinite(loss),
        optimizer=train.optimizer or source.axes.get("optimizer") or "",
        model=train.model or source.axes.get("model") or "",
        device=device,
        devices=used.devices,
        hosts=used.hosts,
        seed=_integer(source.axes.get(SEED_AXIS)) if train.seed < 0 else train.seed,
        dataset=train.dataset,
        tokenizer=train.tokenizer,
        **planned,
        perplexity=math.exp(final) if (final := numbers["final_val_loss"]) is not None and final < 700 else None,
        pruning=train.pruning or "none",
        target_sparsity=train.target_sparsity if train.pruning not in ("", "none") else None,
        **spent,
        joules=None if gpu is None or gpu.simulated else gpu.whole.joules,
        joules_per_token=None if gpu is None or gpu.simulated else gpu.main.joules_per_token,
        reused_from=run.reused_from or None,
        code=last.code or None if last else None,
        adjusted=tuple(f"{change.name} {change.asked} -> {change.used}: {change.why}" for change in used.adjusted),
        log=f"{folder.name}/{folder.output_log.name}" if folder.output_log.exists() else None,
        log_tail=end.log_tail[-LOG_TAIL:] if end and state.status is Status.FAILED else (),
        # How an attempt ended whose process was killed follows from its file.
        attempts=tuple(one if one is running else replaced(one, end=end_of(one)) for one in state.attempts),
        alerts=tuple(sorted(read_alerts(folder.path), key=lambda one: (one.severity is Severity.WARNING, one.since))),
        links={sent.tracker: sent.link for sent in read_track(folder) if sent.link},
        val=metrics.val,
        train=metrics.train,
        gpu=gpu,
    )


def _result(files: Files, state: State) -> RunResult | None:
    """Return the result of the last attempt; None while it trains, or if its trainer left none with numbers."""
    result = files.result
    if result is None or state.status is Status.RUNNING or not state.attempts:
        return None
    is_mine = state.status is Status.FINISHED or result.attempt == state.attempts[-1].number
    return result if is_mine and (result.status != Status.FAILED or result.step is not None) else None


def _known(used: RunResult, metrics: Metrics, name: str) -> Any:
    """Return a number of the trainer's result, else of its log."""
    value = getattr(used, name)
    return getattr(metrics.numbers, name) if value is None else value


def _bytes(folder: RunDir) -> int:
    """Return the size of what is slow to read."""
    return sum(path.stat().st_size for path in (folder.metrics, folder.gpu_samples) if path.exists())


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None
