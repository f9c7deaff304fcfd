"""The last lines of a matrix: the commands that finish what is left."""

from __future__ import annotations

import pytest

from kmatrix.cli.running.start import print_next_steps
from kmatrix.runner.loop import EXIT_FAILED, Outcome
from records_factory import FakeRun, make_matrix


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("killed", ["Retry killed runs: make continue TARGET={}", "Retry failed runs too: add RETRY_FAILED=1"]),
        ("nan", ["Retry failed runs: make continue TARGET={} RETRY_FAILED=1"]),
    ],
)
def test_a_failed_run_has_the_command_that_retries_it(tmp_path, capsys, kind, lines):
    matrix = make_matrix(tmp_path, [FakeRun(), FakeRun(optimizer="sgd", status="failed", kind=kind, stop_at=40)])
    print_next_steps(matrix, Outcome(counts={"finished": 1, "failed": 1}, exit_code=EXIT_FAILED))
    assert capsys.readouterr().out.split("\n")[1:-1] == [line.format(matrix.path) for line in lines]
