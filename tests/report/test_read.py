"""Runs are read from their files, by one process or by several."""

from __future__ import annotations

from kmatrix.errors import damaged_files
from kmatrix.report import read
from kmatrix.status.look import look
from records_factory import make_matrix, runs_with_seeds


class Pool:
    """A process pool whose processes are calls."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert not damaged_files(), "what another process notes is not known here"

    map = staticmethod(map)


def test_runs_that_processes_read_are_those_that_one_reads(tmp_path, monkeypatch):
    matrix = make_matrix(tmp_path, runs_with_seeds(2, [3.1, 3.2]))
    first, _ = matrix.runs()
    first.metrics.write_text("{\n" + first.metrics.read_text())
    alone, damage = read.read_runs(look(matrix.path)), damaged_files()
    assert len(damage) == 1
    monkeypatch.setattr(read, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(read, "LARGE", 0)
    assert read.read_runs(look(matrix.path)) == alone
    assert damaged_files() == damage
