"""The commands that plan and run: dry run, matrix, one run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from kmatrix.cli.again import yes
from kmatrix.cli.arguments import Arguments
from kmatrix.cli.data import data_lines, forecast_lines, with_known_vocabulary
from kmatrix.cli.execution import detach, execute, monitor, need_torch
from kmatrix.cli.finish import command_of
from kmatrix.cli.planning import Plan, make_plan
from kmatrix.cli.session import ROOT, below_root, open_tree, overrides, shown
from kmatrix.cli.trackers import need_trackers, tracking
from kmatrix.config import RunConfig, with_data
from kmatrix.equal import held_equal
from kmatrix.errors import LaunchError
from kmatrix.launch.create import Creation, RunText, check_place, create
from kmatrix.launch.judging import check_judging
from kmatrix.launch.monitor import Monitor
from kmatrix.launch.prepare import Dataset, Key, key, prepare_data
from kmatrix.launch.reopen import reopen, too_few_gpus
from kmatrix.matrix import Run, settle
from kmatrix.plan import forecast, warnings
from kmatrix.records import MatrixDir

TRAINS_ANEW = ("reproduce", "quickstart")  # their point is to train
QUICKSTART = "gpt2-cpu-quick"


def dry_run(arguments: Arguments) -> int:
    """Print the axes, a line for each run, and a line for each reason for which cells are cut."""
    plan = make_plan(arguments)
    data_dir = below_root(plan.config.data_dir)
    configs = {run.name: with_known_vocabulary(plan.run_config(run), data_dir) for run in plan.matrix.runs}
    equal = held_equal(plan.equal, configs)
    print(_axes_line(plan))
    said: dict[str, None] = {}
    for run in plan.matrix.runs:
        print(_run_line(run, configs[run.name]))
        said.update(dict.fromkeys(warnings(configs[run.name].fields)))
    if equal:
        print(f"equal {equal}")
    notes, more = forecast_lines(data_dir, [config.fields for config in configs.values()])
    said.update(dict.fromkeys(more))
    for cut in plan.matrix.cuts:
        print(f"cut {cut.count}: {cut.reason}")
    for note in (*plan.matrix.notes, *plan.notes, *notes):
        print(f"note: {note}")
    for text in said:
        print(f"warning: {text}")
    return 0


def test_matrix(arguments: Arguments) -> int:
    """Run every run of the matrix, then write the report."""
    return _run_matrix(arguments, make_plan(arguments))


def quickstart(arguments: Arguments) -> int:
    """Run the quickstart configuration, from a file of its own: .config is left alone."""
    from kmatrix.cli.configure import defconfig

    overrides(open_tree(arguments), arguments)  # refuses a wrong name before anything is written
    own = {**arguments.values, "KCONFIG_CONFIG": str(ROOT / ".config.quickstart")}
    defconfig(Arguments(f"defconfig-{QUICKSTART}", own))
    arguments = dataclasses.replace(arguments, values=own)
    status = _run_matrix(arguments, make_plan(arguments))
    print(f"\nNow your own: make defconfig-{QUICKSTART} menuconfig test-matrix")
    return status


def train(arguments: Arguments) -> int:
    """Run one configuration: a matrix of one."""
    return _run_matrix(arguments, make_plan(arguments, one=True))


def _run_matrix(arguments: Arguments, plan: Plan) -> int:
    """Make a matrix and run it, here or in the background."""
    matrix, recorder = make_matrix(arguments, plan)
    going = reopen(matrix, plan.gpus)
    number, skipped = len(going.plans), len(going.skipped)
    print(f"{_several(number, 'run')} in {shown(matrix.path)}" + (f", {skipped} skipped" if skipped else ""))
    if yes(arguments, "DETACH"):
        return detach(matrix, arguments, "GPUS", "SIMULATE")
    return execute(matrix, going, recorder, plan.gpus)


def make_matrix(
    arguments: Arguments, plan: Plan, *, shards: Mapping[Key, int] | None = None
) -> tuple[MatrixDir, Monitor | None]:
    """Make the directories of a matrix, with everything checked first; return it, and how its runs are recorded.

    shards: how many of training each dataset has, where an earlier run says so.
    """
    for note in (*plan.matrix.notes, *plan.notes):
        print(f"note: {note}")
    configs = {run.name: plan.run_config(run) for run in plan.matrix.runs}
    held_equal(plan.equal, configs)
    skipped = _skipped(plan, configs)
    for text in dict.fromkeys(text for config in configs.values() for text in warnings(config.fields)):
        print(f"warning: {text}")
    need_torch()
    need_trackers(plan.config.trackers)
    command_of(plan.config.on_finish)
    recorder = monitor(arguments.get("SIMULATE"), plan.config.monitor_hz, plan.config.prometheus_port)
    planned = _creation(arguments, plan, configs, skipped, shards)
    if yes(arguments, "PREFLIGHT") if arguments.get("PREFLIGHT") else plan.config.preflight:
        from kmatrix.cli.preflight import preflight

        preflight(planned, plan.gpus)
    matrix = create(planned)
    if plan.config.reuse and not arguments.get("SIMULATE") and arguments.target not in TRAINS_ANEW:
        _reuse(matrix, plan, recorded=recorder is not None)
    return matrix, recorder


def _reuse(matrix: MatrixDir, plan: Plan, *, recorded: bool) -> None:
    """Take over what has finished in an earlier matrix, and say so."""
    from kmatrix.launch.reuse import take_over

    neutral = {name.removeprefix("GPT2_").lower() for name in (*plan.tree.neutral, *plan.tree.neutral_unless)}
    found = take_over(matrix, matrix.path.parent, neutral, recorded=recorded)
    for name, source in found.taken.items():
        print(f"{name}: taken over from {source}, where it has finished (REUSE=n trains it again)")
    for name, why in found.not_taken.items():
        print(f"note: {name} has finished before and is trained again; {why}")


def _creation(
    arguments: Arguments,
    plan: Plan,
    configs: dict[str, RunConfig],
    skipped: dict[str, str],
    shards: Mapping[Key, int] | None,
) -> Creation:
    """Check that the matrix can be made here, prepare its data, and return all that its directories are made from."""
    results_dir = below_root(plan.config.results_dir)
    check_place(results_dir)
    going = [config.fields for name, config in configs.items() if name not in skipped]
    data_dir = below_root(plan.config.data_dir)
    check_judging(going, data_dir)
    data = prepare_data(Path(sys.executable), ROOT, data_dir, going, shards)
    configs = {name: _with_data(config, data) for name, config in configs.items()}
    for line in data_lines([configs[name].fields for name in configs if name not in skipped], data):
        print(line)
    return Creation(
        plan=plan.matrix,
        configs=configs,
        equal=held_equal(plan.equal, configs),
        texts=_texts(plan),
        data=data,
        data_dir=data_dir,
        skipped=skipped,
        gpus=plan.gpus,
        results_dir=results_dir,
        checkpoint_dir=below_root(plan.config.checkpoint_dir) if plan.config.checkpoint_dir else None,
        timeout_s=plan.config.run_timeout_s,
        root=ROOT,
        config_text=plan.path.read_text(encoding="utf-8"),
        command=" ".join(["kmatrix", arguments.target, *arguments.all_words]),
        overrides=tuple(arguments.words),
        tracking=tracking(plan.config),
    )


def _with_data(config: RunConfig, data: Mapping[Key, Dataset]) -> RunConfig:
    """Return a run's configuration with its epochs as steps; a skipped run may have no data."""
    there = data.get(key(config.fields))
    return with_data(config, there.train_tokens, there.vocab_size) if there else config


