"""A configuration and NAME=value assignments -> the runs of a matrix, each with its configuration and forecast."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path

from kmatrix.config import PREFIX, Config, RunConfig, read, with_vocabulary
from kmatrix.errors import ConfigError, LaunchError
from kmatrix.experiment.cluster.resolve import resolve
from kmatrix.experiment.configure import config_layers, merge_layers, on_this_machine
from kmatrix.experiment.inputs.data import prepared
from kmatrix.experiment.inputs.initial import BY_DATA, InitialWeights, check_fit, read_initial
from kmatrix.experiment.inputs.initial import SYMBOL as INIT_FROM
from kmatrix.experiment.inputs.initial import asked as asked_checkpoints
from kmatrix.experiment.machine import Machine, RunKind
from kmatrix.kconfig.assignments import load_config, merge
from kmatrix.kconfig.tree import Assignment, Tree
from kmatrix.matrix.axes import COUPLED, EXCLUDE, overrides, plan_axes, single
from kmatrix.matrix.expand import Matrix, Run, expand
from kmatrix.matrix.rules import AUTO, plan_rules, with_rules
from kmatrix.plan.feasibility import GpuModel
from kmatrix.plan.risk import Risk
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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """An expanded matrix with everything resolved that depends on this machine. Nothing is written yet."""

    tree: Tree
    lines: tuple[Assignment, ...]  # of the configuration, without the command line
    base: tuple[Assignment, ...]  # the lines that hold in every run
    matrix: Matrix  # each run with the vocabulary of its data, if that is known
    config: Config
    machine: Machine  # that executes the runs
    notes: tuple[str, ...]  # about idle lines of the configuration and unusable GPUs
    overrides: tuple[str, ...]  # NAME=value, as given
    initial: Mapping[str, InitialWeights]  # by the text of INIT_FROM
    verdict: VerdictRules  # how the losses will be compared
    equal_by: str  # MATRIX_EQUAL: what must be equal in all runs
    equal: str  # that value as text, "" if nothing must be equal

    @property
    def runs(self) -> tuple[Run, ...]:
        return self.matrix.runs

    @cached_property
    def configs(self) -> dict[str, RunConfig]:
        """The configurations by run name."""
        return {run.name: run.config for run in self.runs}

    @property
    def data_dir(self) -> Path:
        return below_root(self.config.data_dir)

    @property
    def neutral(self) -> frozenset[str]:
        """The trainer's fields that cannot change a result."""
        return frozenset(name.removeprefix(PREFIX).lower() for name in self.tree.neutral)

    @cached_property
    def kinds(self) -> dict[RunKind, list[str]]:
        """The kinds of runs, with their forecasts -> the names of the runs of each."""
        found: dict[tuple[object, ...], list[str]] = {}
        for name, config in self.configs.items():
            found.setdefault(shape_of(config.train), []).append(name)
        return {self.machine.kind(self.configs[names[0]]): names for names in found.values()}

    @cached_property
    def skipped(self) -> dict[str, str]:
        """The runs for which this machine has too few GPUs, with the reason."""
        return {name: kind.lacks for kind, names in self.kinds.items() if kind.lacks for name in names}

    @property
    def warnings(self) -> list[str]:
        """Sentences about legal settings that are probably mistakes, and about nodes that could not be asked for."""
        found: dict[str, list[str]] = {}
        for kind, names in self.kinds.items():
            for text in kind.warnings:
                found.setdefault(text, []).extend(names)
        of_runs = [t if len(n) == len(self.configs) else f"{first_names(n)}: {t}" for t, n in found.items()]
        return [*filter(None, [self.machine.nodes.warning if self.machine.nodes else ""]), *of_runs]


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
    lines = load_config(tree, config)
    if machine is not None:
        lines = on_this_machine(tree, lines, machine)
    return _plan(tree, lines, assignments, gpus=gpus, one=one, options=options, device=device)


def plan_matrix(defconfig: str, *, gpus: str = "", **assignments: object) -> Plan:
    """Plan the matrix of a defconfig with fragments, such as "gpt2-cpu-quick+bf16", without writing a .config.

    gpus: indices or UUIDs of the GPUs that may be used, all by default.  assignments: symbols with or without GPT2_,
    such as MAX_ITERS=10; a list is an axis: OPTIMIZER=["adamw", "muon"].
    """
    tree = Tree.parse()
    lines = merge_layers(tree, config_layers(defconfig))
    return _plan(tree, lines, {name: _text(value) for name, value in assignments.items()}, gpus=gpus)


def _text(value: object) -> str:
    """Return a Python value as the command line spells it: y and n for bools, commas between the values of an axis."""
    if isinstance(value, bool):
        return "y" if value else "n"
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    return str(value)


