"""A matrix as it stands now, from its files: what `make status` shows, of a running matrix and of a finished one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kmatrix.errors import RecordError, SchemaError
from kmatrix.estimate import Measured, Phase, Rest, Source, ends_of, rest_of_run, whole_run
from kmatrix.launch.alarm import kept
from kmatrix.launch.box import gpus_now
from kmatrix.launch.history import measured_before
from kmatrix.launch.standing import read_state, settle
from kmatrix.launch.state import RunState, overall
from kmatrix.launch.views import MatrixView, Memory, RunView
from kmatrix.launch.watch import MetricsTail, limit_s
from kmatrix.packing import Limits
from kmatrix.records import MatrixDir, RunDir, Status, read_json, read_jsonl
from kmatrix.records.tracking import read_track, sent_of

TO_COME = (Status.RUNNING, Status.PLANNED, Status.STOPPED)
EMPTY: Mapping[str, Any] = {}


class Overview:
    """Looks at a matrix again and again; each look reads what the metrics of its runs have grown by."""

    def __init__(self, matrix: MatrixDir) -> None:
        self._matrix = matrix
        self._tails: dict[tuple[str, int], MetricsTail] = {}
        self._records: dict[str, Mapping[str, Any]] = {}  # run -> its run.json
        self._earlier: list[Measured] | None = None  # runs of other matrices, once they are needed

    def look(self, now: float | None = None) -> MatrixView:
        """Return how the matrix stands. Raises SchemaError where a newer kmatrix wrote it."""
        now = time.time() if now is None else now
        running = self._matrix.is_held()
        found = [self._run(run, now, running=running) for run in self._matrix.runs()]
        here = self._measured(found)
        views = self._packed([self._priced(self._expected(view, here)) for view in found])
        record = _readable(self._matrix)
        left = [view.ends_s for view in views if view.status in TO_COME]
        left_s = max(s for s in left if s is not None) if left and None not in left else None
        return MatrixView(
            name=self._matrix.name,
            status=Status.RUNNING if running else overall([view.status for view in views]),
            running=running,
            started=record.get("started"),
            ended=None if running else record.get("ended"),
            left_s=left_s,
            ends=None if left_s is None else now + left_s,
            dollars=_total([view.dollars for view in views]),
            all_dollars=_total([view.all_dollars for view in views]),
            runs=tuple(views),
            gpus=tuple(gpus_now(self._matrix, self._gpus(record), views, now)),
        )

    def _gpus(self, record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return the GPUs that its runner has; of a matrix that was never run, those it was planned for."""
        planned = [(one.get("provenance") or EMPTY).get("gpus") or [] for one in self._records.values()]
        return record["gpus"] if isinstance(record.get("gpus"), list) else max(planned, key=len, default=[])

    def _run(self, run: RunDir, now: float, *, running: bool) -> RunView:
        state = _state(run, running=running)
        if run.name not in self._records:
            self._records[run.name] = read_json(run.run_json)
        record = self._records[run.name]
        train = record.get("train") or EMPTY
        result = _result(run, state)
        tail = self._tail(run, state, train)
        memory = _memory(run)
        fullest = max(memory, key=lambda device: device.most, default=None)
        last = state.last
        live = state.status is Status.RUNNING
        elapsed = _elapsed(state, now)
        step = result.get("step") if result else tail.step
        left = _left(run, tail, train, elapsed, now) if live else None
        return RunView(
            name=run.name,
            status=state.status,
            kind=last.kind if last else None,
            reason=state.reason,
            attempt=state.number,
            micro_batch=last.micro_batch if last else None,
            step=step,
            max_iters=train.get("max_iters"),
            loss=result.get("final_train_loss") if result else tail.loss,
            val_loss=_first(result.get("final_val_loss"), tail.val_loss),
            tokens_per_second=result.get("tokens_per_second") if result else tail.tokens_per_second,
            mfu=result.get("mfu") if result else (None if tail.mfu is None else tail.mfu / 100.0),
            ranks=train.get("num_gpus"),
            device=str(train.get("device") or ""),
            memory_mib=fullest.most if fullest else None,
            memory_total_mib=fullest.total if fullest else None,
            memory=memory,
            gpus=last.gpus if last else (),
            elapsed_s=_first(elapsed, result.get("seconds")),
            attempt_s=now - last.started if live and last and last.started is not None else None,
            left_s=left,
            left_from=None if left is None else Source.OWN,
            epochs=_epochs(record, step),
            all_epochs=_epochs(record, train.get("max_iters")),
            ended_by=result.get("ended_by"),
            alerts=tuple(alert.text for alert in kept(run) if alert.until is None) if live else (),
            reused_from=state.reused_from,
            trackers=read_track(run) if live else sent_of(run),
        )

    def _tail(self, run: RunDir, state: RunState, train: Mapping[str, Any]) -> MetricsTail:
        number = max(state.number, 1)
        tail = self._tails.get((run.name, number))
        if tail is None:
            tail = MetricsTail(run.metrics, attempt=number, max_iters=train.get("max_iters"), whole=True)
            self._tails[run.name, number] = tail
        tail.read()
        return tail

    def _measured(self, views: Sequence[RunView]) -> list[Measured]:
        """Return how long the runs of this matrix take that show it: finished ones, and those that go on."""
        found = []
        for view in views:
            train, elapsed = self._train(view), view.elapsed_s
            if view.status is Status.FINISHED and view.step and elapsed:
                found.append(Measured(train, elapsed, view.step))
            elif view.status is Status.RUNNING and view.left_s is not None and elapsed and view.max_iters:
                found.append(Measured(train, elapsed + view.left_s, view.max_iters))
        return found

    def _expected(self, view: RunView, here: Sequence[Measured]) -> RunView:
        """Return a run that waits, or shows no pace yet, with the time that runs like it take."""
        if view.status not in TO_COME or view.left_s is not None:
            return view
        train = self._train(view)
        known = whole_run(train, here, ())
        if known is None or known.source is not Source.MATRIX:
            self._earlier = measured_before(self._matrix) if self._earlier is None else self._earlier
            known = whole_run(train, here, self._earlier, self._records[view.name].get("expected_s"))
        if known is None:
            return view
        done = (view.step or 0) / view.max_iters if view.status is Status.STOPPED and view.max_iters else 0.0
        left = max(0.0, known.seconds * (1 - done) - (view.attempt_s or 0.0))
        limit = limit_s(train)
        if limit is not None:
            left = min(left, max(0.0, limit - (view.elapsed_s or 0.0)))
        return replace(view, left_s=left, left_from=known.source)

    def _priced(self, view: RunView) -> RunView:
        """Return a run with what it cost and will cost, where a GPU hour has a price."""
        price = self._train(view).get("gpu_hour_price")
        if not price or view.ranks is None:
            return view
        an_hour = float(price) * view.ranks
        dollars = an_hour * (view.elapsed_s or 0.0) / 3600
        more = view.left_s if view.status in TO_COME else 0.0
        return replace(view, dollars=dollars, all_dollars=None if more is None else dollars + an_hour * more / 3600)

    def _packed(self, views: Sequence[RunView]) -> list[RunView]:
        """Return the runs with the times at which the launcher lets them start and end."""
        first = next(iter(self._records.values()), EMPTY)
        about = first.get("provenance") or EMPTY
        cores = int(about.get("cores") or 1)
        rest = []
        for view in (view for view in views if view.status in TO_COME):
            cuda, ranks, threads = view.device == "cuda", view.ranks or 1, self._train(view).get("cpu_threads")
            width = ranks if cuda else min(ranks * int(threads or 1), cores)
            live = view.status is Status.RUNNING
            rest.append(Rest(name=view.name, width=width, cuda=cuda, running=live, seconds=view.left_s))
        there = len(about.get("gpus") or ())  # or more, where it went on elsewhere
        gpus = max([there, *(one.width for one in rest if one.cuda)])
        known = ends_of(rest, gpus=gpus, cores=cores, limits=Limits.of(first.get("symbols") or EMPTY)) or {}
        spans = {view.name: known.get(view.name, (None, None)) for view in views}
        return [replace(view, starts_s=spans[view.name][0], ends_s=spans[view.name][1]) for view in views]

    def _train(self, view: RunView) -> Mapping[str, Any]:
        return self._records[view.name].get("train") or EMPTY


