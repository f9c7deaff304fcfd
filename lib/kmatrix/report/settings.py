"""The settings in which configurations differ, and those that were tuned for some optimizers only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kmatrix.records.decode import Scalar
from kmatrix.records.runs import RunFile
from kmatrix.report.reproduction import PATH_FIELDS
from kmatrix.report.results import Configuration, Setting

DERIVED_FROM = {"warmup_steps": "warmup_fraction"}  # settings computed from another symbol
# Fields that are not settings: the seed, of which a configuration has several, paths, and what follows from the data
# or from the machine.
NOT_SETTINGS = PATH_FIELDS | {"seed", "cpu_threads", "data_shards", "data_sha256", "init_sha256", "vocab_size"}
TUNED = ("learning_rate", "weight_decay", "beta1", "beta2")  # settings that papers tune per optimizer

Fields = Mapping[str, Scalar]


def differing(
    configurations: Sequence[Configuration], runs: Mapping[str, RunFile], fields: Mapping[str, Fields]
) -> tuple[Setting, ...]:
    """Return the settings in which configurations differ, those that somebody chose first: the rest follows from them.

    configurations: the reference first.  fields: training fields by run.
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


def tuning_warnings(runs: Mapping[str, RunFile], fields: Mapping[str, Fields]) -> Iterator[str]:
    """Yield a warning per setting that is tuned for some optimizers only: that alone can decide a comparison."""
    optimizers = dict.fromkeys(fields[run].get("optimizer") for run in runs)
    for name in TUNED:
        swept, asked, default = list[str](), list[str](), list[str]()
        for optimizer in filter(None, optimizers):
            own = [run for run in runs if fields[run].get("optimizer") == optimizer]
            values = {fields[run].get(name) for run in own} - {None}
            if any(_has_chosen(runs[run], name) for run in own):
                (swept if len(values) > 1 else asked).append(str(optimizer))
            elif values:
                default.append(str(optimizer))
        if swept and (rest := asked + default):
            yield (
                f"{name} was swept for {', '.join(swept)} but not for {', '.join(rest)}: "
                "a tuned optimizer is compared with an untuned one"
            )
        if name == "learning_rate" and asked and default:
            yield (
                f"{name} was set for {', '.join(asked)} but is the default for {', '.join(default)}: "
                "the comparison is fair only if all values suit this model"
            )


def _has_chosen(run: RunFile, name: str) -> bool:
    """Return whether the user set this field."""
    asked = {symbol.removeprefix("GPT2_").lower() for symbol in run.asked}
    return name in asked or DERIVED_FROM.get(name) in asked
