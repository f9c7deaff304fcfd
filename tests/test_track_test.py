"""`make wandb-test`, `make trackio-test`: one line where a tracker works here, and what is wrong where it does not."""

from __future__ import annotations

import itertools
import re

import pytest
from refusing_server import refusing
from support import Program
from wandb_server import WandbServer

from kmatrix.cli import track_test
from kmatrix.cli.track_test import LOSS, STEPS, made_up_run
from kmatrix.records import merged_metrics
from kmatrix.records.tracking import Sending, Sent

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
def unauthorized():
    """A server that knows no key. Yields its URL."""
    with refusing("user is not logged in") as url:
        yield url


def test_the_made_up_run_is_one_as_any_other(tmp_path):
    run = made_up_run(tmp_path, "trackio", "mine", {})

    lines = merged_metrics(run.metrics)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert all(first[LOSS] > second[LOSS] for first, second in itertools.pairwise(lines))


def test_trackio_stores_a_made_up_run_and_gives_it_back(program):
    answer = program.good("trackio-test")

    assert f"Trackio works: {STEPS} steps were sent" in answer.out
    assert answer.out.rstrip().endswith("read back")


def test_wandb_without_a_key_keeps_a_made_up_run_in_files_and_says_so(program):
    answer = program.good("wandb-test")

    assert f"W&B works (offline: there is no key here): {STEPS} steps were sent" in answer.out


def test_wandb_with_a_key_sends_the_made_up_run_to_its_server_and_says_where(program, monkeypatch):
    with WandbServer() as server:
        for name, text in server.environment.items():
            monkeypatch.setenv(name, text)
        answer = program.good("wandb-test", "PROJECT=mine")

    assert f"W&B works (online: the key is in WANDB_API_KEY): it took {STEPS} steps" in answer.out
    assert server.environment["WANDB_API_KEY"] not in answer.out
    ((_, kept),) = server.runs.items()
    assert kept.steps == list(range(STEPS))
    assert kept.exit_code == 0
    assert re.search(r"look at http\S+mine\S+, and delete the run there", answer.out)


def test_a_key_that_is_none_is_named_as_the_cause_and_not_repeated(program, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "short-key")

    message = program.refused("wandb-test")

    assert f"W&B does not take a run: 0 of {STEPS} steps" in message
    assert "the key is wrong" in message
    assert "short-key" not in message


@pytest.mark.slow
def test_a_key_that_the_server_does_not_know_is_named_as_the_cause(program, monkeypatch, unauthorized):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", unauthorized)

    message = program.refused("wandb-test")

    assert "the key is wrong" in message
    assert "401" in message
    assert KEY not in message


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("CommError: dial tcp 10.0.0.1:443: i/o timeout", "the server cannot be reached"),
        ("ConnectionError: WANDB_MODE=disabled: W&B is switched off", "unset WANDB_MODE"),
        ("ImportError: cannot import name x", "make setup-trackers"),
        ("OSError: [Errno 28] No space left on device", "the folder for temporary files"),
        ("something else", "something else"),
    ],
)
def test_what_a_package_says_is_put_into_words(tmp_path, error, cause):
    run = made_up_run(tmp_path, "wandb", "mine", {})
    run.track_log.write_text(f"12:00 wandb: failed: {error}\nmore of it\n")
    sent = Sent(tracker="wandb", state=Sending.FAILED, error=error)

    failure = track_test._failure("wandb", run, sent)

    assert cause in failure.why
    assert failure.why.count(error) == 1
    assert failure.why.endswith("more of it")


def test_a_step_that_the_reader_does_not_give_back_is_an_error(program, monkeypatch):
    monkeypatch.setitem(track_test.READERS, "trackio", lambda run, project: {0: 11.0})

    assert f"Trackio took {STEPS} steps and lost {STEPS - 1}" in program.refused("trackio-test")


def test_a_project_that_no_tracker_takes_is_refused(program):
    assert "small letters" in program.refused("trackio-test", "PROJECT=My own")