def _state(run: RunDir, *, running: bool) -> RunState:
    """How a run stands; what says running is believed only while the matrix has a runner."""
    if not running:
        return settle(run)
    try:
        return read_state(run)
    except SchemaError:
        raise
    except (RecordError, KeyError, ValueError, TypeError) as error:
        return RunState(status=Status.FAILED, reason=str(error).splitlines()[0])


def _result(run: RunDir, state: RunState) -> Mapping[str, Any]:
    """The result of the last attempt; empty while it goes on, or where it left none."""
    if state.status in (Status.RUNNING, Status.PLANNED, Status.SKIPPED):
        return EMPTY
    try:
        result = read_json(run.result)
    except RecordError:
        return EMPTY
    return result if state.reused_from or result.get("attempt", 1) == state.number else EMPTY


def _memory(run: RunDir) -> tuple[Memory, ...]:
    """What each device of the run held at most, from its recording's summary."""
    try:
        gpus = read_json(run.gpu_summary).get("gpus") or []
    except RecordError:
        return ()
    return tuple(
        Memory(
            device=str(gpu.get("gpu_index", place)),
            most=float(gpu["memory_used"]["max"]),
            total=gpu.get("memory_total"),
        )
        for place, gpu in enumerate(gpus)
        if isinstance(gpu.get("memory_used"), dict) and gpu["memory_used"].get("max") is not None
    )


