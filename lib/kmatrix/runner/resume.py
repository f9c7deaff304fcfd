"""Plan the pending attempts of an existing matrix, from its run.json files alone: .config is not read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kmatrix.errors import ConfigError, RecordError, SchemaError
from kmatrix.gpu.nvml.detect import Gpu
from kmatrix.packing import Limits
from kmatrix.records.checkpoint_dir import checkpoint_dir
from kmatrix.records.checkpoints import Checkpoints
from kmatrix.records.paths import MatrixDir, RunDir
from kmatrix.records.plan import make_runs
from kmatrix.records.runs import RunFile, Status, read_matrix_file_or_empty, read_run_file_or_empty
from kmatrix.records.states import RunRequest, read_matrix_status, read_requests, read_run_status
from kmatrix.records.train_config import TrainConfig, budget_s
from kmatrix.runner.rounds import SeedRounds, rounds_of_matrix
from kmatrix.status.cost import wall_s
from kmatrix.status.estimate import MeasuredRuns, guess, measured_before, measured_here
from kmatrix.status.outcomes import NOT_NEEDED, has_adaptive_seeds, rules_are_lost
from kmatrix.status.state import Attempt, RunPlan, RunState, next_attempt
from kmatrix.status.status_file import recover_status, writing
from kmatrix.text import plural

TRAINER = ("-m", "gpt2.train")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """The pending attempts of a matrix, and the runs without one."""

    plans: tuple[RunPlan, ...]  # in the matrix's order; of adaptive seeds, seed by seed
    reserve: tuple[RunPlan, ...] = ()  # executed only if the losses want them later
    rounds: SeedRounds | None = None  # None without adaptive seeds, and in a job, which has a part of the runs
    again: bool = False  # a failed run gets one more attempt, because a verdict waits for it
    skipped: Mapping[str, str] = field(default_factory=dict)  # run -> why it cannot run here
    stays: Mapping[str, RunState] = field(default_factory=dict)  # runs that need no attempt, or were not selected
    requests: Mapping[str, RunRequest] = field(default_factory=dict)  # runs of `plans` that wait for a release
    damaged: tuple[str, ...] = ()  # of `stays`: no readable run.json, so no attempt is possible


def reopen(
    matrix: MatrixDir,
    gpus: Sequence[Gpu] | None,
    *,
    names: Collection[str] | None = None,
    resume: str = "auto",
    retry_failed: bool = False,
    command: tuple[str, ...] = TRAINER,
    limits: Limits | None = None,
    unasked: bool = False,
    micro_batch: int | None = None,
) -> ResumePlan:
    """Return the pending attempts of a matrix.

    gpus: usable ones, None for runs of a cluster, which are not executed here.  names: selected runs, None for all.
    resume: start of an attempt after the first.
    retry_failed: retry failed runs, too; runs that were killed are always retried.
    limits: of a job on a cluster. Then times come from the plan: measured ones need all runs, in each of many jobs.
    unasked: also execute runs that the losses do not want now.
    micro_batch: replaces that of these runs; their global batch stays the same.
    Raises RecordError if the rules of adaptive seeds are lost, ConfigError if the micro-batch does not fit a run.
    """
    plans, skipped, stays = [], {}, {}
    damaged = []
    estimates = _Estimates(matrix, limits)
    plan_of_matrix = read_matrix_file_or_empty(matrix)
    rules = plan_of_matrix.verdict
    # Adaptive seeds need all run.json at once; those of a matrix of 10,000 runs would take a lot of memory.
    # A job has a part of the runs: what is wanted was decided when it was submitted.
    is_whole = has_adaptive_seeds(rules) and limits is None
    records = {run.name: read_run_file_or_empty(run) for run in matrix.runs()} if is_whole else {}
    rounds, states = rounds_of_matrix(matrix, records) if is_whole else None, {}
    for run in matrix.runs():
        state, record = recover_status(run, has_runner=False), records.get(run.name) or read_run_file_or_empty(run)
        if rules_are_lost(plan_of_matrix, record) and not unasked:
            raise _lost_rules(matrix)
        train = record.train
        # Without a readable run.json there is nothing to train: the run stays failed, with the damage as the reason.
        known = record != RunFile()
        damaged += [] if known else [run.name]
        attempt = None
        if known:
            attempt = _attempt(state, train, resume, retry_failed=retry_failed, again=has_adaptive_seeds(rules))
        states[run.name] = state
        if attempt is None or (names is not None and run.name not in names):
            stays[run.name] = state
        elif why := _lack(train, gpus):
            skipped[run.name] = why
        else:
            if gpus is None:  # a job's time limit needs an estimate with a basis, not one that only orders runs
                expected_s = estimates.known_s(record)
            elif rules.seeds_auto:  # seed by seed, not the longest first: a verdict needs the first seeds of all
                expected_s = None
            else:
                expected_s = estimates.expected_s(record)
            attempt = _with_micro_batch(attempt, run.name, train, micro_batch)
            plan = run_plan(run, record, attempt, command, expected_s)
            plans.append(replace(plan, spent_s=wall_s(state.attempts) or 0.0))
    requests = read_requests(matrix)
    reserve: list[RunPlan] = []
    if rounds is not None:
        plans.sort(key=lambda plan: rounds.place(plan.name))
        wanted = rounds.wanted(states, {plan.name for plan in plans})  # also if they failed, or could not run, before
        if not unasked:
            reserve = [plan for plan in plans if plan.name not in wanted]
            plans = [plan for plan in plans if plan.name in wanted]
    return ResumePlan(
        plans=tuple(plans),
        reserve=tuple(reserve),
        rounds=rounds,
        again=has_adaptive_seeds(rules),
        skipped=skipped,
        stays=stays,
        requests=requests,
        damaged=tuple(damaged),
    )


def _with_micro_batch(attempt: Attempt, name: str, train: TrainConfig, micro_batch: int | None) -> Attempt:
    """Return an attempt with another micro-batch, None for that which it has.

    Raises ConfigError if the global batch of the run would not stay the same.
    """
    if micro_batch is None:
        return attempt
    ranks, global_batch = train.num_gpus or 1, train.global_batch or 0
    sequences = global_batch // ranks
    if sequences % micro_batch:
        divisors = [str(size) for size in range(1, sequences + 1) if sequences % size == 0]
        raise ConfigError(
            f"MICRO_BATCH={micro_batch} would change the global batch of {name}",
            why=f"each of {plural(ranks, 'rank')} has {sequences} of the {plural(global_batch, 'sequence')} of a step",
            hint=f"pass a divisor of {sequences}: {', '.join(divisors)}",
        )
    return replace(attempt, micro_batch=micro_batch)


def _lost_rules(matrix: MatrixDir) -> RecordError:
    """Return the error of a matrix whose runs were planned for adaptive seeds, by rules that are unknown now."""
    return RecordError(
        f"{matrix.name} has lost the rules by which it selects runs: all of them would be executed",
        why=f"{matrix.matrix_json.name} is missing or damaged",
        hint="bring it back from a copy, or start a new matrix with the same values, which reuses the finished runs",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredRuns:
    """The runs of a plan that had no run.json."""

    made: tuple[str, ...] = ()  # made again
    lost: tuple[str, ...] = ()  # not in the plan
    why: str = ""  # the damage of the plan, "" for none


def restore_runs(matrix: MatrixDir) -> RestoredRuns:
    """Make the runs again that matrix.json lists and that have no run.json. The caller holds the matrix.

    Runs that finished are not touched, and a run whose run.json alone was lost keeps its results.
    """
    missing = matrix.missing()
    made, why = [], ""
    try:
        with writing(matrix.path):
            made = make_runs(matrix, set(missing))
    except SchemaError:
        raise
    except RecordError as error:  # the other runs continue
        why = f"{error.what}: {error.why}"
    return RestoredRuns(made=tuple(made), lost=tuple(name for name in missing if name not in made), why=why)


class _Estimates:
    """Estimates of run times, which order runs that may run at the same time."""

    def __init__(self, matrix: MatrixDir, limits: Limits | None) -> None:
        self._matrix, self._limits = matrix, limits
        self._measured: MeasuredRuns | None = None

    def expected_s(self, record: RunFile) -> float | None:
        """Return the estimated time (s) of a run, None if runs start one at a time."""
        train = record.train
        limits = (self._limits or Limits.of(record.symbols)).on(gpus=train.device == "cuda")
        if limits.jobs == 1:
            return None  # they start in the matrix's order
        if self._limits is not None:
            return record.expected_s or guess(train)
        known = self._of(record)
        return guess(train) if known is None else known

    def known_s(self, record: RunFile) -> float | None:
        """Return the estimated time (s) of a run, at most its budget; None if nothing like it is known."""
        found = [known for known in (self._of(record), budget_s(record.train)) if known is not None]
        return min(found, default=None)

    def _of(self, record: RunFile) -> float | None:
        """Return the estimated time (s) of a run from measured runs, or of the plan; None without a basis."""
        if self._measured is None:
            self._measured = MeasuredRuns(measured_here(self._matrix), measured_before(self._matrix))
        known = self._measured.whole(record.train, record.expected_s)
        return None if known is None else known.seconds


def _lack(train: TrainConfig, gpus: Sequence[Gpu] | None) -> str:
    """Return why a run cannot run, "" if it can. gpus: as for `reopen`."""
    return (too_few_gpus(train, len(gpus)) if gpus is not None else "") or _no_data(train)


def too_few_gpus(train: TrainConfig, there: int) -> str:
    """Return why a run cannot run on a machine with this many GPUs, "" if it can."""
    ranks = (train.num_gpus or 1) // (train.num_nodes or 1)
    if train.device != "cuda" or ranks <= there:
        return ""
    on = " on each node" if (train.num_nodes or 1) > 1 else ""
    return f"needs {plural(ranks, 'GPU')}{on}, found {there}"


def _no_data(train: TrainConfig) -> str:
    """Return why a run has no data, "" if it has. Data is prepared only for runs that the planning machine can run."""
    return "" if train.data_path != "" else "its data was not prepared: plan the matrix on this machine"


def run_plan(
    run: RunDir, record: RunFile, attempt: Attempt, command: tuple[str, ...], expected_s: float | None
) -> RunPlan:
    """Return the plan of one attempt."""
    train = record.train
    return RunPlan(
        name=run.name,
        run_id=record.run_id or "",
        dir=RunDir(run.path.resolve()),  # absolute: the trainer has another working directory
        ranks=train.num_gpus or 1,
        nodes=train.num_nodes or 1,
        cuda=train.device == "cuda",
        cpu_threads=train.cpu_threads or 1,
        command=command,
        timeout_s=record.timeout_s,
        attempt=attempt.number,
        expected_s=expected_s,
        resume=attempt.resume,
        micro_batch=attempt.micro_batch,
        environment=record.environment,
    )


def _attempt(state: RunState, train: TrainConfig, resume: str, *, retry_failed: bool, again: bool) -> Attempt | None:
    return next_attempt(
        state,
        batch_size=train.batch_size or 1,
        resume=resume,
        retry_failed=retry_failed,
        retry_killed=True,
        again=again,
    )


def is_up_to_date(matrix: MatrixDir) -> bool:
    """Return whether the files of an ended matrix say so: its status, that of each run, and its report."""
    record, report = read_matrix_status(matrix), _time(matrix.summary)
    if record.ended is None or record.status is Status.RUNNING:
        return False
    runs = matrix.runs()
    statuses = Counter(stored.status.value for run in runs if (stored := read_run_status(run)) is not None)
    return dict(statuses) == dict(record.counts) and all(_time(run.status) <= report for run in runs)


def _time(path: Path) -> float:
    """Return the modification time of a file (Unix seconds), 0 without one."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def describe_plan(plan: ResumePlan) -> list[str]:
    """Return one line per pending or skipped run, and one per status of the other runs."""
    lines = [
        f"{one.name}: {plan.requests[one.name].reason if one.name in plan.requests else _describe_attempt(one)}"
        for one in plan.plans
    ]
    lines += [f"{name}: skipped, {why}" for name, why in plan.skipped.items()]
    if plan.reserve:
        lines.append(f"{plural(len(plan.reserve), 'run')} in reserve: {NOT_NEEDED}")
    for status in Status:
        count = sum(state.status is status for state in plan.stays.values())
        if count:
            hint = " (RETRY_FAILED=1 retries)" if status is Status.FAILED else ""
            lines.append(f"{count} {status}: unchanged{hint}")
    return lines


def _describe_attempt(plan: RunPlan) -> str:
    """Return `attempt 2, from its last good checkpoint, micro-batch 6`."""
    origins = {"none": "from scratch", "auto": "from its last good checkpoint"}
    if plan.resume == "auto" and not Checkpoints(checkpoint_dir(plan.dir)).newest():
        origins["auto"] = "from scratch: it has no checkpoint"
    text = f"attempt {plan.attempt}, {origins.get(plan.resume, f'from {plan.resume}')}"
    return text + (f", micro-batch {plan.micro_batch}" if plan.micro_batch is not None else "")