def _several(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _texts(plan: Plan) -> dict[str, RunText]:
    """Return the configuration of each run as text."""
    texts = {}
    for run in plan.matrix.runs:
        settle(plan.tree, plan.base, run)
        values = plan.tree.values()
        asked = {plan.tree.axis_of(plan.tree.kconf.syms[item.name]) for item in plan.base}
        asked |= {point.axis for point in run.points}
        texts[run.name] = RunText(
            config=plan.tree.config_text(),
            minimal=plan.tree.minimal_text(),
            values=values,
            asked=tuple(sorted(asked & values.keys())),
        )
    return texts


def _skipped(plan: Plan, configs: dict[str, RunConfig]) -> dict[str, str]:
    """Return the runs that cannot run here, with their reason; refuse the matrix where none can."""
    there = len(plan.gpus)
    skipped = {name: why for name, config in configs.items() if (why := too_few_gpus(config.fields, there))}
    if len(skipped) == len(configs):
        most = min(config.ranks for config in configs.values())
        raise LaunchError(
            f"no run of this matrix can run here: the smallest needs {most} GPU{'s' if most > 1 else ''}, "
            f"and {there or 'no'} NVIDIA GPU{' is' if there == 1 else 's are'} usable",
            fix="run it on a machine with GPUs, or try it on the CPU: make defconfig-gpt2-cpu-quick",
        )
    return skipped


def _axes_line(plan: Plan) -> str:
    axes = " x ".join(f"{axis.label}({len(axis.points)})" for axis in plan.matrix.axes) or "(none)"
    cut = sum(cut.count for cut in plan.matrix.cuts)
    cells, runs, collapsed = plan.matrix.cells, len(plan.matrix.runs), plan.matrix.collapsed
    return f"axes {axes} = {_several(cells, 'cell')}: {_several(runs, 'run')}, {collapsed} collapsed, {cut} cut"


def _run_line(run: Run, config: RunConfig) -> str:
    known = forecast(config.shape, config.fields, tokens=config.tokens)
    axes = [f"{label}={text}" for label, text in run.axes]
    axes += [f"{point.axis.removeprefix('GPT2_').lower()}={point.text}" for point in run.points if not point.swept]
    memory = f", memory over {known.state_mib:,.0f} MiB" if known.state_mib is not None else ""
    where = "cpu" if config.device == "cpu" else "gpu"
    return (
        f"run {run.run_id} {run.name}  {' '.join(axes)}  {config.ranks} {where}{'s' if config.ranks > 1 else ''}, "
        f"global batch {config.global_batch} sequences, {_length(config)}, {_count(known.params)} parameters"
        f"{f', {_count(known.flops)}FLOP' if known.flops is not None else ''}{memory}"
    )


def _length(config: RunConfig) -> str:
    """Say how long a run is, and what decides it where that is not the number of steps."""
    if config.tokens is None:
        return f"{config.fields['max_epochs']:g} epochs of its data"
    by = "" if config.bound == "max_iters" else f" in {config.steps} steps ({config.bound.upper()})"
    time = config.fields["max_time"], config.fields["max_cost"]
    most = [f"{text} at the most" for text in (time[0] and f"{time[0]:g} s", time[1] and f"${time[1]:g}") if text]
    return ", ".join([f"{_count(config.tokens)} tokens{by}", *most])


def _count(number: float) -> str:
    """A number with three digits and a letter for its thousands."""
    for letter in ("", "k", "M", "G", "T", "P", "E"):
        if number < 999.5:  # what rounds to 1000 is written with the next letter
            return f"{number:.3g}{letter}"
        number /= 1000
    return f"{number:.3g}Z"
