"""The settings of the runs: those of each optimizer with their origin, and those in which configurations differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kmatrix.records.decode import Scalar
from kmatrix.records.runs import RunFile
from kmatrix.report.reproduction import PATH_FIELDS
from kmatrix.report.results import Configuration, OptimizerSetting, OptimizerSettings, Setting

# Fields that configure optimizer and pruning, in the order of the summary. Fields that start with the name of the
# optimizer are appended.
OPTIMIZER_FIELDS = (
    *("learning_rate", "embedding_lr", "head_lr", "scalar_lr", "min_lr", "schedule", "warmup_steps", "weight_decay"),
    *("grad_clip", "beta1", "beta2", "epsilon", "amsgrad", "sgd_momentum", "sgd_nesterov"),
    *("muon_momentum", "muon_nesterov", "muon_ns_steps", "muon_split_qkv", "muon_adjust_lr_fn", "muon_adamw_lr"),
    *("adafactor_beta2_decay", "adafactor_clip", "soap_frequency"),
    *("adamwprune_base", "spam_theta", "spam_interval", "spam_warmup_steps"),
    *("pruning", "target_sparsity", "pruning_warmup", "pruning_ramp_end", "pruning_frequency"),
)
PRUNING_FIELDS = ("pruning", "target_sparsity")  # prefixes
DERIVED_FROM = {"warmup_steps": "warmup_fraction"}  # settings computed from another symbol
DEFAULT, ASKED, SWEPT = "default", "asked for", "swept"  # origins
# Fields that are not settings: the seed, of which a configuration has several, paths, and what follows from the data
# or from the machine.
NOT_SETTINGS = PATH_FIELDS | {"seed", "cpu_threads", "data_shards", "data_sha256", "init_sha256", "vocab_size"}
TUNED = ("learning_rate", "weight_decay", "beta1", "beta2")  # settings that papers tune per optimizer

Fields = Mapping[str, Scalar]


def optimizer_settings(runs: Mapping[str, RunFile], fields: Mapping[str, Fields]) -> tuple[OptimizerSettings, ...]:
    """Return the settings of each optimizer over all of its runs, in their order. fields: training fields by run."""
    members: dict[str, list[str]] = {}
    for name in runs:
        if optimizer := str(fields[name].get("optimizer") or ""):
            members.setdefault(optimizer, []).append(name)
    return tuple(
        OptimizerSettings(
            optimizer=optimizer,
            settings=tuple(_of_optimizer(optimizer, [fields[name] for name in names], [runs[name] for name in names])),
        )
        for optimizer, names in members.items()
    )


def _of_optimizer(optimizer: str, known: Sequence[Fields], runs: Sequence[RunFile]) -> Iterator[OptimizerSetting]:
    own = [name for one in known for name in one if name.startswith(f"{optimizer}_") and name not in OPTIMIZER_FIELDS]
    for name in dict.fromkeys([*OPTIMIZER_FIELDS, *own]):
        having = [one for one in known if one.get(name) is not None and not _is_unused(name, one)]
        if having:
            values = tuple(dict.fromkeys(one[name] for one in having))
            chosen = any(map(_has_chosen, runs, [name] * len(runs)))
            origin = (SWEPT if len(values) > 1 else ASKED) if chosen else DEFAULT
            yield OptimizerSetting(name=name, values=values, origin=origin)


def _is_unused(name: str, fields: Fields) -> bool:
    return name.startswith(PRUNING_FIELDS) and fields.get("pruning") in (None, "none")


def _has_chosen(run: RunFile, name: str) -> bool:
    """Return whether the user set this field."""
    asked = {symbol.removeprefix("GPT2_").lower() for symbol in run.asked}
    return name in asked or DERIVED_FROM.get(name) in asked


def differing(
    configurations: Sequence[Configuration], runs: Mapping[str, RunFile], fields: Mapping[str, Fields]
) -> tuple[Setting, ...]:
    """Return the settings in which configurations differ, those that somebody chose first: the rest follows from them.

    configurations: the reference first.
    """
    firsts = {one.name: (*one.counted, *one.runs)[0] for one in configurations}
    found = []
    for name in dict.fromkeys(name for run in firsts.values() for name in fields[run] if name not in NOT_SETTINGS):
        of_each = {one: fields[run].get(name) for one, run in firsts.items()}
        values = tuple(dict.fromkeys(of_each.values()))
        if len(values) > 1:
            places = {one: values.index(value) for one, value in of_each.items()}
            chosen = any(_has_chosen(runs[run], name) for run in firsts.values())
            found.append(Setting(name=name, values=values, of=places, chosen=chosen))
    return tuple(sorted(found, key=lambda setting: not setting.chosen))


def tuning_warnings(found: Sequence[OptimizerSettings]) -> Iterator[str]:
    """Yield a warning per setting that is tuned for some optimizers only: that alone can decide a comparison."""
    for name in TUNED:
        origins = {one.optimizer: setting.origin for one in found for setting in one.settings if setting.name == name}
        swept = [optimizer for optimizer, origin in origins.items() if origin == SWEPT]
        rest = [optimizer for optimizer, origin in origins.items() if origin != SWEPT]
        if swept and rest:
            yield (
                f"{name} was swept for {', '.join(swept)} but not for {', '.join(rest)}: "
                "a tuned optimizer is compared with an untuned one"
            )
        asked = [optimizer for optimizer, origin in origins.items() if origin == ASKED]
        default = [optimizer for optimizer, origin in origins.items() if origin == DEFAULT]
        if name == "learning_rate" and asked and default:
            yield (
                f"{name} was set for {', '.join(asked)} but is the default for {', '.join(default)}: "
                "the comparison is fair only if all values suit this model"
            )