def _epochs(record: Mapping[str, Any], steps: int | None) -> float | None:
    """How often so many steps read the data, None where their size is not known."""
    train, tokens = record.get("train") or EMPTY, record.get("train_tokens")
    if steps is None or not tokens:
        return None
    return steps * int(train["global_batch"]) * int(train["block_size"]) / int(tokens)


def _elapsed(state: RunState, now: float) -> float | None:
    """Seconds of all attempts together."""
    spans = [
        (attempt.ended or now) - attempt.started
        for attempt in state.attempts
        if attempt.started is not None and (attempt.ended is not None or attempt.status is Status.RUNNING)
    ]
    return sum(spans) if spans else None


def _left(run: RunDir, tail: MetricsTail, train: Mapping[str, Any], elapsed: float | None, now: float) -> float | None:
    """Seconds until the last step, or until the run's budget is spent where that comes first."""
    left = None
    if tail.span is not None:
        left = rest_of_run(*tail.span, _phases(run, tail.attempt), train, now)
    limit = limit_s(train)
    if limit is not None and elapsed is not None:
        rest = max(0.0, limit - elapsed)
        return rest if left is None else min(left, rest)
    return left


def _phases(run: RunDir, attempt: int) -> list[Phase]:
    """When this attempt did not train."""
    found = []
    for line in read_jsonl(run.phases):
        try:
            if line.get("attempt", 1) == attempt:
                found.append(Phase(str(line["phase"]), float(line["begin"]), float(line["end"])))
        except (KeyError, TypeError, ValueError):
            continue
    return found


def _total(values: Sequence[float | None]) -> float | None:
    """The sum, None where one of them is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _readable(matrix: MatrixDir) -> Mapping[str, Any]:
    try:
        return read_json(matrix.status)
    except SchemaError:
        raise
    except RecordError:
        return EMPTY
