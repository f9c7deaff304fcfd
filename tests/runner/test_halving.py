"""Successive halving in the runner: rungs, survivors, failures, kills, requests and budgets."""

from __future__ import annotations

import random

import pytest

from halved import MAX_ITERS, HalvedEngine, halved_matrix
from kmatrix.records.files import read_json, read_jsonl, write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import read_run_file
from kmatrix.records.states import Request, change_requests
from kmatrix.runner.archive import archive_results
from kmatrix.runner.loop import EXIT_FAILED
from kmatrix.runner.resume import describe_plan, reopen
from kmatrix.runner.rounds import rounds_of_matrix
from kmatrix.status.alerts import AlertKind
from kmatrix.status.cost import MatrixBudget
from kmatrix.status.status_file import recover_status
from kmatrix.status.watch import alerts_of_run
from scripted import FAIL, NAN, name_of, run

NINE = "abcdefghi"
FIRST, SECOND = 10, 30  # rungs of 9 configurations at 90 steps, with evaluations after each 5
# At the first rung c, f and i are best; at the second one f and i, whose losses were the worse of the three before.
CURVES = {name: {5: 5.0, FIRST: 4.0 + place / 100} for place, name in enumerate(NINE)}
CURVES["c"] = {FIRST: 3.1, SECOND: 2.9, MAX_ITERS: 2.8}
CURVES["f"] = {FIRST: 3.2, SECOND: 2.8, MAX_ITERS: 2.7}
CURVES["i"] = {FIRST: 3.3, SECOND: 2.7, MAX_ITERS: 2.6}


@pytest.fixture
def matrix(tmp_path):
    folder = MatrixDir(tmp_path / "test_matrix_results_20260101_000000")
    folder.path.mkdir()
    return folder


def wanted_of(matrix):
    """Return the runs that are wanted now, and why the others are not."""
    records = {run.name: read_run_file(run) for run in matrix.runs()}
    states = {run.name: recover_status(run, has_runner=False) for run in matrix.runs()}
    rounds = rounds_of_matrix(matrix, records)
    return dict(rounds.wanted(states)), {name: place.text for name, place in rounds.places().items()}


def steps_of(engine):
    return {name.split("_")[1]: steps for name, steps in engine.steps.items()}


STEPS = dict.fromkeys(NINE, FIRST) | {"c": SECOND, "f": MAX_ITERS, "i": MAX_ITERS}


def test_each_rung_keeps_the_best_third_and_the_matrix_is_finished(matrix):
    halved_matrix(matrix, NINE)
    engine = HalvedEngine(CURVES)
    shown = []
    outcome = run(matrix, engine, on_progress=shown.append)
    assert outcome.exit_code == 0
    assert steps_of(engine) == STEPS
    assert engine.asked[:9] == [(name_of(name, 1), FIRST) for name in NINE]
    assert {(one.run, one.index, one.total) for one in shown} == {
        (name_of(name, 1), place, 9) for place, name in enumerate(NINE, 1)
    }
    assert [one.until for one in shown if one.run == name_of("c", 1)] == [FIRST, SECOND]
    assert [one.until for one in shown if one.run == name_of("i", 1)] == [FIRST, SECOND, MAX_ITERS]
    assert engine.asked[9:] == [
        *((name_of(name, 1), SECOND) for name in "cfi"),
        *((name_of(name, 1), None) for name in "fi"),
    ]
    assert read_json(matrix.status)["status"] == "finished"
    lines = list(read_jsonl(matrix.journal))
    assert [line["text"] for line in lines if "text" in line] == [
        "step 10: 3 of 9 configurations train on: c (3.1000), f (3.2000), i (3.3000)",
        "step 30: 2 of 3 configurations train on: i (2.7000), f (2.8000)",
    ]
    assert {update.total for update in shown} == {9}
    assert max(update.index for update in shown) == 9
    # Nothing is left, and `continue` says why.
    wanted, why = wanted_of(matrix)
    assert wanted == {}
    assert why[name_of("a", 1)] == "ended at step 10: not among the best 3 of 9"
    assert why[name_of("c", 1)] == "ended at step 30: not among the best 2 of 3"
    assert name_of("i", 1) not in why
    plan = reopen(matrix, ())
    assert (plan.plans, len(plan.reserve)) == ((), 7)
    assert describe_plan(plan)[:2] == [
        "6 runs ended at step 10: not among the best 3 of 9",
        "1 run ended at step 30: not among the best 2 of 3",
    ]
    again = HalvedEngine(CURVES)
    assert run(matrix, again).exit_code == 0
    assert again.started == []


