"""Read the numbers of one run from its files, finished or not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from kmatrix.curves.make import read_curves
from kmatrix.curves.values import RunCurves
from kmatrix.own_file import open_to_read
from kmatrix.records.dataset import FLAT
from kmatrix.records.decode import Scalar
from kmatrix.records.files import last_lines
from kmatrix.records.jobs.files import read_node
from kmatrix.records.jobs.paths import nodes_of
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import (
    AxisEntry,
    RunFile,
    RunResult,
    Status,
    read_run_file_or_empty,
    read_train_values_or_empty,
    read_used_file_or_empty,
)
from kmatrix.records.states import RunStatusFile, read_run_status
from kmatrix.records.tracking import read_track
from kmatrix.report.numbers import GPUS_AXIS, RankDevice, RunNumbers
from kmatrix.status.alerts import alerts_of
from kmatrix.status.cost import spent_of
from kmatrix.status.outcomes import SEED_AXIS, all_axes, end_of
from kmatrix.status.state import RunState
from kmatrix.status.status_file import current_result, recover_status

# Datasets whose text does not depend on the tokenizer, and the symbols that select a part of it: runs with equal
# text are comparable in bits per byte, even with different tokenizers.
TEXT_DATASETS = ("stdlib", "shakespeare", "folder")
TEXT_SYMBOLS = ("GPT2_DATA_PATH", "GPT2_TEXT_COLUMN", "GPT2_VAL_PERCENT")

# Fields of run.json's "train" that configure optimizer and pruning, in the order of the summary. Fields that start
# with the name of the optimizer are appended.
SETTING_FIELDS = (
    *(
        "learning_rate",
        "embedding_lr",
        "head_lr",
        "scalar_lr",
        "min_lr",
        "schedule",
        "warmup_steps",
        "weight_decay",
        "grad_clip",
    ),
    *("beta1", "beta2", "epsilon", "amsgrad", "sgd_momentum", "sgd_nesterov"),
    *("muon_momentum", "muon_nesterov", "muon_ns_steps", "muon_split_qkv"),
    *("muon_adjust_lr_fn", "muon_adamw_lr"),
    *("adafactor_beta2_decay", "adafactor_clip", "soap_frequency"),
    *("adamwprune_base", "spam_theta", "spam_interval", "spam_warmup_steps"),
    *(
        "pruning",
        "target_sparsity",
        "pruning_warmup",
        "pruning_ramp_end",
        "pruning_frequency",
    ),
)
PRUNING_FIELDS = ("pruning", "target_sparsity")  # prefixes
LOG_TAIL = 20  # lines kept of a failed run's log


def read_numbers(
    run_dir: RunDir, planned: RunFile, axes_of_matrix: Sequence[AxisEntry] = (), *, has_runner: bool
) -> RunNumbers:
    """Return the numbers of one run.

    planned: its entry in matrix.json, used until the run has a run.json.  has_runner: as of `recover_status`.
    """
    # A report may be made while the matrix runs.
    run = read_run_file_or_empty(run_dir)
    is_readable = run != RunFile()
    state = recover_status(run_dir, has_runner=has_runner, record=run if is_readable else None)
    run = run if is_readable else planned  # missing or damaged
    # A planned run has no attempt: its files are those of a result that is being archived.
    status = None if state.status is Status.PLANNED else read_run_status(run_dir)
    status = status or RunStatusFile()
    curves = _curves(run_dir, state)  # after what can refuse the run: it may write a file
    train, axes = run.train, all_axes(run, axes_of_matrix)
    configuration = read_train_values_or_empty(run_dir)

    # The trainer's result, completed by what the metrics say: all that an unfinished run has.
    result = current_result(run_dir, state)
    known = (result or RunResult()).or_else(curves.measured)
    spent = spent_of(state, train, time.time())
    final = result if state.status is Status.FINISHED else known  # a finished run is ranked by its own result alone
    return RunNumbers(
        name=run_dir.name,
        run_id=run.run_id or "",
        axes=axes,
        status=state.status,
        reason=state.reason,
        kind=_kind(state),
        end=end_of(state, train, lambda: result),
        optimizer=train.optimizer or axes.get("optimizer") or "",
        model=train.model or axes.get("model") or "",
        # The device may have an index, as in cuda:0.
        device={"cuda": "gpu", "cpu": "cpu"}.get(str(known.device or train.device).split(":")[0], ""),
        device_name=known.device_name or None,
        devices=_rank_devices(run_dir, train.num_nodes or 1),
        # The best evidence first: what ran, what was planned, the name of the axis.
        world_size=known.world_size or train.num_gpus or _parse_int(axes.get(GPUS_AXIS)),
        num_nodes=train.num_nodes or 1,
        seed=_parse_int(axes.get(SEED_AXIS)) if train.seed < 0 else train.seed,
        attempt=known.attempt,
        data_sha256=train.data_sha256 or None,
        data_layout=train.data_layout or FLAT,
        tokenizer=train.tokenizer,
        text=_text(run),
        steps=known.step,
        max_iters=train.max_iters or None,
        global_batch=train.global_batch or None,
        block_size=train.block_size or None,
        eval_samples=train.eval_samples or None,
        planned_tokens=train.max_iters * train.tokens_per_step or None,
        warmup_share=_share(train.warmup_steps, train.max_iters),
        initial_val_loss=known.initial_val_loss,
        final_val_loss=final.final_val_loss if final else None,
        last_val_step=curves.val.step[-1] if curves.val else None,
        best_val_loss=known.best_val_loss,
        best_val_step=known.best_val_step,
        bits_per_byte=final.final_bits_per_byte if final else None,
        best_bits_per_byte=known.best_bits_per_byte,
        hellaswag_accuracy=known.hellaswag_accuracy,
        hellaswag_accuracy_norm=known.hellaswag_accuracy_norm,
        core_metric=known.core_metric,
        core_standard_error=known.core_standard_error,
        final_train_loss=known.final_train_loss,
        tokens=known.tokens,
        tokens_per_second=known.tokens_per_second,
        mfu=known.mfu,
        step_ms=known.step_ms,
        seconds=known.seconds,
        wall_s=spent.wall_s,
        gpu_hours=spent.gpu_hours,
        dollars=spent.dollars,
        peak_memory_mib=known.peak_memory_mib,
        params=known.params,
        ended=known.ended,
        ended_by=known.ended_by or None,
        evidence=_evidence(run_dir, result, curves),
        log=f"{run_dir.name}/{run_dir.output_log.name}" if run_dir.output_log.exists() else "",
        log_tail=_log_tail(run_dir, status.log_tail) if state.status is Status.FAILED else (),
        adjusted=_adjusted(run_dir),
        pruning=train.pruning or "none",
        target_sparsity=train.target_sparsity if train.pruning not in ("", "none") else None,
        sparsity=known.sparsity,
        settings=optimizer_settings(configuration),
        configuration=configuration,
        explicit=frozenset(name.removeprefix("GPT2_").lower() for name in run.asked),
        attempts=status.attempts,
        starts=curves.first_steps if len(status.attempts) > 1 else {},
        reused_from=run.reused_from or "",
        alerts=alerts_of(status.alerts),
        links={sent.tracker: sent.link for sent in read_track(run_dir) if sent.link},
        curves=curves,
    )


def _kind(state: RunState) -> str:
    """Return how a run failed or stopped, in a word; "" if it finished or has not ended."""
    unfinished = state.status in (Status.FAILED, Status.STOPPED)
    return (state.last.kind or "") if unfinished and state.last else ""


def times_on_hosts(run_dir: RunDir, run: RunNumbers) -> dict[str, list[tuple[float, float]]]:
    """Return when the attempts ran on each host, by the clock of that host: begin and end of each, Unix s.

    Of attempts before the last one, only the times on the host of their rank 0 are known.
    """
    times: dict[str, list[tuple[float, float]]] = {}
    for attempt in run.attempts:
        number = attempt.attempt or 1
        hosts = attempt.hosts
        if attempt.started is None or attempt.ended is None or not hosts:
            continue
        # The runner and node 0 are on one host.
        times.setdefault(hosts[0], []).append((attempt.started, max(attempt.started, attempt.ended)))
        nodes = [found for node in nodes_of(run_dir) if (found := read_node(node)) and found.attempt == number]
        first = next((node.started for node in nodes if node.node == 0), None)
        for node in nodes:
            if node.node > 0 and node.host != hosts[0] and node.started is not None and first is not None:
                # The agents start together, and time passes alike on all hosts, whatever their clocks show.
                span = (node.started, node.started + max(0.0, attempt.ended - first))
                times.setdefault(node.host, []).append(span)
    return times


def optimizer_settings(train: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings of optimizer and pruning among all fields of "train", without None and unused pruning."""
    optimizer = str(train.get("optimizer") or "")
    own = [name for name in train if optimizer and name.startswith(f"{optimizer}_") and name not in SETTING_FIELDS]
    found = {name: train[name] for name in (*SETTING_FIELDS, *own) if train.get(name) is not None}
    if found.get("pruning") in (None, "none"):
        found = {name: value for name, value in found.items() if not name.startswith(PRUNING_FIELDS)}
    return found


