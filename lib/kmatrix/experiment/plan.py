"""A configuration and NAME=value assignments -> the runs of a matrix, each with its configuration and forecast."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

from kmatrix.config import PREFIX, Config, RunConfig, read, with_vocabulary
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.experiment.cluster.resolve import resolve
from kmatrix.experiment.configure import config_layers, merge_layers, on_this_machine, redacted_comments, text_of_config
from kmatrix.experiment.inputs.benchmarks import missing_benchmarks
from kmatrix.experiment.inputs.data import forecast_data, with_known_vocabulary
from kmatrix.experiment.inputs.initial import BY_DATA, InitialWeights, check_fit, read_initial
from kmatrix.experiment.inputs.initial import SYMBOL as INIT_FROM
from kmatrix.experiment.inputs.initial import asked as asked_checkpoints
from kmatrix.experiment.machine import Machine, RunKind
from kmatrix.kconfig.assignments import load_config, merge
from kmatrix.kconfig.tree import NOT_AN_AXIS, Assignment, Tree
from kmatrix.matrix.axes import overrides, plan_axes, single
from kmatrix.matrix.expand import Matrix, Run, expand
from kmatrix.matrix.rules import AUTO, plan_rules, read_rules, with_seeds
from kmatrix.plan.feasibility import GpuModel
from kmatrix.plan.risk import Risk
from kmatrix.records.decode import replaced
from kmatrix.records.paths import below_root
from kmatrix.records.runs import VerdictRules
from kmatrix.records.train_config import TrainConfig
from kmatrix.text import first_names, plural

EQUAL = "MATRIX_EQUAL"
EQUAL_BY = {"steps": "the same MAX_ITERS for all", "tokens": "MAX_TOKENS=<n> MAX_ITERS=0", "time": "MAX_TIME=<time>"}
# Fields that no forecast, check or warning reads: they affect neither memory nor time, nor which code runs.
NUMBERS = frozenset(
    {
        *("seed", "learning_rate", "min_lr", "embedding_lr", "head_lr", "scalar_lr", "muon_adamw_lr", "weight_decay"),
        *("beta1", "beta2", "epsilon", "grad_clip", "spam_theta", "adafactor_beta2_decay", "adafactor_clip"),
        *("target_sparsity", "wsd_decay_fraction"),
    }
)
shape_of = attrgetter(*(name for name in TrainConfig.names() if name not in NUMBERS))  # equal: runs of one kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a plan."""

    run: Run
    kind: RunKind
    config: RunConfig  # with the vocabulary of its dataset, if that is prepared

    @property
    def name(self) -> str:
        return self.run.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An expanded matrix with everything resolved that depends on this machine. Nothing is written yet."""

    tree: Tree
    base: tuple[Assignment, ...]  # the lines that hold in every run
    matrix: Matrix
    runs: tuple[PlannedRun, ...]
    kinds: tuple[RunKind, ...]  # of the runs, each once
    config: Config
    machine: Machine  # that executes the runs
    notes: tuple[str, ...]  # about idle lines of the configuration and unusable GPUs
    data_notes: tuple[str, ...]
    warnings: tuple[str, ...]  # of the runs, without repetitions
    data_warnings: tuple[str, ...]
    equal_by: str  # MATRIX_EQUAL: what must be equal in all runs
    equal: str  # that value as text, "" if nothing must be equal
    overrides: tuple[str, ...]  # NAME=value, as given
    config_text: str  # the .config that the matrix is made from
    initial: Mapping[str, InitialWeights]  # by the text of INIT_FROM
    verdict: VerdictRules = field(default_factory=VerdictRules)  # how the losses will be compared

    @property
    def data_dir(self) -> Path:
        return below_root(self.config.data_dir)

    @property
    def neutral(self) -> frozenset[str]:
        """The trainer's fields that cannot change a result."""
        return frozenset(name.removeprefix(PREFIX).lower() for name in self.tree.neutral)

    @property
    def configs(self) -> dict[str, RunConfig]:
        """The configurations by run name."""
        return {planned.name: planned.config for planned in self.runs}


def make_plan(
    config: Path,
    assignments: Mapping[str, str],
    *,
    gpus: str = "",
    one: bool = False,
    options: Collection[str] = (),
    machine: Path | None = None,
    device: GpuModel | None = None,
) -> Plan:
    """Read a .config, apply assignments to it, resolve devices, and expand the matrix.

    gpus: indices or UUIDs of the GPUs that may be used, all by default.
    one: a matrix of one run; axes in `assignments` are refused, and those of .config are ignored, but values coupled
    to that run still apply.  options: other names that the command takes, for suggestions.
    machine: the .config whose settings of the machine replace those of `config`, which is that of a run.
    device: the GPU model to plan for instead of the GPUs of this machine.
    """
    tree = Tree.parse()
    asked = overrides(tree, assignments, options)
    base, text = load_config(tree, config), redacted_comments(config.read_text(encoding="utf-8"))
    if machine is not None:
        base = on_this_machine(tree, base, machine)
        text = text_of_config(tree, base)
    if one:
        base = _without_matrix(base, asked)
    words = tuple(f"{name}={text}" for name, text in assignments.items())
    return _plan(tree, base, asked, gpus=gpus, one=one, words=words, text=text, device=device)