def test_a_runner_that_dies_at_any_time_changes_neither_the_survivors_nor_the_steps(matrix):
    halved_matrix(matrix, NINE)
    dice = random.Random(5)
    done, starts = {}, 0
    while True:
        engine = HalvedEngine(CURVES)
        engine.kill_after = dice.randrange(4)
        try:
            run(matrix, engine)
        except KeyboardInterrupt:
            starts += len(engine.started)
        else:
            starts += len(engine.started)
        for name, steps in steps_of(engine).items():
            done[name] = done.get(name, 0) + steps
        if not wanted_of(matrix)[0]:
            break
    assert done == STEPS
    assert run(matrix, HalvedEngine(CURVES)).exit_code == 0
    assert starts == 14
    assert read_json(matrix.status)["status"] == "finished"


def test_continue_counts_the_runs_that_it_starts(matrix):
    halved_matrix(matrix, NINE)
    engine = HalvedEngine(CURVES)
    engine.kill_after = 5
    with pytest.raises(KeyboardInterrupt):
        run(matrix, engine)
    shown = []
    run(matrix, HalvedEngine(CURVES), on_progress=shown.append)
    assert all(1 <= one.index <= one.total <= 9 for one in shown)
    assert {one.total for one in shown[:3]} == {4}  # to the first rung
    # c has waited there since before: it is the fifth that this execution starts.
    assert {(one.run, one.index) for one in shown if one.index > 4} == {(name_of("c", 1), 5)}
    assert max(one.total for one in shown) == 5


def test_a_rising_loss_before_a_rung_raises_no_alert(matrix):
    halved_matrix(matrix, "abc")
    rising = {5: 3.0, FIRST: 3.1, 15: 3.2, 20: 3.3, 25: 3.4, SECOND: 3.5}
    engine = HalvedEngine(
        {"a": {**rising, 35: 3.6, 40: 3.7, 45: 3.8}, "b": {**rising, 30: 3.4}, "c": {**rising, 30: 9.0}}
    )
    run(matrix, engine)
    found = {one.name: [alert.kind for alert in alerts_of_run(one)] for one in matrix.runs()}
    assert found == {name_of("a", 1): [AlertKind.LOSS], name_of("b", 1): [], name_of("c", 1): []}


def test_the_first_recorded_loss_of_a_rung_counts(matrix):
    """A survivor whose checkpoint is lost evaluates the rung again, with another loss."""
    halved_matrix(matrix, NINE)
    engine = HalvedEngine(CURVES)
    engine.kill_after = 9
    with pytest.raises(KeyboardInterrupt):
        run(matrix, engine)
    for name in "cfi":
        (matrix.run(name_of(name, 1)).path / "scripted_step").unlink()
    again = HalvedEngine(CURVES)
    again.noise = 2.0
    assert run(matrix, again).exit_code == 0
    assert steps_of(again) == {"c": SECOND, "f": MAX_ITERS, "i": MAX_ITERS}
    assert {name for name, why in wanted_of(matrix)[1].items() if "step 10" in why} == {
        name_of(name, 1) for name in NINE if name not in "cfi"
    }


def test_diverged_and_failed_configurations_are_last(matrix):
    curves = {**CURVES, "c": {7: NAN}, "f": {FIRST: 3.0, 20: FAIL}}
    halved_matrix(matrix, NINE)
    engine = HalvedEngine(curves, always=True)
    assert run(matrix, engine).exit_code == EXIT_FAILED
    # c has diverged before the first rung: a is third there. f fails twice before the second one.
    attempts = [attempt for name, attempt in engine.started if name == name_of("f", 1)]
    assert attempts == [1, 2, 3]  # to the first rung, and two that fail
    assert [name for name, attempt in engine.started if name == name_of("c", 1)] == [name_of("c", 1)]
    assert steps_of(engine)["i"] == MAX_ITERS
    assert steps_of(engine)["a"] == MAX_ITERS
    assert wanted_of(matrix)[0] == {}
    assert read_json(matrix.status)["status"] == "failed"


def test_all_configurations_diverge_and_nothing_is_wanted(matrix):
    halved_matrix(matrix, "abc")
    engine = HalvedEngine({name: {3: NAN} for name in "abc"})
    assert run(matrix, engine).exit_code == EXIT_FAILED
    assert wanted_of(matrix)[0] == {}
    assert len(engine.started) == 3


