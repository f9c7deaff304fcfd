"""What users ask of a matrix: continue, hold, release, kill. With or without a runner."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping

from kmatrix.clock import clock
from kmatrix.packing import too_few_gpus
from kmatrix.records import attempts
from kmatrix.records.control import Again, Request, allow, change
from kmatrix.records.decode import convert, replaced
from kmatrix.records.runs import Status
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.fold import DAMAGED, STOPPED, rule_of
from kmatrix.status.look import Look


def go_on(
    seen: Look,
    *,
    retry_failed: bool = False,
    resume: str = "auto",
    micro_batch: int | None = None,
    only: Iterable[str] = (),
    settings: Mapping[str, str] | None = None,
) -> list[str]:
    """Order one more attempt of each run that does not go on by itself; return their names. Twice is once.

    Only a person asks so. An order has the number of the attempt that it follows, so that it is void after a kill, for
    a second command, and in a job that starts again. only: names of runs; empty: all. Raises ConfigError if the
    micro-batch does not fit a run.
    """
    chosen = set(only) or set(seen.states)
    again: dict[str, Again] = {}
    for name, state in seen.states.items():
        asks = rule_of(state.kind).by_continue or (
            state.status is Status.FAILED and retry_failed and state.kind != DAMAGED
        )
        is_open = state.status in (Status.STOPPED, Status.FAILED)
        if name in chosen and is_open and (asks or micro_batch is not None or resume != "auto"):
            if micro_batch is not None:
                convert(dict(seen.files[name].train), TrainConfig, name).with_micro_batch(micro_batch)
            again[name] = Again(after=state.number, resume=resume, micro_batch=micro_batch)
    if again or settings is not None:
        change(
            seen.path,
            lambda known: replaced(
                known, again={**known.again, **again}, settings=known.settings if settings is None else dict(settings)
            ),
        )
    allow(seen.path)
    return list(again)


def hold(seen: Look, names: Iterable[str]) -> None:
    """Hold runs: one that trains saves a checkpoint and stops, the others do not start."""
    asked = dict.fromkeys(names, Request(time=clock.now()))
    change(seen.path, lambda known: replaced(known, runs={**asked, **known.runs}))


def release(seen: Look, names: Iterable[str]) -> None:
    """Release runs: one that was stopped by its request goes on by itself."""
    chosen = set(names)

    def changed_by(name: str) -> bool:
        state = seen.states[name]
        kind = state.kind or "".join(one.stop for one in state.attempts[-1:])  # of one that saves just now
        return kind.startswith(STOPPED) and seen.files[name].request is not None

    again = {name: Again(after=seen.states[name].number) for name in chosen if changed_by(name)}
    change(
        seen.path,
        lambda known: replaced(
            known,
            runs={name: one for name, one in known.runs.items() if name not in chosen},
            again={**known.again, **again},
        ),
    )


def kill(seen: Look) -> None:
    """Kill the programs of the runs that train on this host; the kernel kills their ranks."""
    me = attempts.this_process()
    for state in seen.states.values():
        one = state.attempts[-1] if state.attempts else None
        if state.status is Status.RUNNING and one is not None and attempts.is_here(one, me):
            try:
                os.kill(one.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def fit(seen: Look, gpus: int) -> None:
    """Skip the runs that need more GPUs than this machine has, and no others: it may have more now than before."""
    skipped = {}
    for name, files in seen.files.items():
        ranks, nodes = (int(files.train.get(key) or 1) for key in ("num_gpus", "num_nodes"))
        why = too_few_gpus(str(files.train.get("device")), ranks, nodes, gpus)
        if why and seen.states[name].status is not Status.FINISHED:
            skipped[name] = Request(skip=why)
    former = {name: files.request for name, files in seen.files.items() if files.request and files.request.skip}
    if former != skipped:
        change(
            seen.path,
            lambda known: replaced(
                known, runs={**skipped, **{name: one for name, one in known.runs.items() if not one.skip}}
            ),
        )
