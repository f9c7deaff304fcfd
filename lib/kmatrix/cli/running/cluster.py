"""Submit the runs of a matrix to a cluster, and follow them: the part of the commands that train without training."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from kmatrix.cli.commands import Arguments, yes
from kmatrix.cli.running.follow import follow, watch
from kmatrix.cli.running.jobs import (
    check_plan,
    content_of,
    engine_of,
    print_job_commands,
)
from kmatrix.cli.running.limits import (
    asked_budget,
    asked_micro_batch,
    check_budget,
    refuse_if_spent,
    resume_from,
)
from kmatrix.cli.running.make import make_dirs
from kmatrix.cli.running.restore import exit_code, open_matrix
from kmatrix.cli.targets import chosen_runs, warn_interrupted
from kmatrix.cli.trackers import asked_trackers
from kmatrix.engines.base import Scheduler
from kmatrix.engines.polling import known_jobs, refresh
from kmatrix.engines.schedulers import find_scheduler, is_setting, settings_of, site_settings
from kmatrix.errors import ConfigError, KmatrixError, LaunchError
from kmatrix.experiment.inputs.data import Key
from kmatrix.experiment.plan import Plan
from kmatrix.experiment.provenance import code_of
from kmatrix.kconfig.tree import open_tree
from kmatrix.matrix.axes import overrides
from kmatrix.own_file import open_to_read
from kmatrix.records.decode import replaced
from kmatrix.records.files import last_lines
from kmatrix.records.jobs.claim import age_s
from kmatrix.records.jobs.files import (
    SLURM,
    TITLES,
    EngineFile,
    JobView,
    SubmissionFile,
    is_at_home,
    newest_shares,
    read_engine,
    read_share_end,
    write_engine,
)
from kmatrix.records.jobs.paths import JobsDir
from kmatrix.records.lock import held
from kmatrix.records.paths import ROOT, MatrixDir, below_root, matrix_dirs
from kmatrix.records.runs import MatrixFile, Status, read_matrix_file_or_empty
from kmatrix.runner.cluster import own_engine, refuse_others
from kmatrix.runner.execute import check_simulation, nodes_of_runs
from kmatrix.runner.loop import EXIT_FAILED
from kmatrix.runner.resume import ResumePlan, describe_plan, reopen
from kmatrix.runner.shares import submissions_of
from kmatrix.runner.submit import hand_over, occupied_runs, resolve_doubts, submit_plans, submitting
from kmatrix.status.activity import Activity, MatrixActivity
from kmatrix.status.cost import BUDGETS
from kmatrix.status.state import GPU_LOST, NCCL, RunPlan
from kmatrix.status.status_file import recover_status
from kmatrix.text import first_names, make_command, plural, shown

TRIAL_S, TRIAL_LINES = 1800.0, 10  # of a preflight: time limit of its jobs; lines of the log of one that died
AGAIN_S = 60.0  # within this time, the same command repeats the last one, whose end was perhaps not seen
# Of `continue`, for the runner in the job.
FOR_RUNNER = ("RETRY_FAILED", "MICRO_BATCH", "TRACKER", "SIMULATE", *BUDGETS)
HERE_ONLY = ("GPUS",)  # arguments about devices of this machine


def submit_matrix(
    arguments: Arguments,
    plan: Plan,
    *,
    reuse: bool = True,
    shards: Mapping[Key, int] | None = None,
) -> MatrixDir:
    """Make a matrix and submit its runs, or complete one whose submission was interrupted. Return it.

    reuse, shards: as for `make_matrix`.
    Raises LaunchError before anything is made if the cluster has no place for a run.
    """
    name = plan.config.engine
    _refuse_local_arguments(arguments, TITLES[name])
    settings = settings_of(name, plan.runs[0].values.texts)
    scheduler = find_scheduler(name, settings)
    matrix, why = _same_matrix(plan, reuse=reuse and plan.config.reuse)
    if matrix is None:
        for note in check_plan(scheduler, plan):
            print(f"note: {note}")
        matrix, _ = make_dirs(arguments, plan, reuse=reuse, shards=shards, run_jobs=_run_trial)
    else:
        print(f"note: {shown(matrix.path)} has the same runs, and {why}")
        open_matrix(matrix, arguments, on_cluster=True)
    engine = engine_of(matrix)
    if engine.settings != settings:
        engine = replaced(engine, settings=settings)
    _submit(matrix, engine, scheduler, arguments=_for_runner(arguments))
    return matrix


def _same_matrix(plan: Plan, *, reuse: bool) -> tuple[MatrixDir | None, str]:
    """Return the matrix of the same runs that this command completes, and why; None to make a new one.

    One whose first submission was interrupted; or one whose jobs wait or run, because the same command, repeated after
    a lost connection, would train each run twice. reuse: False for a second matrix next to the first, if that was not
    submitted just now.
    """
    wanted = {planned.run.run_id for planned in plan.runs}
    for matrix in reversed(matrix_dirs(below_root(plan.config.results_dir))):
        try:
            engine = read_engine(matrix)
        except KmatrixError:
            continue
        if engine is None or engine.engine != plan.config.engine:
            continue
        is_here = is_at_home(matrix, engine) and matrix.is_mine()
        record = read_matrix_file_or_empty(matrix)
        if not is_here or {run.run_id for run in record.runs} != wanted:
            continue
        if not engine.submitted:
            return matrix, "was interrupted before all jobs were submitted: it is completed, no second matrix is made"
        if why := _why_enough(matrix, record, reuse=reuse):
            return matrix, why
    return None, ""


def _why_enough(matrix: MatrixDir, record: MatrixFile, *, reuse: bool) -> str:
    """Return why a submitted matrix of the same runs needs no second one, "" if it does. reuse: see `_same_matrix`."""
    age = age_s(JobsDir(matrix).log)
    is_new = age is not None and age < AGAIN_S
    if not is_new and not reuse:
        return ""
    if MatrixActivity(matrix, refresh(matrix)).activity is Activity.NONE:
        return ""
    if record.provenance.get("code") != code_of(ROOT).sha256:
        return ""
    if reuse:
        return "its jobs wait or run: no second matrix is made; REUSE=n makes one"
    return f"was submitted less than {AGAIN_S:g} s ago: no second matrix is made"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """What a command has submitted, and what it has left."""

    plan: ResumePlan
    is_idle: bool  # no run of the command has a job


def _submit(
    matrix: MatrixDir,
    engine: EngineFile,
    scheduler: Scheduler,
    *,
    names: Collection[str] | None = None,
    resume: str = "auto",
    resumed: bool = False,
    unasked: bool = False,
    arguments: Mapping[str, str],
) -> Submitted:
    """Submit the open runs of a matrix that have no job, and print the jobs.

    resumed: print what each run does.  unasked: also submit runs that the losses do not want now.
    """
    retry = arguments.get("RETRY_FAILED") in ("1", "y")
    with submitting(matrix) as submitter:
        for number, job in resolve_doubts(submitter, engine, scheduler).items():
            print(f"job {job}: submission {number}, submitted by an earlier command")
        micro_batch = int(arguments["MICRO_BATCH"]) if arguments.get("MICRO_BATCH") else None
        plan = reopen(
            matrix,
            None,
            names=names,
            resume=resume,
            retry_failed=retry,
            unasked=unasked,
            micro_batch=micro_batch,
        )
        wanted = {one.name for one in plan.plans if one.name not in plan.requests}
        busy = occupied_runs(matrix, engine, scheduler, wanted)
        plans = [one for one in plan.plans if one.name in wanted and one.name not in busy]
        former = read_engine(matrix)
        try:
            submit_plans(
                submitter,
                engine,
                scheduler,
                plans,
                is_busy=bool(busy),
                seeds=plan.rounds is not None,
                arguments=arguments,
                site=site_settings(engine.engine, engine.settings),
                on_submitted=_print_submitted,
            )
        except LaunchError as error:  # the matrix is made, and perhaps some of its jobs
            error.hint = "; ".join(
                filter(None, [error.hint, f"submit the rest: {make_command('continue', matrix.path)}"])
            )
            raise
        for line in describe_plan(dataclasses.replace(plan, plans=tuple(plans))) if resumed else ():
            print(f"  {line}")
        for line in _suspects(plans) if resumed and engine.engine == SLURM else ():
            print(f"note: {line}")
        _print_busy(busy)
        if busy and former is not None and former.settings != engine.settings:
            print(
                f"note: jobs keep the settings that they were submitted with; first {make_command('stop', matrix.path)}"
            )
        what = plural(len(plans), "run") if plans else "nothing"
        more = f", {len(plan.reserve)} in reserve" if plan.reserve and not resumed else ""
        print(f"{what} submitted to {scheduler.name}: {shown(matrix.path)}{more}")
        if plans or busy:
            print_job_commands(matrix)
    # Last: a command that is killed before is found, and completed, by the next one.
    write_engine(matrix, replaced(engine, submitted=True))
    return Submitted(plan=plan, is_idle=not plans and not busy)


def _print_submitted(_: int, submission: SubmissionFile, job: str) -> None:
    print(f"job {job}: {content_of(submission)}", flush=True)


def _print_busy(busy: Mapping[str, JobView]) -> None:
    """Print one line per state of the jobs that are left as they are."""
    by_state: dict[str, list[str]] = {}
    for run, view in busy.items():
        by_state.setdefault(str(view.phase), []).append(run)
    for state, runs in by_state.items():
        jobs = first_names(dict.fromkeys(busy[run].job for run in runs))
        print(f"{plural(len(runs), 'run')} {state} already, and not submitted again: job {jobs}")


def _suspects(plans: Iterable[RunPlan]) -> Iterator[str]:
    """Yield the hosts on which runs ended by lost connections or GPUs, and how to leave out a node.

    A collective that never ends does not show which node is at fault, so none is excluded without the user.
    """
    found: dict[str, list[str]] = {}
    for plan in plans:
        last = recover_status(plan.dir, has_runner=False).last if plan.attempt > 1 else None
        if last is not None and last.kind in (NCCL, GPU_LOST) and last.hosts:
            found.setdefault(" and ".join(last.hosts), []).append(plan.name)
    for hosts, names in found.items():
        what = f"{first_names(names)} lost connections or GPUs on {hosts}"
        yield f"{what}; to leave out a node: SLURM_EXTRA_FLAGS=--exclude=<node>"


def continue_matrix(matrix: MatrixDir, engine: EngineFile, arguments: Arguments) -> int:
    """Submit what has not finished and has no job: `make continue` of a matrix of a cluster."""
    warn_interrupted(arguments)
    _refuse_local_arguments(arguments, TITLES.get(engine.engine, engine.engine))
    given = _checked_arguments(arguments)
    resume = resume_from(arguments.get("RESUME", "auto"))
    settings = _settings(matrix, engine, arguments)
    scheduler = find_scheduler(engine.engine, settings)
    lost = open_matrix(matrix, arguments, on_cluster=True)
    names = {run.name for run in chosen_runs(matrix, arguments)}
    check_simulation(arguments.get("SIMULATE"), nodes_of_runs(matrix))
    if (budget := asked_budget(matrix, arguments)) and reopen(matrix, None, names=names).plans:
        refuse_if_spent(matrix, budget)
    if arguments.get("RESUME"):
        given["RESUME"] = resume
    done = _submit(
        matrix,
        _current(matrix, engine, settings, scheduler),
        scheduler,
        names=names,
        resume=resume,
        resumed=True,
        arguments=given,
    )
    if yes(arguments, "WAIT"):
        return follow(matrix)
    stays = (state for name, state in done.plan.stays.items() if name not in done.plan.damaged)
    failed = any(state.status is Status.FAILED for state in stays)
    return exit_code(matrix, EXIT_FAILED if failed and done.is_idle else 0, lost, done.plan.damaged)


def submit_runs(
    matrix: MatrixDir, arguments: Arguments, names: Collection[str] | None, *, unasked: bool = False
) -> int:
    """Submit these runs of a matrix of a cluster, after `test-rerun` or `add` has made them.

    names: None for all that are open.  unasked: also runs that the losses do not want now.
    """
    engine = engine_of(matrix)
    settings = _settings(matrix, engine, arguments)
    scheduler = find_scheduler(engine.engine, settings)
    engine = _current(matrix, engine, settings, scheduler)
    _submit(matrix, engine, scheduler, names=names, unasked=unasked, arguments=_for_runner(arguments))
    return follow(matrix) if yes(arguments, "WAIT") else 0


def _current(matrix: MatrixDir, engine: EngineFile, settings: Mapping[str, str], scheduler: Scheduler) -> EngineFile:
    """Return engine.json for this path and these settings. It is not written yet, unless the matrix is a copy."""
    with held(matrix):
        engine, message = own_engine(matrix, engine, scheduler)
    if message:
        print(f"note: {message}")
    return replaced(engine, settings=dict(settings))


def refuse_if_busy(matrix: MatrixDir, arguments: Arguments, names: Collection[str]) -> None:
    """Raise LaunchError if one of these runs has a job, UnreachableError if the scheduler does not answer."""
    engine = engine_of(matrix)
    scheduler = find_scheduler(engine.engine, _settings(matrix, engine, arguments))
    if busy := occupied_runs(matrix, engine, scheduler, names):
        raise LaunchError(
            f"{first_names(busy)} of {matrix.name} have jobs: {first_names({view.job for view in busy.values()})}",
            why="their results are being written",
            hint=f"wait for them, or stop them with {make_command('stop', matrix.path)}",
        )


def _checked_arguments(arguments: Arguments) -> dict[str, str]:
    """Return the arguments for the runner in the job. Raises ConfigError for an invalid one."""
    asked_trackers(arguments)
    asked_micro_batch(arguments)
    check_budget(arguments)
    yes(arguments, "RETRY_FAILED")
    return _for_runner(arguments)


def _for_runner(arguments: Arguments) -> dict[str, str]:
    return {name: text for name in FOR_RUNNER if (text := arguments.get(name))}


def _refuse_local_arguments(arguments: Arguments, title: str) -> None:
    """Raise ConfigError for arguments about this machine, and print a note on DETACH."""
    for name in HERE_ONLY:
        if arguments.get(name):
            raise ConfigError(
                f"{name}={arguments.get(name)} selects GPUs of this machine",
                why=f"{title} chooses the GPUs of its jobs",
                hint=f"omit {name}, or pass ENGINE=local",
            )
    if yes(arguments, "DETACH"):
        print(f"note: DETACH=1 changes nothing: the jobs of {title} do not need this command")


def _settings(matrix: MatrixDir, engine: EngineFile, arguments: Arguments) -> dict[str, str]:
    """Return the settings of the scheduler: those of engine.json with the assignments of the command line.

    Settings name files that jobs execute. Raises LaunchError if the matrix belongs to another user.
    """
    refuse_others(matrix)
    tree = open_tree(arguments.kconfig)
    title = TITLES.get(engine.engine, engine.engine)
    settings = dict(engine.settings)
    if arguments.assignments:
        asked = overrides(tree, {"ENGINE": engine.engine, **arguments.assignments}, arguments.takes)
        for symbol, values in asked.items():
            if symbol != "ENGINE" and (not is_setting(engine.engine, symbol) or len(values) != 1):
                raise ConfigError(
                    f"{arguments.target} does not take {symbol}",
                    why=f"a matrix keeps its configuration; only settings of {title} can change, each to one value",
                )
        tree.reset()
        texts = tree.apply([values[0] for values in asked.values()]).texts
        settings |= {symbol: texts[symbol] for symbol in asked if symbol != "ENGINE"}
    tree.reset()
    return settings


def _run_trial(matrix: MatrixDir) -> None:
    """Submit the runs of a preflight, and wait until they have ended. Ctrl+C cancels them."""
    engine = engine_of(matrix)
    scheduler = find_scheduler(engine.engine, engine.settings)
    rules = scheduler.rules()
    # around_s: with a long notice, half an hour would leave no time to train.
    limits = (max(TRIAL_S, rules.around_s), rules.seconds, rules.most_seconds)
    rules = dataclasses.replace(rules, seconds=min(limit for limit in limits if limit is not None))
    try:
        with submitting(matrix) as submitter:
            submissions = submissions_of(reopen(matrix, None).plans, rules)
            hand_over(submitter, engine, scheduler, submissions, on_submitted=_print_submitted)
        print("preflight: waiting for these jobs; Ctrl+C cancels them, and nothing is made", flush=True)
        watch(matrix)
    except BaseException:
        with suppress(LaunchError):
            scheduler.cancel(list(known_jobs(matrix, engine, scheduler).values()), now=True)
        raise
    for share in newest_shares(matrix).values():
        if read_share_end(share) is None and share.log.exists():  # its reason is in no other file
            with open_to_read(share.log) as file:
                print("".join(last_lines(file)[-TRIAL_LINES:]), end="")