def plan_matrix(defconfig: str, *, gpus: str = "", **assignments: object) -> Plan:
    """Plan the matrix of a defconfig with fragments, such as "gpt2-cpu-quick+bf16", without writing a .config.

    gpus: indices or UUIDs of the GPUs that may be used, all by default.  assignments: symbols with or without GPT2_,
    such as MAX_ITERS=10; a list is an axis: OPTIMIZER=["adamw", "muon"].
    """
    tree = Tree.parse()
    base = merge_layers(tree, config_layers(defconfig))
    text = text_of_config(tree, base)
    texts = {name: _text(value) for name, value in assignments.items()}
    words = tuple(f"{name}={value}" for name, value in texts.items())
    return _plan(tree, base, overrides(tree, texts), gpus=gpus, one=False, words=words, text=text)


def _text(value: object) -> str:
    """Return a Python value as the command line spells it: y and n for bools, commas between the values of an axis."""
    if isinstance(value, bool):
        return "y" if value else "n"
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return str(value)


def _plan(
    tree: Tree,
    base: list[Assignment],
    asked: Mapping[str, Sequence[Assignment]],
    *,
    gpus: str,
    one: bool,
    words: tuple[str, ...],
    text: str,
    device: GpuModel | None = None,
) -> Plan:
    """Return the plan of a configuration. asked: assignments by axis.  words, text: of Plan."""
    base, _ = merge(tree, base, single(asked))
    axes = plan_axes(tree, base, asked)
    rules = read_rules(tree, base)
    if one:  # lines that only other runs of the matrix use are noted, not refused
        axes = replace(axes, narrowed=True)
        rules = replaced(rules, seeds_auto=False, seeds=())
    axes = with_seeds(tree, axes, rules)
    # Resolve the device and the GPU count where the runs execute, then expand: excluded cells depend on both.
    there = resolve(tree, base, axes, gpus)
    base, axes, nodes = there.base, there.axes, there.nodes
    initial = read_initial(asked_checkpoints(base, axes))
    tree.contents[INIT_FROM] = {"none": "", **{text: weights.sha256 for text, weights in initial.items()}}
    matrix = expand(tree, base, axes)
    values = matrix.runs[0].values
    control = read(tree.typed_values(values))  # these settings are equal in all runs
    data_dir = below_root(control.data_dir)
    machine = Machine(gpus=there.gpus, nodes=nodes, asked=device, results_dir=below_root(control.results_dir))
    runs, kinds = _planned_runs(matrix.runs, data_dir, machine)
    if alone := {name: kind.config for name, kind in kinds.items() if not kind.config.bound}:
        raise machine.budget_alone(alone)
    # A single run has nothing to compare.
    verdict = rules if one else plan_rules(tree, rules, base, matrix.runs, control.engine)
    warned = [text for kind in kinds.values() for text in kind.warnings]
    warned = [nodes.warning, *warned] if nodes and nodes.warning else warned
    trains = {name: kind.config.train for name, kind in kinds.items()}
    if initial:
        check_fit(initial, trains, prepared=False)
    data_notes, data_warnings = forecast_data(data_dir, [*trains.values()])
    missing_benchmarks(trains.values(), data_dir)
    # A single run has nothing to be equal to.
    equal_by = "any" if one else next((item.value for item in base if item.name == EQUAL), "any")
    return Plan(
        tree=tree,
        base=tuple(base),
        matrix=matrix,
        runs=runs,
        kinds=tuple(kinds.values()),
        config=control,
        machine=machine,
        notes=(*matrix.notes, *there.notes),
        data_notes=tuple(data_notes),
        warnings=tuple(dict.fromkeys(warned)),
        data_warnings=tuple(data_warnings),
        equal_by=equal_by,
        equal=equal_budget(equal_by, {name: kind.config for name, kind in kinds.items()}),
        overrides=words,
        config_text=text,
        initial=initial,
        verdict=verdict,
    )


def _planned_runs(
    runs: Sequence[Run], data_dir: Path, machine: Machine
) -> tuple[tuple[PlannedRun, ...], dict[str, RunKind]]:
    """Return the planned runs, and their kinds by the name of the first run of each."""
    found: dict[tuple[object, ...], RunKind] = {}
    kinds: dict[str, RunKind] = {}
    planned = []
    for run in runs:
        shape = shape_of(run.config.train)
        kind = found.get(shape)
        if kind is None:
            config = run.config
            config = with_known_vocabulary(config, data_dir) if config.train.tokenizer in BY_DATA else config
            kind = found[shape] = kinds[run.name] = machine.kind(config)
        config = with_vocabulary(run.config, kind.config.train.vocab_size)
        planned.append(PlannedRun(run=run, kind=kind, config=config))
    return tuple(planned), kinds


