"""The sources of the trainer: which files they are, and one hash of all."""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = ("py", "toml")


def trainer_files(root: Path) -> dict[str, str]:
    """Return the SHA-256 of each source of the trainer: gpt2/, and the modules of kmatrix that it imports.

    Imports are followed through kmatrix, so that an edit of the control side does not change the trainer's code.
    """
    found: dict[Path, str] = {}
    names: set[str] = set()
    pending = [path for suffix in SUFFIXES for path in (root / "gpt2").rglob(f"*.{suffix}")]
    while pending:
        path = pending.pop()
        if path not in found:
            # Imports are followed in the text: importing the trainer would load torch.
            source = path.read_bytes()
            found[path] = hashlib.sha256(source).hexdigest()
            new = set(_imports(source)) - names
            names |= new
            pending += [known for name in new for known in _module_files(root / "lib", name)]
    return {str(path.relative_to(root)): found[path] for path in sorted(found)}


@functools.lru_cache(maxsize=256)  # a process may make several matrices: parsing all sources takes half a second
def _imports(source: bytes) -> tuple[str, ...]:
    """Return the dotted names that a module imports from kmatrix, imports inside functions included."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:  # a file that does not parse imports nothing, and the trainer reports it
        return ()
    found: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("kmatrix")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kmatrix"):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(found)


def _module_files(lib: Path, name: str) -> Iterator[Path]:
    """Yield the file of a module and those of the packages around it. The last word may be a name in the module."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        place = lib.joinpath(*parts[:end])
        yield from (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file())


def whole(files: dict[str, str]) -> str:
    """Return one SHA-256 of all files. files: name -> SHA-256."""
    return hashlib.sha256("".join(f"{name}\0{digest}\n" for name, digest in files.items()).encode()).hexdigest()


def sha256_of_copy(folder: Path) -> str:
    """Return the hash of the sources in `code/` of a matrix, which has nothing else: that of where they came from."""
    paths = sorted(path for suffix in SUFFIXES for path in folder.rglob(f"*.{suffix}"))
    return whole({str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths})
