"""How far the runs on the GPUs are: their newest metrics, read as they grow."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from kmatrix.errors import SchemaError
from kmatrix.gpu.formats.summary import TotalsEntry
from kmatrix.gputop.view import RunLine
from kmatrix.records.decode import Record, decode_lines, decode_optional, field
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.records.states import PhaseLine, read_run_status
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.estimate import Phase
from kmatrix.status.watch import MetricsTail

JOULES = 3.6e6  # of a kWh


class ProgressReader:
    """The progress of one run. A call of `read` costs what was appended to its files since the last one."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path)
        self._train = TrainConfig()
        with suppress(SchemaError):
            self._train = read_run_file_or_empty(self.run).train
        self._tail: tuple[int, MetricsTail] | None = None  # of an attempt

    def read(self) -> RunLine:
        """Return the newest state. Unknown values are None: all of them if a newer kmatrix wrote the run."""
        try:
            return self._read()
        except SchemaError:
            return RunLine(name=self.run.name)

    def _read(self) -> RunLine:
        status = read_run_status(self.run)
        attempt = max(1, (status.attempt or 1) if status else 1)
        if self._tail is None or self._tail[0] != attempt:
            tail = MetricsTail(self.run.metrics, attempt=attempt, max_iters=self._train.max_iters or None, whole=True)
            self._tail = attempt, tail
        tail = self._tail[1]
        tail.read()
        phases = [Phase.of(line) for line in decode_lines(self.run.phases, PhaseLine)] if tail.recent else []
        left = tail.left_s(phases, self._train, tail.since_s(time.time())) if tail.recent else None
        summary = decode_optional(self.run.gpu_summary, _Summary)
        joules = summary.totals.joules if summary else None
        return RunLine(
            name=self.run.name,
            step=tail.step,
            max_iters=self._train.max_iters or None,
            loss=tail.loss,
            tokens_per_second=tail.tokens_per_second,
            mfu=tail.mfu,
            left_s=left,
            kwh=None if joules is None else joules / JOULES,
        )


class _Summary(Record, frozen=True, kw_only=True):
    """The energy in gpu_summary.json."""

    totals: TotalsEntry = field(default_factory=TotalsEntry)
