"""Find kmatrix and the packages of the checkout's environment, whatever Python of its version runs a script."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"  # as `make setup` creates it


def find_packages(*packages, imported=False):
    """Make kmatrix and these packages importable, or end with one line that says what to run.

    imported: the caller is imported by another program, not run as a script. Raises ImportError then.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of numpy start slowly, and reports need none
    sys.path.insert(0, str(ROOT / "lib"))  # without an installation of kmatrix
    if missing := _missing(packages):
        sys.path.append(str(VENV / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"))
    if not missing or not _missing(packages):
        return
    text = f"{sys.executable} lacks {', '.join(missing)}: run `make setup`, then use {VENV / 'bin' / 'python'}"
    if imported:
        raise ImportError(text)
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


def _missing(packages):
    """Return the names of what this Python lacks."""
    if sys.version_info < (3, 11):  # noqa: UP036 (users start a script with any Python)
        return ["Python 3.11"]
    return [name for name in packages if importlib.util.find_spec(name) is None]
