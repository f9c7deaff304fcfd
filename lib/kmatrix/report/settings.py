"""The settings in which configurations differ, and those that were tuned for some optimizers only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kmatrix.records.runs import RunFile
from kmatrix.records.train_config import TrainConfig
from kmatrix.report.reproduction import PATH_FIELDS
from kmatrix.report.results import Configuration, Setting

DERIVED_FROM = {"warmup_steps": "warmup_fraction"}  # settings computed from another symbol
# Fields that are not settings: the seed, of which a configuration has several, paths, and what follows from the data
# or from the machine.
NOT_SETTINGS = PATH_FIELDS | {"seed", "cpu_threads", "data_shards", "data_sha256", "init_sha256", "vocab_size"}
TUNED = ("learning_rate", "weight_decay", "beta1", "beta2")  # settings that papers tune per optimizer


def differing(configurations: Sequence[Configuration], files: Mapping[str, RunFile]) -> tuple[Setting, ...]:
    """Return the settings in which configurations differ, those that somebody chose first: the rest follows from them.

    configurations: the reference first.  files: of all runs, as planned.
    """
    firsts = {one.name: files[(*one.counted, *one.runs)[0]] for one in configurations}
    found = []
    for name in TrainConfig.names():
        of_each = {one: getattr(run.train, name) for one, run in firsts.items()}
        values = tuple(dict.fromkeys(of_each.values()))
        if len(values) > 1 and name not in NOT_SETTINGS:
            places = {one: values.index(value) for one, value in of_each.items()}
            chosen = any(_has_chosen(run, name) for run in firsts.values())
            found.append(Setting(name=name, values=values, of=places, chosen=chosen))
    return tuple(sorted(found, key=lambda setting: not setting.chosen))


def tuning_warnings(files: Mapping[str, RunFile]) -> Iterator[str]:
    """Yield a warning per setting that is tuned for some optimizers only: that alone can decide a comparison."""
    optimizers: dict[str, list[RunFile]] = {}
    for run in files.values():
        optimizers.setdefault(run.train.optimizer, []).append(run)
    for name in TUNED:
        values = {one: {getattr(run.train, name) for run in runs} - {None} for one, runs in optimizers.items()}
        tuned = [one for one, runs in optimizers.items() if any(_has_chosen(run, name) for run in runs)]
        swept = [one for one in tuned if len(values[one]) > 1]
        rest = [one for one in optimizers if values[one] and one not in swept]
        if swept and rest:
            yield (
                f"{name} was swept for {', '.join(swept)} but not for {', '.join(rest)}: "
                "a tuned optimizer is compared with an untuned one"
            )
        asked, default = [one for one in rest if one in tuned], [one for one in rest if one not in tuned]
        if name == "learning_rate" and asked and default:
            yield (
                f"{name} was set for {', '.join(asked)} but is the default for {', '.join(default)}: "
                "the comparison is fair only if all values suit this model"
            )


def _has_chosen(run: RunFile, name: str) -> bool:
    """Return whether the user set this field."""
    asked = {symbol.removeprefix("GPT2_").lower() for symbol in run.asked}
    return name in asked or DERIVED_FROM.get(name) in asked
