"""Adaptive seeds in the runner: the reserve, further rounds, failures, budgets and requests."""

from __future__ import annotations

import random

import pytest

from kmatrix.errors import RecordError
from kmatrix.records.files import read_json, read_jsonl, write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.records.states import change_requests
from kmatrix.runner.archive import archive_results
from kmatrix.runner.loop import EXIT_FAILED, EXIT_STOPPED
from kmatrix.runner.resume import describe_plan, reopen
from kmatrix.status.cost import MatrixBudget
from kmatrix.status.outcomes import Outcomes, adaptive_seeds
from kmatrix.status.status_file import recover_status
from scripted import ABOVE, FAIL, NAN, ScriptedEngine, adaptive_matrix, name_of, run

pytestmark = pytest.mark.process

# muon is clearly better; the difference of the others is lost in the noise.
CLEAR = {"adamw": [3.30, 3.31, 3.29, 3.30, 3.31, 3.29], "muon": [3.20, 3.2101, 3.1902, 3.2003, 3.2101, 3.1902]}
OPEN = {"adamw": [3.30, 3.20, 3.27, 3.21, 3.29, 3.22], "muon": [3.22, 3.28, 3.21, 3.30, 3.24, 3.25]}


@pytest.fixture
def matrix(tmp_path):
    folder = MatrixDir(tmp_path / "test_matrix_results_20260101_000000")
    folder.path.mkdir()
    return folder


def started(engine):
    return [name.split("_")[1] + name.split("_")[2].removeprefix("seed") for name, _ in engine.started]


def verdict_of(matrix):
    from kmatrix.records.runs import read_run_file

    records = {run.name: read_run_file(run) for run in matrix.runs()}
    seeds = adaptive_seeds(matrix, records)
    states = {run.name: recover_status(run, has_runner=False) for run in matrix.runs()}
    wanted = seeds.wanted(Outcomes(matrix, records).ends(states))
    return seeds.replays, wanted