def _curves(run_dir: RunDir, state: RunState) -> RunCurves:
    """Return the curves of a run. curves.json is written if it is outdated and the run has ended."""
    if state.status is Status.PLANNED:
        return RunCurves()
    return read_curves(run_dir, state.number or None, keep=state.status is not Status.RUNNING)


def _evidence(run_dir: RunDir, result: RunResult | None, curves: RunCurves) -> str:
    if result is not None:
        return f"{run_dir.name}/{run_dir.result.name}"
    return f"{run_dir.name}/{run_dir.metrics.name}" if curves.measured.step is not None else ""


def _log_tail(run_dir: RunDir, lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last lines of a failed run's log. lines: those in its status.json; empty: read the log itself."""
    if not lines and run_dir.output_log.exists():
        with open_to_read(run_dir.output_log) as file:
            lines = last_lines(file)
    return tuple(str(line).rstrip("\r\n") for line in lines[-LOG_TAIL:])


def _rank_devices(run_dir: RunDir, nodes: int) -> tuple[RankDevice, ...]:
    """Return the devices of all ranks as the trainer recorded them; empty without their hosts. nodes: as planned."""
    used = read_used_file_or_empty(run_dir)
    if not used.hosts or len(used.hosts) != len(used.devices):
        return ()
    width = max(1, len(used.hosts) // nodes)
    uuids = [gpu.uuid or None for gpu in used.gpus] if len(used.gpus) == len(used.hosts) else [None] * len(used.hosts)
    return tuple(
        RankDevice(rank=rank, node=rank // width, host=host, name=name, uuid=uuid)
        for rank, (host, name, uuid) in enumerate(zip(used.hosts, used.devices, uuids, strict=True))
    )


def _adjusted(run_dir: RunDir) -> tuple[str, ...]:
    """Return the settings that the trainer changed, one sentence each."""
    changes = read_used_file_or_empty(run_dir).adjusted
    return tuple(f"{change.name} {change.asked} -> {change.used}: {change.why}" for change in changes)


def _text(run: RunFile) -> str:
    """Return the name of the training text, equal for all tokenizers; "" if only the tokens are known."""
    if run.train.dataset not in TEXT_DATASETS:
        return ""
    parts = (f"{name}={run.symbols[name]}" for name in TEXT_SYMBOLS if run.symbols.get(name))
    # Rows that are packed by best fit have lower bits per byte: they are another text.
    layout = [] if run.train.data_layout in ("", FLAT) else [run.train.data_layout]
    return " ".join([run.train.dataset, *parts, *layout])


def _parse_int(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _share(part: int | None, whole: int | None) -> float | None:
    return None if part is None or not whole else part / whole
