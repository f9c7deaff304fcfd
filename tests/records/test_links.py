"""A link that leads out of a matrix is refused before anything is written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kmatrix.errors import LaunchError
from kmatrix.records.checkpoint_dir import check_own_files
from kmatrix.records.paths import MatrixDir
from kmatrix.report.write import draw_graphs


@pytest.mark.parametrize("name", ["journal.jsonl", "run/output.log", "run/ranks/0/timings.jsonl", "run/wandb", "tb"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_out_of_the_matrix_is_refused(matrix, tmp_path, name, exists):
    if exists:
        (tmp_path / "victim").touch()
    path = matrix.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(tmp_path / "victim")

    with pytest.raises(LaunchError, match=r"is a link to .*victim"):
        check_own_files(matrix)


def test_links_within_the_matrix_and_to_the_matrix_are_allowed(matrix, tmp_path):
    (matrix.path / "a").mkdir()
    (matrix.path / "latest").symlink_to("a")
    (tmp_path / "short").symlink_to(matrix.path)

    check_own_files(MatrixDir(tmp_path / "short"))


def test_a_graph_does_not_overwrite_what_a_link_names(matrix, tmp_path):
    (tmp_path / "victim").write_text("mine")
    matrix.graphs.mkdir()
    (matrix.graphs / "loss_vs_steps.png").symlink_to(tmp_path / "victim")

    with pytest.raises(LaunchError, match="is a link to"):
        draw_graphs(SimpleNamespace(path=matrix.path, runs=()))
    assert (tmp_path / "victim").read_text() == "mine"
