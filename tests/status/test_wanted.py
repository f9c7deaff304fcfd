"""Which runs the losses want: families of comparable configurations, and the seeds that their verdicts ask for."""

from __future__ import annotations

import math

import pytest

from kmatrix.records.attempts import Attempt, End
from kmatrix.records.control import Request
from kmatrix.records.files import read_json, write_json
from kmatrix.records.matrix import Plan, PlannedRun
from kmatrix.records.runs import AxisEntry, RunResult, VerdictRules
from kmatrix.status.fold import Files, state_of
from kmatrix.status.look import look
from kmatrix.status.wanted import (
    SeedEnd,
    adaptive_seeds,
    all_axes,
    end_of,
    families_of_plan,
    wanted,
)
from records_factory import FakeRun, make_matrix, make_run

SEEDS = (1, 2, 3, 4, 5, 6)
RULES = VerdictRules(seeds_auto=True, seeds=SEEDS, seeds_min=3)
CLEAR = {"adamw": [3.30, 3.31, 3.29, 3.30, 3.31, 3.30], "muon": [3.20, 3.2101, 3.1902, 3.2003, 3.2101, 3.2]}
OPEN = {"adamw": [3.30, 3.21, 3.25], "muon": [3.22, 3.28, 3.26]}


def name_of(optimizer, seed):
    return f"gpt2_{optimizer}_seed{seed}_1cpu"


def planned(optimizers=("adamw", "muon"), train=None, **fields):
    """Return the runs of a matrix with adaptive seeds. train: optimizer -> its fields."""
    return [
        FakeRun(optimizer=one, seed=seed, axes={"seed": str(seed)}, train=(train or {}).get(one, {}), **fields)
        for one in optimizers
        for seed in SEEDS
    ]


def matrix_of(tmp_path, runs, done=(), **verdict):
    rules = {"seeds_auto": True, "seeds": list(SEEDS), "seeds_min": 3, **verdict}
    matrix = make_matrix(tmp_path, done, planned=runs, verdict=rules)
    plan = read_json(matrix.matrix_json)
    write_json(matrix.matrix_json, {**plan, "runs": [{**run, "selected": True} for run in plan["runs"]]})
    return matrix


def ends_of(losses):
    return {name_of(one, seed): SeedEnd(loss) for one, known in losses.items() for seed, loss in enumerate(known, 1)}


def seeds(losses, optimizers=("adamw", "muon"), others=()):
    """Return adaptive seeds after these losses. others: optimizers whose losses are measured on something else."""
    runs = tuple(
        planned_run(name_of(one, seed), {"optimizer": one, "seed": str(seed)}, seed, block_size=64 * (one in others))
        for one in optimizers
        for seed in SEEDS
    )
    return adaptive_seeds(families_of_plan(Plan(verdict=RULES, runs=runs)), ends_of(losses))


def planned_run(name, axes, seed=1, **train):
    return PlannedRun(name=name, run_id=name, axes=axes, train={"seed": seed, **train})


def first(number, *optimizers):
    return {name_of(one, seed) for one in optimizers for seed in range(1, number + 1)}


# Ends


def failed(*kinds, **fields):
    attempts = tuple(Attempt(number=number, end=End(kind=kind)) for number, kind in enumerate(kinds, 1))
    return Files(attempts=attempts, micro_batch=4, **fields)


@pytest.mark.parametrize(
    ("files", "end"),
    [
        (Files(), None),
        (Files(attempts=(Attempt(number=1),), is_live=True), None),
        (failed("stopped"), None),
        (Files(request=Request()), None),
        (Files(request=Request(skip="too few GPUs")), SeedEnd(None)),
        # A first failure is tried once more; another one, or what would happen again, is the end.
        (failed("died"), None),
        (failed("timeout"), None),
        (failed("died", "died"), SeedEnd(None)),
        (failed("mismatch"), SeedEnd(None)),
        (failed("oom"), None),
        (failed("nccl", "nccl"), SeedEnd(None)),
        (failed("disk"), None),  # `continue` runs it as soon as there is space
        (failed("nan"), SeedEnd(math.inf)),
        (Files(damage="run.json is damaged"), SeedEnd(None)),
    ],
)
def test_a_seed_is_over_when_no_attempt_follows_by_itself(files, end):
    assert end_of(files, state_of(files, spare=True)) == end


@pytest.mark.parametrize(
    ("result", "loss"),
    [
        ({"final_val_loss": 3.28, "initial_val_loss": 10.9}, 3.28),
        ({"final_val_loss": 3.28}, 3.28),
        ({"final_val_loss": 10.9, "initial_val_loss": 10.9}, math.inf),  # as good as before the first step
        ({}, None),
    ],
)
def test_a_finished_seed_has_a_loss_unless_it_diverged(result, loss):
    files = Files(run_id="a", result=RunResult(run_id="a", status="finished", **result))
    assert end_of(files, state_of(files)) == SeedEnd(loss)


