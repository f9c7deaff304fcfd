"""A command in a record is this user's if they signed it."""

from __future__ import annotations

import stat

import pytest

from kmatrix.runner.signature import is_signed, sign


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_signed_text_is_known_and_a_changed_one_is_not(home):
    signature = sign("notify-send done")

    assert is_signed("notify-send done", signature)
    assert not is_signed("rm -r /", signature)
    assert not is_signed("notify-send done", "")
    assert sign("notify-send done") == signature
    assert stat.S_IMODE((home / ".config" / "kmatrix" / "key").stat().st_mode) == 0o600
    assert [path.name for path in (home / ".config" / "kmatrix").iterdir()] == ["key"]


def test_the_signature_of_another_user_is_not_ours(tmp_path, monkeypatch):
    theirs = sign("touch /tmp/x")
    monkeypatch.setenv("HOME", str(tmp_path / "other"))

    assert not is_signed("touch /tmp/x", theirs)
    assert not (tmp_path / "other").exists()  # reading makes no key
    assert sign("touch /tmp/x") != theirs


def test_without_a_home_nothing_is_signed(monkeypatch):
    monkeypatch.setenv("HOME", "/proc/nowhere")

    assert sign("touch /tmp/x") == ""
    assert not is_signed("touch /tmp/x", "")
