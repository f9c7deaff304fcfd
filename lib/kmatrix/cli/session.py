"""What every command that reads a configuration begins with: the tree, the paths, the .config, the overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import kmatrix
from kmatrix.cli.arguments import Arguments
from kmatrix.errors import ConfigError
from kmatrix.kconfig import Assignment, Tree, parse_override, put_in_force, read_assignments
from kmatrix.kconfig.assign import asked, resolve_name
from kmatrix.kconfig.sets import SETS, parse_set
from kmatrix.records import write_bytes, write_text

ROOT = Path(kmatrix.__file__).parents[2]  # the project: Kconfig, defconfigs/, gpt2/


def open_tree(arguments: Arguments) -> Tree:
    """Parse the Kconfig files: the project's, or KCONFIG=."""
    own = arguments.get("KCONFIG")
    if not own:
        return Tree.parse(srctree=ROOT)
    path = Path(own)
    if not path.is_file():
        raise ConfigError(f"KCONFIG={own}: there is no such file")
    return Tree.parse(str(path.resolve()), srctree=ROOT if path.resolve().parent == ROOT else path.resolve().parent)


def config_path(arguments: Arguments) -> Path:
    """Where .config lies: KCONFIG_CONFIG=, else below O=, else in the project's root."""
    if arguments.get("KCONFIG_CONFIG"):
        return Path(arguments.get("KCONFIG_CONFIG"))
    return Path(arguments.get("O")) / ".config" if arguments.get("O") else ROOT / ".config"


def shown(path: Path) -> str:
    """A path as a user would type it here."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def load_config(tree: Tree, path: Path) -> list[Assignment]:
    """Put a .config in force, every line of it, and return the lines that were asked for."""
    if not path.exists():
        raise ConfigError(
            f"there is no {shown(path)}",
            fix="make one: `make defconfig-<name>` (see `make list-defconfigs`) or `make menuconfig`",
        )
    lines = read_assignments(tree, Path(shown(path)))
    put_in_force(tree, lines)
    return asked(tree, path, lines)


def overrides(tree: Tree, arguments: Arguments) -> dict[str, list[Assignment]]:
    """Return the command line's assignments: axis -> one for each value."""
    found: dict[str, list[Assignment]] = {}
    for name, text in arguments.assignments.items():
        for axis, values in _meant(tree, arguments, name, text).items():
            if axis in found:
                raise ConfigError(f"command line: {name}={text}", why=f"{axis} is set twice")
            found[axis] = values
    return found


def _meant(tree: Tree, arguments: Arguments, name: str, text: str) -> dict[str, list[Assignment]]:
    """Return the axes that one NAME=value sets: one, or those of a set."""
    if name in SETS:
        return parse_set(tree, name, text)
    resolve_name(tree, name, tuple(arguments.takes))
    axis, values = parse_override(tree, name, text)
    return {axis: values}


def single(found: Mapping[str, Sequence[Assignment]]) -> list[Assignment]:
    """Return the overrides that hold in every run: those of one value."""
    return [values[0] for values in found.values() if len(values) == 1]


def write_config(path: Path, text: str) -> str:
    """Write a .config and keep the former one beside it. Returns a sentence; equal content is left untouched."""
    try:
        former = path.read_bytes() if path.exists() else None
        if former == text.encode():
            return f"no change to {shown(path)}"
        if former is not None:
            write_bytes(path.with_name(path.name + ".old"), former)
    except OSError as error:
        raise _unwritable(path, error) from None
    write_out(path, text)
    return f"configuration written to {shown(path)}"


def write_out(path: Path, text: str) -> None:
    """Write a file that the user named, whole or not at all."""
    try:
        write_text(path, text)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {shown(path)}", why=error.strerror or str(error), fix="name a file that can be written"
    )


def below_root(text: str) -> Path:
    """Return a folder of the configuration: relative ones start at the project's root."""
    path = Path(text).expanduser()
    return path if path.is_absolute() else ROOT / path
