"""How far the runs on the GPUs are: their newest metrics, read as they grow."""

from __future__ import annotations

from pathlib import Path

from kmatrix.gpu.formats.summary import TotalsEntry
from kmatrix.gputop.view import RunLine
from kmatrix.records import attempts
from kmatrix.records.decode import Record, decode_lines, decode_optional, field
from kmatrix.records.events import PhaseLine
from kmatrix.records.paths import RunDir
from kmatrix.records.runs import read_run_file_or_empty
from kmatrix.status.estimate import rest_of_run
from kmatrix.status.live import MetricsTail

JOULES = 3.6e6  # of a kWh


class ProgressReader:
    """The progress of one run. A call of `read` costs what was appended to its files since the last one."""

    def __init__(self, path: Path) -> None:
        self.run = RunDir(path)
        self._train = read_run_file_or_empty(self.run).train
        self._tail: tuple[int, MetricsTail] | None = None  # of an attempt

    def read(self) -> RunLine:
        """Return the newest state. Unknown values are None."""
        attempt = max(attempts.numbers(self.run.path), default=1)
        if self._tail is None or self._tail[0] != attempt:
            self._tail = attempt, MetricsTail(self.run.metrics, attempt=attempt)
        tail = self._tail[1]
        tail.read()
        phases = decode_lines(self.run.phases, PhaseLine) if tail.recent else []
        left = rest_of_run(tail.recent, phases, self._train.to_json(), tail.since_s(), earlier=tail.earlier)
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
