"""`bench/scale.py` measures each figure of the goals of scale; its smallest size runs here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from factories import ROOT, environment

sys.path.insert(0, str(ROOT / "bench"))
import scale

pytestmark = pytest.mark.nightly


def test_every_figure_is_printed_next_to_its_goal_at_the_smallest_size():
    done = subprocess.run(
        [sys.executable, "bench/scale.py", "--smallest"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = {line.split(" (")[0]: line for line in done.stdout.splitlines()[2:]}
    assert set(lines) == {figure.title for figure in scale.FIGURES.values()}
    for figure in scale.FIGURES.values():
        assert f"{figure.goal:g} {figure.unit}" in lines[figure.title]
        measured = lines[figure.title].rpartition(")")[2].split()[0]
        assert (measured == "-") == (figure.title == "small reports, CPU of the original")


def test_the_goals_are_those_of_the_specification():
    goals = {name: (figure.goal, figure.unit) for name, figure in scale.FIGURES.items()}
    assert goals["dry-run"] == (10, "s")
    assert goals["dry-run-memory"] == (500, "MiB")
    assert goals["summary"] == (5, "s")
    assert goals["redraw"] == (100, "ms")
    assert goals["queued"] == goals["queued-estimate"] == (5, "s")
    assert goals["queued-memory"] == (300, "MiB")
    assert goals["queued-redraw"] == (100, "ms")
    assert goals["continue"] == (3, "s")
    assert goals["recorder"] == (1.5, "%")
    assert goals["reports"] == (1, "x")


def test_an_unknown_figure_is_refused(capsys):
    with pytest.raises(SystemExit):
        scale.main(["nothing"])
    assert "unknown figure nothing" in capsys.readouterr().err


def test_a_missed_goal_gives_status_1_at_full_size(monkeypatch, capsys):
    monkeypatch.setattr(scale, "in_a_process", lambda name, sizes: scale.Found(value=1e9, note="x"))
    assert scale.main(["summary"]) == 1
    assert "MISSED" in capsys.readouterr().out
    monkeypatch.setattr(scale, "in_a_process", lambda name, sizes: scale.Found(value=None, note="x"))
    assert scale.main(["summary"]) == 0
