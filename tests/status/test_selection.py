"""Successive halving from files: which loss of a rung counts, and what is known of each seed."""

from __future__ import annotations

import json
import math

import pytest

from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import Status
from kmatrix.status.outcomes import Family, SeedEnd
from kmatrix.status.selection.halving import HalvedFamily, Halving
from kmatrix.status.selection.rung_losses import RungLosses, first_losses
from kmatrix.status.state import Attempt, RunState
from kmatrix.verdict.family import Rules
from kmatrix.verdict.halving import Rung


def evaluation(step, loss, attempt=1):
    return json.dumps({"step": step, "attempt": attempt, "val/loss": loss})


@pytest.fixture
def log(tmp_path):
    """Return a function that writes metrics.jsonl."""
    path = tmp_path / "metrics.jsonl"

    def write(*lines):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


def test_a_loss_at_a_rung_that_is_not_below_the_first_one_diverged(log):
    lines = (evaluation(0, 5.0), evaluation(10, 4.9), evaluation(20, 5.0), evaluation(30, None), evaluation(40, 5.1))
    found = first_losses(log(*lines), (10, 20, 30, 40))
    assert found == {10: 4.9, 20: math.inf, 30: math.inf, 40: math.inf}
    # A run that was reused may have no evaluation before its first step.
    assert first_losses(log(evaluation(10, 4.9)), (10,)) == {10: 4.9}


def test_lines_of_the_training_and_of_archived_attempts_do_not_count(log):
    training = json.dumps({"step": 10, "attempt": 1, "train/loss": 4.0})
    path = log(evaluation(0, 5.0), training, evaluation(10, 4.5), evaluation(0, 5.0, 2), evaluation(10, 4.4, 2))
    assert first_losses(path, (10,)) == {10: 4.5}
    assert first_losses(path, (10,), archived=1) == {10: 4.4}
    assert first_losses(path, (10,), archived=2) == {}


def test_a_run_whose_results_were_archived_has_no_losses_until_it_starts_again(tmp_path):
    matrix = MatrixDir(tmp_path)
    run = matrix.run("a")
    run.path.mkdir(parents=True)
    started = RunState(status=Status.RUNNING, attempts=(Attempt(number=1),))
    run.metrics.write_text(evaluation(0, 5.0) + "\n" + evaluation(10, 4.5) + "\n", encoding="utf-8")
    losses = RungLosses(matrix)
    assert losses.of("a", started, (10,)) == {10: 4.5}
    assert losses.of("a", RunState(), (10,)) == {}
    reused = RunState(status=Status.FINISHED, reused_from="another matrix")  # without an attempt of its own
    assert losses.of("a", reused, (10,)) == {10: 4.5}
    assert losses.of("a", RunState(), (10,)) == {}
    run.metrics.unlink()
    assert losses.of("a", started, (10,)) == {}


def halving(*rungs, seeds=(1, 2)):
    family = Family(
        configurations={name: {"optimizer": name} for name in "abcd"},
        runs={(name, seed): f"{name}{seed}" for name in "abcd" for seed in (1, 2)},
        rules=Rules(seeds=seeds),
    )
    return Halving([HalvedFamily(family=family, rungs=rungs, max_iters=90)])


def test_a_seed_without_a_run_is_not_waited_for_and_an_early_end_has_its_loss():
    found = halving(Rung(step=30, keep=2), seeds=(1, 2, 3))  # the runs of seed 3 are damaged
    at_rungs = {f"{name}{seed}": {30: 3.0 + place} for place, name in enumerate("abc") for seed in (1, 2)}
    ends = {"d1": SeedEnd(2.0, 20), "d2": SeedEnd(1.0, 90)}  # one ended before the rung, one was not measured there
    assert found.targets(ends, at_rungs) == {"a1": None, "a2": None}
    (rung,) = found.replays[0].rungs
    assert (rung.losses["d"], rung.kept) == (2.0, ("d", "a"))


def test_the_training_to_come_has_all_seeds():
    found = halving(Rung(step=30, keep=3), Rung(step=60, keep=2))
    assert len(found.targets({}, {})) == 8
    assert [(leg.configurations, leg.until, leg.run_steps) for leg in found.legs()] == [
        (3, 60, 3 * 2 * 30),
        (2, None, 2 * 2 * 30),
    ]
