"""Read the numbers of one run from its files, finished or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kmatrix.records.dataset import FLAT
from kmatrix.records.decode import Scalar, replaced
from kmatrix.records.files import last_lines
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunFile, RunResult, Status
from kmatrix.records.tracking import read_track
from kmatrix.report.metrics import Metrics
from kmatrix.report.numbers import GPUS_AXIS, RankDevice, RunNumbers
from kmatrix.status.alerts import read_alerts
from kmatrix.status.cost import spent_of
from kmatrix.status.fold import Files, State
from kmatrix.status.look import Look
from kmatrix.status.wanted import SEED_AXIS, all_axes, end_of

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
KNOWN = (  # fields of RunResult that RunNumbers has, too
    *("attempt", "initial_val_loss", "best_val_loss", "best_val_step", "best_bits_per_byte", "final_train_loss"),
    *("hellaswag_accuracy", "hellaswag_accuracy_norm", "core_metric", "core_standard_error", "sparsity", "params"),
    *("tokens", "tokens_per_second", "mfu", "step_ms", "seconds", "peak_memory_mib", "ended"),
)
LOG_TAIL = 20  # lines kept of a failed run's log


def read_numbers(run_dir: RunDir, run: RunFile, seen: Look, metrics: Metrics) -> RunNumbers:
    """Return the numbers of one run. run: as planned.  metrics: of its log."""
    files, state = seen.files[run_dir.name], seen.states[run_dir.name]
    train, axes = run.train, all_axes(run.axes, run.symbols, seen.plan.axis_entries)
    last = state.attempts[-1] if state.attempts else None

    # The trainer's result, completed by what the metrics say: all that an unfinished run has.
    result = _result(files, state)
    known = result or RunResult()
    missing = [name for name in metrics.numbers.__struct_fields__ if getattr(known, name) is None]
    known = replaced(known, **{name: getattr(metrics.numbers, name) for name in missing})
    spent = spent_of(state, files.train)
    final = result if state.status is Status.FINISHED else known  # a finished run is ranked by its own result alone
    copied: dict[str, Any] = {name: getattr(known, name) for name in KNOWN}
    return RunNumbers(
        **copied,
        name=run_dir.name,
        run_id=run.run_id or "",
        axes=axes,
        status=state.status,
        reason=state.reason,
        kind=state.kind if state.status in (Status.FAILED, Status.STOPPED) else "",
        end=end_of(files, state),
        optimizer=train.optimizer or axes.get("optimizer") or "",
        model=train.model or axes.get("model") or "",
        # The device may have an index, as in cuda:0.
        device={"cuda": "gpu", "cpu": "cpu"}.get(str(known.device or train.device).split(":")[0], ""),
        device_name=known.device_name or None,
        devices=_rank_devices(result or RunResult(), train.num_nodes or 1),
        # The best evidence first: what ran, what was planned, the name of the axis.
        world_size=known.world_size or train.num_gpus or _parse_int(axes.get(GPUS_AXIS)),
        num_nodes=train.num_nodes or 1,
        seed=_parse_int(axes.get(SEED_AXIS)) if train.seed < 0 else train.seed,
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
        final_val_loss=final.final_val_loss if final else None,
        last_val_step=metrics.val.step[-1] if metrics.val.step else None,
        bits_per_byte=final.final_bits_per_byte if final else None,
        wall_s=spent.wall_s,
        gpu_hours=spent.gpu_hours,
        dollars=spent.dollars,
        ended_by=known.ended_by or None,
        evidence=_evidence(run_dir, result, metrics),
        log=f"{run_dir.name}/{run_dir.output_log.name}" if run_dir.output_log.exists() else "",
        log_tail=_log_tail(run_dir, last.end.log_tail if last and last.end else ())
        if state.status is Status.FAILED
        else (),
        adjusted=_adjusted(result or RunResult()),
        pruning=train.pruning or "none",
        target_sparsity=train.target_sparsity if train.pruning not in ("", "none") else None,
        settings=optimizer_settings(files.train),
        configuration=files.train,
        code=last.code if last else "",
        explicit=frozenset(name.removeprefix("GPT2_").lower() for name in run.asked),
        attempts=state.attempts,
        starts=metrics.first_steps if len(state.attempts) > 1 else {},
        reused_from=run.reused_from or "",
        alerts=tuple(read_alerts(run_dir.path)),
        links={sent.tracker: sent.link for sent in read_track(run_dir) if sent.link},
        metrics=metrics,
    )


def optimizer_settings(train: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings of optimizer and pruning among all fields of "train", without None and unused pruning."""
    optimizer = str(train.get("optimizer") or "")
    own = [name for name in train if optimizer and name.startswith(f"{optimizer}_") and name not in SETTING_FIELDS]
    found = {name: train[name] for name in (*SETTING_FIELDS, *own) if train.get(name) is not None}
    if found.get("pruning") in (None, "none"):
        found = {name: value for name, value in found.items() if not name.startswith(PRUNING_FIELDS)}
    return found


def _result(files: Files, state: State) -> RunResult | None:
    """Return the result of the last attempt; None while it trains, or if its trainer left none with numbers."""
    result = files.result
    if result is None or state.status is Status.RUNNING or not state.attempts:
        return None
    is_mine = state.status is Status.FINISHED or result.attempt == state.attempts[-1].number
    return result if is_mine and (result.status != Status.FAILED or result.step is not None) else None


def _evidence(run_dir: RunDir, result: RunResult | None, metrics: Metrics) -> str:
    if result is not None:
        return f"{run_dir.name}/{run_dir.result.name}"
    return f"{run_dir.name}/{run_dir.metrics.name}" if metrics.numbers.step is not None else ""


def _log_tail(run_dir: RunDir, lines: Sequence[str]) -> tuple[str, ...]:
    """Return the last lines of a failed run's log. lines: those of its last end; empty: read the log itself."""
    if not lines and run_dir.output_log.exists():
        with run_dir.output_log.open("rb") as file:
            lines = last_lines(file)
    return tuple(str(line).rstrip("\r\n") for line in lines[-LOG_TAIL:])


def _rank_devices(used: RunResult, nodes: int) -> tuple[RankDevice, ...]:
    """Return the devices of all ranks as the trainer recorded them; empty without their hosts. nodes: as planned."""
    if not used.hosts or len(used.hosts) != len(used.devices):
        return ()
    width = max(1, len(used.hosts) // nodes)
    uuids = [gpu.uuid or None for gpu in used.gpus] if len(used.gpus) == len(used.hosts) else [None] * len(used.hosts)
    return tuple(
        RankDevice(rank=rank, node=rank // width, host=host, name=name, uuid=uuid)
        for rank, (host, name, uuid) in enumerate(zip(used.hosts, used.devices, uuids, strict=True))
    )


def _adjusted(result: RunResult) -> tuple[str, ...]:
    """Return the settings that the trainer changed, one sentence each."""
    return tuple(f"{change.name} {change.asked} -> {change.used}: {change.why}" for change in result.adjusted)


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
