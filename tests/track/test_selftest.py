"""`make wandb-test` and `make trackio-test` print one line if a tracker works here, or the error."""

from __future__ import annotations

import itertools
import re

import pytest

import kmatrix.track.selftest as track_test
from kmatrix.records.runs import merged_metrics
from kmatrix.records.tracking import SyncState, SyncStatus
from kmatrix.track.selftest import LOSS, STEPS, synthetic_run
from programs import Program
from refusing_server import server_refusing_keys
from wandb_server import WandbServer

KEY = "k" * 40


@pytest.fixture(autouse=True)
def no_key_of_the_machine(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.fixture
def program(tmp_path):
    return Program(tmp_path)


@pytest.fixture
def rejecting_server():
    """A server that rejects every key. Yields its URL."""
    with server_refusing_keys("user is not logged in") as url:
        yield url


def test_the_synthetic_run_has_the_files_of_a_real_run(tmp_path):
    run = synthetic_run(tmp_path, "trackio", "mine", {})

    lines = merged_metrics(run.metrics)
    assert [line.step for line in lines] == list(range(STEPS))
    assert all(first.values[LOSS] > second.values[LOSS] for first, second in itertools.pairwise(lines))


@pytest.mark.nightly
def test_trackio_stores_a_synthetic_run_that_is_read_back(program):
    result = program.check("trackio-test")

    assert f"Trackio works: uploaded {STEPS} steps in" in result.out
    assert result.out.rstrip().endswith("read them back")


@pytest.mark.nightly
def test_wandb_without_a_key_writes_a_synthetic_run_to_files_and_reports_it(program):
    result = program.check("wandb-test")

    assert f"W&B works (offline: no API key): uploaded {STEPS} steps in" in result.out


@pytest.mark.nightly
def test_wandb_with_a_key_sends_the_synthetic_run_and_prints_its_url(program, monkeypatch):
    with WandbServer() as server:
        for name, text in server.environment.items():
            monkeypatch.setenv(name, text)
        result = program.check("wandb-test", "PROJECT=mine")

    assert f"W&B works (online: API key in WANDB_API_KEY): uploaded {STEPS} steps in" in result.out
    assert server.environment["WANDB_API_KEY"] not in result.out
    ((_, kept),) = server.runs.items()
    assert kept.steps == list(range(STEPS))
    assert kept.exit_code == 0
    assert re.search(r"open http\S+mine\S+ to check the run, then delete it there", result.out)


@pytest.mark.nightly
def test_a_malformed_key_is_reported_as_the_cause_and_not_printed(program, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "short-key")

    message = program.refused("wandb-test")

    assert f"W&B test failed: 0 of {STEPS} steps sent" in message
    assert "invalid API key" in message
    assert "short-key" not in message


@pytest.mark.nightly
def test_a_key_unknown_to_the_server_is_reported_as_the_cause(program, monkeypatch, rejecting_server):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", rejecting_server)

    message = program.refused("wandb-test")

    assert "invalid API key" in message
    assert "401" in message
    assert KEY not in message


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("CommError: dial tcp 10.0.0.1:443: i/o timeout", "cannot reach the server"),
        ("ConnectionError: WANDB_MODE=disabled: W&B is switched off", "unset WANDB_MODE"),
        ("ImportError: cannot import name x", "make setup-trackers"),
        ("OSError: [Errno 28] No space left on device", "cannot write to the temporary directory"),
        ("something else", "something else"),
    ],
)
def test_errors_of_the_packages_are_explained(tmp_path, error, cause):
    run = synthetic_run(tmp_path, "wandb", "mine", {})
    run.track_log.write_text(f"12:00 wandb: failed: {error}\nmore of it\n")
    sent = SyncStatus(tracker="wandb", state=SyncState.FAILED, error=error)

    failure = track_test.tracker_failure("wandb", run, sent)

    assert cause in failure.why
    assert failure.why.count(error) == 1
    assert failure.why.endswith("more of it")


@pytest.mark.nightly
def test_a_step_that_cannot_be_read_back_is_an_error(program, monkeypatch):
    monkeypatch.setitem(track_test.READERS, "trackio", lambda run, project: {0: 11.0})

    assert f"Trackio lost {STEPS - 1} of {STEPS} steps" in program.refused("trackio-test")


def test_a_project_name_that_no_tracker_accepts_is_refused(program):
    assert "lower-case letters" in program.refused("trackio-test", "PROJECT=My own")