def _plan(
    tree: Tree,
    lines: list[Assignment],
    assignments: Mapping[str, str],
    *,
    gpus: str,
    one: bool = False,
    options: Collection[str] = (),
    device: GpuModel | None = None,
) -> Plan:
    """Return the plan of the lines of a configuration. The other arguments are those of `make_plan`."""
    asked = overrides(tree, assignments, options)
    base, _ = merge(tree, _without_matrix(lines, asked) if one else lines, single(asked))
    # Lines that only other runs of the matrix use are noted if there is one run, not refused.
    axes, rules = with_rules(tree, base, plan_axes(tree, base, asked, one=one))
    # Resolve the device and the GPU count where the runs execute, then expand: excluded cells depend on both.
    there = resolve(tree, base, axes, gpus)
    base, axes = there.base, there.axes
    initial = read_initial(checkpoints) if (checkpoints := asked_checkpoints(base, axes)) else {}
    tree.contents[INIT_FROM] = {"none": "", **{text: weights.sha256 for text, weights in initial.items()}}
    matrix = expand(tree, base, axes)
    control = read(tree.typed_values(matrix.runs[0].values))  # these settings are equal in all runs
    data_dir, equal_by = below_root(control.data_dir), next((one.value for one in base if one.name == EQUAL), "any")
    matrix = replace(matrix, runs=tuple(_with_vocabulary(run, data_dir) for run in matrix.runs))
    configs = {run.name: run.config for run in matrix.runs}
    machine = Machine(gpus=there.gpus, nodes=there.nodes, asked=device, results_dir=below_root(control.results_dir))
    if alone := next((run for run in matrix.runs if not run.config.bound), None):
        raise machine.budget_alone(alone.name, alone.config)
    if initial:
        check_fit(initial, {name: config.train for name, config in configs.items()}, prepared=False)
    return Plan(
        tree=tree,
        lines=tuple(lines),
        base=tuple(base),
        matrix=matrix,
        config=control,
        machine=machine,
        notes=(*matrix.notes, *there.notes),
        overrides=tuple(f"{name}={text}" for name, text in assignments.items()),
        initial=initial,
        # A single run has nothing to compare.
        verdict=rules if one else plan_rules(tree, rules, base, matrix.runs, control.engine),
        equal_by=equal_by,
        equal=equal_budget(equal_by, configs),
    )


def _with_vocabulary(run: Run, data_dir: Path) -> Run:
    """Return a run with the vocabulary of its data, if they decide it and are prepared."""
    train = run.config.train
    known = prepared(data_dir, train) if train.tokenizer in BY_DATA else None
    return replace(run, config=with_vocabulary(run.config, known.vocab_size)) if known else run


def refuse_risks(plan: Plan) -> list[str]:
    """Return a warning for each estimate that ALLOW_RISK=y accepts. Raises LaunchError if a run is impossible."""
    accepted: dict[Risk, list[str]] = {}
    refused: dict[Risk, list[str]] = {}
    for kind, names in plan.kinds.items():
        for risk in kind.risks:
            is_accepted = plan.config.allow_risk and not risk.certain
            (accepted if is_accepted else refused).setdefault(risk, []).extend(names)
    if refused:
        risk, names = next(iter(refused.items()))
        which = first_names(names) if len(names) < len(plan.configs) or len(names) == 1 else "every run"
        estimate = "" if risk.certain else "; this is an estimate: ALLOW_RISK=y starts it anyway"
        raise LaunchError(f"impossible: {which}: {risk.what}", hint=f"{risk.fix}{estimate}")
    return [f"ALLOW_RISK=y: {first_names(names)}: {risk.what}: {risk.fix}" for risk, names in accepted.items()]


def no_gpus(plan: Plan) -> LaunchError:
    """Return the error for a matrix of which no run has enough GPUs here."""
    there = len(plan.machine.gpus)
    train = min((kind.config.train for kind in plan.kinds), key=lambda train: train.num_gpus)
    # With the same micro-batch, the global batch must stay a multiple of micro-batch x ranks.
    fits = [count for count in range(there, 0, -1) if train.global_batch % (train.batch_size * count) == 0]
    return LaunchError(
        "no run of this matrix can run on this machine: "
        f"the smallest needs {plural(train.num_gpus, 'GPU')}, "
        f"and {there or 'no'} NVIDIA GPU{' is' if there == 1 else 's are'} usable",
        hint=f"pass NUM_GPUS={fits[0] if fits else 1}"
        if there
        else "run it on a machine with GPUs, or try it on the CPU: make defconfig-gpt2-cpu-quick",
    )


def _without_matrix(base: list[Assignment], asked: Mapping[str, Sequence[Assignment]]) -> list[Assignment]:
    """Return the lines for one run: no axes, and nothing that is asked of several runs."""
    several = [
        values[0].where.removeprefix("command line: ")
        for name, values in asked.items()
        if len(values) > 1 or (name, values[0].value) == (AUTO, "y")
    ]
    if several:
        raise ConfigError(
            f"train runs one configuration: {', '.join(several)}", hint="use make test-matrix for a matrix"
        )
    return [item for item in base if not item.name.startswith("MATRIX_") or item.name in (COUPLED, EXCLUDE)]


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