def test_a_clear_difference_ends_after_the_first_seeds_and_the_matrix_is_finished(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    engine = ScriptedEngine(CLEAR)
    outcome = run(matrix, engine)
    # Seed by seed: all configurations run their first seed before any runs its second.
    assert started(engine) == ["adamw1", "muon1", "adamw2", "muon2", "adamw3", "muon3"]
    assert outcome.exit_code == 0
    assert outcome.counts == {"planned": 6, "finished": 6}
    assert read_json(matrix.status)["status"] == "finished"
    lines = list(read_jsonl(matrix.journal))
    assert [line["text"] for line in lines if "text" in line] == ["looked after 3 seeds: muon better than adamw"]
    assert next(line for line in lines if line["event"] == "matrix started")["reserve"] == 6
    # Nothing is left, and `continue` says why.
    plan = reopen(matrix, ())
    assert (plan.plans, len(plan.reserve)) == ((), 6)
    assert describe_plan(plan)[0] == "6 runs in reserve: their seeds are not needed so far"
    again = ScriptedEngine(CLEAR)
    assert run(matrix, again).exit_code == 0
    assert again.started == []


def test_an_open_comparison_gets_one_more_seed_in_each_round(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    engine = ScriptedEngine(OPEN)
    notes, shown = [], []
    assert run(matrix, engine, on_progress=shown.append, on_note=notes.append).exit_code == 0
    assert (shown[0].total, shown[0].reserve) == (6, 6)
    assert (shown[-1].total, shown[-1].reserve) == (len(engine.started), 12 - len(engine.started))
    assert started(engine)[:8] == ["adamw1", "muon1", "adamw2", "muon2", "adamw3", "muon3", "adamw4", "muon4"]
    wanted = [line["runs"] for line in read_jsonl(matrix.journal) if line["event"] == "runs wanted"]
    assert wanted[0] == [name_of("adamw", 4), name_of("muon", 4)]
    assert notes[0].startswith("looked after 3 seeds: ")
    assert " open" in notes[0]


def test_a_matrix_without_adaptive_seeds_runs_all_of_them(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"], seeds_auto=False)
    engine = ScriptedEngine({**CLEAR, "adamw": [FAIL, *CLEAR["adamw"][1:]]})
    assert run(matrix, engine).counts == {"finished": 11, "failed": 1}
    assert "reserve" not in next(iter(read_jsonl(matrix.journal)))


def test_a_failed_seed_runs_once_more_and_is_then_left_out(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    script = {**CLEAR, "adamw": [3.30, FAIL, 3.29, 3.30, 3.31, 3.29]}
    engine = ScriptedEngine(script, twice=True)
    outcome = run(matrix, engine)
    assert [number for name, number in engine.started if name == name_of("adamw", 2)] == [1, 2]
    # Three seeds with a loss are needed: the fourth takes the place of the second.
    assert started(engine)[-2:] == ["adamw4", "muon4"]
    assert outcome.exit_code == EXIT_FAILED
    assert read_json(matrix.status)["status"] == "failed"
    # `continue` leaves it alone; RETRY_FAILED=1 runs it, and the verdict waits for it.
    assert reopen(matrix, ()).plans == ()
    assert [plan.name for plan in reopen(matrix, (), retry_failed=True).plans] == [name_of("adamw", 2)]
    again = ScriptedEngine(CLEAR)
    assert run(matrix, again, retry_failed=True).exit_code == 0
    assert again.started == [(name_of("adamw", 2), 3)]


def test_a_seed_whose_second_attempt_succeeds_counts(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    engine = ScriptedEngine({**CLEAR, "muon": [FAIL, *CLEAR["muon"][1:]]})
    run(matrix, engine)
    assert recover_status(matrix.run(name_of("muon", 1)), has_runner=False).status == "finished"


@pytest.mark.parametrize("how", [NAN, ABOVE])
def test_a_diverged_seed_is_not_tried_again_and_its_configuration_is_never_better(matrix, how):
    adaptive_matrix(matrix, ["adamw", "muon"])
    engine = ScriptedEngine({**CLEAR, "muon": [how, *CLEAR["muon"][1:]]})
    outcome = run(matrix, engine)
    assert (outcome.exit_code == EXIT_FAILED) is (how == NAN)  # a run above its first loss finished
    assert engine.started.count((name_of("muon", 1), 1)) == 1
    assert (name_of("muon", 1), 2) not in engine.started
    (replay,), wanted = verdict_of(matrix)
    assert wanted == frozenset()
    assert replay.verdict.diverged == {"adamw": 0, "muon": 1}
    assert {pair.outcome for pair in replay.verdict.pairs} == {"open"}


def test_kills_at_any_run_change_neither_the_seeds_nor_the_verdict(tmp_path):
    def made(name):
        folder = MatrixDir(tmp_path / name)
        folder.path.mkdir()
        return adaptive_matrix(folder, ["adamw", "muon", "soap"])

    script = {**OPEN, "soap": [3.5, 3.52, 3.49, 3.5, 3.51, 3.5]}
    whole = ScriptedEngine(script)
    calm = made("test_matrix_results_20260101_000001")
    run(calm, whole)
    chance, stormy = random.Random(7), made("test_matrix_results_20260101_000002")
    begun = []
    for _ in range(40):
        engine = ScriptedEngine(script)
        engine.kill_after = chance.randrange(0, 3)
        try:
            run(stormy, engine)
            break
        except KeyboardInterrupt:
            continue
        finally:
            begun += engine.started
    assert sorted(begun) == sorted(whole.started)  # no finished seed ran again
    assert verdict_of(stormy) == verdict_of(calm)


def test_a_budget_that_is_spent_starts_no_further_seeds(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    engine = ScriptedEngine(OPEN)
    outcome = run(matrix, engine, budget=MatrixBudget(hours=6 / 3600))  # each run took a second
    assert len(engine.started) == 6
    assert outcome.exit_code == EXIT_STOPPED
    assert outcome.spent is not None
    assert outcome.spent.symbol == "BUDGET_HOURS"
    assert read_json(matrix.status)["status"] == "stopped"
    assert any(line["event"] == "budget spent" for line in read_jsonl(matrix.journal))
    (replay,), wanted = verdict_of(matrix)
    assert wanted
    assert {pair.outcome for pair in replay.verdict.pairs} == {"open"}


def test_a_held_seed_is_waited_for(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    change_requests(matrix, [name_of("adamw", 1)], hold=True)
    engine = ScriptedEngine(CLEAR)
    assert run(matrix, engine).exit_code == EXIT_STOPPED
    assert "adamw4" not in started(engine)
    engine.started.clear()
    assert run(matrix, engine).exit_code == EXIT_STOPPED
    assert engine.started == []
    change_requests(matrix, [name_of("adamw", 1)], hold=False)
    assert run(matrix, engine).exit_code == 0
    assert started(engine) == ["adamw1"]


def test_requests_of_runs_in_reserve_are_followed_while_the_matrix_runs(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    asked = []

    def ask(progress):
        if progress.run == name_of("muon", 1) and not asked:
            asked.append(change_requests(matrix, [name_of("muon", 4)], hold=True))

    engine = ScriptedEngine(OPEN)
    run(matrix, engine, on_progress=ask)
    assert recover_status(matrix.run(name_of("muon", 4)), has_runner=False).status == "planned"
    assert "adamw4" in started(engine)
    assert "muon4" not in started(engine)
    assert "muon5" not in started(engine)  # the round waits for the held seed


def test_selected_runs_are_run_only_as_far_as_they_are_wanted(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    engine = ScriptedEngine(CLEAR)
    names = {name_of("adamw", seed) for seed in range(1, 7)}
    run(matrix, engine, names=names)
    assert started(engine) == ["adamw1", "adamw2", "adamw3"]
    assert read_json(matrix.status)["unselected"] == [name_of("muon", seed) for seed in (1, 2, 3)]
    assert read_json(matrix.status)["status"] == "stopped"


def test_a_rerun_trains_what_it_names_and_the_verdict_waits_for_it(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    run(matrix, ScriptedEngine(CLEAR))
    chosen = [matrix.run(name_of("adamw", seed)) for seed in (2, 5)]
    archive_results(matrix, chosen)
    assert [plan.name for plan in reopen(matrix, ()).plans] == [name_of("adamw", 2)]
    engine = ScriptedEngine(CLEAR)
    run(matrix, engine, names={one.name for one in chosen}, unasked=True)
    assert started(engine) == ["adamw2", "adamw5"]
    (replay,), wanted = verdict_of(matrix)
    assert (wanted, replay.unused) == (frozenset(), 1)


@pytest.mark.parametrize("content", [None, "{", '{"verdict": {"confidence": 0}}'])
def test_a_matrix_that_has_lost_its_rules_does_not_run_all_its_seeds(matrix, content):
    adaptive_matrix(matrix, tuple(CLEAR))
    for folder in matrix.runs():
        write_json(folder.run_json, {**read_json(folder.run_json), "selected": True})
    assert len(reopen(matrix, ()).plans) == 6
    matrix.matrix_json.unlink()
    if content is not None:
        matrix.matrix_json.write_text(content)
    with pytest.raises(RecordError, match="has lost the rules by which it selects runs"):
        reopen(matrix, ())
    one = name_of("muon", 6)
    assert [plan.name for plan in reopen(matrix, (), names=[one], unasked=True).plans] == [one]  # the user names it
