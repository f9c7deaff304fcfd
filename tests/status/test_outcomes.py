"""The outcomes of seeds: families of comparable configurations, and which seeds a verdict wants."""

from __future__ import annotations

import math

import pytest

import kmatrix.status.outcomes as module
from kmatrix.records.decode import replaced
from kmatrix.records.files import read_json, write_json
from kmatrix.records.paths import MatrixDir
from kmatrix.records.runs import RunFile, RunResult, Status, VerdictRules, read_matrix_file_or_empty, read_run_file
from kmatrix.records.train_config import TrainConfig
from kmatrix.status.outcomes import AdaptiveSeeds, SeedEnd, adaptive_seeds, end_of, families_of, without_budget
from kmatrix.status.state import Attempt, RunState
from kmatrix.verdict.family import FamilyVerdict, Method, PairOutcome, PairVerdict, Replay, Rules
from scripted import MEASURED, adaptive_matrix, name_of

TRAIN = TrainConfig(batch_size=4)


def failed(*kinds):
    attempts = tuple(Attempt(number=n, status=Status.FAILED, kind=kind) for n, kind in enumerate(kinds, 1))
    return RunState(status=Status.FAILED, attempts=attempts)


@pytest.mark.parametrize(
    ("state", "end"),
    [
        (RunState(), None),
        (RunState(status=Status.RUNNING, attempts=(Attempt(number=1),)), None),
        (RunState(status=Status.STOPPED, attempts=(Attempt(number=1, status=Status.STOPPED),)), None),
        (RunState(status=Status.PLANNED, reason="held"), None),
        (RunState(status=Status.SKIPPED, reason="skipped"), SeedEnd(None)),
        # A first failure is tried once more; another one, or what would happen again, is the end.
        (failed("died"), None),
        (failed("timeout"), None),
        (failed("killed"), None),
        (failed("died", "died"), SeedEnd(None)),
        (failed("mismatch"), SeedEnd(None)),
        (failed("oom"), None),
        (failed("oom", "oom"), None),  # 4, then 2 sequences: the third attempt has 1
        (failed("nccl", "nccl", "nccl"), SeedEnd(None)),
        (failed("disk"), None),  # `continue` runs it as soon as there is space
        (failed("nan"), SeedEnd(math.inf)),
        (RunState(status=Status.FAILED, reason="run.json is damaged"), SeedEnd(None)),
    ],
)
def test_a_seed_is_over_when_no_attempt_follows_by_itself(state, end):
    assert end_of(state, TRAIN, lambda: pytest.fail("it has no result")) == end


@pytest.mark.parametrize(
    ("result", "loss"),
    [
        (RunResult(final_val_loss=3.28, initial_val_loss=10.9), 3.28),
        (RunResult(final_val_loss=3.28), 3.28),
        (RunResult(final_val_loss=10.9, initial_val_loss=10.9), math.inf),  # as good as before the first step
        (RunResult(), None),
        (None, None),
    ],
)
def test_a_finished_seed_has_a_loss_unless_it_diverged(result, loss):
    assert end_of(RunState(status=Status.FINISHED), TRAIN, lambda: result) == SeedEnd(loss)


@pytest.fixture
def matrix(tmp_path):
    folder = MatrixDir(tmp_path / "test_matrix_results_20260101_000000")
    folder.path.mkdir()
    return folder


def records_of(matrix):
    return {run.name: read_run_file(run) for run in matrix.runs()}


def seeds_of(matrix) -> AdaptiveSeeds:
    found = adaptive_seeds(matrix, records_of(matrix))
    assert found is not None
    return found


def ended(losses):
    return {
        name_of(configuration, seed): SeedEnd(loss)
        for configuration, known in losses.items()
        for seed, loss in enumerate(known, 1)
    }


def test_runs_on_other_data_or_sequences_are_another_family(matrix):
    others = {"soap": {"block_size": 64}, "lion": {"data_sha256": "cd"}, "sgd": {"eval_samples": 20}}
    adaptive_matrix(matrix, ["adamw", "muon", *others], train=others)
    assert [list(family.configurations) for family in seeds_of(matrix).families] == [
        *(["adamw", "muon"], ["soap"], ["lion"], ["sgd"])
    ]


