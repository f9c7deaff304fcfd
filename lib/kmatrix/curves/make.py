"""Make the thinned curves of a run from its log and its recordings, and keep them in curves.json."""

from __future__ import annotations

import hashlib
import math
import os
import statistics
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kmatrix.curves.energy import joules_between, recordings_of
from kmatrix.curves.file import (
    AttemptSpan,
    CurvesFile,
    EvaluationColumns,
    KnotColumns,
    TrainingColumns,
    curves_text,
    read_curves_file,
)
from kmatrix.curves.metrics import MetricColumns, read_metrics
from kmatrix.curves.thin import columns, evenly, knots
from kmatrix.curves.values import RunCurves, curves_of_file, number
from kmatrix.errors import RecordError, note_damage, note_lines
from kmatrix.records.decode import decode_bytes
from kmatrix.records.files import write_bytes
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import RunResult

MOST_EVALUATIONS = 400  # per run
MOST_COLUMNS = 400  # of the training loss
DIGITS = 7  # significant digits of the training loss and of the knots
MOST_ENERGIES = 1000  # steps at which the energy is looked up, without evaluations
END_BYTES = 4096  # of a log, at its beginning and at its end: with their times, they are those of one run only


def read_curves(run_dir: RunDir, attempt: int | None, *, keep: bool) -> RunCurves:
    """Return the curves of a run: from curves.json if it is valid, else from its log and its recordings.

    attempt: the last one; None: of a run that was reused, whose attempts were made elsewhere.
    keep: write curves.json if it was not valid; only for a run that has ended. An error of that is ignored.
    """
    known = read_curves_file(run_dir)
    if known is None or not _is_valid(known, run_dir, attempt):
        try:
            known = make_curves(run_dir, attempt)
        except OSError as error:
            note_damage(run_dir.metrics, error.strerror or str(error))
            return RunCurves()
        if keep:
            with suppress(OSError):
                _write_own(run_dir, known)
    if known.damaged:
        note_lines(run_dir.metrics, known.damaged, known.lines + known.damaged)
    return curves_of_file(known)


def write_curves(run_dir: RunDir, curves: CurvesFile) -> None:
    """Write curves.json. Raises OSError; a missing folder is not made again."""
    text = curves_text(curves)
    try:
        decode_bytes(text, CurvesFile, run_dir.curves.name)
    except RecordError:
        return  # numbers that no run has, such as a negative time: every reader would report the file as damaged
    # Not flushed to disk: it can be made again at any time.
    write_bytes(run_dir.curves, text, durable=False, parents=False)


def make_curves(run_dir: RunDir, attempt: int | None) -> CurvesFile:
    """Return the curves of a run from its log and its recordings. attempt: the last one.

    Raises OSError if metrics.jsonl cannot be read; a missing one has no points.
    """
    # The sizes first: what is appended meanwhile makes the result outdated.
    metrics_bytes, samples_bytes = source_bytes(run_dir)
    rows = read_metrics(run_dir.metrics, metrics_bytes)
    seconds = _seconds(rows)
    evaluated = [at for at, loss in enumerate(rows["val_loss"]) if not math.isnan(loss)]
    trained = [at for at, loss in enumerate(rows["train_loss"]) if not math.isnan(loss)]
    kept = [evaluated[at] for at in evenly([rows["val_loss"][at] for at in evaluated], MOST_EVALUATIONS)]
    joules, simulated = _joules(run_dir, rows, kept) if samples_bytes else ({}, False)
    return CurvesFile(
        metrics_bytes=metrics_bytes,
        metrics_ends=digest_of_ends(run_dir.metrics, metrics_bytes),
        samples_bytes=samples_bytes,
        attempt=attempt,
        lines=rows.lines,
        damaged=rows.damaged,
        attempts=tuple(
            AttemptSpan(attempt=number, first_step=step, last_time=rows.last_times.get(number))
            for number, step in rows.first_steps.items()
        ),
        measured=_measured(rows, seconds, evaluated, trained),
        val=EvaluationColumns(
            step=tuple(rows.step[at] for at in kept),
            loss=tuple(rows["val_loss"][at] for at in kept),
            tokens=tuple(number(rows["tokens"][at]) for at in kept),
            seconds=tuple(_known(seconds[at]) for at in kept),
            joules=tuple(joules[at] for at in kept) if joules else (),
            total=len(evaluated),
        ),
        train=_training([rows.step[at] for at in trained], [rows["train_loss"][at] for at in trained]),
        seconds=_line(rows.step, seconds),
        tokens=_line(rows.step, rows["tokens"]),
        joules=_line([rows.step[at] for at in sorted(joules)], [joules[at] for at in sorted(joules)]),
        simulated=simulated,
    )


def source_bytes(run_dir: RunDir) -> tuple[int, int]:
    """Return the sizes of metrics.jsonl and of all recordings of devices; 0 if there is none."""
    return _size(run_dir.metrics), sum(map(_size, (run_dir.gpu_samples, *run_dir.earlier_gpu_samples())))


def digest_of_ends(path: Path, size: int) -> str:
    """Return the SHA-256 of the first and the last END_BYTES of the first `size` bytes of a log; "" if it has none.

    The whole log would take seconds for a thousand runs.
    """
    if not size:
        return ""
    try:
        with path.open("rb") as file:
            ends = file.read(min(END_BYTES, size))
            file.seek(max(len(ends), size - END_BYTES))
            ends += file.read(size - file.tell())
    except OSError:
        return ""
    return hashlib.sha256(ends).hexdigest()


