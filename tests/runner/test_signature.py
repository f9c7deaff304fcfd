"""A command in a record is this user's if they signed it."""

from __future__ import annotations

import stat

import pytest

from kmatrix.runner.signature import is_signed, matrix_identity, sign


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


FOR = matrix_identity("test_matrix_results_20261122_120000", 1795348800.123456)


def test_a_signed_text_is_known_and_a_changed_one_is_not(home):
    signature = sign("notify-send done", *FOR)

    assert is_signed("notify-send done", signature, *FOR)
    assert not is_signed("rm -r /", signature, *FOR)
    assert not is_signed("notify-send done", "", *FOR)
    assert sign("notify-send done", *FOR) == signature
    assert stat.S_IMODE((home / ".config" / "kmatrix" / "key").stat().st_mode) == 0o600
    assert [path.name for path in (home / ".config" / "kmatrix").iterdir()] == ["key"]


@pytest.mark.parametrize(
    "other",
    [
        (),
        ("matrix",),
        matrix_identity("test_matrix_results_20261122_120001", 1795348800.123456),
        matrix_identity("test_matrix_results_20261122_120000", 1795348800.123457),
        matrix_identity("test_matrix_results_20261122_120000", None),
    ],
)
def test_a_text_that_was_signed_for_one_matrix_is_foreign_in_another(other):
    assert not is_signed("notify-send done", sign("notify-send done", *FOR), *other)


@pytest.mark.parametrize("signature", ["é", "\udc80", "\ud800x", "a" * 64, "[]"])
def test_a_damaged_signature_is_none(signature):
    sign("touch /tmp/x", *FOR)

    assert not is_signed("touch /tmp/x", signature, *FOR)
    assert not is_signed("\ud800", signature, *FOR)


def test_the_signature_of_another_user_is_not_ours(tmp_path, monkeypatch):
    theirs = sign("touch /tmp/x", *FOR)
    monkeypatch.setenv("HOME", str(tmp_path / "other"))

    assert not is_signed("touch /tmp/x", theirs, *FOR)
    assert not (tmp_path / "other").exists()  # reading makes no key
    assert sign("touch /tmp/x", *FOR) != theirs


def test_without_a_home_nothing_is_signed(monkeypatch):
    monkeypatch.setenv("HOME", "/proc/nowhere")

    assert sign("touch /tmp/x", *FOR) == ""
    assert not is_signed("touch /tmp/x", "", *FOR)