# Families


def test_runs_on_other_data_or_sequences_are_another_family(tmp_path):
    others = {"soap": {"block_size": 64}, "lion": {"data_sha256": "cd"}, "sgd": {"eval_samples": 20}}
    matrix = matrix_of(tmp_path, planned(["adamw", "muon", *others], others))
    families = families_of_plan(look(matrix.path).plan)
    assert [list(family.configurations) for family in families] == [["adamw", "muon"], ["lion"], ["soap"], ["sgd"]]
    assert families[0].rules.seeds == SEEDS


def test_a_run_that_was_there_before_an_axis_was_added_has_the_value_of_its_symbol():
    axis = AxisEntry(label="lr", symbol="GPT2_LEARNING_RATE", values=("2e-3", "6e-4"))
    assert all_axes({"seed": "1"}, {"GPT2_LEARNING_RATE": "0.002"}, [axis]) == {"lr": "2e-3", "seed": "1"}


def test_configurations_are_named_by_what_they_differ_in():
    axes = [{"optimizer": "adamw", "lr": lr, "model": "tiny", "seed": "1"} for lr in ("1e-3", "2e-3")]
    runs = tuple(planned_run(str(number), one) for number, one in enumerate(axes))
    (family,) = families_of_plan(Plan(verdict=RULES, runs=runs))
    assert list(family.configurations) == ["adamw, lr 1e-3", "adamw, lr 2e-3"]


def test_a_seed_without_a_run_is_over_without_a_loss():
    (family,) = families_of_plan(Plan(verdict=RULES, runs=(planned_run("run", {"optimizer": "adamw"}),)))
    assert family.losses({}) == {"adamw": dict.fromkeys(SEEDS[1:])}


# What is wanted


def test_without_adaptive_seeds_all_runs_are_wanted(tmp_path):
    matrix = make_matrix(tmp_path, [], planned=planned())
    assert wanted(look(matrix.path)) == [run.name for run in planned()]


def test_a_matrix_begins_with_the_fewest_seeds_and_ends_when_its_losses_decide(tmp_path):
    matrix = matrix_of(tmp_path, planned())
    assert set(wanted(look(matrix.path))) == first(3, "adamw", "muon")
    for one, losses in CLEAR.items():
        for seed in (1, 2, 3):
            make_run(matrix, FakeRun(optimizer=one, seed=seed, axes={"seed": str(seed)}, final_loss=losses[seed - 1]))
    seen = look(matrix.path)
    assert set(wanted(seen)) == first(3, "adamw", "muon"), "those that have run stay part of the matrix"
    assert not any(seen.states[name].is_due for name in wanted(seen))


def test_an_open_comparison_gets_one_more_seed_of_each_side():
    assert seeds(OPEN).asked == first(4, "adamw", "muon")
    one_missing = {**OPEN, "muon": OPEN["muon"][:2]}
    assert seeds(one_missing).asked == first(3, "adamw", "muon"), "the next round waits for the last run of this one"


def test_losses_that_no_round_asked_for_change_nothing():
    found = seeds(CLEAR)
    assert found.asked == first(3, "adamw", "muon")
    assert found.replays[0].unused == 6


def test_each_family_asks_for_its_own_seeds():
    losses = {**{one: known[:3] for one, known in CLEAR.items()}, "lion": OPEN["adamw"], "soap": OPEN["muon"]}
    found = seeds(losses, ["adamw", "muon", "lion", "soap"], others=("lion", "soap"))
    assert found.asked == first(3, "adamw", "muon") | first(4, "lion", "soap")


def test_open_comparisons_of_a_matrix_without_budget_get_no_seed_because_of_it():
    losses = {**OPEN, "soap": [4.3, 4.2102, 4.2501]}
    (replay,) = seeds(losses, ["adamw", "muon", "soap"]).replays
    pairs = replay.verdict.without_budget().against_reference
    assert {(pair.outcome, pair.no_more) for pair in pairs} == {("open", "budget"), ("better", None)}


def test_planned_and_stopped_runs_that_are_not_wanted_are_the_reserve():
    statuses = {name_of("adamw", 1): "planned", name_of("adamw", 5): "stopped", name_of("muon", 5): "finished"}
    assert seeds({}).reserve(statuses) == {name_of("adamw", 5)}


def test_a_replay_is_made_once_for_the_same_losses(monkeypatch):
    seeds(CLEAR)
    monkeypatch.setattr("kmatrix.verdict.replay.replay", lambda losses, rules: pytest.fail("it is known"))
    seeds(CLEAR)
