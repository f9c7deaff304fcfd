"""W&B's debug logs reach the results without keys."""

from __future__ import annotations

from types import SimpleNamespace

from kmatrix.redaction.forms import HIDDEN
from kmatrix.track.wandb import keep_logs_private, publish_logs


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
