"""The section of the page on the configuration of each run, as a difference to the leader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kmatrix.records.decode import Scalar
from kmatrix.report.numbers import MatrixNumbers, RunNumbers
from kmatrix.report.page.parts.groups import PageGroup
from kmatrix.report.page.parts.text import plain, shown
from kmatrix.report.reproduction import PATH_FIELDS

# Fields of "train" that are not settings: the seed, of which a configuration has several, paths, and what follows
# from the data or from the machine.
NOT_SETTINGS = PATH_FIELDS | {"seed", "cpu_threads", "data_shards", "data_sha256", "init_sha256", "vocab_size"}
MOST_COLUMNS = 5  # configurations next to the leader; more of them get a list instead of columns
MOST_LISTED = 200  # configurations in that list
MOST_VALUES = 8  # of a setting
VALUE = 60  # characters of a value


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingCell:
    """A setting of one configuration."""

    value: Scalar | None  # None: it does not apply
    is_default: bool  # nobody chose the value
    differs: bool = False  # from the leader


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingRow:
    """A setting in which configurations differ."""

    name: str
    leader: SettingCell
    others: tuple[SettingCell, ...]  # in the order of SettingsSection.others
    common: tuple[tuple[Scalar | None, int], ...]  # the most common values of the others, and how many have each
    hidden: int  # further values


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationDiff:
    """The settings in which one configuration differs from the leader: name, its value, the leader's value."""

    group: PageGroup
    changes: tuple[tuple[str, Scalar | None, Scalar | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsSection:
    """The settings in which configurations differ from the leader."""

    leader: PageGroup
    is_ranked: bool  # otherwise the first configuration takes the place of the leader
    others: tuple[PageGroup, ...]
    rows: tuple[SettingRow, ...]
    same: int  # settings that are equal in all configurations
    diffs: tuple[ConfigurationDiff, ...]  # of the others, if they are too many for columns

    @property
    def in_columns(self) -> bool:
        return not self.diffs

    @property
    def hidden(self) -> int:
        """The number of configurations that the list leaves out."""
        return len(self.others) - len(self.diffs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDiffs:
    """The settings in which each run differs from the first run of the leader.

    Names and values are stored once: sweeps have 1,000 runs with the same few.
    """

    reference: str  # name of that run; "" if no run has a configuration
    names: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    # of each run, None if its configuration is unknown: (name, value there, value here) as indices, in one sequence
    runs: tuple[tuple[int, ...] | None, ...] = field(default=(), repr=False)


def settings(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> SettingsSection | None:
    """Return the section, or None without two configurations that differ."""
    del numbers
    known = [(group, run) for group in groups if (run := _configured(group)) is not None]
    if len(known) < 2:
        return None
    (leader, reference), others = known[0], known[1:]
    names = _setting_names([run for _, run in known])
    rows = [row for name in names if (row := _row(name, reference, [run for _, run in others])) is not None]
    if not rows:
        return None
    # What somebody chose first: the rest follows from it.
    rows.sort(key=lambda row: not any(run.is_explicit(row.name) for _, run in known))
    listed = others[:MOST_LISTED] if len(others) > MOST_COLUMNS else ()
    return SettingsSection(
        leader=leader,
        is_ranked=leader.rank is not None,
        others=tuple(group for group, _ in others),
        rows=tuple(rows),
        same=len(names) - len(rows),
        diffs=tuple(
            ConfigurationDiff(group=group, changes=_changes(reference, run, [row.name for row in rows]))
            for group, run in listed
        ),
    )


def run_diffs(numbers: MatrixNumbers, groups: Sequence[PageGroup]) -> RunDiffs:
    """Return what each run's own configuration changes, against the first run of the leader."""
    reference = next((run for group in groups if (run := _configured(group)) is not None), None)
    if reference is None:
        return RunDiffs(reference="")
    names: dict[str, int] = {}
    values: dict[str, int] = {}
    found: list[tuple[int, ...] | None] = []
    for run in numbers.runs:
        changes = _changes(reference, run, _setting_names([reference, run])) if run.configuration else ()
        indices = [
            (names.setdefault(name, len(names)), *(values.setdefault(_text(v), len(values)) for v in (there, here)))
            for name, here, there in changes
        ]
        found.append(tuple(index for change in indices for index in change) if run.configuration else None)
    return RunDiffs(reference=reference.name, names=tuple(names), values=tuple(values), runs=tuple(found))


def _configured(group: PageGroup) -> RunNumbers | None:
    """Return a run of a configuration whose settings are known, one that counts if there is one."""
    return next((run for run in (*group.counted, *group.runs) if run.configuration), None)


def _setting_names(runs: Sequence[RunNumbers]) -> list[str]:
    """Return the names of all settings, in the order of run.json."""
    return [
        name for name in dict.fromkeys(name for run in runs for name in run.configuration) if name not in NOT_SETTINGS
    ]


def _row(name: str, reference: RunNumbers, others: Sequence[RunNumbers]) -> SettingRow | None:
    """Return the row of a setting, or None if it is the same everywhere."""
    leader = _cell(name, reference, reference)
    cells = [_cell(name, run, reference) for run in others]
    if not any(cell.differs for cell in cells):
        return None
    counts = Counter(cell.value for cell in cells).most_common()
    return SettingRow(
        name=name,
        leader=leader,
        others=tuple(cells) if len(cells) <= MOST_COLUMNS else (),
        common=tuple(counts[:MOST_VALUES]),
        hidden=len(counts[MOST_VALUES:]),
    )


def _cell(name: str, run: RunNumbers, reference: RunNumbers) -> SettingCell:
    value = run.configuration.get(name)
    return SettingCell(
        value=value,
        is_default=value is not None and not run.is_explicit(name),
        differs=value != reference.configuration.get(name),
    )


def _changes(
    reference: RunNumbers, run: RunNumbers, names: Sequence[str]
) -> tuple[tuple[str, Scalar | None, Scalar | None], ...]:
    """Return the settings that differ: name, value of the run, value of the reference."""
    mine, theirs = run.configuration, reference.configuration
    return tuple((name, mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name))


def _text(value: Scalar | None) -> str:
    return shown(plain(value), VALUE)
