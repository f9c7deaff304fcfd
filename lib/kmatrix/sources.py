"""The sources of the trainer: which files they are, and one hash of all."""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = ("py", "toml")
# The modules and packages of kmatrix that the trainer imports.
SHARED = (
    *("__init__.py", "clock.py", "depth_rule.py", "errors.py", "forms.py", "hosts.py", "locks.py", "output.py"),
    *("rules.py", "shapes.py", "text.py", "records", "redaction"),
)


def trainer_files(root: Path) -> dict[str, str]:
    """Return the SHA-256 of each source of the trainer: gpt2/, and what it imports of kmatrix."""
    return _hashes(root, [root / "gpt2", *(root / "lib" / "kmatrix" / name for name in SHARED)])


def sha256_of_copy(folder: Path) -> str:
    """Return the hash of the sources in `code/` of a matrix, which has nothing else: that of where they came from."""
    return whole(_hashes(folder, [folder]))


def _hashes(root: Path, places: list[Path]) -> dict[str, str]:
    """Return the SHA-256 of the sources in some files and folders."""
    paths = [path for place in places if place.is_file() for path in [place]]
    paths += [path for place in places for suffix in SUFFIXES for path in place.rglob(f"*.{suffix}")]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)}


def whole(files: dict[str, str]) -> str:
    """Return one SHA-256 of all files. files: name -> SHA-256."""
    return hashlib.sha256("".join(f"{name}\0{digest}\n" for name, digest in files.items()).encode()).hexdigest()