def _is_valid(curves: CurvesFile, run_dir: RunDir, attempt: int | None) -> bool:
    """Return whether curves.json was made from the files that are here now. Without a log, it saves nothing."""
    return (
        attempt in (None, curves.attempt)
        and (curves.metrics_bytes, curves.samples_bytes) == source_bytes(run_dir)
        and curves.metrics_ends != ""
        and curves.metrics_ends == digest_of_ends(run_dir.metrics, curves.metrics_bytes)
    )


def _write_own(run_dir: RunDir, curves: CurvesFile) -> None:
    """Write curves.json unless the folder is another user's, which is only read, or a link."""
    folder = run_dir.path
    if not folder.is_symlink() and folder.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK):
        write_curves(run_dir, curves)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _seconds(rows: MetricColumns) -> array[float]:
    """Return the training time at each row in s. It accumulates over attempts: the clock of some starts at 0."""
    found = array("d")
    offset = last = 0.0
    for elapsed in rows["elapsed_s"]:
        if not math.isnan(elapsed):
            offset += last if elapsed < last else 0.0  # the clock went back: a later attempt began
            last = elapsed
        found.append(offset + elapsed)
    return found


def _joules(run_dir: RunDir, rows: MetricColumns, evaluated: Sequence[int]) -> tuple[dict[int, float], bool]:
    """Return row -> energy (J) since the training began, for evaluations and evenly spaced rows; empty if unknown.

    The second value says whether the GPUs were simulated. Evaluations and checkpoints are included; what an attempt
    trained and lost, and the time between attempts, are not. Unknown for several nodes: each has a clock of its own.
    """
    recordings = recordings_of(run_dir)
    if not recordings or not len(rows) or run_dir.later_nodes():
        return {}, False
    wanted = {*range(0, len(rows), -(-len(rows) // MOST_ENERGIES)), *evaluated, len(rows) - 1}
    # Each attempt needs its own ends: the time between two of them was not training.
    wanted |= {at + near for at in range(1, len(rows)) if rows.attempt[at] != rows.attempt[at - 1] for near in (-1, 0)}
    found: dict[int, float] = {}
    total, before = 0.0, None
    for at in sorted(wanted):
        end, elapsed = rows["time"][at], rows["elapsed_s"][at]
        if before is not None and rows.attempt[before] == rows.attempt[at]:
            begin = rows["time"][before]
        else:  # the first row of an attempt: back to the beginning of its training
            passed = rows["elapsed_s"][before] if before is not None else 0.0
            begin = end - (elapsed - passed if elapsed >= passed else elapsed)
        total += joules_between(recordings, begin, end)
        if math.isnan(total):
            return {}, False
        found[at], before = round(total, 1), at
    return found, any(one.simulated for one in recordings)


def _training(steps: Sequence[int], losses: Sequence[float]) -> TrainingColumns:
    width, ranges = columns(steps, MOST_COLUMNS)
    groups = [losses[begin:end] for begin, end in ranges]
    thinned = any(len(group) > 1 for group in groups)
    return TrainingColumns(
        width=width,
        step=tuple(steps[begin] // width * width for begin, _ in ranges),
        mean=tuple(_rounded(math.fsum(group) / len(group)) for group in groups),
        minimum=tuple(_rounded(min(group)) for group in groups) if thinned else (),
        maximum=tuple(_rounded(max(group)) for group in groups) if thinned else (),
        count=tuple(map(len, groups)) if thinned else (),
        total=len(steps),
    )


def _line(steps: Sequence[int], values: Sequence[float]) -> KnotColumns:
    known = [at for at, value in enumerate(values) if not math.isnan(value)]
    xs, ys = [steps[at] for at in known], [values[at] for at in known]
    kept = knots(xs, ys, MOST_COLUMNS)
    return KnotColumns(step=tuple(xs[at] for at in kept), value=tuple(_rounded(ys[at]) for at in kept))


def _measured(
    rows: MetricColumns, seconds: Sequence[float], evaluated: Sequence[int], trained: Sequence[int]
) -> RunResult:
    """Return the numbers in metrics.jsonl, which are used until the run has a result."""
    if not len(rows):
        return RunResult()
    losses = rows["val_loss"]
    best = min(evaluated, key=losses.__getitem__, default=None)
    last = max([*evaluated[-1:], *trained[-1:]], default=None)
    return RunResult(
        attempt=rows.attempt[-1] or None,
        step=rows.step[-1],
        tokens=_int(rows["tokens"][-1]),
        seconds=None if last is None else _known(seconds[last]),
        initial_val_loss=losses[evaluated[0]] if evaluated and rows.step[evaluated[0]] == 0 else None,
        final_val_loss=losses[evaluated[-1]] if evaluated else None,
        best_val_loss=None if best is None else losses[best],
        best_val_step=None if best is None else rows.step[best],
        final_bits_per_byte=_known(rows["bits_per_byte"][evaluated[-1]]) if evaluated else None,
        best_bits_per_byte=None if best is None else _known(rows["bits_per_byte"][best]),
        hellaswag_accuracy=_newest(rows["accuracy"]),
        hellaswag_accuracy_norm=_newest(rows["accuracy_norm"]),
        core_metric=_newest(rows["core_metric"]),
        core_standard_error=_newest(rows["core_standard_error"]),
        final_train_loss=rows["train_loss"][trained[-1]] if trained else None,
        sparsity=_newest(rows["sparsity"]),
        tokens_per_second=_median(rows["tokens_per_s"]),
        mfu=_median(rows["mfu"]),
        step_ms=_median(rows["step_ms"]),
    )


def _median(values: Sequence[float]) -> float | None:
    """Return the median of the known values. The first one is excluded if there are more: it includes warm-up."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known[1:] or known) if known else None


def _newest(values: Sequence[float]) -> float | None:
    return next((value for value in reversed(values) if not math.isnan(value)), None)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _int(value: float) -> int | None:
    return None if math.isnan(value) else int(value)
