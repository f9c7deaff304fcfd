"""The tracker program redacts its own output and the logs of trackers."""

from __future__ import annotations

from kmatrix.redaction import HIDDEN
from kmatrix.track.__main__ import redact_files


def test_a_log_is_redacted_and_other_logs_are_not_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "correct-horse")
    other_log, tracker_log = tmp_path / "a.log", tmp_path / "b.log"
    other_log.write_bytes(b"x \xff\nkey correct-horse\r\n")
    tracker_log.write_bytes(b"nothing here\n")
    before = tracker_log.stat().st_ino

    redact_files([other_log, tracker_log, tmp_path / "none.log"])

    assert other_log.read_bytes() == f"x \udcff\nkey {HIDDEN}\r\n".encode(errors="surrogateescape")
    assert tracker_log.stat().st_ino == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "b.log"]