def test_added_configurations_take_part_in_all_rungs_and_finished_runs_stay(matrix):
    """As `make add` does: the matrix lists more runs, and the rungs are decided again, with their losses."""
    halved_matrix(matrix, NINE)
    run(matrix, HalvedEngine(CURVES))
    halved_matrix(matrix, NINE + "jkl")
    added = {"j": {FIRST: 3.0, SECOND: 2.0, MAX_ITERS: 1.9}, "k": {FIRST: 3.4, SECOND: 3.3}, "l": {FIRST: 9.0}}
    engine = HalvedEngine({**CURVES, **added})
    assert run(matrix, engine).exit_code == 0
    # Now 4 of 12 pass the first rung: c, f, i and j; then i and j. f had trained to its end, and keeps its result.
    assert steps_of(engine) == {"j": MAX_ITERS, "k": FIRST, "l": FIRST}
    finished = [one.name for one in matrix.runs() if recover_status(one, has_runner=False).status == "finished"]
    assert finished == [name_of(name, 1) for name in "fij"]
    assert wanted_of(matrix)[0] == {}


def test_a_result_that_says_finished_and_rung_is_a_mismatch(matrix):
    halved_matrix(matrix, NINE)
    run(matrix, HalvedEngine(CURVES))
    one = matrix.run(name_of("a", 1))
    write_json(one.result, {**read_json(one.result), "status": "finished", "final_val_loss": 0.1})
    one.status.unlink()
    state = recover_status(one, has_runner=False)
    assert (state.status, state.reason) == (
        "failed",
        "result.json says that it has finished, and that it waits at a rung",
    )


def test_the_mean_over_seeds_decides(matrix):
    halved_matrix(matrix, "abcd", seeds=2)
    curves = {
        "a": [{30: 3.0}, {30: 3.5}],
        "b": [{30: 3.1}, {30: 3.2}],
        "c": [{30: 2.9}, {30: 3.7}],
        "d": [{30: 3.3}, {30: 3.1}],
    }
    engine = HalvedEngine(curves)
    assert run(matrix, engine).exit_code == 0
    finished = [run.name for run in matrix.runs() if recover_status(run, has_runner=False).status == "finished"]
    assert finished == [name_of(name, seed) for name in "bd" for seed in (1, 2)]


def test_a_held_run_is_waited_for_and_a_skipped_one_is_not(matrix):
    halved_matrix(matrix, NINE)
    change_requests(matrix, [name_of("c", 1)], Request.HOLD)
    engine = HalvedEngine(CURVES)
    run(matrix, engine)
    assert len(engine.started) == 8
    assert wanted_of(matrix)[0] == {name_of("c", 1): FIRST}
    assert read_json(matrix.status)["status"] == "stopped"
    change_requests(matrix, [name_of("c", 1)], None)
    change_requests(matrix, [name_of("c", 1)], Request.SKIP)
    again = HalvedEngine(CURVES)
    assert run(matrix, again).exit_code == EXIT_FAILED
    assert steps_of(again) == {"a": 20, "f": 80, "i": 80}


def test_a_named_run_is_continued_although_a_rung_has_ended_it(matrix):
    halved_matrix(matrix, NINE)
    run(matrix, HalvedEngine(CURVES))
    engine = HalvedEngine(CURVES)
    assert run(matrix, engine, names={name_of("a", 1)}, unasked=True).exit_code == 0
    assert engine.asked == [(name_of("a", 1), None)]
    assert steps_of(engine) == {"a": MAX_ITERS - FIRST}
    # Its final loss does not compete with that of the survivors.
    assert wanted_of(matrix)[0] == {}


def test_a_rerun_of_a_run_trains_it_to_the_rung_again(matrix):
    halved_matrix(matrix, NINE)
    run(matrix, HalvedEngine(CURVES))
    archive_results(matrix, [matrix.run(name_of("a", 1))])
    assert wanted_of(matrix)[0] == {name_of("a", 1): FIRST}
    engine = HalvedEngine(CURVES)
    assert run(matrix, engine, names={name_of("a", 1)}, unasked=True).exit_code == 0
    assert steps_of(engine) == {"a": FIRST}
    assert wanted_of(matrix)[0] == {}


def test_a_budget_stops_the_matrix_between_two_rungs(matrix):
    halved_matrix(matrix, NINE)
    engine = HalvedEngine(CURVES)
    run(matrix, engine, budget=MatrixBudget(hours=8.5 / 3600))
    assert steps_of(engine) == dict.fromkeys(NINE, FIRST)
    assert sorted(wanted_of(matrix)[0].values()) == [SECOND] * 3
    assert read_json(matrix.status)["status"] == "stopped"
