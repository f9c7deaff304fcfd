"""Train a run of one rank in this process: without threads, processes and signals, so that the test is fast."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from gpt2 import dist, train, watchdog
from gpt2.log import RunLog
from kmatrix.records.files import read_json
from kmatrix.records.paths import RunDir


class StopAfter:
    """Ask the loop to stop after some updates, instead of a signal. None: never."""

    signal = "TEST"

    def __init__(self, log: RunLog, updates: int | None) -> None:
        self.log, self.updates = log, updates

    @property
    def requested(self) -> bool:
        return self.updates is not None and self.log.step >= self.updates


class DirectPool:
    """An executor that runs at once, in the thread that submits."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*arguments, **named))
        return done


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How a training in this process ended."""

    returncode: int
    stdout: str


def train_here(run_dir: RunDir, *, attempt: int = 1, stop_after: int | None = None, **options: Any) -> Trained:
    """Train a run; checkpoints are written at once, and nothing ends a hang. options: of gpt2.train.train."""
    log = RunLog(run_dir, "0123456789", attempt, main=True)
    dog, stop = watchdog.Watchdog(log, 0), StopAfter(log, stop_after)
    output, threads = io.StringIO(), torch.get_num_threads()
    no_threads = mock.patch.multiple("gpt2.checkpoint", ThreadPoolExecutor=DirectPool)
    with no_threads, mock.patch.object(dog, "begin"), torch.random.fork_rng(), redirect_stdout(output):
        try:
            code = train.train(read_json(run_dir.run_json), log, stop, dog, **options)  # type: ignore[arg-type]
        except Exception as error:
            code = dist.EXIT_FAILED
            dog.record(watchdog.kind_of(error), watchdog.one_line(error))
    torch.set_num_threads(threads)
    dog.end()
    return Trained(returncode=code, stdout=output.getvalue())
