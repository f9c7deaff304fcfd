"""make wandb-view: the runs of a matrix in W&B's own screen, without a key and without a connection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kmatrix.cli.commands import parse
from kmatrix.cli.pages import gather, wandb_view
from kmatrix.errors import ConfigError
from kmatrix.records.paths import RunDir
from kmatrix.track.wandb import WandbFiles
from tmux_screen import Tmux
from track_factory import MATRIX, make_run_dir, write_recording, write_training
from waiting import wait_until

LIB = str(Path(__file__).resolve().parents[2] / "lib")

pytest.importorskip("wandb", reason="make setup-trackers installs it")


def page_command(results: Path, *arguments: str):
    return parse("wandb-view", [f"RESULTS_DIR={results}", *arguments])[1]


def make_offline_runs(run: RunDir, *times: str) -> None:
    """Create the directories that wandb writes for a run, empty."""
    for time in times:
        offline_run = WandbFiles(run.path).folder / f"offline-run-20260101_0000{time}-abc-1"
        offline_run.mkdir(parents=True)
        (offline_run / "run-abc-1.wandb").write_bytes(time.encode())


def test_each_run_is_listed_once_per_time_it_was_opened(tmp_path):
    run = make_run_dir(tmp_path)
    make_offline_runs(run, "07", "05")
    folder = tmp_path / "shown"
    folder.mkdir()
    gather([run], folder)
    entries = {path.name: next(path.iterdir()).read_text() for path in folder.iterdir()}
    assert entries == {f"run-20260101_000005-{run.name}": "05", f"run-20260101_000007-{run.name}.2": "07"}


def test_runs_without_data_are_named(tmp_path):
    run = make_run_dir(tmp_path)
    with pytest.raises(ConfigError, match=f"no W&B data in .* for {run.name}"):
        wandb_view(page_command(tmp_path, f"TARGET={tmp_path / MATRIX}"))


def test_without_a_terminal_the_readers_of_the_files_are_named(tmp_path, monkeypatch):
    make_offline_runs(make_run_dir(tmp_path), "01")
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115, PTH123 (closed with the process of the test)
    with pytest.raises(ConfigError, match="needs a terminal") as raised:
        wandb_view(page_command(tmp_path))
    assert "wandb leet inspect --json" in raised.value.hint


@pytest.mark.slow
def test_the_charts_of_the_runs_are_on_the_screen(tmp_path):
    for name in ("gpt2_adamw_2gpu", "gpt2_muon_2gpu"):
        run = make_run_dir(tmp_path, name, trackers=("wandb",))
        write_training(run, range(60))
        write_recording(run, range(60))
        environ = {**os.environ, "WANDB_MODE": "offline", "HOME": str(tmp_path), "PYTHONPATH": LIB}
        subprocess.run([sys.executable, "-m", "kmatrix.track", str(run.path)], env=environ, check=True, timeout=120)
    make_run_dir(tmp_path, "gpt2_lion_2gpu")
    arguments = [f"RESULTS_DIR={tmp_path}", f"TARGET={tmp_path / MATRIX}"]
    environ = {"PYTHONPATH": LIB, "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    terminal = Tmux(tmp_path, (240, 50), environ, sys.executable, "-m", "kmatrix", "wandb-view", *arguments)
    try:
        screen = wait_for(terminal, "train/loss", "-gpt2_adamw_2gpu", "-gpt2_muon_2gpu", "gpu_total_memory")
        assert "lion" not in screen
        terminal("send-keys", "q")
        wait_for(terminal, "status=0", "no W&B data: gpt2_lion_2gpu")
    finally:
        terminal("kill-server")


def wait_for(terminal: Tmux, *texts: str) -> str:
    """Return the screen as soon as all texts are visible."""

    def all_texts_shown():
        screen = terminal.screen()
        return screen if all(text in screen for text in texts) else None

    return wait_until(all_texts_shown, f"{texts} are on the screen")