def refuse_risks(plan: Plan, *, estimates: bool = True) -> list[str]:
    """Raise LaunchError if a run is impossible; return a warning for each accepted estimate.

    estimates: refuse estimates too, without ALLOW_RISK=y.
    """
    accepted: dict[Risk, list[str]] = {}
    refused: dict[Risk, list[str]] = {}
    for planned in plan.runs:
        for risk in planned.kind.risks:
            is_accepted = not risk.certain and (plan.config.allow_risk or not estimates)
            (accepted if is_accepted else refused).setdefault(risk, []).append(planned.name)
    if refused:
        raise _impossible(plan, refused)
    why = "ALLOW_RISK=y" if plan.config.allow_risk else "impossible on this machine"
    return [f"{why}: {first_names(names)}: {risk.what}: {risk.fix}" for risk, names in accepted.items()]


def _impossible(plan: Plan, refused: Mapping[Risk, Sequence[str]]) -> LaunchError:
    """Return the error for impossible runs: the first reason with its fix, and the others."""
    (risk, names), *others = refused.items()
    count = len({name for group in refused.values() for name in group})
    which = first_names(names) if count < len(plan.runs) else "every run" if len(plan.runs) > 1 else names[0]
    fix = risk.fix
    if not risk.certain:
        fix += "; this is an estimate: ALLOW_RISK=y starts it anyway"
    return LaunchError(
        f"impossible: {which}: {risk.what}",
        why="; ".join(f"{first_names(more)}: {other.what}: {other.fix}" for other, more in others),
        hint=fix,
    )


def no_gpus(plan: Plan) -> LaunchError:
    """Return the error for a matrix of which no run has enough GPUs here."""
    least = min(plan.kinds, key=lambda kind: kind.config.train.num_gpus)
    there = len(plan.machine.gpus)
    return LaunchError(
        "no run of this matrix can run on this machine: "
        f"the smallest needs {plural(least.config.train.num_gpus, 'GPU')}, "
        f"and {there or 'no'} NVIDIA GPU{' is' if there == 1 else 's are'} usable",
        hint=gpu_fix(plan, least),
    )


def gpu_fix(plan: Plan, kind: RunKind) -> str:
    """Return the arguments with which runs that need more GPUs than there are can run on this machine."""
    there = len(plan.machine.gpus)
    if not there:
        return "run it on a machine with GPUs, or try it on the CPU: make defconfig-gpt2-cpu-quick"
    train = kind.config.train
    # With the same micro-batch, the global batch must stay a multiple of micro-batch x ranks.
    fits = [count for count in range(there, 0, -1) if train.global_batch % (train.batch_size * count) == 0]
    every = ", or NUM_GPUS=0 for all usable GPUs" if there in fits else ""
    return f"pass NUM_GPUS={fits[0] if fits else 1}{every}"


def _without_matrix(base: list[Assignment], asked: Mapping[str, Sequence[Assignment]]) -> list[Assignment]:
    several = [
        values[0].where.removeprefix("command line: ")
        for name, values in asked.items()
        if len(values) > 1 or (name, values[0].value) == (AUTO, "y")
    ]
    if several:
        raise ConfigError(
            f"train runs one configuration: {', '.join(several)}", hint="use make test-matrix for a matrix"
        )
    return [item for item in base if not item.name.startswith("MATRIX_") or item.name in NOT_AN_AXIS]


def equal_budget(what: str, runs: Mapping[str, RunConfig]) -> str:
    """Return the budget that all runs share, such as "steps: 500", or "" if none is required. runs: by name.

    what: MATRIX_EQUAL.  Raises ConfigError if the runs differ.
    """
    if what == "any" or not runs:
        return ""
    # Equal plans are not equal runs if something else can end one of them first.
    limits = {"max_time", "max_cost", "early_stopping_patience"} - {f"max_{what}"}
    if early := {field for field in limits for run in runs.values() if getattr(run.train, field)}:
        name = min(early).upper()
        raise ConfigError(
            f"MATRIX_EQUAL={what} conflicts with {name}",
            why=f"{name} can end a run early",
            hint=f"remove {name}, or pass MATRIX_EQUAL=any",
        )
    measured = {"steps": "train.max_iters", "tokens": "tokens", "time": "train.max_time"}[what]
    values = {name: attrgetter(measured)(run) or 0 for name, run in runs.items()}
    least, most = (pick(values, key=values.__getitem__) for pick in (min, max))
    # A run ends after a whole step, so equal budgets in tokens may differ by one step.
    slack = max(run.train.tokens_per_step for run in runs.values()) if what == "tokens" else 0
    if not values[least] or values[most] - values[least] > slack:
        raise ConfigError(
            f"MATRIX_EQUAL={what} does not hold",
            why=f"{least} has {values[least]:,.0f} and {most} has {values[most]:,.0f}",
            hint=f"pass {EQUAL_BY[what]}",
        )
    unit = {"steps": "steps", "tokens": "tokens, up to one step", "time": "s at most"}[what]
    return f"{what}: {values[most]:,.0f} {unit}"