def test_the_baseline_is_found_by_its_axes_and_rules_come_from_the_plan(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"], baseline={"optimizer": "muon"}, confidence=0.9, min_difference=0.01)
    (family,) = seeds_of(matrix).families
    assert (family.rules.baseline, family.rules.confidence, family.rules.min_difference) == ("muon", 0.9, 0.01)
    assert (family.rules.seeds, family.rules.seeds_min) == ((1, 2, 3, 4, 5, 6), 3)


def test_a_matrix_without_adaptive_seeds_has_families_of_the_seeds_that_it_has(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"], seeds=2, seeds_auto=False)
    assert adaptive_seeds(matrix, records_of(matrix)) is None
    plan = read_matrix_file_or_empty(matrix)
    (family,) = families_of(replaced(plan.verdict, seeds=()), plan.axis_entries, records_of(matrix))
    assert family.rules.seeds == (1, 2)


def test_configurations_have_names_of_the_axes_in_which_they_differ(matrix):
    plan = VerdictRules()
    train = TrainConfig(**MEASURED)
    axes = [{"optimizer": "adamw", "lr": "1e-3", "gpus": "2"}, {"optimizer": "adamw", "lr": "2e-3", "gpus": "2"}]
    (family,) = families_of(plan, (), {str(n): RunFile(axes=one, train=train) for n, one in enumerate(axes)})
    assert list(family.configurations) == ["adamw, lr 1e-3", "adamw, lr 2e-3"]


def test_a_damaged_run_is_in_no_family(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    records = {**records_of(matrix), name_of("muon", 6): RunFile()}
    found = adaptive_seeds(matrix, records)
    assert found is not None
    assert ("muon", 6) not in found.families[0].runs


def test_a_verdict_does_not_wait_for_a_seed_whose_run_is_damaged(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    seeds = adaptive_seeds(matrix, {**records_of(matrix), name_of("muon", 2): RunFile()})
    assert seeds is not None
    assert seeds.wanted({}) == {name_of(one, seed) for one in ("adamw", "muon") for seed in (1, 2, 3)} - {
        name_of("muon", 2)
    }
    ends = ended({one: known[:3] for one, known in CLEAR.items()})
    del ends[name_of("muon", 2)]
    # The pair skips the second seed, and goes on with the next one.
    assert seeds.wanted(ends) == {name_of("adamw", 4), name_of("muon", 4)}


CLEAR = {"adamw": [3.30, 3.31, 3.29, 3.30, 3.31, 3.29], "muon": [3.20, 3.2101, 3.1902, 3.2003, 3.2101, 3.1902]}


def test_the_first_seeds_of_all_are_wanted_and_then_none_if_the_difference_is_clear(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    seeds = seeds_of(matrix)
    first = {name_of(one, seed) for one in CLEAR for seed in (1, 2, 3)}
    assert seeds.wanted({}) == first
    ends = ended({one: known[:3] for one, known in CLEAR.items()})
    assert seeds.wanted({name: ends[name] for name in list(ends)[:4]}) == first - set(list(ends)[:4])
    assert list(seeds.decisions()) == []
    assert seeds.wanted(ends) == frozenset()
    assert list(seeds.decisions()) == ["looked after 3 seeds: muon better than adamw"]
    assert list(seeds.decisions()) == []
    waiting = dict.fromkeys([name_of("muon", 4), name_of("adamw", 4)], Status.PLANNED)
    assert seeds.reserve(waiting, frozenset()) == set(waiting)


def test_a_replay_is_made_once_per_round(matrix, monkeypatch):
    adaptive_matrix(matrix, ["adamw", "muon"])
    calls = []
    real = module.replay
    monkeypatch.setattr(module, "replay", lambda *given: calls.append(1) or real(*given))
    seeds, ends = seeds_of(matrix), ended({one: known[:3] for one, known in CLEAR.items()})
    for number in range(len(ends) + 1):
        seeds.wanted(dict(list(ends.items())[:number]))
        seeds.wanted(dict(list(ends.items())[:number]))
    assert len(calls) == 2
    # A seed that is skipped, and released again, is to come again.
    assert seeds.wanted(ends) == frozenset()
    del ends[name_of("muon", 2)]
    assert seeds.wanted(ends) == {name_of("muon", 2)}
    # A result that changes (a rerun) counts, too.
    ends[name_of("muon", 2)] = SeedEnd(math.inf)
    assert name_of("muon", 4) in seeds.wanted(ends)


def test_losses_beyond_the_round_do_not_matter(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    seeds = seeds_of(matrix)
    assert seeds.wanted(ended(CLEAR)) == frozenset()
    assert seeds.replays[0].rounds == (3,)
    assert seeds.replays[0].unused == 6


def test_each_family_asks_for_its_own_seeds(matrix):
    others = {"lion": {"block_size": 64}, "soap": {"block_size": 64}}
    adaptive_matrix(matrix, ["adamw", "muon", *others], train=others)
    seeds, close = seeds_of(matrix), {"lion": [3.30, 3.21, 3.25], "soap": [3.22, 3.28, 3.26]}
    ends = ended({**{one: known[:3] for one, known in CLEAR.items()}, **close})
    assert seeds.wanted(ends) == {name_of(one, 4) for one in close}


def test_open_comparisons_of_a_matrix_without_budget_get_no_seed_because_of_it(matrix):
    adaptive_matrix(matrix, ["adamw", "muon", "soap"])
    seeds = seeds_of(matrix)
    losses = {"adamw": [3.30, 3.21, 3.25], "muon": [3.22, 3.28, 3.26], "soap": [4.3, 4.2102, 4.2501]}
    assert seeds.wanted(ended(losses))
    (replay,) = seeds.replays
    assert {(pair.outcome, pair.no_more) for pair in without_budget(replay.verdict).against_reference} == {
        ("open", "budget"),
        ("better", None),
    }


def test_the_stored_rules_of_an_unreadable_matrix_are_those_of_no_adaptive_seeds(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    record = read_json(matrix.matrix_json)
    write_json(matrix.matrix_json, {**record, "verdict": {}})
    assert adaptive_seeds(matrix, records_of(matrix)) is None


def test_the_seeds_that_are_likely_are_those_of_the_comparison_that_needs_most_without_those_that_run(
    matrix, monkeypatch
):
    """adamw is in both comparisons: 3 more seeds, of which its fourth is wanted now."""
    adaptive_matrix(matrix, ["adamw", "muon", "soap"])
    pairs = tuple(
        PairVerdict(a="adamw", b=name, outcome=PairOutcome.OPEN, method=Method.SEQUENTIAL, more_seeds=more)
        for name, more in (("muon", 3), ("soap", 1))
    )
    rules = Rules(seeds=(1, 2, 3, 4, 5, 6))
    verdict = FamilyVerdict(rules=rules, reference="adamw", means={}, pairs=pairs)
    now = Replay(verdict=verdict, wanted=frozenset({("adamw", 4)}), rounds=(3,), asked={})
    monkeypatch.setattr(module, "replay", lambda losses, rules: now)
    seeds = seeds_of(matrix)
    assert seeds.wanted({}) == {name_of("adamw", 4)}
    reserve = {name_of(name, seed) for name in ("adamw", "muon", "soap") for seed in (4, 5, 6)} - {name_of("adamw", 4)}
    assert seeds.likely(reserve) == {
        *(name_of("adamw", seed) for seed in (5, 6)),
        *(name_of("muon", seed) for seed in (4, 5, 6)),
        name_of("soap", 4),
    }


def test_planned_and_stopped_runs_that_are_not_wanted_are_the_reserve(matrix):
    adaptive_matrix(matrix, ["adamw", "muon"])
    statuses = dict(zip(sorted(records_of(matrix)), Status, strict=False))
    waiting = {name for name, status in statuses.items() if status in (Status.PLANNED, Status.STOPPED)}
    one = min(waiting)
    assert len(waiting) == 2
    assert seeds_of(matrix).reserve(statuses, [one]) == waiting - {one}
