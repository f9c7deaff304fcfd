"""Run a script with the checkout's environment if the Python that started it lacks a package."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv" / "bin" / "python"  # as `make setup` creates it
OLDEST = (3, 11)
MARK = "KMATRIX_ENVIRONMENT"  # set for the second start, which must not start a third


def find_packages(*packages, imported=False):
    """Make kmatrix and these packages importable, or end with one line that says what to run.

    imported: the caller is imported by another program, not run as a script.
    """
    # Without an installation of kmatrix.
    sys.path.insert(0, str(ROOT / "lib"))
    missing = _missing(packages)
    if not missing:
        return
    if imported and _add_site_packages() and not _missing(packages):
        return
    command = getattr(sys, "orig_argv", [sys.executable, *sys.argv])
    # An imported module can only start a one-liner again: other programs may have done something before the import.
    may_restart = not imported or "-c" in command
    if may_restart and PYTHON.exists() and not os.environ.get(MARK):
        arguments = _without_options(command) if imported else sys.argv
        os.execve(PYTHON, [str(PYTHON), *arguments], {**os.environ, MARK: "1"})
    text = f"error: {sys.executable} lacks {', '.join(missing)}: run `make setup`, then use {PYTHON}"
    if may_restart:
        sys.exit(_ended(text))
    raise ImportError(text)


def _missing(packages):
    """Return the names of what this Python lacks."""
    if sys.version_info < OLDEST:
        return [f"Python {OLDEST[0]}.{OLDEST[1]}"]
    return [name for name in packages if importlib.util.find_spec(name) is None]


def _add_site_packages():
    """Add the packages of the checkout's environment, if they are for this version of Python."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    folder = ROOT / ".venv" / "lib" / version / "site-packages"
    if folder.is_dir():
        sys.path.append(str(folder))
    return folder.is_dir()


def _without_options(command):
    """Return the arguments of a one-liner from -c on."""
    return command[command.index("-c") :]


def _ended(text):
    print(text, file=sys.stderr)
    return 2
