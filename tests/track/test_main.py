"""W&B's debug logs reach the results without keys."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from kmatrix.records.paths import program_environment
from kmatrix.redaction.forms import HIDDEN
from kmatrix.track.wandb import keep_logs_private, publish_logs
from track_factory import make_run_dir
from waiting import wait_until


class Settings(SimpleNamespace):
    """The part of W&B's settings that names its log directory."""

    log_dir = "the usual place"


def test_debug_logs_are_private_until_they_are_copied_without_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "correct-horse")
    keep_logs_private(Settings)
    settings = Settings(sync_dir=str(tmp_path / "wandb" / "run-1"))
    folder = tmp_path.__class__(settings.log_dir)
    assert tmp_path not in folder.parents
    assert folder.parent.stat().st_mode & 0o077 == 0
    folder.mkdir()
    (folder / "debug-internal.log").write_bytes(b"x \xff\nkey correct-horse\r\n")

    publish_logs(tmp_path)

    copied = tmp_path / "wandb" / "run-1" / "logs" / "debug-internal.log"
    assert copied.read_bytes() == f"x \udcff\nkey {HIDDEN}\r\n".encode(errors="surrogateescape")
    assert not folder.parent.exists()


@pytest.mark.process
def test_the_log_of_a_tracker_process_has_no_keys(tmp_path):
    run = make_run_dir(tmp_path)
    words = [sys.executable, "-m", "kmatrix.track", str(run.path), "--trackers", "correct-horse"]
    with run.track_log.open("ab") as log:
        environment = program_environment(WANDB_API_KEY="correct-horse")
        done = subprocess.run(words, env=environment, stdout=log, stderr=log, check=False, start_new_session=True)
    assert done.returncode == 2
    wait_until(lambda: "unknown tracker" in run.track_log.read_text())
    assert f"unknown tracker '{HIDDEN}'" in run.track_log.read_text()
