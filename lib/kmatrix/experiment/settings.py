"""Change settings of a matrix that cannot change a result: `make continue NAME=value`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from kmatrix.config import SYMBOLS, environment, read
from kmatrix.errors import ConfigError
from kmatrix.experiment.configure import OnMessage, ignore, merge_lines
from kmatrix.experiment.create import planned
from kmatrix.experiment.make import tracking
from kmatrix.kconfig.assignments import apply_assignments, load_config
from kmatrix.kconfig.tree import Tree
from kmatrix.matrix.axes import overrides, single
from kmatrix.records.checkpoint_dir import check_own_files, recorded
from kmatrix.records.decode import as_json
from kmatrix.records.files import read_json, write_json
from kmatrix.records.matrix import whole
from kmatrix.records.paths import MatrixDir, below_root
from kmatrix.runner.conclude import command_of
from kmatrix.track.available import need_trackers

# What decides how a matrix is made, is read from .config by other commands, or is fixed before its first run.
FIXED = ("MATRIX_", "ENGINE", "RESULTS_DIR", "DATA_DIR", "REUSE", "PREFLIGHT", "ALLOW_RISK", "TARGET_LOSS")
CHECKPOINT_DIR = "CHECKPOINT_DIR"


def change_settings(
    matrix: MatrixDir,
    words: Mapping[str, str],
    staying: Collection[str],
    options: Collection[str] = (),
    on_message: OnMessage = ignore,
) -> None:
    """Write NAME=value into the plan of a matrix: its next attempts are started with it.

    staying: runs that have finished, which keep the values that they were trained with.
    Each NAME=value has to take effect in the configuration that the matrix was made from. Raises ConfigError if it does
    not, and for a symbol that can change a result or is fixed when a matrix is made; then nothing is written.
    """
    if not words:
        return
    tree, record = Tree.parse(), read_json(matrix.matrix_json)
    given = overrides(tree, dict(word.split("=", 1) for word in record["overrides"]))
    base = merge_lines(tree, load_config(tree, matrix.config), single(given))
    before, asked = tree.apply(base), overrides(tree, words, options)
    for axis, values in asked.items():
        if axis not in tree.neutral or axis.startswith(FIXED) or len(values) > 1:
            raise ConfigError(
                values[0].where,
                why=f"only a setting that changes no result can be changed in {matrix.name}",
                hint="RUN='*muon*' selects runs; other values need a new matrix",
            )
    tree.reset()
    apply_assignments(tree, merge_lines(tree, base, single(asked), on_message))
    now = tree.effective()
    typed = tree.typed_values(now)
    config = read(typed)
    need_trackers(config.trackers)
    command_of(config.on_finish)
    place = take_folder(matrix, below_root(config.checkpoint_dir)) if CHECKPOINT_DIR in asked else {}
    # The others are not settings: those of an axis of the configuration are visible in one and not in the other.
    changed = {name: now.get(name) for name in sorted(tree.neutral) if before.get(name) != now.get(name)}
    shared = {"timeout_s": config.run_timeout_s, "tracking": as_json(tracking(config)), "environment": environment(now)}
    train = {field: typed[name] for field, name in SYMBOLS.items() if name in changed}
    change = {**shared, "symbols": changed, "train": train}
    common, runs = whole(record["common"], change), []
    for run in record["runs"]:
        was = whole(record["common"], run)
        runs.append(planned(common, {**was, **shared} if run["name"] in staying else whole(was, change)))
    overridden = [*words_without(tree, record["overrides"], asked), *(f"{name}={text}" for name, text in words.items())]
    write_json(matrix.matrix_json, {**record, **place, "overrides": overridden, "common": common, "runs": runs})


def words_without(tree: Tree, words: Iterable[str], axes: Mapping[str, object]) -> list[str]:
    """Return the NAME=value that set none of these axes, by any name of theirs."""
    return [word for word in words if axes.keys().isdisjoint(overrides(tree, dict([word.split("=", 1)])))]


def take_folder(matrix: MatrixDir, base: Path) -> dict[str, str]:
    """Make a folder for the checkpoints of a matrix below `base`, and return what matrix.json has of it.

    Raises ConfigError if its checkpoints are in the run directories, LaunchError if it belongs to another matrix.
    """
    current = recorded(matrix).checkpoints
    if current is None:
        raise ConfigError(
            f"CHECKPOINT_DIR={base}: the checkpoints of {matrix.name} are in its run directories",
            hint="leave CHECKPOINT_DIR= out; it is set when a matrix is made",
        )
    if (folder := base.expanduser().resolve() / Path(current).name) == Path(current):
        check_own_files(matrix)
    folder.mkdir(parents=True, exist_ok=True)
    return {"checkpoints": str(folder), "owner": str(matrix.path.resolve())}
